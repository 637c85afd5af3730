"""AdaFed: a common descent whose rates are powers of the clients' losses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from dqnfed.algorithms.common_descent import CommonDescent, FloatArray
from dqnfed.algorithms.common_descent_messages import (
    DescentMemory,
    DescentUpdate,
    LocalUpdate,
    ProbeUpdate,
    TrialUpdate,
)
from dqnfed.core.algorithm import check_choice, check_range
from dqnfed.core.digest import Digest, field_numbers
from dqnfed.core.problem import Problem, Task


class RatedLocalUpdate(NamedTuple):
    gradient: Tensor  # [n]  theta before the local epochs minus theta after them, in the gradient's place
    rate: Tensor  # []       from the loss at the theta that was sent


@dataclass(frozen=True, kw_only=True)
class AdaFed(CommonDescent):
    r"""Adaptive common descent (Hamidi & Yang, TMLR 2024): client k's decrease is proportional to its loss^gamma.

    Objective: one step that lowers every participant's loss, client k's at a rate proportional to
    :math:`d_k = (F_k - \text{floor})^\gamma`: the worse a client is off, the more it gains.

    Client: gradient g_k and loss F_k at theta, and the secant curvature of its loss along the last step; with `local =
    "sgd"`, `epochs` of SGD instead, whose update stands for the gradient, and F_k.

    Server: u = the shortest vector with g_k'u >= d_k for all k, then theta - alpha u; metric, guards and step lengths
    are DQN-Fed's. With `form = "paper"`: u with g_k'u = d_k exactly, and theta - step_size * u / ||u||^2.

    State: server, theta, the model before and, for the metric, `metric_memory` pairs; client, theta and gradient when
    everybody takes part. The paper's form keeps nothing but theta.

    Payload: n + 3 floats up, n down; 2n + 3 up with the metric and 2n down when the cohort changes; n + 1 up with local
    SGD.

    Evaluation: the global model.

    Differences: no official code was found. Unlike the paper, rates are by default lower bounds, and the step length is
    a rule of its own: the paper's direction shrinks to nothing where gradients nearly agree. For gamma other than 1
    the rates are scaled to the clients' mean loss, since only their ratios are meant. `form = "paper"` does none of
    this; it sets constraint, metric, step, ridge, cap and rate_bounds. The paper's Gram-Schmidt recursion is replaced
    by its closed form, which does not depend on the order of the clients and has no denominator that may vanish.

    Reference: Hamidi & Yang, AdaFed: Fair Federated Learning via Adaptive Common Descent Direction, TMLR 2024.
    """

    Update: ClassVar[tuple[type, ...]] = (DescentUpdate, RatedLocalUpdate, ProbeUpdate, TrialUpdate)

    gamma: float = 1.0  # power of the loss in a client's rate, >= 0; 0: everybody's decrease is the same
    form: str = "safeguarded"  # safeguarded | paper: the direction of norm 1 / ||u|| with a fixed server step
    cap: bool = False  # rates at most 2 (f_k - floor); for gamma = 1 they always are

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "gamma", low=0.0)
        check_choice(self, "form", ("safeguarded", "paper"))

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        chosen = self
        if self.form == "paper":
            chosen = replace(
                self,
                constraint="exactly",
                metric="identity",
                step=self.step if self.step == "diminishing" else "fixed",
                ridge=0.0,
                cap=False,
                rate_bounds=inf,
            )
        return super(AdaFed, chosen).prepare(problem, n_clients, cohort_size)

    @property
    def caps_rates(self) -> bool:
        return self.cap or self.gamma == 1.0

    def rate(self, problem: Problem, task: Task, theta: Tensor, gradient: Tensor, loss: Tensor) -> Tensor:
        return self.loss_rate(problem, loss)

    def loss_rate(self, problem: Problem, loss: Tensor) -> Tensor:
        """Return the rate of a client with the given loss."""
        return (loss - problem.loss_floor).clamp(min=0.0) ** self.gamma

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: DescentMemory) -> tuple[Any, DescentMemory]:
        update, memory = super().client_step(problem, task, sent, memory)
        if isinstance(update, LocalUpdate):
            rate = self.loss_rate(problem, problem.loss(sent.theta, task))
            return RatedLocalUpdate(update.gradient, rate), memory
        return update, memory

    def wanted_rates(self, updates: Any, squares: FloatArray, digest: Digest | None) -> FloatArray:
        rates = field_numbers(updates.rate, digest, "rate")
        if self.form == "paper":
            return rates
        if self.gamma != 1.0 and isinstance(updates, DescentUpdate):
            losses = field_numbers(updates.loss, digest, "loss")
            rates = rates * (losses.sum() / rates.sum()) if rates.sum() > 0 else rates
        return self._trusted_rates(rates, squares)

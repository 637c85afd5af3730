"""AdaFed: DQN-Fed's predecessor, whose rates are powers of the clients' losses."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor

from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.parts import messages as msg
from dqnfed.algorithms.parts.length import Parts
from dqnfed.algorithms.parts.messages import DescentMemory, LocalUpdate
from dqnfed.algorithms.parts.rates import Here, Rates
from dqnfed.core.algorithm import Info, check_choice, check_range, check_used
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.maths.solvers import bounded_rates

PAPER = {"constraint": "exactly", "metric": "identity", "ridge": 0.0, "cap": False, "rate_bounds": inf}


class RatedLocalUpdate(NamedTuple):
    gradient: Tensor  # [n]  theta before the local epochs minus theta after them, in the gradient's place
    loss: Tensor  # []       at the model that was sent
    rate: Tensor  # []       from that loss


@dataclass(frozen=True, kw_only=True)
class AdaFed(DQNFed):
    r"""Adaptive common descent (Hamidi & Yang, TMLR 2024): client k's decrease is proportional to its loss^gamma.

    Objective: one step that lowers every participant's loss, client k's at a rate proportional to
    :math:`d_k = (F_k - \text{floor})^\gamma`: the higher a client's loss, the more it gains.

    Client: gradient g_k and loss F_k at theta and, if all clients take part, the secant curvature of its loss along the
    last step; with `local = "sgd"`, `epochs` of SGD, whose update stands for the gradient, and F_k.

    Server: u = the shortest vector with g_k'u >= d_k for all k, then theta - alpha u; metric, cached clients, step
    lengths and safeguards are DQN-Fed's. With `form = "paper"`: u with g_k'u = d_k exactly, and theta - step_size * u /
    ||u||^2.

    State: as DQN-Fed's, but clients keep a model and a gradient only where curvatures set the step length. The paper's
    form keeps nothing but theta.

    Payload: n + 3 floats up, n + 2 without curvatures, n down.

    Evaluation: the global model.

    Differences: no official code was found. Unlike the paper, rates are by default lower bounds, and the step length is
    a rule of its own: the paper's direction shrinks to nothing where gradients nearly agree. For gamma other than 1
    the rates are scaled to the clients' mean loss, since only their ratios are meant. `form = "paper"` does none of
    this; it sets constraint, metric, step, ridge, cap and rate_bounds. The paper's Gram-Schmidt recursion is replaced
    by its closed form, which does not depend on the order of the clients and has no denominator that may vanish.

    Reference: Hamidi & Yang, AdaFed: Fair Federated Learning via Adaptive Common Descent Direction, TMLR 2024.
    """

    info: ClassVar[Info] = replace(
        DQNFed.info,
        replies=(msg.DescentUpdate, msg.GradientUpdate, RatedLocalUpdate, msg.ProbeUpdate, msg.TrialUpdate),
    )

    gradient_settings: ClassVar[tuple[str, ...]] = ("cap",)
    rates: str = field(default="loss", init=False, repr=False)
    memory: int = field(default=1, init=False, repr=False)
    gamma: float = 1.0  # power of the loss in a client's rate, >= 0; 0: everybody's decrease is the same
    form: str = "safeguarded"  # safeguarded | paper: the direction of norm 1 / ||u|| with a fixed server step
    cap: bool = False  # rates at most 2 (f_k - floor); for gamma = 1 they always are

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "gamma", low=0.0)
        check_choice(self, "form", ("safeguarded", "paper"))
        check_used(self, "cap", used=self.gamma != 1.0, why="with gamma=1, whose rates are never above the cap")

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        if self.form != "paper":
            return super().prepare(problem, n_clients, cohort_size)
        for name, value in PAPER.items():
            check_used(self, name, used=getattr(self, name) == value, why="with form='paper', which sets it")
        step = self.step if self.step in ("fixed", "diminishing") else "fixed"
        check_used(self, "step", used=self.step == step, why="with form='paper', but for 'fixed' and 'diminishing'")
        chosen: dict[str, Any] = {**PAPER, "step": step}
        return super(AdaFed, replace(self, **chosen)).prepare(problem, n_clients, cohort_size)

    @cached_property
    def parts(self) -> Parts:
        parts = super().parts
        trust = replace(parts.trust, checks_rates=self.cap or self.gamma == 1.0)
        return parts._replace(rates=Rates("loss", power=self.gamma), trust=trust)

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: DescentMemory) -> tuple[Any, DescentMemory]:
        update, memory = super().client_step(problem, task, sent, memory)
        if isinstance(update, LocalUpdate):
            rate = self.parts.rates.first(problem, task, Here(sent.theta, *update))
            return RatedLocalUpdate(*update, rate), memory
        return update, memory

    def wanted_rates(
        self, replies: Replies[Any], squares: FloatArray, others: FloatArray, losses: FloatArray
    ) -> FloatArray:
        rates = replies.scalars("rate")
        if self.form == "paper":
            return rates
        if self.local == "sgd":  # in units of the updates: only the rates' ratios are meant
            rates = rates * (squares.sum() / rates.sum() if rates.sum() > 0 else 0.0)
        elif self.gamma != 1.0 and rates.sum() > 0:
            rates = rates * (losses.sum() / rates.sum())
        return bounded_rates(rates, squares, self.rate_bounds, others)

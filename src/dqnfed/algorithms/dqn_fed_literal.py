"""DQN-Fed as its paper prints it: the reference that shows why the safeguards are there."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.parts.messages import Models
from dqnfed.algorithms.parts.rates import MAX_HESSIAN
from dqnfed.core.algorithm import RATE_SCHEDULE, Cohort, Info, ServerStep, check_choice, check_range, check_used
from dqnfed.core.curvature import newton_direction
from dqnfed.core.gradients import loss_gradient
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.directions import rate_matching_step
from dqnfed.maths.quasi_newton import Pairs, empty_pairs, lbfgs_direct_rate, lbfgs_rate, push_pair


class LiteralServer(NamedTuple):
    theta: Tensor  # [n]
    theta_before: Tensor  # [n]


class LiteralMemory(NamedTuple):
    pairs: Pairs  # [m, n]


class LiteralUpdate(NamedTuple):
    gradient: Tensor  # [n]
    rate: Tensor  # []


@dataclass(frozen=True, kw_only=True)
class DQNFedLiteral(LocalWork[LiteralServer, LiteralMemory, LiteralUpdate]):
    r"""Algorithm 1 of DQN-Fed (Hamidi & Ye, TMLR 2025), read literally; it diverges on heterogeneous clients.

    Objective: theta moves so that client k's loss falls at the rate :math:`d_k = g_k^\top B_k g_k`.

    Client: for each of `epochs` local epochs a BFGS update of B_k from the last two local models and a gradient step of
    length lr to the next one; sends the gradient at the last local model, and d_k.

    Server: scaled Gram-Schmidt, lambda*, eta = sum_k 1/||g~_k||^2; computed as the one minimum-norm solve to which
    these are equal, so that a vanishing denominator of the orthogonalisation does no harm.

    State: client, `memory` pairs; server, theta and the model before.

    Payload: n + 1 floats up, 2n down.

    Evaluation: the global model.

    Differences: what the paper leaves open is decided so: B starts at the identity and its pairs persist over rounds
    (`persists`), the oldest leaving after `memory`; the local model moves by lr times the gradient; in round 0, where
    theta^{-1} is not defined, s is zero and the pair is skipped; every client is sent theta^{t-1}. `form = "direct"`
    is the printed recursion (B s = y), "inverse" what the text around it needs (H y = s), "hessian" the exact inverse
    Hessian.

    Reference: Hamidi & Ye, Distributed Quasi-Newton Method for Fair and Fast Federated Learning, TMLR 2025.
    """

    info: ClassVar[Info] = Info(
        server=LiteralServer,
        memory=LiteralMemory,
        messages=(Models,),
        replies=(LiteralUpdate,),
        theta_fields=("theta", "theta_before"),
        local_work=frozenset({"lr", "epochs", *RATE_SCHEDULE}),
        diverges=True,
        exemptions={
            "test_mean_loss_falls_on_a_bowl": "the paper's step length diverges on heterogeneous clients",
            "test_stays_finite_on_hard_federations": "the paper's step is unbounded where gradients nearly coincide",
        },
    )

    form: str = "direct"  # direct | inverse | hessian (exact, small models)
    memory: int = 10  # pairs, >= 1
    persists: bool = True  # whether B_k outlives the round

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "form", ("direct", "inverse", "hessian"))
        check_range(self, "memory", low=1)
        for name in ("memory", "persists"):
            check_used(self, name, used=self.form != "hessian", why="with form='hessian', which keeps no pairs")

    def unused(self) -> frozenset[str]:
        one_epoch = {"lr", *RATE_SCHEDULE} if self.epochs == 1 else set()  # then theta is not moved
        return super().unused() | one_epoch

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        if self.form == "hessian" and problem.n_parameters > MAX_HESSIAN:
            raise ValueError(
                f"DQNFedLiteral: form='hessian' builds an n x n matrix per client, n <= {MAX_HESSIAN}, but n is "
                f"{problem.n_parameters}; use form='inverse'."
            )
        return self

    def init_server(self, problem: Problem, n_clients: int) -> LiteralServer:
        return LiteralServer(problem.theta0.clone(), problem.theta0.clone())

    def init_memory(self, problem: Problem, task: Task) -> LiteralMemory:
        theta = problem.theta0
        return LiteralMemory(empty_pairs(self.memory, len(theta), theta.dtype, theta.device))

    def send(self, server: LiteralServer) -> Models:
        return Models(server.theta, server.theta_before)

    def passes(self, sent: Any) -> float:
        return self.epochs + 1.0

    def client_step(
        self, problem: Problem, task: Task, sent: Models, memory: LiteralMemory
    ) -> tuple[LiteralUpdate, LiteralMemory]:
        slope = partial(loss_gradient, problem)
        pairs = memory.pairs if self.persists else emptied(memory.pairs)
        before, theta = sent.theta_before, sent.theta
        gradient_before, gradient = slope(before, task), slope(theta, task)
        for epoch in range(self.epochs):
            pairs = push_pair(pairs, theta - before, gradient - gradient_before)
            if epoch < self.epochs - 1:
                before, gradient_before = theta, gradient
                theta = theta - task.lr * gradient
                gradient = slope(theta, task)
        if self.form == "hessian":
            rate = gradient @ newton_direction(problem, task, theta, gradient)
        elif self.form == "inverse":
            rate = lbfgs_rate(pairs, gradient)
        else:
            rate = lbfgs_direct_rate(pairs, gradient)
        return LiteralUpdate(gradient, rate), LiteralMemory(pairs)

    def server_step(
        self, server: LiteralServer, replies: Replies[LiteralUpdate], cohort: Cohort
    ) -> ServerStep[LiteralServer]:
        found = rate_matching_step(replies.rows("gradient"), replies.rows("rate"))
        diagnostics = {"residual": float(found.residual), "step_norm": float(found.step.norm())}
        return ServerStep(LiteralServer(server.theta - found.step, server.theta), diagnostics=diagnostics)


def emptied(pairs: Pairs) -> Pairs:
    """Return the memory without its pairs."""
    return Pairs(torch.zeros_like(pairs.s), torch.zeros_like(pairs.y), torch.zeros_like(pairs.n_pairs))

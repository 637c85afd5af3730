"""FedNew: one step of consensus ADMM on the Newton direction a round; no Hessian is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Info, ServerStep, check_range
from dqnfed.core.curvature import (
    client_gradient,
    client_hessian,
    hessian_passes,
    log_full_participation,
    refuse_if_too_large,
)
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.symmetric import damped_factor, factored_solution


class FedNewServer(NamedTuple):
    theta: Tensor  # [n]
    step: Tensor  # [n] y, what was subtracted last
    n_rounds: Tensor  # [] int64


class FedNewMemory(NamedTuple):
    dual: Tensor  # [n] lambda_k
    own_step: Tensor  # [n] y_k, what it sent last
    factor: Tensor  # [n, n] Cholesky factor of its Hessian + (alpha + rho) I


class Fresh(NamedTuple):
    """The model and the last common step; clients renew their Hessian."""

    theta: Tensor  # [n]
    step: Tensor  # [n]


class Kept(NamedTuple):
    """The model and the last common step; clients use the Hessian they have."""

    theta: Tensor  # [n]
    step: Tensor  # [n]


class FedNewUpdate(NamedTuple):
    step: Tensor  # [n] y_k


@dataclass(frozen=True, kw_only=True)
class FedNew(LocalWork[FedNewServer, FedNewMemory, FedNewUpdate]):
    """FedNew (Elgabli et al., ICML 2022): Newton's direction by one ADMM pass a round, warm-started.

    Objective: the mean of the clients' losses, convex.

    Client: y_k = (H_k + (alpha + rho) I)^-1 (g_k - lambda_k + rho y), y the last common step; sends y_k, and moves
    its dual, lambda_k += rho (y_k - y), when it receives the new y. No local training: lr, epochs and batch_size are
    not used.

    Server: y = mean y_k; theta - y; unit step. The duals sum to zero, so they need not be sent.

    State: client, 2 n floats and a factor of n^2; server, theta and y.

    Payload: n floats up, 2 n down.

    Evaluation: the global model.

    Differences: theta is sent with y, so that no client has to add up steps. Here f is a mean over examples; the
    authors' code sums over them, so its rho and alpha are n_k times these (and its reported objective has another
    ridge than the one it minimises, which is not copied).

    Reference: PMLR 162:5861, arXiv 2206.08829.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=FedNewServer,
        memory=FedNewMemory,
        messages=(Fresh, Kept),
        replies=(FedNewUpdate,),
        needs=("sum",),
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    rho: float = 0.1  # penalty on disagreement, > 0
    alpha: float = 0.01  # damping of the Newton direction, >= 0
    refresh: int = 1  # rounds between new Hessians; 0: the first one is kept

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "rho", low=0.0, open_low=True)
        check_range(self, "alpha", low=0.0)
        check_range(self, "refresh", low=0)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        log_full_participation("fednew", n_clients, cohort_size)
        refuse_if_too_large(problem, 2 * n_clients, "FedNew", "fednew-cg")
        return self

    def init_server(self, problem: Problem, n_clients: int) -> FedNewServer:
        theta = problem.theta0.clone()
        return FedNewServer(theta, torch.zeros_like(theta), torch.zeros((), dtype=torch.long))

    def init_memory(self, problem: Problem, task: Task) -> FedNewMemory:
        zeros = torch.zeros_like(problem.theta0)
        return FedNewMemory(zeros, zeros.clone(), zeros.new_zeros(len(zeros), len(zeros)))

    def select(self, server: FedNewServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return torch.arange(n_clients)

    def send(self, server: FedNewServer) -> Fresh | Kept:
        t = int(server.n_rounds)
        renews = t == 0 or (self.refresh > 0 and t % self.refresh == 0)
        return Fresh(server.theta, server.step) if renews else Kept(server.theta, server.step)

    def client_step(
        self, problem: Problem, task: Task, sent: Fresh | Kept, memory: FedNewMemory
    ) -> tuple[FedNewUpdate, FedNewMemory]:
        dual = memory.dual + self.rho * (memory.own_step - sent.step)
        own, factor = self.own_step(problem, task, sent, dual, memory.factor)
        return FedNewUpdate(own), FedNewMemory(dual, own, factor)

    def own_step(
        self, problem: Problem, task: Task, sent: Fresh | Kept, dual: Tensor, factor: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the client's ADMM step y_k and the factor it was solved with."""
        if isinstance(sent, Fresh):
            factor = damped_factor(client_hessian(problem, task, sent.theta), self.alpha + self.rho)
        wanted = client_gradient(problem, task, sent.theta) - dual + self.rho * sent.step
        return factored_solution(factor, wanted), factor

    def server_step(
        self, server: FedNewServer, replies: Replies[FedNewUpdate], cohort: Cohort
    ) -> ServerStep[FedNewServer]:
        step = replies.mean("step")
        return ServerStep(FedNewServer(server.theta - step, step, server.n_rounds + 1))

    def passes(self, sent: Fresh | Kept) -> float:
        return 1.0 + (hessian_passes(sent.theta) if isinstance(sent, Fresh) else 0.0)

"""DistributedNewton (COMRADE): the mean of the clients' own Newton steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Status, Theta, check_range, check_used
from dqnfed.core.curvature import client_gradient, client_hessian, hessian_passes, refuse_if_too_large
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.symmetric import damped_factor, factored_solution


class DistributedNewtonServer(NamedTuple):
    theta: Tensor  # [n]


class DistributedNewtonUpdate(NamedTuple):
    step: Tensor  # [n] the client's own Newton step


@dataclass(frozen=True, kw_only=True)
class DistributedNewton(LocalWork[DistributedNewtonServer, Empty, DistributedNewtonUpdate]):
    """Communication-efficient and robust distributed Newton (Ghosh, Maity & Mazumdar, NeurIPS 2020).

    Objective: the mean of the clients' losses, convex, on data that is shuffled over the clients.

    Client: p_k = H_k^-1 g_k with its own Hessian and gradient. No local training: lr, epochs and batch_size are not
    used.

    Server: drops the `trim` share of longest steps, subtracts `server_lr` times the mean of the rest.

    State: none beyond theta.

    Payload: n floats up, n down, one phase.

    Evaluation: the global model.

    Differences: none. Its fixed point is not the minimiser: on clients that differ it stalls at a bias (a gap of
    1.4e-2 on a1a), as the paper's bound says.

    Reference: arXiv 2006.08737.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=DistributedNewtonServer,
        replies=(DistributedNewtonUpdate,),
        needs=("sum", "gram with `trim`, which compares the steps' norms"),
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    server_lr: float = 1.0  # > 0
    trim: float = 0.0  # share of the cohort, those with the longest steps, that is left out, in [0, 1/2)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_range(self, "trim", low=0.0, high=0.5, open_high=True)

    @property
    def needs(self) -> str:
        return "gram" if self.trim else "sum"

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        is_used = self._n_trimmed(cohort_size) > 0
        check_used(self, "trim", used=is_used, why=f"with {cohort_size} clients a round, of which it is less than one")
        refuse_if_too_large(problem, cohort_size, "DistributedNewton", "fednew-cg")
        return self

    def init_server(self, problem: Problem, n_clients: int) -> DistributedNewtonServer:
        return DistributedNewtonServer(problem.theta0.clone())

    def client_step(
        self, problem: Problem, task: Task, sent: Theta, memory: Empty
    ) -> tuple[DistributedNewtonUpdate, Empty]:
        factor = damped_factor(client_hessian(problem, task, sent.theta))
        return DistributedNewtonUpdate(factored_solution(factor, client_gradient(problem, task, sent.theta))), memory

    def server_step(
        self, server: DistributedNewtonServer, replies: Replies[DistributedNewtonUpdate], cohort: Cohort
    ) -> ServerStep[DistributedNewtonServer]:
        n_trimmed, weights = self._n_trimmed(len(replies)), torch.ones(len(replies), dtype=torch.float64)
        if n_trimmed:
            shortest_first = np.argsort(replies.norms("step"), kind="stable")
            weights[torch.from_numpy(shortest_first[-n_trimmed:])] = 0.0
        theta = server.theta - self.server_lr * replies.mean("step", weights)
        return ServerStep(DistributedNewtonServer(theta), Status.NEXT, {"trimmed": float(n_trimmed)})

    def _n_trimmed(self, n_replies: int) -> int:
        return int(self.trim * n_replies + 1e-9)

    def passes(self, sent: Theta) -> float:
        return 1.0 + hessian_passes(sent.theta)

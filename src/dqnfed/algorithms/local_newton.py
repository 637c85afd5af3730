"""LocalNewton: a few Newton steps on each client, then the mean of the models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_range, check_used
from dqnfed.core.curvature import LOSS_PASSES, client_gradient, client_hessian, hessian_passes, refuse_if_too_large
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.symmetric import damped_factor, factored_solution

N_LENGTHS = 20  # of the local line search: 1, 1/2, ..., 2^-19


class LocalNewtonServer(NamedTuple):
    theta: Tensor  # [n]


class LocalNewtonUpdate(NamedTuple):
    theta: Tensor  # [n] the local model


@dataclass(frozen=True, kw_only=True)
class LocalNewton(LocalWork[LocalNewtonServer, Empty, LocalNewtonUpdate]):
    """LocalNewton (Gupta, Ghosh, Derezinski, Khanna, Ramchandran & Mahoney, UAI 2021).

    Objective: the mean of the clients' losses, convex, on data that is shuffled over the clients.

    Client: `local_steps` Newton steps on its own loss, each with its own backtracking line search; sends its model.
    lr, epochs and batch_size are not used.

    Server: the mean of the models.

    State: none beyond theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: the number of local steps is fixed, without the paper's adaptive schedule and its closing GIANT
    steps. On clients that differ it stalls at a bias that grows with `local_steps` (gaps of 1.4e-2 and 4.1e-2 on
    a1a for 1 and 3 steps).

    Reference: arXiv 2105.07320.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=LocalNewtonServer,
        replies=(LocalNewtonUpdate,),
        needs=("sum",),
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    local_steps: int = 1  # Newton steps a round, >= 1
    line_search: bool = True  # local Armijo backtracking; False: unit steps
    sufficient: float = 0.1  # share of the first-order decrease that a length must reach, in (0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "local_steps", low=1)
        check_range(self, "sufficient", low=0.0, high=1.0, open_low=True, open_high=True)
        check_used(self, "sufficient", used=self.line_search, why="with `line_search = False`")

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        refuse_if_too_large(problem, cohort_size, "LocalNewton", "fednew-cg")
        return self

    def init_server(self, problem: Problem, n_clients: int) -> LocalNewtonServer:
        return LocalNewtonServer(problem.theta0.clone())

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[LocalNewtonUpdate, Empty]:
        theta = sent.theta
        for _ in range(self.local_steps):
            gradient = client_gradient(problem, task, theta)
            step = factored_solution(damped_factor(client_hessian(problem, task, theta)), gradient)
            theta = theta - (self._length(problem, task, theta, gradient, step) if self.line_search else 1.0) * step
        return LocalNewtonUpdate(theta), memory

    def _length(self, problem: Problem, task: Task, theta: Tensor, gradient: Tensor, step: Tensor) -> Tensor:
        lengths = 0.5 ** torch.arange(N_LENGTHS, dtype=theta.dtype, device=theta.device)
        losses = torch.stack([client_loss(problem, theta - length * step, task) for length in lengths])
        wanted = client_loss(problem, theta, task) - self.sufficient * lengths * (gradient @ step)
        falls = (losses <= wanted).to(theta.dtype)
        return (lengths * falls).amax()  # the longest that falls; 0 if none does

    def server_step(
        self, server: LocalNewtonServer, replies: Replies[LocalNewtonUpdate], cohort: Cohort
    ) -> ServerStep[LocalNewtonServer]:
        return ServerStep(LocalNewtonServer(replies.mean("theta")))

    def passes(self, sent: Theta) -> float:
        search = (N_LENGTHS + 1) * LOSS_PASSES if self.line_search else 0.0
        return self.local_steps * (1.0 + hessian_passes(sent.theta) + search)

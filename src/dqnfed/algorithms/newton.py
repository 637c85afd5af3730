"""Newton's method with the exact Hessians of all clients: what the other second-order methods are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_choice
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
from dqnfed.maths.symmetric import n_packed, packed, positive_solution, unpacked


class NewtonServer(NamedTuple):
    theta: Tensor  # [n]
    hessian: Tensor  # [T] upper triangle of the mean Hessian in use
    has_hessian: Tensor  # [] bool


class Curvature(NamedTuple):
    """The model; clients reply with gradient and Hessian there."""

    theta: Tensor  # [n]


class Full(NamedTuple):
    gradient: Tensor  # [n]
    hessian: Tensor  # [T] upper triangle


class Slope(NamedTuple):
    gradient: Tensor  # [n]


@dataclass(frozen=True, kw_only=True)
class Newton(LocalWork[NewtonServer, Empty, Full | Slope]):
    """Newton's method on the mean of the clients' losses; with `renew = "once"`, Newton-Zero (Islamov et al. 2021).

    Objective: the mean of the clients' losses, all clients alike; twice differentiable and strictly convex.

    Client: gradient and exact Hessian at theta. No local training: lr, epochs and batch_size are not used.

    Server: subtracts the solution of (mean Hessian) p = mean gradient; unit step, no learning rate.

    State: client, none; server, theta (and the first Hessian with `renew = "once"`).

    Payload: n + n (n + 1) / 2 floats up, n down; `renew = "once"` sends the triangle in the first round only.

    Evaluation: the global model.

    Differences: none; a mean Hessian that is not positive definite is solved with clipped eigenvalues.

    Reference: Newton-Zero is the baseline "NZ" of Islamov, Qian & Richtarik, ICML 2021.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=NewtonServer,
        messages=(Curvature, Theta),
        replies=(Full, Slope),
        needs=("sum",),
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    renew: str = "every-round"  # every-round | once: the Hessian at the start is kept

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "renew", ("every-round", "once"))

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        refuse_if_too_large(problem, n_clients, "newton", "fednl-diag, fednl-head, fednew-cg or fedns-ggn")
        if self.renew == "once":
            log_full_participation('newton with `renew = "once"`', n_clients, cohort_size)
        return self

    def init_server(self, problem: Problem, n_clients: int) -> NewtonServer:
        theta = problem.theta0.clone()
        return NewtonServer(theta, theta.new_zeros(n_packed(len(theta))), torch.tensor(False))

    def select(self, server: NewtonServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return torch.arange(n_clients) if self.renew == "once" else sampled

    def send(self, server: NewtonServer) -> Curvature | Theta:
        kept = self.renew == "once" and bool(server.has_hessian)
        return Theta(server.theta) if kept else Curvature(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Curvature | Theta, memory: Empty
    ) -> tuple[Full | Slope, Empty]:
        gradient = client_gradient(problem, task, sent.theta)
        if isinstance(sent, Theta):
            return Slope(gradient), memory
        return Full(gradient, packed(client_hessian(problem, task, sent.theta))), memory

    def server_step(
        self, server: NewtonServer, replies: Replies[Full | Slope], cohort: Cohort
    ) -> ServerStep[NewtonServer]:
        hessian = replies.mean("hessian") if replies.kind is Full else server.hessian
        step = positive_solution(unpacked(hessian, len(server.theta)), replies.mean("gradient"))
        return ServerStep(NewtonServer(server.theta - step, hessian, torch.tensor(True)))

    def passes(self, sent: Curvature | Theta) -> float:
        return 1.0 if isinstance(sent, Theta) else 1.0 + hessian_passes(sent.theta)

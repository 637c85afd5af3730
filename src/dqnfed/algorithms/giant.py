"""GIANT: the global gradient through the clients' inverse Hessians, with a line search."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Status, Theta, check_range
from dqnfed.core.curvature import (
    LOSS_PASSES,
    PRODUCT_PASSES,
    client_gradient,
    client_hessian,
    hessian_passes,
    hessian_product,
    refuse_if_too_large,
)
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.conjugate_gradient import cg_solution
from dqnfed.maths.symmetric import damped_factor, factored_solution

LENGTHS = tuple(4.0**-j for j in range(10))  # that clients and server try, the longest first
ROUNDING = 10.0  # in units of the loss's last digit: an increase smaller than this is none


class GIANTServer(NamedTuple):
    theta: Tensor  # [n]
    gradient: Tensor  # [n] of the mean loss at theta
    loss: Tensor  # [] the mean loss at theta
    step: Tensor  # [n]
    phase: Tensor  # [] int64: 0 gradients, 1 directions, 2 line search


class Through(NamedTuple):
    """The global gradient, to be sent through the client's inverse Hessian."""

    theta: Tensor  # [n]
    gradient: Tensor  # [n]


class Along(NamedTuple):
    """The common step, whose lengths the clients try."""

    theta: Tensor  # [n]
    step: Tensor  # [n]


class Slope(NamedTuple):
    gradient: Tensor  # [n]
    loss: Tensor  # []


class Direction(NamedTuple):
    step: Tensor  # [n]


class Losses(NamedTuple):
    losses: Tensor  # [10] at theta - a step for a = 1, 1/4, ..., 4^-9


@dataclass(frozen=True, kw_only=True)
class GIANT(LocalWork[GIANTServer, Empty, Slope | Direction | Losses]):
    """Globally improved approximate Newton (Wang, Roosta, Xu & Mahoney, NeurIPS 2018).

    Objective: the mean of the clients' losses, convex, on data that is shuffled over the clients.

    Client: phase 1, gradient and loss; phase 2, p_k = H_k^-1 g with the GLOBAL gradient g, exactly or by `cg_steps`
    conjugate gradients; phase 3, its losses at ten lengths. No local training: lr, epochs and batch_size are not
    used.

    Server: p = mean p_k, the harmonic mean of the Hessians at work; subtracts a p with the largest a of 1, 1/4,
    ..., 4^-9 at which the mean loss falls by `sufficient` times a g'p; none: the model stays.

    State: none between rounds.

    Payload: 2 n + 11 floats up, 3 n down, three phases.

    Evaluation: the global model.

    Differences: the line search, optional in the paper, is always on: on clients that differ the mean of inverses
    overshoots.

    Reference: arXiv 1709.03528.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=GIANTServer,
        messages=(Theta, Through, Along),
        replies=(Slope, Direction, Losses),
        needs=("sum",),
        nan_ok_fields=("losses",),  # not finite: that step is too long
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    cg_steps: int = 0  # conjugate gradient iterations a solve; 0: exact, by Cholesky
    sufficient: float = 0.1  # share of the first-order decrease that a length must reach, in (0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "cg_steps", low=0)
        check_range(self, "sufficient", low=0.0, high=1.0, open_low=True, open_high=True)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        if self.cg_steps == 0:
            refuse_if_too_large(problem, cohort_size, "GIANT with exact solves", "`cg_steps`, or fednew-cg")
        return self

    def init_server(self, problem: Problem, n_clients: int) -> GIANTServer:
        theta = problem.theta0.clone()
        zeros = torch.zeros_like(theta)
        return GIANTServer(theta, zeros, theta.new_zeros(()), zeros.clone(), torch.zeros((), dtype=torch.long))

    def send(self, server: GIANTServer) -> Theta | Through | Along:
        if int(server.phase) == 0:
            return Theta(server.theta)
        if int(server.phase) == 1:
            return Through(server.theta, server.gradient)
        return Along(server.theta, server.step)

    def client_step(
        self, problem: Problem, task: Task, sent: Theta | Through | Along, memory: Empty
    ) -> tuple[Slope | Direction | Losses, Empty]:
        if isinstance(sent, Theta):
            return Slope(client_gradient(problem, task, sent.theta), client_loss(problem, sent.theta, task)), memory
        if isinstance(sent, Along):
            trials = [client_loss(problem, sent.theta - length * sent.step, task) for length in LENGTHS]
            return Losses(torch.stack(trials)), memory
        if self.cg_steps == 0:
            factor = damped_factor(client_hessian(problem, task, sent.theta))
            return Direction(factored_solution(factor, sent.gradient)), memory
        return Direction(
            cg_solution(
                lambda v: hessian_product(problem, task, sent.theta, v), sent.gradient, n_iterations=self.cg_steps
            )
        ), memory

    def server_step(
        self, server: GIANTServer, replies: Replies[Slope | Direction | Losses], cohort: Cohort
    ) -> ServerStep[GIANTServer]:
        if replies.kind is Slope:
            loss = server.loss.new_tensor(float(replies.scalars("loss").mean()))
            found = server._replace(gradient=replies.mean("gradient"), loss=loss, phase=server.phase + 1)
            return ServerStep(found, Status.AGAIN)
        if replies.kind is Direction:
            return ServerStep(server._replace(step=replies.mean("step"), phase=server.phase + 1), Status.AGAIN)
        slope = server.gradient @ server.step
        lengths = slope.new_tensor(LENGTHS)
        rounding = ROUNDING * torch.finfo(slope.dtype).eps * server.loss.abs()
        falls = replies.mean("losses") <= server.loss - self.sufficient * lengths * slope + rounding
        done = server._replace(phase=torch.zeros_like(server.phase))
        if not bool(falls.any()):
            return ServerStep(done, Status.HOLD, {"length": 0.0})
        length = float(lengths[falls.long().argmax()])
        return ServerStep(done._replace(theta=server.theta - length * server.step), Status.NEXT, {"length": length})

    def passes(self, sent: Theta | Through | Along) -> float:
        if isinstance(sent, Theta):
            return 1.0
        if isinstance(sent, Along):
            return len(LENGTHS) * LOSS_PASSES
        return self.cg_steps * PRODUCT_PASSES if self.cg_steps else hessian_passes(sent.theta)

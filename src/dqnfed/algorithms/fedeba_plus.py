"""FedEBA+: entropy-based weights, and local steps that are aligned with the others' where losses are unequal."""

from __future__ import annotations

from dataclasses import dataclass
from math import acos, degrees, inf, sqrt
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import client_weights
from dqnfed.algorithms.term import tilted_weights
from dqnfed.core.algorithm import (
    Cohort,
    Empty,
    Info,
    ServerStep,
    Status,
    Theta,
    check_choice,
    check_range,
    check_used,
)
from dqnfed.core.gradients import client_loss, loss_gradient
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies

LOSSES, SLOPES, ALIGNED, PLAIN = range(4)  # what the next message asks for


class FedEBAServer(NamedTuple):
    theta: Tensor  # [n]
    losses: Tensor  # [n_clients] of this round; NaN: not in the cohort; float64 on the host
    slope: Tensor  # [n] weighted mean of the clients' gradients; zeros where it is not asked for
    phase: Tensor  # [] LOSSES, SLOPES, ALIGNED or PLAIN


class AskSlope(NamedTuple):
    theta: Tensor  # [n]
    n_phase: Tensor  # [] 1


class Aligned(NamedTuple):
    theta: Tensor  # [n]
    slope: Tensor  # [n] weighted mean of the clients' gradients


class AskUpdate(NamedTuple):
    theta: Tensor  # [n]
    n_phase: Tensor  # [] 3


class SentLoss(NamedTuple):
    loss: Tensor  # [] training loss at the theta that was sent


class SentSlope(NamedTuple):
    gradient: Tensor  # [n]


class AlignedUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the aligned local work minus theta after it


class FirstStepUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    first: Tensor  # [n] theta minus theta after the first local step


EBAReply = SentLoss | SentSlope | AlignedUpdate | FirstStepUpdate


@dataclass(frozen=True, kw_only=True)
class FedEBAPlus(LocalWork[FedEBAServer, Empty, EBAReply]):
    r"""Entropy-based aggregation with alignment (Wang et al., arXiv 2301.12407, 2023); not checked against its paper.

    Objective: weights of largest entropy whose mean loss is given, which are softmax weights of the losses.

    Client: sends its training loss F_k at theta. Where losses are unequal it then sends its gradient at theta, and
    makes `epochs` of SGD along (1 - alpha) times its own gradient plus alpha times the weighted mean of all; else plain
    local SGD, and it sends the update of its first step beside its update.

    Server: weights :math:`w_k = p_k e^{F_k / \tau} / \sum_j p_j e^{F_j / \tau}`. Losses are unequal where the angle
    between them and the vector of ones is above `angle` degrees. Then theta - server_lr * sum_k w_k delta_k; else
    theta - server_lr * ((1 - alpha) sum_k w_k delta_k + alpha times the plain mean of the first steps).

    State: theta; within a round, its losses and the mean gradient.

    Payload: 1 float up and n down; then 2n up and n down, or 2n up and 3n down where losses are unequal.

    Evaluation: the global model.

    Differences: no official code was found, and the formulas are from public reviews of the paper: **not claimed to be
    faithful**. The pull of the mean gradient is constant during the local work, and weight decay is scaled by 1 - alpha
    like the client's own gradient. With angle = 90, above which no angle is, there is no exchange of gradients; with
    angle = 90 and alpha = 0 it is one TERM step with t = 1 / tau.

    Reference: Wang, Wang, Shi, Karimireddy & Tang, Entropy-driven Fair and Effective Federated Learning, arXiv
    2301.12407, 2023.
    """

    info: ClassVar[Info] = Info(
        server=FedEBAServer,
        messages=(Theta, AskSlope, Aligned, AskUpdate),
        replies=(SentLoss, SentSlope, AlignedUpdate, FirstStepUpdate),
        needs=("sum",),
        own_descent=False,  # the others' gradients are in an aligned update
        clip_fields=("delta", "first"),
    )

    tau: float = 0.5  # temperature of the weights, > 0
    alpha: float = 0.5  # share of the alignment, in [0, 1)
    angle: float = 45.0  # degrees from equal losses, above which local steps are aligned, in [0, 90]
    server_lr: float = 1.0  # > 0
    weighting: str = "uniform"  # uniform | examples: p_k

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "tau", low=0.0, high=inf, open_low=True)
        check_range(self, "alpha", low=0.0, high=1.0, open_high=True)
        check_range(self, "angle", low=0.0, high=90.0)
        check_used(self, "angle", used=self.alpha > 0, why="with alpha = 0, where nothing is aligned")
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("uniform", "examples"))

    def init_server(self, problem: Problem, n_clients: int) -> FedEBAServer:
        unknown = torch.full((n_clients,), torch.nan, dtype=torch.float64)
        return FedEBAServer(problem.theta0.clone(), unknown, torch.zeros_like(problem.theta0), torch.tensor(LOSSES))

    def send(self, server: FedEBAServer) -> Theta | AskSlope | Aligned | AskUpdate:
        phase = int(server.phase)
        if phase == LOSSES:
            return Theta(server.theta)
        if phase == ALIGNED:
            return Aligned(server.theta, server.slope)
        return AskSlope(server.theta, server.phase) if phase == SLOPES else AskUpdate(server.theta, server.phase)

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: Empty) -> tuple[EBAReply, Empty]:
        if isinstance(sent, Theta):
            return SentLoss(client_loss(problem, sent.theta, task)), memory
        if isinstance(sent, AskSlope):
            return SentSlope(loss_gradient(problem, sent.theta, task)), memory
        if isinstance(sent, Aligned):
            own = 1.0 - self.alpha
            pull = self.alpha / own * sent.slope  # own (g + pull) = (1 - alpha) g + alpha slope
            local = self.local_sgd(problem, task._replace(lr=own * task.lr), sent.theta, correction=pull)
            return AlignedUpdate(sent.theta - local), memory
        first = self.local_sgd(problem, task._replace(batches=task.batches[:1]), sent.theta)
        local = self.local_sgd(problem, task, sent.theta)
        return FirstStepUpdate(sent.theta - local, sent.theta - first), memory

    def server_step(self, server: FedEBAServer, replies: Replies[EBAReply], cohort: Cohort) -> ServerStep[FedEBAServer]:
        if replies.kind is SentLoss:
            return self._after_losses(server, torch.from_numpy(replies.scalars("loss")), cohort)
        weights = self._weights(server.losses[cohort.clients], cohort)
        if replies.kind is SentSlope:
            slope = replies.combine("gradient", weights)
            return ServerStep(server._replace(slope=slope, phase=torch.tensor(ALIGNED)), Status.AGAIN)
        step = replies.combine("delta", weights)
        if replies.kind is FirstStepUpdate:
            step = (1.0 - self.alpha) * step + self.alpha * replies.mean("first")
        nobody, zeros = torch.full_like(server.losses, torch.nan), torch.zeros_like(server.theta)
        after = FedEBAServer(server.theta - self.server_lr * step, nobody, zeros, torch.tensor(LOSSES))
        return ServerStep(after, diagnostics={"largest_weight": float(weights.max())})

    def _after_losses(self, server: FedEBAServer, losses: Tensor, cohort: Cohort) -> ServerStep[FedEBAServer]:
        found = angle_from_equal(losses)
        phase = torch.tensor(SLOPES if self.alpha > 0 and found > self.angle else PLAIN)
        kept = server._replace(losses=server.losses.index_copy(0, cohort.clients, losses), phase=phase)
        return ServerStep(kept, Status.AGAIN, {"angle": found, "aligned": float(int(phase) == SLOPES)})

    def _weights(self, losses: Tensor, cohort: Cohort) -> Tensor:
        return tilted_weights(client_weights(self.weighting, cohort), losses, 1.0 / self.tau)

    def passes(self, sent: Any) -> float:
        return 1.0 if isinstance(sent, AskSlope) else 0.0 if isinstance(sent, Theta) else float(self.epochs)


def angle_from_equal(losses: Tensor) -> float:
    """Return the angle between the losses and the vector of ones, in degrees; 0 where all losses are 0."""
    size = float(torch.linalg.vector_norm(losses)) * sqrt(len(losses))
    return degrees(acos(max(-1.0, min(1.0, float(losses.sum()) / size)))) if size > 0 else 0.0

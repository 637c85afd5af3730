"""FairMOO: first equal losses, then a common descent that does not make them unequal again."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import LossUpdate, ReweightedServer
from dqnfed.core.algorithm import (
    Cohort,
    Empty,
    Info,
    ServerStep,
    Theta,
    check_choice,
    check_range,
    check_used,
)
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.maths.simplex import min_norm_in_half_space
from dqnfed.maths.solvers import min_norm_weights


@dataclass(frozen=True, kw_only=True)
class FairMOO(LocalWork[ReweightedServer, Empty, LossUpdate]):
    r"""Fairness-constrained multi-objective optimisation (FairMOO, 2025).

    Objective: minimise all clients' losses, subject to a variance of the losses of at most `prefer`.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta; sends the update delta_k and
    F_k. With `losses = "local"`, F_k is the mean loss over its batches, each before the step on it.

    Server: with g_k = delta_k / lr, the losses' unbiased variance has the gradient
    :math:`g_f = \frac{2}{K} \sum_k (F_k - \bar F) g_k`. Where the variance is above `prefer`, d = g_f. Else d is the
    shortest convex combination of the g_k with d'g_f >= 0. Then theta - server_lr lr d / ||d||.

    State: theta.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: from the authors' code, which is all that we have read. There F_k is as with `losses = "local"`, of the
    last epoch; where clients hold one class these losses are far more alike than those of the model that was sent, and
    a small `prefer` is met that is never met by the latter. The factor of g_f is that code's 2 / K, though
    the variance it is compared with is over K - 1; with a step of fixed length only the direction counts. Where no
    combination fulfils the condition (d opposes g_f whatever the weights) the condition is left out. The step has the
    same length in every round: near the optimum theta circles around it unless lr decays (the authors': 0.999 a round).

    Reference: Zhang et al., FairMOO, 2025, github.com/Zhg9300/FairMOO.
    """

    info: ClassVar[Info] = Info(server=ReweightedServer, replies=(LossUpdate,), needs=("gram",), clip_fields=("delta",))

    prefer: float = 6e-3  # variance of the losses above which it alone is lowered, >= 0
    losses: str = "sent"  # sent | local: at the model that was sent, or the mean over the batches of the local work
    server_lr: float = 1.0  # length of a step over lr, > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "prefer", low=0.0)
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "losses", ("sent", "local"))
        several = self.epochs > 1 or self.batch_size is not None
        check_used(self, "losses", used=several, why="with one step a round, which starts from the model that was sent")
        if self.losses == "local" and (self.momentum or self.optimizer != "sgd"):
            raise ValueError(
                "FairMOO: `losses` = 'local' takes local steps one by one: plain SGD without momentum alone."
            )

    def init_server(self, problem: Problem, n_clients: int) -> ReweightedServer:
        return ReweightedServer(problem.theta0.clone())

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[LossUpdate, Empty]:
        if self.losses == "local":
            theta, loss = self.local_sgd_with_loss(problem, task, sent.theta)
        else:
            theta, loss = self.local_sgd(problem, task, sent.theta), client_loss(problem, sent.theta, task)
        return LossUpdate(sent.theta - theta, loss), memory

    def local_sgd_with_loss(self, problem: Problem, task: Task, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return theta after the local steps, and the mean loss of the examples, each before the step on its batch."""
        total, count = theta.new_zeros(()), theta.new_zeros(())
        for batch in task.batches:
            if batch.shape[-1]:
                size, loss = (batch >= 0).sum(), problem.batch_loss(theta, task, batch)
            else:
                size, loss = task.mask.sum(), client_loss(problem, theta, task)
            total, count = total + size * loss, count + size
            theta = self.local_sgd(problem, task._replace(batches=batch[None]), theta)
        return theta, total / count.clamp(min=1)

    def server_step(
        self, server: ReweightedServer, replies: Replies[LossUpdate], cohort: Cohort
    ) -> ServerStep[ReweightedServer]:
        losses, M = replies.scalars("loss"), replies.gram("delta")
        variance = float(losses.var(ddof=1)) if len(losses) > 1 else 0.0
        weights = fair_weights(M, losses, is_unfair=variance > self.prefer)
        length = sqrt(max(float(weights @ M @ weights), 0.0))
        theta: Tensor = server.theta
        if length > 0.0:
            rate = self.server_lr * self.lr_at(cohort.round) / length
            theta = theta - replies.combine("delta", torch.from_numpy(rate * weights))
        return ServerStep(ReweightedServer(theta), diagnostics={"variance": variance, "length": length})


def fair_weights(M: FloatArray, losses: FloatArray, *, is_unfair: bool) -> FloatArray:
    """Return the weights of the updates: the variance's gradient, or the shortest sum that does not raise it."""
    slope: FloatArray = 2.0 / len(losses) * (losses - losses.mean())
    if is_unfair:
        return slope
    found = min_norm_in_half_space(M, M @ slope)
    return min_norm_weights(M) if found is None else found

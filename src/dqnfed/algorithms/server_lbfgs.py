"""Server L-BFGS on the mean loss: the ablation that shows what DQN-Fed's fairness adds to its metric."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, isnan, nan
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.parts.messages import Models, Probe
from dqnfed.algorithms.parts.metric import Mean, Metric, MetricState
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Status, Theta, check_choice, check_range
from dqnfed.core.gradients import gradients_and_values, loss_gradient
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths import step_length
from dqnfed.maths.gramian import norm_of
from dqnfed.maths.quasi_newton import probe_length, secant_curvature


class LBFGSServer(NamedTuple):
    theta: Tensor  # [n]
    theta_before: Tensor  # [n]
    step_norm: Tensor  # []
    n_steps: Tensor  # []
    metric: MetricState
    direction: Tensor  # [n]  of the first step, while its curvature is probed
    mean: Mean  # the cohort's mean gradient then
    probing: Tensor  # []


class LBFGSUpdate(NamedTuple):
    gradient: Tensor  # [n]
    gradient_change: Tensor  # [n] or [0]


class ProbeUpdate(NamedTuple):
    gradient_change: Tensor  # [n]


@dataclass(frozen=True, kw_only=True)
class ServerLBFGS(LocalWork[LBFGSServer, Empty, LBFGSUpdate]):
    """L-BFGS on the cohort's mean loss, at the server: the ablation that shows what DQN-Fed's fairness adds.

    Objective: the mean loss over clients; nothing about it is fair.

    Client: its full gradient by one pass; when the cohort changes, also the change of its gradient over the last step.

    Server: u = W^-1 mean_k g_k, W from `memory` damped secant pairs of the mean loss; theta - alpha u with alpha =
    min(1, g'u / (c ||u||^2)), c the mean loss' own curvature along the last step, at most `growth` times the last step.

    State: server, theta, the model and mean gradient before, `memory` pairs. Local epochs are not used.

    Payload: n floats up, n down; 2n each when the cohort changes.

    Evaluation: the global model.

    Differences: damping, step length and first probe are DQN-Fed's, so that only the direction differs from it.

    Reference: Liu & Nocedal, On the limited memory BFGS method for large scale optimization, Math. Programming 1989.
    """

    info: ClassVar[Info] = Info(
        server=LBFGSServer,
        messages=(Theta, Models, Probe),
        replies=(LBFGSUpdate, ProbeUpdate),
        needs=("sum",),
        theta_fields=("theta", "theta_before"),
        clip_fields=("gradient", "gradient_change"),
        local_work=frozenset(),
    )

    memory: int = 10  # pairs, >= 1
    growth: float = 2.0  # a step is at most this many times the last one, >= 1
    previous: str = "auto"  # kept | sent | auto: the server keeps the mean gradient if everybody takes part

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "memory", low=1)
        check_range(self, "growth", low=1.0, high=inf)
        check_choice(self, "previous", ("auto", "kept", "sent"))

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        everybody = cohort_size == n_clients
        if self.previous == "kept" and not everybody:
            raise ValueError(
                "ServerLBFGS: previous='kept' compares mean gradients of one and the same cohort, but only "
                f"{cohort_size} of {n_clients} clients take part; use previous='sent'."
            )
        return replace(self, previous="kept" if everybody and self.previous != "sent" else "sent")

    @cached_property
    def metric(self) -> Metric:
        """The metric of a prepared method."""
        return Metric(self.memory, keeps_mean=self.previous == "kept")

    def init_server(self, problem: Problem, n_clients: int) -> LBFGSServer:
        theta, zero, metric = problem.theta0, torch.zeros((), dtype=torch.float64), self.metric.init(problem.theta0)
        probing = torch.zeros((), dtype=torch.bool)
        return LBFGSServer(
            theta.clone(), theta.clone(), zero, zero.long(), metric, theta.new_zeros(0), metric.before, probing
        )

    def send(self, server: LBFGSServer) -> Theta | Models | Probe:
        if bool(server.probing):
            length = probe_length(server.theta, server.direction)
            return Probe(server.theta, server.theta - length * server.direction)
        if int(server.n_steps) == 0 or self.previous == "kept":
            return Theta(server.theta)
        return Models(server.theta, server.theta_before)

    def passes(self, sent: Any) -> float:
        return 1.0 if isinstance(sent, Theta) else 2.0

    def client_step(self, problem: Problem, task: Task, sent: Any, memory: Empty) -> tuple[Any, Empty]:
        if isinstance(sent, Theta):
            gradient = loss_gradient(problem, sent.theta, task)
            return LBFGSUpdate(gradient, gradient.new_zeros(0)), memory
        other = sent.nearby if isinstance(sent, Probe) else sent.theta_before
        (gradient, _), (before, _) = gradients_and_values(problem, (sent.theta, other), task)
        if isinstance(sent, Probe):
            return ProbeUpdate(before - gradient), memory
        return LBFGSUpdate(gradient, gradient - before), memory

    def server_step(self, server: LBFGSServer, replies: Replies[Any], cohort: Cohort) -> ServerStep[LBFGSServer]:
        if replies.kind is ProbeUpdate:
            move = -probe_length(server.theta, server.direction) * server.direction
            curvature = float(secant_curvature(move, replies.mean("gradient_change")))
            return self._moved(server, server.direction, server.mean, curvature)
        everybody = torch.ones(len(replies), dtype=torch.bool)
        members = torch.zeros(cohort.n_clients, dtype=torch.bool).index_copy(0, cohort.clients, everybody)
        mean = Mean(replies.mean("gradient"), members)
        if int(server.n_steps) == 0:
            first = server._replace(direction=mean.gradient, mean=mean, probing=torch.ones((), dtype=torch.bool))
            return ServerStep(first, Status.AGAIN)
        move, change = server.theta - server.theta_before, self.metric.change(server.metric, replies, cohort)
        curvature = nan if change is None else float(secant_curvature(move, change))
        server = server._replace(metric=self.metric.learn(server.metric, move, change))
        return self._moved(server, self.metric.apply(server.metric, mean.gradient), mean, curvature)

    def _moved(self, server: LBFGSServer, u: Tensor, mean: Mean, curvature: float) -> ServerStep[LBFGSServer]:
        """Return theta - alpha u, alpha as long as the mean loss' own curvature and the last step allow."""
        norm, slope = norm_of(u), float(mean.gradient.double() @ u.double())
        last_norm = float(server.step_norm) if int(server.n_steps) else None
        growth = 1.0 if isnan(curvature) else self.growth  # nothing known of the curvature: as long as before
        full = 1.0 if int(server.metric.pairs.n_pairs) else inf
        largest = min(full, step_length.growth_limit(norm, last_norm, growth=growth))
        alpha = step_length.curvature_length(np.array([slope]), np.array([abs(curvature)]), norm**2, largest=largest)
        notes = {"alpha": alpha, "step_norm": alpha * norm}
        held = server._replace(probing=torch.zeros_like(server.probing))
        if step_length.is_stationary(alpha, norm, norm_of(server.theta)):
            return ServerStep(held, Status.HOLD, notes)
        moved = held._replace(
            theta=server.theta - alpha * u,
            theta_before=server.theta,
            step_norm=torch.tensor(alpha * norm, dtype=torch.float64),
            n_steps=server.n_steps + 1,
            metric=server.metric._replace(before=mean if self.previous == "kept" else server.metric.before),
            direction=server.direction[:0],
            mean=server.metric.before._replace(gradient=server.direction[:0]),
        )
        return ServerStep(moved, Status.NEXT, notes)

"""Server L-BFGS on the mean loss: the ablation that shows what DQN-Fed's fairness adds to its metric."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.common_descent_messages import Models, Probe
from dqnfed.core.algorithm import Algorithm, Cohort, Empty, ServerStep, Status, Theta, check_choice, check_range
from dqnfed.core.gradients import loss_gradient
from dqnfed.core.problem import Problem, Task
from dqnfed.maths import step_length
from dqnfed.maths.directions import mean_step
from dqnfed.maths.quasi_newton import (
    Pairs,
    empty_pairs,
    lbfgs_inverse_product,
    probe_length,
    secant_curvature,
    server_remembered,
)


class LBFGSServer(NamedTuple):
    theta: Tensor  # [n]
    theta_before: Tensor  # [n]
    gradient_before: Tensor  # [n]  mean gradient of the last cohort, at theta_before
    answered_before: Tensor  # [C]  whose mean it is
    step_norm: Tensor  # []
    n_steps: Tensor  # []
    pairs: Pairs  # [m, n]
    direction: Tensor  # [n]  of the first step, while its curvature is probed
    probing: Tensor  # []


class LBFGSUpdate(NamedTuple):
    gradient: Tensor  # [n]
    gradient_change: Tensor  # [n] or [0]


class ProbeUpdate(NamedTuple):
    gradient_change: Tensor  # [n]


@dataclass(frozen=True, kw_only=True)
class ServerLBFGS(Algorithm[LBFGSServer, Empty, LBFGSUpdate]):
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

    Server: ClassVar[type] = LBFGSServer
    Sent: ClassVar[tuple[type, ...]] = (Theta, Models, Probe)
    Update: ClassVar[tuple[type, ...]] = (LBFGSUpdate, ProbeUpdate)
    starts: ClassVar[tuple[str, ...]] = ("theta", "theta_before")
    scales: ClassVar[tuple[str, ...]] = ("gradient", "gradient_change")

    memory: int = 10  # pairs, >= 1
    growth: float = 2.0  # a step is at most this many times the last one, >= 1
    previous: str = "auto"  # kept | sent | auto: the server keeps the mean gradient if everybody takes part

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "memory", low=1)
        check_range(self, "growth", low=1.0)
        check_choice(self, "previous", ("auto", "kept", "sent"))

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        everybody = cohort_size == n_clients
        if self.previous == "kept" and not everybody:
            raise ValueError(
                "ServerLBFGS: previous='kept' compares mean gradients of one and the same cohort, but only "
                f"{cohort_size} of {n_clients} clients take part; use previous='sent'."
            )
        return replace(self, previous="kept" if everybody and self.previous != "sent" else "sent")

    def init_server(self, problem: Problem, n_clients: int) -> LBFGSServer:
        theta = problem.theta0
        return LBFGSServer(
            theta=theta.clone(),
            theta_before=theta.clone(),
            gradient_before=torch.zeros_like(theta),
            answered_before=torch.zeros(n_clients, dtype=torch.bool),
            step_norm=torch.zeros((), dtype=torch.float64),
            n_steps=torch.zeros((), dtype=torch.int64),
            pairs=empty_pairs(self.memory, len(theta), theta.dtype, theta.device),
            direction=torch.zeros_like(theta),
            probing=torch.zeros((), dtype=torch.bool),
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
        slope = partial(loss_gradient, problem)
        gradient = slope(sent.theta, task)
        if isinstance(sent, Probe):
            return ProbeUpdate(slope(sent.nearby, task) - gradient), memory
        if isinstance(sent, Models):
            return LBFGSUpdate(gradient, gradient - slope(sent.theta_before, task)), memory
        return LBFGSUpdate(gradient, gradient.new_zeros(0)), memory

    def server_step(self, server: LBFGSServer, updates: Any, cohort: Cohort) -> ServerStep[LBFGSServer]:
        if isinstance(updates, ProbeUpdate):
            length = probe_length(server.theta, server.direction)
            change = mean_step(updates.gradient_change)
            curvature = secant_curvature(-length * server.direction, change)
            return self._moved(server, server.direction, server.gradient_before, float(curvature))
        gradient = mean_step(updates.gradient)
        answered = torch.zeros_like(server.answered_before)
        answered[cohort.clients] = True
        if int(server.n_steps) == 0:
            first = server._replace(
                direction=gradient,
                gradient_before=gradient,
                answered_before=answered,
                probing=torch.ones((), dtype=torch.bool),
            )
            return ServerStep(first, Status.AGAIN)
        s, curvature_along = server.theta - server.theta_before, torch.nan
        if self.previous == "sent" or torch.equal(answered, server.answered_before):
            kept = self.previous == "kept"
            y = gradient - server.gradient_before if kept else mean_step(updates.gradient_change)
            server = server._replace(pairs=server_remembered(server.pairs, s, y))
            curvature_along = float(secant_curvature(s, y))
        u = lbfgs_inverse_product(server.pairs, gradient)
        return self._moved(server._replace(answered_before=answered), u, gradient, curvature_along)

    def _moved(self, server: LBFGSServer, u: Tensor, gradient: Tensor, curvature: float) -> ServerStep[LBFGSServer]:
        norm = float(torch.linalg.vector_norm(u, dtype=torch.float64))
        slope = float(gradient.double() @ u.double())
        previous = float(server.step_norm) if int(server.n_steps) else None
        growth = 1.0 if np.isnan(curvature) else self.growth  # nothing known of the curvature: as long as before
        largest = min(
            1.0 if int(server.pairs.n_pairs) else np.inf, step_length.growth_limit(norm, previous, growth=growth)
        )
        alpha = step_length.curvature_length(np.array([slope]), np.array([abs(curvature)]), norm**2, largest=largest)
        theta_norm = float(torch.linalg.vector_norm(server.theta, dtype=torch.float64))
        moved = server._replace(
            theta=server.theta - alpha * u,
            theta_before=server.theta,
            gradient_before=gradient,
            step_norm=torch.tensor(alpha * norm, dtype=torch.float64),
            n_steps=server.n_steps + 1,
            probing=torch.zeros((), dtype=torch.bool),
        )
        diagnostics = {"alpha": alpha, "step_norm": alpha * norm}
        if step_length.is_stationary(alpha, norm, theta_norm):
            held = server._replace(probing=torch.zeros((), dtype=torch.bool))
            return ServerStep(held, Status.HOLD, diagnostics)
        return ServerStep(moved, Status.NEXT, diagnostics)

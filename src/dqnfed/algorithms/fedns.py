"""FedNS: Newton's method with sketched square roots of the clients' Hessians."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.backtracking import Search, Trial, TrialLoss, after_trial, new_search, no_search
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Status, Theta, check_choice, check_range, check_used
from dqnfed.core.curvature import LOSS_PASSES, client_gradient, hessian_root, refuse_if_too_large
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.sketches import KINDS, draw_keys, sketch
from dqnfed.maths.symmetric import positive_solution

MIN_DAMPING = 1e-8  # for problems without a ridge


class FedNSServer(NamedTuple):
    theta: Tensor  # [n]
    search: Search


class FedNSUpdate(NamedTuple):
    gradient: Tensor  # [n]
    loss: Tensor  # []
    root: Tensor  # [rows, n] the sketched square root of the Hessian


@dataclass(frozen=True, kw_only=True)
class FedNS(LocalWork[FedNSServer, Empty, FedNSUpdate | TrialLoss]):
    """Federated Newton sketch (Li, Liu, Wang, Wang & Li, AAAI 2024).

    Objective: the mean of the clients' losses, a generalised linear model with a ridge.

    Client: the square root R_k [n_k, n] of its Hessian without ridge, sketched to `rows` rows by a fresh random
    matrix S_k with E S'S = I; sends S_k R_k and its gradient. No local training: lr, epochs and batch_size are not
    used.

    Server: H = mean (S_k R_k)'(S_k R_k) + ridge I; subtracts a H^-1 g, a by backtracking.

    State: none beyond theta.

    Payload: n + 1 + rows n floats up, n down, and one float in each trial of the line search.

    Evaluation: the global model.

    Differences: the ridge is added exactly, the line search runs (a bug keeps it from running in the authors' code)
    and the sketch is counted in the bits. The number of rows is fixed: without FedNDES' adaptation.

    Reference: arXiv 2401.02734.

    Curvature: sketched exact Hessian (Gauss-Newton for models not linear in theta).
    """

    info: ClassVar[Info] = Info(
        server=FedNSServer,
        messages=(Theta, Trial),
        replies=(FedNSUpdate, TrialLoss),
        needs=("rows",),
        nan_ok_fields=("trial_loss",),
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    rows: int = 20  # of the sketch; 0: none, a gradient step
    sketch: str = "gaussian"  # gaussian | rademacher
    damping: float | None = None  # added to the sketched Hessian, > 0; None: the problem's ridge
    sufficient: float = 0.1  # share of the first-order decrease that a trial must reach, in (0, 1)
    shrink: float = 0.5  # factor between trials, in (0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "rows", low=0)
        check_choice(self, "sketch", KINDS)
        check_used(self, "sketch", used=self.rows > 0, why="with `rows = 0`")
        if self.damping is not None:
            check_range(self, "damping", low=0.0, open_low=True)
        check_range(self, "sufficient", low=0.0, high=1.0, open_low=True, open_high=True)
        check_range(self, "shrink", low=0.0, high=1.0, open_low=True, open_high=True)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        refuse_if_too_large(problem, 1, "FedNS", "fedns-ggn")
        return self if self.damping is not None else replace(self, damping=max(problem.ridge, MIN_DAMPING))

    def init_server(self, problem: Problem, n_clients: int) -> FedNSServer:
        return FedNSServer(problem.theta0.clone(), no_search(problem.theta0))

    def noise(self, problem: Problem, generator: torch.Generator) -> Tensor:
        return draw_keys(generator)

    def send(self, server: FedNSServer) -> Theta | Trial:
        if server.search.is_on:
            return Trial(server.theta - server.search.length * server.search.step)
        return Theta(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Theta | Trial, memory: Empty
    ) -> tuple[FedNSUpdate | TrialLoss, Empty]:
        if isinstance(sent, Trial):
            return TrialLoss(client_loss(problem, sent.theta, task)), memory
        root = hessian_root(problem, task, sent.theta)
        S = sketch(task.noise, self.rows, root.shape[0], kind=self.sketch, dtype=root.dtype)
        gradient, loss = client_gradient(problem, task, sent.theta), client_loss(problem, sent.theta, task)
        return FedNSUpdate(gradient, loss, S @ root), memory

    def server_step(
        self, server: FedNSServer, replies: Replies[FedNSUpdate | TrialLoss], cohort: Cohort
    ) -> ServerStep[FedNSServer]:
        if replies.kind is TrialLoss:
            trial_loss = float(replies.scalars("trial_loss").mean())
            found = after_trial(server.theta, server.search, trial_loss, self.sufficient, self.shrink)
            return ServerStep(server._replace(theta=found.theta, search=found.search), found.status, found.diagnostics)
        n = len(server.theta)
        rows = replies.rows("root").reshape(-1, n)
        eye = torch.eye(n, dtype=rows.dtype, device=rows.device)
        hessian = rows.T @ rows / len(cohort.clients) + (self.damping or MIN_DAMPING) * eye
        gradient = replies.mean("gradient")
        step = positive_solution(hessian, gradient)
        search = new_search(step, float(replies.scalars("loss").mean()), gradient @ step)
        return ServerStep(server._replace(search=search), Status.AGAIN)

    def passes(self, sent: Theta | Trial) -> float:
        return LOSS_PASSES if isinstance(sent, Trial) else 1.0 + self.rows

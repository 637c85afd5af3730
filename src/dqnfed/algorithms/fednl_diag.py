"""FedNL-diag: FedNL's Hessian learning on the diagonal of the Gauss-Newton matrix, for networks."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.backtracking import Search, Trial, TrialLoss, after_trial, new_search, no_search
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Status, Theta, check_range
from dqnfed.core.curvature import LOSS_PASSES, client_gradient, gauss_newton_rows, n_outputs
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.sketches import draw_keys, sketch


class FedNLDiagServer(NamedTuple):
    theta: Tensor  # [n]
    total: Tensor  # [n] sum of the estimates of all clients that took part so far
    is_known: Tensor  # [C] bool, took part so far
    search: Search


class FedNLDiagMemory(NamedTuple):
    estimate: Tensor  # [n]
    n_rounds: Tensor  # [] in which it took part


class FedNLDiagUpdate(NamedTuple):
    gradient: Tensor  # [n]
    loss: Tensor  # []
    values: Tensor  # [k] largest differences between the diagonal and its estimate
    places: Tensor  # [k] int32
    base: Tensor  # [] a new client's estimate starts at this constant; 0 from its second round on
    error: Tensor  # [] mean |difference| before compression


@dataclass(frozen=True, kw_only=True)
class FedNLDiag(LocalWork[FedNLDiagServer, FedNLDiagMemory, FedNLDiagUpdate | TrialLoss]):
    """FedNL on the diagonal of the Gauss-Newton matrix: an approximation for networks, not the published FedNL.

    Objective: the mean of the sampled clients' losses.

    Client: full gradient; the diagonal estimated without bias by `probes` backward passes with random signs; sends the
    `keep` share of largest differences to its estimate, and moves the estimate by alpha times these. No local training:
    lr, epochs and batch_size are not used.

    Server: h = mean estimate of all clients that took part so far, l = mean |difference|; step = g / (h + l + mu), then
    its length by backtracking on the cohort's mean loss, at most `max_step` long.

    State: client, n floats; server, theta and 2 n.

    Payload: n + 3 floats, keep n values and as many indices up, n down; one float a trial.

    Evaluation: the global model.

    Differences: Unlike the paper, the curvature is a diagonal, the clients are sampled, a new client starts from the
    mean of its diagonal, l is a mean (the Frobenius norm of a long diagonal freezes training) and the step is searched
    for.

    Reference: after Safaryan et al., ICML 2022 (arXiv 2106.02969).

    Curvature: diagonal of the Gauss-Newton matrix, stochastic.
    """

    info: ClassVar[Info] = Info(
        server=FedNLDiagServer,
        memory=FedNLDiagMemory,
        messages=(Theta, Trial),
        replies=(FedNLDiagUpdate, TrialLoss),
        needs=("rows",),
        nan_ok_fields=("trial_loss",),
        local_work=frozenset(),
        problem_kinds=frozenset({"network"}),
    )

    probes: int = 2  # backward passes for the diagonal, >= 1
    keep: float = 0.1  # share of the coordinates that are sent, in (0, 1]
    alpha: float = 0.5  # Hessian learning rate in (0, 1]; below 1 since the diagonal is noisy
    mu: float = 1e-3  # least curvature, > 0
    max_step: float = 1.0  # longest step, > 0
    sufficient: float = 0.1  # share of the first-order decrease that a trial must reach, in (0, 1)
    shrink: float = 0.5  # factor between trials, in (0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "probes", low=1)
        check_range(self, "keep", low=0.0, high=1.0, open_low=True)
        check_range(self, "alpha", low=0.0, high=1.0, open_low=True)
        for name in ("mu", "max_step"):
            check_range(self, name, low=0.0, open_low=True)
        for name in ("sufficient", "shrink"):
            check_range(self, name, low=0.0, high=1.0, open_low=True, open_high=True)

    def init_server(self, problem: Problem, n_clients: int) -> FedNLDiagServer:
        theta = problem.theta0.clone()
        return FedNLDiagServer(theta, torch.zeros_like(theta), torch.zeros(n_clients).bool(), no_search(theta))

    def init_memory(self, problem: Problem, task: Task) -> FedNLDiagMemory:
        return FedNLDiagMemory(torch.zeros_like(problem.theta0), problem.theta0.new_zeros(()))

    def noise(self, problem: Problem, generator: torch.Generator) -> Tensor:
        return draw_keys(generator)

    def send(self, server: FedNLDiagServer) -> Theta | Trial:
        if server.search.is_on:
            return Trial(server.theta - server.search.length * server.search.step)
        return Theta(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Theta | Trial, memory: FedNLDiagMemory
    ) -> tuple[FedNLDiagUpdate | TrialLoss, FedNLDiagMemory]:
        if isinstance(sent, Trial):
            return TrialLoss(client_loss(problem, sent.theta, task)), memory
        width = len(task.mask) * n_outputs(problem, task)
        signs = sketch(task.noise, self.probes, width, kind="rademacher", dtype=sent.theta.dtype)
        diagonal = gauss_newton_rows(problem, task, sent.theta, signs).square().sum(0) + problem.ridge
        is_new = memory.n_rounds == 0
        base = torch.where(is_new, diagonal.mean(), torch.zeros_like(diagonal[0]))
        estimate = memory.estimate + base
        difference = diagonal - estimate
        places = torch.topk(difference.abs(), self.n_kept(len(difference))).indices
        values = difference[places]
        gradient, loss = client_gradient(problem, task, sent.theta), client_loss(problem, sent.theta, task)
        update = FedNLDiagUpdate(gradient, loss, values, places.to(torch.int32), base, difference.abs().mean())
        moved = estimate.scatter_add(0, places, self.alpha * values)
        return update, FedNLDiagMemory(moved, memory.n_rounds + 1)

    def n_kept(self, n: int) -> int:
        """Return how many coordinates of n are sent."""
        return max(1, round(self.keep * n))

    def server_step(
        self, server: FedNLDiagServer, replies: Replies[FedNLDiagUpdate | TrialLoss], cohort: Cohort
    ) -> ServerStep[FedNLDiagServer]:
        if replies.kind is TrialLoss:
            trial_loss = float(replies.scalars("trial_loss").mean())
            found = after_trial(server.theta, server.search, trial_loss, self.sufficient, self.shrink)
            return ServerStep(server._replace(theta=found.theta, search=found.search), found.status, found.diagnostics)
        places, values = replies.rows("places").reshape(-1).long(), self.alpha * replies.rows("values").reshape(-1)
        total = (server.total + float(replies.scalars("base").sum())).scatter_add(0, places, values)
        is_known = server.is_known.index_fill(0, cohort.clients.to(server.is_known.device), True)
        curvature = (total / is_known.sum()).clamp(min=0.0) + (float(replies.scalars("error").mean()) + self.mu)
        gradient = replies.mean("gradient")
        step = gradient / curvature
        step = step * (self.max_step / step.norm().clamp(min=self.max_step))
        search = new_search(step, float(replies.scalars("loss").mean()), gradient @ step)
        return ServerStep(FedNLDiagServer(server.theta, total, is_known, search), Status.AGAIN)

    def uplink_bits(self, reply: FedNLDiagUpdate | TrialLoss) -> int:
        if isinstance(reply, TrialLoss):
            return super().uplink_bits(reply)
        n, k, float_bits = len(reply.gradient), len(reply.values), 8 * reply.gradient.element_size()
        return (n + 3 + k) * float_bits + k * max(1, ceil(log2(n)))

    def passes(self, sent: Theta | Trial) -> float:
        return LOSS_PASSES if isinstance(sent, Trial) else 1.0 + self.probes

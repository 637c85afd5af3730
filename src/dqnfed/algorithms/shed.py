"""SHED: Hessians sent a few eigenpairs at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.backtracking import Search, Trial, TrialLoss, after_trial, new_search, no_search
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Status, check_choice, check_range, check_used
from dqnfed.core.curvature import (
    LOSS_PASSES,
    client_gradient,
    client_hessian,
    hessian_passes,
    log_full_participation,
    refuse_if_too_large,
)
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.symmetric import eigenpairs, positive_solution


class SHEDServer(NamedTuple):
    theta: Tensor  # [n]
    values: Tensor  # [C, n] the eigenvalues received since the last renewal; zero where none is known yet
    vectors: Tensor  # [C, n, n] their eigenvectors, as rows
    n_known: Tensor  # [] int64 pairs known of every client
    n_rounds: Tensor  # [] int64
    search: Search


class SHEDMemory(NamedTuple):
    values: Tensor  # [n] eigenvalues at the last renewal, largest first
    vectors: Tensor  # [n, n] eigenvectors, as rows


class Renew(NamedTuple):
    """The model; clients decompose their Hessian there and start again with its first pairs."""

    theta: Tensor  # [n]


class Continue(NamedTuple):
    """The model; clients send their next pairs."""

    theta: Tensor  # [n]
    n_known: Tensor  # [] int64


class SHEDUpdate(NamedTuple):
    gradient: Tensor  # [n]
    loss: Tensor  # []
    values: Tensor  # [q] the next eigenvalues
    vectors: Tensor  # [q, n]
    rest: Tensor  # [] rho_k, the curvature that stands for all pairs not yet sent


@dataclass(frozen=True, kw_only=True)
class SHED(LocalWork[SHEDServer, SHEDMemory, SHEDUpdate | TrialLoss]):
    """Sharing Hessian eigenvectors (Dal Fabbro, Dey, Rossi & Schenato, Automatica 2024).

    Objective: the mean of the clients' losses, convex.

    Client: in renewal rounds (1, 2, 3, 5, 8, 13, ... apart by Fibonacci numbers) decomposes its Hessian; every
    round sends its gradient and its next `pairs` eigenpairs. No local training: lr, epochs and batch_size are not
    used.

    Server: H_k ~ sum_j (l_j - rho_k) v_j v_j' + rho_k I with the pairs known so far, rho_k the largest eigenvalue
    not yet sent, so that the model dominates the Hessian of the renewal point; subtracts a H^-1 g, a by
    backtracking.

    State: client, n^2 + n floats; server, theta and all pairs received.

    Payload: n + pairs (n + 1) + 2 floats up, n down, and one float in each trial of the line search.

    Evaluation: the global model.

    Differences: the same number of pairs for every client. `rest = "middle"` is the paper's choice for least
    squares: (l_next + l_last) / 2.

    Reference: arXiv 2202.05800.

    Curvature: exact Hessian, truncated.
    """

    info: ClassVar[Info] = Info(
        server=SHEDServer,
        memory=SHEDMemory,
        messages=(Renew, Continue, Trial),
        replies=(SHEDUpdate, TrialLoss),
        needs=("rows",),
        nan_ok_fields=("trial_loss",),
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    pairs: int = 10  # new eigenpairs a round; 0: none, a gradient step; as many as parameters: all at once
    rest: str = "next"  # next: the largest eigenvalue not sent | middle: between it and the smallest
    sufficient: float = 0.1  # share of the first-order decrease that a trial must reach, in (0, 1)
    shrink: float = 0.5  # factor between trials, in (0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "pairs", low=0)
        check_choice(self, "rest", ("next", "middle"))
        check_range(self, "sufficient", low=0.0, high=1.0, open_low=True, open_high=True)
        check_range(self, "shrink", low=0.0, high=1.0, open_low=True, open_high=True)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        log_full_participation("shed", n_clients, cohort_size)
        n = problem.n_parameters
        check_used(self, "rest", used=self.pairs < n, why=f"with all {n} eigenpairs sent at once, which leave no rest")
        refuse_if_too_large(problem, 4 * n_clients, "SHED", "fedns-ggn")
        return self

    def init_server(self, problem: Problem, n_clients: int) -> SHEDServer:
        theta = problem.theta0.clone()
        n = len(theta)
        none = torch.zeros((), dtype=torch.long)
        values, vectors = theta.new_zeros(n_clients, n), theta.new_zeros(n_clients, n, n)
        return SHEDServer(theta, values, vectors, none, none.clone(), no_search(theta))

    def init_memory(self, problem: Problem, task: Task) -> SHEDMemory:
        n = problem.n_parameters
        return SHEDMemory(problem.theta0.new_zeros(n), problem.theta0.new_zeros(n, n))

    def select(self, server: SHEDServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return torch.arange(n_clients)

    def send(self, server: SHEDServer) -> Renew | Continue | Trial:
        if server.search.is_on:
            return Trial(server.theta - server.search.length * server.search.step)
        if is_renewal(int(server.n_rounds)):
            return Renew(server.theta)
        return Continue(server.theta, server.n_known)

    def client_step(
        self, problem: Problem, task: Task, sent: Renew | Continue | Trial, memory: SHEDMemory
    ) -> tuple[SHEDUpdate | TrialLoss, SHEDMemory]:
        if isinstance(sent, Trial):
            return TrialLoss(client_loss(problem, sent.theta, task)), memory
        n, n_known = len(sent.theta), torch.zeros((), dtype=torch.long)
        if isinstance(sent, Renew):
            values, vectors = eigenpairs(client_hessian(problem, task, sent.theta))
            memory = SHEDMemory(values.flip(0), vectors.T.flip(0))
        else:
            n_known = sent.n_known
        places = n_known.to(memory.values.device) + torch.arange(min(self.pairs, n), device=memory.values.device)
        exists, places = places < n, places.clamp(max=n - 1)
        values = torch.where(exists, memory.values[places], torch.zeros_like(memory.values[places]))
        vectors = torch.where(exists[:, None], memory.vectors[places], torch.zeros_like(memory.vectors[places]))
        next_place = (n_known + min(self.pairs, n)).clamp(max=n - 1).to(memory.values.device)
        rest = memory.values[next_place]
        rest = (rest + memory.values[-1]) / 2.0 if self.rest == "middle" else rest
        gradient, loss = client_gradient(problem, task, sent.theta), client_loss(problem, sent.theta, task)
        return SHEDUpdate(gradient, loss, values, vectors, rest), memory

    def server_step(
        self, server: SHEDServer, replies: Replies[SHEDUpdate | TrialLoss], cohort: Cohort
    ) -> ServerStep[SHEDServer]:
        if replies.kind is TrialLoss:
            trial_loss = float(replies.scalars("trial_loss").mean())
            found = after_trial(server.theta, server.search, trial_loss, self.sufficient, self.shrink)
            n_rounds = server.n_rounds + int(found.status is not Status.AGAIN)
            changed = server._replace(theta=found.theta, search=found.search, n_rounds=n_rounds)
            return ServerStep(changed, found.status, found.diagnostics)
        clients = cohort.clients.to(server.theta.device)
        n, n_known = len(server.theta), 0 if is_renewal(int(server.n_rounds)) else int(server.n_known)
        new_values, rests = replies.rows("values"), replies.rows("rest")
        n_now = min(n_known + new_values.shape[1], n)
        values = torch.zeros_like(server.values) if n_known == 0 else server.values.clone()
        vectors = server.vectors.clone()
        values[clients, n_known:n_now] = new_values[:, : n_now - n_known]
        vectors[clients, n_known:n_now] = replies.rows("vectors")[:, : n_now - n_known]
        excess = values[clients, :n_now] - rests[:, None]
        rows = vectors[clients, :n_now].reshape(-1, n)
        hessian = rows.T @ (excess.reshape(-1, 1) * rows) / len(clients)
        hessian = hessian + rests.mean() * torch.eye(n, dtype=hessian.dtype, device=hessian.device)
        gradient = replies.mean("gradient")
        step = positive_solution(hessian, gradient)
        search = new_search(step, float(replies.scalars("loss").mean()), gradient @ step)
        known = torch.tensor(n_now)
        return ServerStep(SHEDServer(server.theta, values, vectors, known, server.n_rounds, search), Status.AGAIN)

    def uplink_bits(self, reply: SHEDUpdate | TrialLoss) -> int:
        if isinstance(reply, TrialLoss):
            return super().uplink_bits(reply)
        n, float_bits = len(reply.gradient), 8 * reply.gradient.element_size()
        n_sent = int((reply.vectors != 0).any(-1).sum())  # once all pairs are known there are none to send
        return (n + 2 + n_sent * (n + 1)) * float_bits

    def passes(self, sent: Renew | Continue | Trial) -> float:
        if isinstance(sent, Trial):
            return LOSS_PASSES
        return 1.0 + (hessian_passes(sent.theta) if isinstance(sent, Renew) else 0.0)


def is_renewal(round: int) -> bool:
    """Return whether Hessians are renewed in this round: 0, 1, 2, 4, 7, 12, 20, ..., apart by Fibonacci numbers."""
    at, gap, next_gap = 0, 1, 1
    while at < round:
        at, gap, next_gap = at + gap, next_gap, gap + next_gap
    return at == round

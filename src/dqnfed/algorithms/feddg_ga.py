"""FedDG-GA: clients weigh more where averaging has raised their losses most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import Reweighted, normalised
from dqnfed.core.algorithm import Cohort, Info, Theta, check_range
from dqnfed.core.gradients import client_loss
from dqnfed.core.problem import Problem, Task


class FedDGGAServer(NamedTuple):
    theta: Tensor  # [n]
    client_weights: Tensor  # [n_clients] of the next round; float64 on the host
    last_round: Tensor  # [n_clients] in which the client took part; -2: never


class FedDGGAMemory(NamedTuple):
    own_loss: Tensor  # [] training loss of the client's own model after its last local work; NaN: none yet


class GapUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    gap: Tensor  # [] training loss of the theta that was sent minus that of the client's own last model; NaN: none yet


@dataclass(frozen=True, kw_only=True)
class FedDGGA(Reweighted[FedDGGAServer, FedDGGAMemory, GapUpdate]):
    r"""Generalisation adjustment (Zhang et al., CVPR 2023): weights follow what averaging costs each client.

    Objective: the mean of the clients' losses, and gaps between the global model and the clients' own that are alike.

    Client: sends the gap g_k, its training loss at theta minus the one that its own model had after its last local
    work; then makes `epochs` of SGD from theta and sends its update.

    Server: weights start at 1/N. A client that took part in the round before gets
    :math:`w_k \leftarrow \mathrm{clip}(w_k + (s_t / K)\, g_k / \max_j |g_j|,\ 0, 1)`; then all are scaled to the sum 1,
    and theta - server_lr * sum_k w_k delta_k with the weights of the cohort, scaled to the sum 1. The step s_t is
    `step`, falling to zero over `decay_rounds` rounds if that is given.

    State: client, the loss of its own model; server, theta, and one weight and the last round of every client.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: the authors measure gaps on validation parts, here they are training losses, which clients have. They
    ask for gaps after aggregation; here the client sends them with the next update, which is the same adjustment. The
    authors' code has 1/3 for 1/K, as its data have three clients. The method is not defined for part of the clients: a
    client that was away in the round before keeps its weight. step = 0 is FedAvg with uniform weights.

    Reference: Zhang, Xu, Yao, Zhang, Tian & Wang, Federated Domain Generalization with Generalization Adjustment,
    CVPR 2023.
    """

    info: ClassVar[Info] = Info(
        server=FedDGGAServer,
        memory=FedDGGAMemory,
        replies=(GapUpdate,),
        needs=("sum",),
        clip_fields=("delta",),
        bounded_fields=("gap",),
        nan_ok_fields=("gap",),
    )

    step: float = 0.2  # of the weights, >= 0; 0 keeps them equal
    decay_rounds: int | None = None  # rounds in which `step` falls linearly to 0, >= 1; None: it stays
    weighting: str = "uniform"  # uniform | examples: the weights at the start

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "step", low=0.0)
        if self.decay_rounds is not None:
            check_range(self, "decay_rounds", low=1)

    @property
    def scalar(self) -> str:
        return "gap"

    def init_server(self, problem: Problem, n_clients: int) -> FedDGGAServer:
        weights = torch.full((n_clients,), 1.0 / n_clients, dtype=torch.float64)
        return FedDGGAServer(problem.theta0.clone(), weights, torch.full((n_clients,), -2))

    def init_memory(self, problem: Problem, task: Task) -> FedDGGAMemory:
        return FedDGGAMemory(problem.theta0.new_tensor(torch.nan))

    def client_step(
        self, problem: Problem, task: Task, sent: Theta, memory: FedDGGAMemory
    ) -> tuple[GapUpdate, FedDGGAMemory]:
        local = self.local_sgd(problem, task, sent.theta)
        gap = client_loss(problem, sent.theta, task) - memory.own_loss
        return GapUpdate(sent.theta - local, gap), FedDGGAMemory(client_loss(problem, local, task))

    def weights(
        self, losses: Tensor, shares: Tensor, server: FedDGGAServer, cohort: Cohort
    ) -> tuple[Tensor, FedDGGAServer]:
        before, here = server.client_weights, cohort.clients
        is_fresh = (server.last_round[here] == cohort.round - 1) & losses.isfinite()
        moved = before.index_copy(0, here, adjusted(before[here], losses, is_fresh, self.step_at(cohort.round)))
        kept = moved / moved.sum()
        last = server.last_round.index_fill(0, here, cohort.round)
        return normalised(kept[here] * shares * len(shares), shares), server._replace(
            client_weights=kept, last_round=last
        )

    def step_at(self, round: int) -> float:
        """Return the step of a round's weights."""
        return self.step if self.decay_rounds is None else self.step * max(0.0, 1.0 - round / self.decay_rounds)


def adjusted(weights: Tensor, gaps: Tensor, is_fresh: Tensor, step: float) -> Tensor:
    """Return the weights moved by step / K times the gaps over the largest of them, held in [0, 1]; not all are 0."""
    gaps = torch.where(is_fresh, gaps, 0.0)
    largest = gaps.abs().max()
    if not bool(largest > 0):
        return weights
    moved = (weights + step / len(gaps) * gaps / largest).clamp(0.0, 1.0)
    return moved if bool(moved.sum() > 0) else weights

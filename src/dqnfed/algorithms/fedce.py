"""FedCE: clients weighted by what they contribute, in the direction of their updates and in the model without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import normalised
from dqnfed.core.algorithm import Cohort, Info, ServerStep, check_choice, check_range
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import FloatArray, Replies


class FedCEServer(NamedTuple):
    theta: Tensor  # [n]
    share: Tensor  # [] 1 / K of the last cohort; 0 before the first
    sums: Tensor  # [3, n_clients] of 1 - cos, of losses without the client, of weights; float64 on the host
    counts: Tensor  # [3, n_clients] how many numbers those sums are of
    last_round: Tensor  # [n_clients] in which the client took part; -2: never


class FedCEMemory(NamedTuple):
    local: Tensor  # [n] the client's model after its last local work; NaN: it had none


class FedCESent(NamedTuple):
    theta: Tensor  # [n]
    share: Tensor  # [] of one client in the last mean; 0: there was none


class FedCEUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    loss_without: Tensor  # [] training loss of the model without the client's last part; NaN: it had none


@dataclass(frozen=True, kw_only=True)
class FedCE(LocalWork[FedCEServer, FedCEMemory, FedCEUpdate]):
    r"""Contribution estimation (Jiang et al., CVPR 2023): who adds what the others lack counts more.

    Objective: the mean of the clients' losses, weighted by their contributions.

    Client: sends its training loss of the model without its own last part, (theta - s v_k) / (1 - s) with v_k its last
    local model and s = 1/K; then the update of `epochs` of SGD from theta.

    Server: with the last weights c and u = sum_k c_k delta_k, a_k = 1 - the mean over the rounds of
    cos(delta_k, u - c_k delta_k); e_k = the mean over the rounds of the losses without the client; both scaled to the
    sum 1 over the cohort. This round's contribution is a_k e_k ("times") or a_k + e_k ("plus"), scaled to the sum 1,
    and the weight c_k its mean over the rounds; theta - server_lr * sum_k c_k delta_k.

    State: client, its last local model; server, theta and sums of these numbers for every client.

    Payload: n + 1 floats up, n + 1 down.

    Evaluation: the global model.

    Differences: the authors use 1 - a validation score where this uses the training loss, which every problem has; and
    the part that is taken out has the weight c_k, which the server would have to tell every client apart: here it is
    1/K. Losses count from a client's second round in a row on; before, its weight is from a_k alone. Sums and means are
    over the cohort.

    Reference: Jiang, Roth, Li, Yang, Zhao, Nath, Xu, Dou & Xu, Fair Federated Medical Image Segmentation via Client
    Contribution Estimation, CVPR 2023.
    """

    info: ClassVar[Info] = Info(
        server=FedCEServer,
        memory=FedCEMemory,
        messages=(FedCESent,),
        replies=(FedCEUpdate,),
        needs=("gram",),
        clip_fields=("delta",),
        bounded_fields=("loss_without",),
        nan_ok_fields=("loss_without",),
    )

    joined_by: str = "times"  # times | plus: how the two contributions are joined
    server_lr: float = 1.0  # > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "joined_by", ("times", "plus"))
        check_range(self, "server_lr", low=0.0, open_low=True)

    def init_server(self, problem: Problem, n_clients: int) -> FedCEServer:
        theta, zeros = problem.theta0, torch.zeros(3, n_clients, dtype=torch.float64)
        return FedCEServer(theta.clone(), theta.new_zeros(()), zeros, zeros.clone(), torch.full((n_clients,), -2))

    def init_memory(self, problem: Problem, task: Task) -> FedCEMemory:
        return FedCEMemory(torch.full_like(problem.theta0, torch.nan))

    def send(self, server: FedCEServer) -> FedCESent:
        return FedCESent(server.theta, server.share)

    def client_step(
        self, problem: Problem, task: Task, sent: FedCESent, memory: FedCEMemory
    ) -> tuple[FedCEUpdate, FedCEMemory]:
        rest = (1.0 - sent.share).clamp(min=1e-6)  # of a cohort of one nothing is left
        without = (sent.theta - sent.share * memory.local) / rest
        local = self.local_sgd(problem, task, sent.theta)
        return FedCEUpdate(sent.theta - local, client_loss(problem, without, task)), FedCEMemory(local)

    def server_step(
        self, server: FedCEServer, replies: Replies[FedCEUpdate], cohort: Cohort
    ) -> ServerStep[FedCEServer]:
        here, K = cohort.clients, len(replies)
        equal = torch.full((K,), 1.0 / K, dtype=torch.float64)
        before = normalised(means(server, 2, here, missing=1.0 / cohort.n_clients), equal)
        angles = 1.0 - torch.from_numpy(cosines_with_others(replies.gram("delta"), before.numpy()))
        losses = torch.from_numpy(replies.scalars("loss_without"))
        is_fresh = (server.last_round[here] == cohort.round - 1) & losses.isfinite()
        kept = added(server, 0, here, angles, torch.ones(K, dtype=torch.bool))
        kept = added(kept, 1, here, losses, is_fresh)
        a = normalised(means(kept, 0, here, missing=0.0), equal)
        known = means(kept, 1, here, missing=torch.nan)
        e = normalised(torch.where(known.isnan(), known.nanmean().nan_to_num(1.0), known), equal)
        joined = normalised(a * e if self.joined_by == "times" else a + e, equal)
        kept = added(kept, 2, here, joined, torch.ones(K, dtype=torch.bool))
        weights = normalised(means(kept, 2, here, missing=0.0), equal)
        theta = server.theta - self.server_lr * replies.combine("delta", weights)
        share, last = torch.full_like(server.share, 1.0 / K), server.last_round.index_fill(0, here, cohort.round)
        after = kept._replace(theta=theta, share=share, last_round=last)
        return ServerStep(after, diagnostics={"largest_weight": float(weights.max())})

    def passes(self, sent: FedCESent) -> float:
        return self.epochs + 1 / 3


def added(server: FedCEServer, row: int, here: Tensor, values: Tensor, counted: Tensor) -> FedCEServer:
    """Return the state with the values of the clients that are counted added to a row of sums."""
    sums, counts = server.sums.clone(), server.counts.clone()
    sums[row, here[counted]] += values[counted]
    counts[row, here[counted]] += 1.0
    return server._replace(sums=sums, counts=counts)


def means(server: FedCEServer, row: int, here: Tensor, *, missing: float) -> Tensor:
    """Return the clients' means over the rounds of a row of sums; `missing` where there is no number."""
    counts = server.counts[row, here]
    return torch.where(counts > 0, server.sums[row, here] / counts.clamp(min=1.0), missing)


def cosines_with_others(M: FloatArray, c: FloatArray) -> FloatArray:
    """Return cos(row_k, sum_j c_j row_j - c_k row_k) of the rows with the Gramian M; 0 where one of them is zero."""
    products, squares = M @ c - c * np.diag(M), np.diag(M)
    others = c @ M @ c - 2.0 * c * (M @ c) + c**2 * squares
    sizes = np.sqrt(np.maximum(squares * others, 0.0))
    return np.asarray(np.clip(np.where(sizes > 0, products / np.where(sizes > 0, sizes, 1.0), 0.0), -1.0, 1.0))

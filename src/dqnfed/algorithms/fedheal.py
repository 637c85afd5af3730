"""FedHEAL: entries whose sign is inconsistent are masked, and clients with long updates gain weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_range
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.directions import mean_step


class FedHEALServer(NamedTuple):
    theta: Tensor  # [n]
    n_positive: Tensor  # [n_clients, n]  rounds in which the entry of the client's update was >= 0; int32
    n_rounds: Tensor  # [n_clients]     rounds in which the client took part
    weights: Tensor  # [n_clients]     not normalised; set when the client first takes part; float64
    increments: Tensor  # [n_clients]     smoothed growth of the weights; float64
    sizes: Tensor  # [n_tensors]     entries of each named tensor of theta


class FedHEALUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it


@dataclass(frozen=True, kw_only=True)
class FedHEAL(LocalWork[FedHEALServer, Empty, FedHEALUpdate]):
    """FedHEAL: federated parameter-harmonised and aggregation-equalised learning.

    Objective: the mean loss, with the progress of clients (domains) evened out.

    Client: makes `epochs` of SGD from theta; sends the update delta_k.

    Server: an entry of delta_k is kept if the share of the client's earlier rounds in which it had the same sign (zero
    counts as positive) exceeds `tau`; everything is kept in a client's first round. D_k is the sum over the named
    tensors of the lengths of the kept entries. The weight grows, w_k <- w_k + i_k, by the smoothed increment
    i_k <- (1 - beta) i_k + beta D_k / sum_j D_j, from w_k = 1 / K. Every entry of theta loses the mean of the kept
    entries, weighted by w over the clients that kept it; nothing where nobody did.

    State: theta, and per client a counter for each entry (C n integers), the rounds it took part in, weight and
    increment.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: Unlike the paper, which has all clients in every round, each client counts its own rounds, starts when
    it first takes part, and only the present cohort's D_j are summed; if they are all zero, the weights stay. Unlike
    the official code, increments start at zero (there they are missing, and the first round fails), buffers take no
    part, and signs are counted as integers, so that the share is exact after any number of rounds.

    Reference: Chen, Huang & Ye, "Fair federated learning under domain skew with local consistency and domain
    diversity", CVPR 2024.
    """

    info: ClassVar[Info] = Info(server=FedHEALServer, replies=(FedHEALUpdate,), needs=("rows",), clip_fields=("delta",))

    tau: float = 0.3  # share of earlier rounds that must agree in sign, in [-1, 1]; below 0 nothing is masked
    beta: float = 0.4  # share of the present round in the increments, in [0, 1]; 0: the weights stay equal

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "tau", low=-1.0, high=1.0)
        check_range(self, "beta", low=0.0, high=1.0)

    def init_server(self, problem: Problem, n_clients: int) -> FedHEALServer:
        theta = problem.theta0.clone()
        return FedHEALServer(
            theta=theta,
            n_positive=torch.zeros(n_clients, len(theta), dtype=torch.int32, device=theta.device),
            n_rounds=torch.zeros(n_clients, dtype=torch.long),
            weights=torch.zeros(n_clients, dtype=torch.float64),
            increments=torch.zeros(n_clients, dtype=torch.float64),
            sizes=torch.tensor([shape.numel() for _, shape in problem.layout]),
        )

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedHEALUpdate, Empty]:
        return FedHEALUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(
        self, server: FedHEALServer, replies: Replies[FedHEALUpdate], cohort: Cohort
    ) -> ServerStep[FedHEALServer]:
        delta, clients = replies.rows("delta"), cohort.clients  # signs are masked entry by entry
        rows = clients.to(delta.device)
        n_rounds, n_positive = server.n_rounds[clients], server.n_positive[rows]
        kept = consistent_entries(delta, n_positive, n_rounds.to(delta.device), self.tau)
        masked = torch.where(kept, delta, 0.0)
        weights, increments = self._grown(server, tensor_lengths(masked, server.sizes.tolist()), clients)
        step = elementwise_mean(masked, kept, weights)
        changed = FedHEALServer(
            theta=server.theta - step,
            n_positive=server.n_positive.index_copy(0, rows, n_positive + (delta >= 0).int()),
            n_rounds=server.n_rounds.index_copy(0, clients, n_rounds + 1),
            weights=server.weights.index_copy(0, clients, weights),
            increments=server.increments.index_copy(0, clients, increments),
            sizes=server.sizes,
        )
        diagnostics = {
            "kept_share": float(kept.double().mean()),
            "largest_weight": float(weights.max() / weights.sum()),
        }
        return ServerStep(changed, diagnostics=diagnostics)

    def _grown(self, server: FedHEALServer, lengths: Tensor, clients: Tensor) -> tuple[Tensor, Tensor]:
        is_new = server.n_rounds[clients] == 0
        weights = torch.where(is_new, 1.0 / len(clients), server.weights[clients])
        increments = server.increments[clients]
        if not bool(lengths.sum() > 0):
            return weights, increments
        increments = (1.0 - self.beta) * increments + self.beta * lengths / lengths.sum()
        return weights + increments, increments


def consistent_entries(delta: Tensor, n_positive: Tensor, n_rounds: Tensor, tau: float) -> Tensor:
    """Return which entries [K, n] had their present sign in more than the share tau of the client's earlier rounds."""
    n_earlier = n_rounds[:, None]
    n_agreeing = torch.where(delta >= 0, n_positive, n_earlier - n_positive)
    return (n_agreeing / n_earlier.clamp(min=1) > tau) | (n_earlier == 0)


def tensor_lengths(rows: Tensor, sizes: list[int]) -> Tensor:
    """Return for each row the sum of the Euclidean lengths of its named tensors, float64 on the host."""
    pieces = rows.split(sizes, dim=1)
    return torch.stack([torch.linalg.vector_norm(piece, dim=1) for piece in pieces]).double().sum(0).cpu()


def elementwise_mean(masked: Tensor, kept: Tensor, weights: Tensor) -> Tensor:
    """Return for each entry the weighted mean over the rows that kept it, zero where none did."""
    kept_share = mean_step(kept.to(masked.dtype), weights)
    kept_share = torch.where(kept.all(0), 1.0, kept_share)  # exactly one, so that nothing masked is exactly FedAvg
    return torch.where(kept.any(0), mean_step(masked, weights) / kept_share, 0.0)

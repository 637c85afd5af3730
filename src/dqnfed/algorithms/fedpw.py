"""FedPW: weights from losses and from agreement, small entries of easy clients left out, agreed ones enlarged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import LossUpdate, normalised
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_range
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class FedPWServer(NamedTuple):
    theta: Tensor  # [n]
    sizes: Tensor  # [T] of the model's tensors
    running: Tensor  # [4, n_clients] a, P of the losses; b, Q of the agreement; float64 on the host, as the one below
    first: Tensor  # [2] mean loss and mean agreement of the first round; NaN before it


@dataclass(frozen=True, kw_only=True)
class FedPW(LocalWork[FedPWServer, Empty, LossUpdate]):
    r"""Parameter-wise and client-wise fairness (FedPW, NeurIPS 2025).

    Objective: a model to which every client and every parameter on which clients agree contributes.

    Client: sends its training loss F_k at theta and the update of `epochs` of SGD from theta.

    Server: shares nu_k = F_k / sum F and sigma_k = S_k / sum S with S_k = sum_j delta_k'delta_j. Running means
    a <- (1 - beta_F) a + beta_F nu, P <- P + a scaled to the sum 1, with beta_F = beta mean F / mean F of the first
    round; likewise b and Q from sigma. The weights are rho P + (1 - rho) Q, rho = std P / (std P + std Q). From the
    second round on, in every tensor, the smallest entries of each update are left out, a share `drop_rate` K (1 / nu_k)
    / sum_j (1 / nu_j), at most 1: easy clients lose most. Of the weighted sum the share `drop_rate` of coordinates on
    which the clients agree most is multiplied by 1 + r, r the mean size of what was left out over the mean size of the
    sum there, if r < 1.

    State: theta, four numbers a client, and two of the first round.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: from the authors' code. Its losses are means over the local work; here they are those at theta. Q may
    become negative where updates oppose each other: negative weights count as 0, and beta_F and beta_S are at most 1.
    Defined for all clients in every round: with a part of them, shares and scalings are over the cohort. The authors'
    code takes every tenth entry for the mean size of what was left out; here it is all of them. Agreement is measured
    on whole updates.

    Reference: FedPW, NeurIPS 2025, github.com/guankaiqi/FedPW.
    """

    info: ClassVar[Info] = Info(server=FedPWServer, replies=(LossUpdate,), needs=("rows",), clip_fields=("delta",))

    beta: float = 0.3  # share of the present round in the running means, at the first round's losses, in (0, 1]
    drop_rate: float = 0.3  # mean share of entries that are left out, in [0, 1); 0: none
    server_lr: float = 1.0  # > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "beta", low=0.0, high=1.0, open_low=True)
        check_range(self, "drop_rate", low=0.0, high=1.0, open_high=True)
        check_range(self, "server_lr", low=0.0, open_low=True)

    def init_server(self, problem: Problem, n_clients: int) -> FedPWServer:
        sizes = torch.tensor([shape.numel() for _, shape in problem.layout])
        running = torch.zeros(4, n_clients, dtype=torch.float64)
        return FedPWServer(problem.theta0.clone(), sizes, running, torch.full((2,), torch.nan, dtype=torch.float64))

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[LossUpdate, Empty]:
        delta = sent.theta - self.local_sgd(problem, task, sent.theta)
        return LossUpdate(delta, client_loss(problem, sent.theta, task)), memory

    def server_step(self, server: FedPWServer, replies: Replies[LossUpdate], cohort: Cohort) -> ServerStep[FedPWServer]:
        losses = torch.from_numpy(replies.scalars("loss")).clamp(min=1e-12)
        agreement = torch.from_numpy(replies.gram("delta")).sum(1)
        now = torch.stack([losses.mean(), agreement.mean()])
        first = torch.where(server.first.isnan(), now, server.first)
        rates = (self.beta * now / first).nan_to_num(self.beta).clamp(0.0, 1.0)
        a, P, b, Q = server.running[:, cohort.clients]
        equal = torch.full_like(losses, 1.0 / len(losses))
        shares = losses / losses.sum()
        a, b = a + rates[0] * (shares - a), b + rates[1] * (_scaled(agreement, equal) - b)
        P, Q = _scaled(P + a, equal), _scaled(Q + b, equal)
        running = server.running.index_copy(1, cohort.clients, torch.stack([a, P, b, Q]))
        spread = P.std(correction=0) + Q.std(correction=0)
        rho = P.std(correction=0) / spread if bool(spread > 0) else 0.5
        weights = normalised(rho * P + (1.0 - rho) * Q, equal)
        step = self._step(replies.rows("delta"), weights, shares, server.sizes, cohort)
        after = FedPWServer(server.theta - self.server_lr * step, server.sizes, running, first)
        return ServerStep(after, diagnostics={"largest_weight": float(weights.max()), "rho": float(rho)})

    def _step(self, rows: Tensor, weights: Tensor, shares: Tensor, sizes: Tensor, cohort: Cohort) -> Tensor:
        w = weights.to(rows)
        if self.drop_rate == 0.0 or cohort.round == 0:
            return w @ rows
        easy = 1.0 / shares
        drops = (self.drop_rate * len(rows) * easy / easy.sum()).clamp(max=1.0)
        kept = without_smallest(rows, drops.tolist(), sizes.tolist())
        return enlarged(w @ kept, rows, rows - kept, self.drop_rate)


def _scaled(values: Tensor, equal: Tensor) -> Tensor:
    """Return the values over their sum; equal ones where that is not positive."""
    total = values.sum()
    return values / total if bool(total > 0) else equal


def without_smallest(rows: Tensor, drops: list[float], sizes: list[int]) -> Tensor:
    """Return the rows [K, n] with a share of the smallest entries of each tensor set to zero, a share for each row."""
    parts = []
    for part in rows.split(sizes, dim=1):
        ranks = part.abs().argsort(dim=1, stable=True).argsort(dim=1)
        cuts = torch.tensor([int(drop * part.shape[1]) for drop in drops], device=part.device)
        parts.append(torch.where(ranks >= cuts[:, None], part, torch.zeros_like(part)))
    return torch.cat(parts, dim=1)


def enlarged(step: Tensor, rows: Tensor, left_out: Tensor, share: float) -> Tensor:
    """Return the step with the share of coordinates on which the rows agree most enlarged by what was left out."""
    unit = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=1e-30)
    unit = unit / torch.linalg.vector_norm(unit, dim=0, keepdim=True).clamp(min=1e-30)
    spread = unit.std(dim=0, correction=0)
    n_agreed = int(share * len(step))
    is_dropped = left_out != 0
    if n_agreed == 0 or not bool(is_dropped.any()):
        return step
    agreed = spread.argsort(stable=True)[:n_agreed]
    ratio = left_out.abs().sum() / is_dropped.sum() / step[agreed].abs().mean().clamp(min=1e-30)
    return step.index_copy(0, agreed, step[agreed] * (1.0 + ratio)) if bool(ratio < 1.0) else step

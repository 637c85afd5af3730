"""FedISM: clients weighted by how sharp the global model is on their data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import Reweighted, normalised
from dqnfed.core.algorithm import Cohort, Empty, Info, Theta, check_range
from dqnfed.core.gradients import client_loss
from dqnfed.core.problem import Problem, Task

SMALLEST = 1e-10  # sharpness below this counts as this


class FedISMServer(NamedTuple):
    theta: Tensor  # [n]
    client_weights: Tensor  # [n_clients] of the client's last round; NaN: it had none; float64 on the host


class SharpnessUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    sharpness: Tensor  # [] rise of the training loss from theta over the length `rho` up its gradient


@dataclass(frozen=True, kw_only=True)
class FedISM(Reweighted[FedISMServer, Empty, SharpnessUpdate]):
    r"""Sharpness matching (Wu et al., IJCAI 2024), its weights: sharper clients count more.

    Objective: a model that is as flat on every client's data as on the others'.

    Client: computes its sharpness at theta, :math:`s_k = \max(10^{-10}, F_k(\theta + \rho\, g_k / \|g_k\|) -
    F_k(\theta))`, then makes `epochs` of SGD from theta; sends the update delta_k and s_k.

    Server: subtracts server_lr times sum_k w_k delta_k, where w_k is `beta` times p_k s_k^q, scaled to the sum 1, plus
    1 - beta times the client's last weight (its share p_k before its first round), scaled to the sum 1.

    State: theta, and every client's last weight.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: the weights alone. The authors' clients train with GSAM on Adam and a logit-adjusted cross-entropy,
    which flattens each client's loss as well; here they make local SGD on their own loss. With part of the clients the
    weights are those of the cohort. q = 0 is FedAvg with the same weighting.

    Reference: Wu, Kuang, Yan & Yu, From Optimization to Generalization: Fair Federated Learning against Quality
    Shift via Inter-Client Sharpness Matching, IJCAI 2024.
    """

    info: ClassVar[Info] = Info(
        server=FedISMServer,
        replies=(SharpnessUpdate,),
        needs=("sum",),
        clip_fields=("delta",),
        bounded_fields=("sharpness",),
    )

    q: float = 2.0  # power of the sharpness, >= 0; 0: FedAvg
    beta: float = 0.5  # share of this round's weights, in (0, 1]
    rho: float = 0.05  # length of the way up the gradient, > 0
    weighting: str = "uniform"  # uniform | examples: p_k

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "q", low=0.0)
        check_range(self, "beta", low=0.0, high=1.0, open_low=True)
        check_range(self, "rho", low=0.0, open_low=True)

    @property
    def scalar(self) -> str:
        return "sharpness"

    def init_server(self, problem: Problem, n_clients: int) -> FedISMServer:
        return FedISMServer(problem.theta0.clone(), torch.full((n_clients,), torch.nan, dtype=torch.float64))

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[SharpnessUpdate, Empty]:
        ((slope, loss),) = problem.kernels.gradients(problem, [sent.theta], task)
        length = torch.linalg.vector_norm(slope)
        uphill = sent.theta + self.rho * slope / torch.where(length > 0, length, torch.ones_like(length))
        sharpness = (client_loss(problem, uphill, task) - loss).clamp(min=SMALLEST)
        return SharpnessUpdate(sent.theta - self.local_sgd(problem, task, sent.theta), sharpness), memory

    def weights(
        self, losses: Tensor, shares: Tensor, server: FedISMServer, cohort: Cohort
    ) -> tuple[Tensor, FedISMServer]:
        before = server.client_weights[cohort.clients]
        before = normalised(torch.where(before.isnan(), shares, before), shares)
        now = normalised(shares * (losses / losses.max()).pow(self.q), shares)
        weights = normalised(self.beta * now + (1.0 - self.beta) * before, shares)
        return weights, server._replace(client_weights=server.client_weights.index_copy(0, cohort.clients, weights))

    def passes(self, sent: Theta) -> float:
        return self.epochs + 1.0

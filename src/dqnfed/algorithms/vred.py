"""VRed and Semi-VRed: the mean loss and a penalty on its variance over clients, or on that above the mean alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dqnfed.algorithms.reweighted import (
    LossUpdate,
    ReweightedServer,
    StatelessReweighted,
    normalised,
    spread_weights,
)
from dqnfed.core.algorithm import Cohort, Info, check_range


@dataclass(frozen=True, kw_only=True)
class VRed(StatelessReweighted):
    r"""Variance reduction over clients, 2024: a penalty on the variance of the clients' losses.

    Objective: :math:`\min \bar F + \beta \sum_k p_k (F_k - \bar F)^2` with :math:`\bar F = \sum_k p_k F_k`.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta; sends the update delta_k and
    F_k.

    Server: subtracts server_lr times sum_k w_k delta_k, where w_k = p_k (1 + 2 beta (F_k - mean F)): the exact gradient
    of the objective if updates are gradients. Where beta is so large that a weight is negative, it counts as 0 and the
    others are scaled to the sum 1.

    State: theta.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: no official code was found. The weights are derived from the objective; that negative ones count as 0
    is ours, since a model that ascends a client's loss may diverge. The mean is over the cohort of a round. beta = 0 is
    FedAvg with the same weighting, to the bit.

    Reference: Semi-Variance Reduction for Fair Federated Learning, arXiv 2406.16193, 2024, where VRed is the first
    step.
    """

    info: ClassVar[Info] = Info(server=ReweightedServer, replies=(LossUpdate,), needs=("sum",), clip_fields=("delta",))

    beta: float = 0.1  # weight of the penalty, >= 0; 0: FedAvg
    weighting: str = "uniform"  # uniform | examples: p_k

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "beta", low=0.0)

    def weights(
        self, losses: Tensor, shares: Tensor, server: ReweightedServer, cohort: Cohort
    ) -> tuple[Tensor, ReweightedServer]:
        return spread_weights(losses, shares, self.beta), server


@dataclass(frozen=True, kw_only=True)
class SemiVRed(VRed):
    r"""Semi-variance reduction over clients, 2024: a penalty on losses above the mean.

    Objective: :math:`\min \bar F + \beta \sum_k p_k \max(F_k - \bar F, 0)^2` with :math:`\bar F = \sum_k p_k F_k`.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta; sends the update delta_k and
    F_k.

    Server: subtracts server_lr times sum_k w_k delta_k. With the excess e_k = max(F_k - mean F, 0),
    w_k = p_k (1 + 2 beta (e_k - sum_j p_j e_j)): the exact gradient of the objective if updates are gradients. Where
    beta is so large that a weight is negative, it counts as 0 and the others are scaled to the sum 1.

    State: theta.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: no official code was found. The weights are derived from the objective; that negative ones count as 0
    is ours. The mean is over the cohort of a round. beta = 0 is FedAvg with the same weighting, to the bit.

    Reference: Semi-Variance Reduction for Fair Federated Learning, arXiv 2406.16193, 2024.
    """

    def weights(
        self, losses: Tensor, shares: Tensor, server: ReweightedServer, cohort: Cohort
    ) -> tuple[Tensor, ReweightedServer]:
        excess = (losses - shares @ losses).clamp(min=0.0)
        return normalised(shares * (1.0 + 2.0 * self.beta * (excess - shares @ excess)), shares), server

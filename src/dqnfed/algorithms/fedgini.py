"""FedGini: clients weighted by the rank of their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import LossUpdate, ReweightedServer, StatelessReweighted, normalised
from dqnfed.core.algorithm import Cohort, Info, check_range


@dataclass(frozen=True, kw_only=True)
class FedGini(StatelessReweighted):
    r"""Gini's welfare over clients (FedGini, Information Sciences 2023): a larger loss, a higher rank, a larger weight.

    Objective: the mean loss plus a share of the losses' inequality, measured by ranks as the Gini coefficient does.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta; sends the update delta_k and
    F_k.

    Server: with the rank i = 0 .. K - 1 of a client's loss, ascending, subtracts server_lr times sum_k w_k delta_k,
    where :math:`w_i \propto p_i \big(1 + (1 - \epsilon)\, i (i + 1) / S\big)`, S the sum of i (i + 1) over all ranks,
    and the weights sum to 1. Clients with equal losses share the mean of their ranks' weights.

    State: theta.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: described from a third party's code, that of FedLF's authors. Its line `weights[argsort(-loss)]` takes
    the weights in the order of the losses instead of giving each client the weight of its rank, so that a client's
    weight is not a function of its loss; here the weight is that of the rank, and the largest loss has the largest. For
    many clients the weights are nearly equal: the largest is about p_k (1 + 3 (1 - epsilon) / K). epsilon = 1 is FedAvg
    with the same weighting, to the bit.

    Reference: FedGini, Information Sciences 2023, as implemented in the code of FedLF (Pan et al., AAAI 2024).
    """

    info: ClassVar[Info] = Info(server=ReweightedServer, replies=(LossUpdate,), needs=("sum",), clip_fields=("delta",))

    epsilon: float = 0.5  # in [0, 1]; smaller: ranks count more; 1: FedAvg
    weighting: str = "uniform"  # uniform | examples: p_k

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "epsilon", low=0.0, high=1.0)

    def weights(
        self, losses: Tensor, shares: Tensor, server: ReweightedServer, cohort: Cohort
    ) -> tuple[Tensor, ReweightedServer]:
        raised = 1.0 + (1.0 - self.epsilon) * rank_shares(losses)
        return normalised(shares * raised, shares), server


def rank_shares(losses: Tensor) -> Tensor:
    """Return i (i + 1) over its sum for the ascending ranks i = 0 .. K - 1 of the losses; equal losses share alike."""
    ranks = torch.arange(len(losses), dtype=losses.dtype)
    by_rank = ranks * (ranks + 1.0)
    by_rank = by_rank / by_rank.sum().clamp(min=1.0)
    _, place, count = torch.unique(losses, return_inverse=True, return_counts=True)  # sorted, equal ones together
    sums = torch.zeros(len(count), dtype=losses.dtype).index_add(0, place.sort().values, by_rank)
    shared: Tensor = sums / count
    return shared[place]

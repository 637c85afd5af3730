"""DRFL: clients weighted by their losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from dqnfed.algorithms.reweighted import LossUpdate, ReweightedServer, StatelessReweighted, normalised
from dqnfed.core.algorithm import Cohort, Info


@dataclass(frozen=True, kw_only=True)
class DRFL(StatelessReweighted):
    """Dynamic reweighting (Zhao & Joshi, 2022): every client weighs as much as its loss.

    Objective: minimise sum_k p_k F_k^2 / 2, which is q-FFL's for q = 1.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta; sends the update delta_k and
    F_k.

    Server: subtracts server_lr times sum_k w_k delta_k, w_k = p_k F_k / sum_j p_j F_j.

    State: theta.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: described from a third party's code, that of FedLF's authors: the losses alone, no exponent. Unlike
    q-FFL with q = 1 the weights sum to 1 and the step is as long as FedAvg's. Negative losses count as 0; where all are
    0 the weights are the shares p_k.

    Reference: Zhao & Joshi, A Dynamic Reweighting Strategy For Fair Federated Learning, ICASSP 2022.
    """

    info: ClassVar[Info] = Info(server=ReweightedServer, replies=(LossUpdate,), needs=("sum",), clip_fields=("delta",))

    weighting: str = "uniform"  # uniform | examples: p_k

    def weights(
        self, losses: Tensor, shares: Tensor, server: ReweightedServer, cohort: Cohort
    ) -> tuple[Tensor, ReweightedServer]:
        return normalised(shares * losses, shares), server

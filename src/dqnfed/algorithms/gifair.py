"""GIFAIR-FL: a penalty on the differences between the losses of clients, or of groups of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import LossUpdate, ReweightedServer, StatelessReweighted, normalised
from dqnfed.core.algorithm import Cohort, Info, check_range
from dqnfed.core.problem import Problem


@dataclass(frozen=True, kw_only=True)
class GIFAIR(StatelessReweighted):
    r"""Group and individual fairness (Yue et al., INFORMS Journal on Data Science 2023).

    Objective: :math:`\min \sum_k p_k F_k + \lambda \sum_{i<j} |L_i - L_j|`, L the losses of clients or, with `groups`,
    the mean losses of groups of clients.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta; sends the update delta_k and
    F_k.

    Server: subtracts server_lr times sum_k w_k delta_k, w_k = p_k + lambda r_k, where r_k is how many of the others
    have a smaller loss, less how many have a larger one; for a client of group s of |A_s| clients, r_k = sum_t
    sign(L_s - L_t) / |A_s|. lambda is `strength` times the largest value that leaves every weight non-negative.

    State: theta.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: Unlike the authors' code, where the server takes the plain mean of clients sampled by their examples
    and a client multiplies its lr by 1 + lambda r_k / p_k with the ranks of the round before, the weights are on the
    server and from this round's losses. Ranks, group means and lambda are those of the cohort. strength = 0 is FedAvg
    to the bit.

    Reference: Yue, Nouiehed & Al Kontar, GIFAIR-FL: A Framework for Group and Individual Fairness in Federated
    Learning, INFORMS Journal on Data Science 2023.
    """

    info: ClassVar[Info] = Info(server=ReweightedServer, replies=(LossUpdate,), needs=("sum",), clip_fields=("delta",))

    strength: float = 0.5  # lambda over its largest value, in [0, 1); 0: FedAvg
    groups: str = ""  # one name for every client, comma separated ("a,a,b"); empty: every client is its own group

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "strength", low=0.0, high=1.0, open_high=True)
        if self.groups and (len(set(self._names())) < 2 or not all(self._names())):
            raise ValueError(
                'GIFAIR: `groups` must name the group of every client, separated by commas, as in "a,a,b", with at '
                f"least two groups, but is {self.groups!r}."
            )

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        if self.groups and len(self._names()) != n_clients:
            raise ValueError(
                f"GIFAIR: `groups` must have one name for each of {n_clients} clients, in their order, but has "
                f"{len(self._names())}: {self.groups!r}."
            )
        return self

    def _names(self) -> list[str]:
        return [name.strip() for name in str(self.groups).split(",")]

    def weights(
        self, losses: Tensor, shares: Tensor, server: ReweightedServer, cohort: Cohort
    ) -> tuple[Tensor, ReweightedServer]:
        members = cohort.clients
        if self.groups:
            names = self._names()
            numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
            members = torch.tensor([numbers[names[c]] for c in cohort.clients.tolist()])
        return gifair_weights(losses, shares, members, self.strength), server


def gifair_weights(losses: Tensor, shares: Tensor, groups: Tensor, strength: float) -> Tensor:
    """Return p_k + lambda r_k, lambda being `strength` times the largest value without a negative weight."""
    _, place, sizes = torch.unique(groups, return_inverse=True, return_counts=True)
    means = torch.zeros(len(sizes), dtype=losses.dtype).index_add(0, place, losses) / sizes
    order = torch.sign(means[:, None] - means[None, :]).sum(1)  # how many groups have less, minus how many have more
    if len(sizes) < 2:
        return shares
    limit = float((shares * sizes[place]).min()) / (len(sizes) - 1)
    return normalised(shares + strength * limit * (order / sizes)[place], shares)

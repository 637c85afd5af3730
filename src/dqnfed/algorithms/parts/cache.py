"""The last replies of clients that are absent, so that a step of few clients does not ignore the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray
from dqnfed.core.seeds import newest_last
from dqnfed.maths.gramian import bordered

IntArray = NDArray[np.int64]
SWEEPS = 4  # entries older than so many sweeps of the federation are dropped; by chance one in fifty is


class CacheState(NamedTuple):
    """One row for each cached client; rows lie where theta is, the numbers about them on the host."""

    rows: Tensor  # [R, n]     gradients
    rate: Tensor  # [R]        the decrease that the client asked for then
    curvature: Tensor  # [R]   along the step before; NaN: not known
    client: Tensor  # [R]
    round: Tensor  # [R]       of the reply
    products: Tensor  # [R, R] of the rows with each other


@dataclass(frozen=True)
class Cache:
    """The newest replies of at most `size` clients; 0: none."""

    size: int

    def init(self, theta: Tensor) -> CacheState:
        """Return an empty cache."""
        numbers, clients = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        return CacheState(theta.new_zeros(0, len(theta)), numbers, numbers, clients, clients, numbers.view(0, 0))

    def absent(self, state: CacheState, cohort: Cohort) -> IntArray:
        """Return the rows of clients that are not in the cohort."""
        return np.flatnonzero(~np.isin(state.client.numpy(), cohort.clients.numpy()))

    def insert(
        self,
        state: CacheState,
        cohort: Cohort,
        rows: Tensor,  # [K, n] of the replies
        rates: FloatArray,  # [K]
        curvature: FloatArray,  # [K]
        products: FloatArray,  # [K, K + R] of the replies with each other and with the cached rows
    ) -> CacheState:
        """Return the cache with the cohort's replies; the oldest others are dropped where it would overflow."""
        stay, chosen = self._kept(state, cohort)
        old, new, place = torch.from_numpy(stay), torch.from_numpy(chosen), state.rows.device
        crossed = products[np.ix_(chosen, len(cohort.clients) + stay)]
        A, C = state.products.numpy()[np.ix_(stay, stay)], products[np.ix_(chosen, chosen)]
        return CacheState(
            torch.cat([state.rows[old.to(place, non_blocking=True)], rows[new.to(place, non_blocking=True)]]),
            torch.cat([state.rate[old], torch.tensor(rates)[new]]),
            torch.cat([state.curvature[old], torch.tensor(curvature)[new]]),
            torch.cat([state.client[old], cohort.clients[new]]),
            torch.cat([state.round[old], torch.full_like(new, cohort.round)]),
            torch.from_numpy(bordered(A, crossed.T, C)),
        )

    def _kept(self, state: CacheState, cohort: Cohort) -> tuple[IntArray, IntArray]:
        """Return which cached rows and which replies are kept: the newest ones."""
        K, client, round = len(cohort.clients), state.client.numpy(), state.round.numpy()
        stay = self.absent(state, cohort)
        stay = stay[cohort.round - round[stay] < SWEEPS * -(-cohort.n_clients // K)]
        n_stay = min(len(stay), max(0, self.size - K))
        stay = stay[newest_last(client[stay], round[stay])[len(stay) - n_stay :]]
        newest = newest_last(cohort.clients.numpy(), cohort.round)[max(0, K - self.size) :]
        return np.sort(stay), np.sort(newest)

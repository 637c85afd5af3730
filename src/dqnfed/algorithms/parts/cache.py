"""The last replies of clients that are absent, so that a step of few clients does not ignore the others.

A row g_j with its rate d_j is a cut through the model of that time: g_j'(theta_j - theta) >= d_j. What has been reached
of it since is credited, so that the same is not asked for again and again.
"""

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
from dqnfed.maths.gramian import bordered, combine

IntArray = NDArray[np.int64]
LEAST = 0.3  # of a rate stays when all of it was reached: a client that is asked again wants more
SWEEPS = 4  # entries older than so many sweeps of the federation are dropped; by chance one in fifty is


class CacheState(NamedTuple):
    """One row for each cached client; rows lie where theta is, the numbers about them on the host."""

    rows: Tensor  # [R, n]     gradients, or model changes of local training
    rate: Tensor  # [R]        the decrease that the client asked for then
    reached: Tensor  # [R]     g_j'(theta_j - theta): what the model has brought of it since
    loss: Tensor  # [R]        at the model of that time
    client: Tensor  # [R]
    round: Tensor  # [R]       of the reply
    products: Tensor  # [R, R] of the rows with each other


class Cut(NamedTuple):
    """A cohort's replies, as the cache keeps them."""

    rows: Tensor  # [K, n]
    rates: FloatArray  # [K]
    reached: FloatArray  # [K]  by this round's step
    losses: FloatArray  # [K]


@dataclass(frozen=True)
class Cache:
    """The newest replies of at most `size` clients; 0: none."""

    size: int

    def init(self, theta: Tensor) -> CacheState:
        """Return an empty cache."""
        numbers, clients = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        return CacheState(
            theta.new_zeros(0, len(theta)), numbers, numbers, numbers, clients, clients, numbers.view(0, 0)
        )

    def absent(self, state: CacheState, cohort: Cohort) -> IntArray:
        """Return the rows of clients that are not in the cohort."""
        return np.flatnonzero(~np.isin(state.client.numpy(), cohort.clients.numpy()))

    def rates(self, state: CacheState, absent: IntArray) -> FloatArray:
        """Return what is left of the rates of these rows."""
        rate, reached = state.rate.numpy()[absent], state.reached.numpy()[absent]
        left = 1.0 - reached / np.where(rate > 0.0, rate, 1.0)
        return np.asarray(rate * np.clip(left, LEAST, 1.0))

    def combine(self, state: CacheState, absent: IntArray, weights: FloatArray) -> Tensor:
        """Return the weighted sum of these rows."""
        on_rows = np.zeros(len(state.rows))
        on_rows[absent] = weights
        return combine(torch.from_numpy(on_rows), state.rows)

    def moved(self, state: CacheState, change: FloatArray) -> CacheState:
        """Return the cache after a step that changes g_j'(theta_j - theta) by `change` [R]."""
        return state._replace(reached=state.reached + torch.from_numpy(change))

    def insert(self, state: CacheState, cohort: Cohort, cut: Cut, products: FloatArray) -> CacheState:
        """Return the cache with the cohort's replies; the oldest others are dropped where it would overflow.

        `products` [K, K + R] are those of the replies with each other and with the cached rows.
        """
        stay, chosen = self._kept(state, cohort)
        old, new, place = torch.from_numpy(stay), torch.from_numpy(chosen), state.rows.device
        rows = state.rows.new_empty(len(old) + len(new), state.rows.shape[1])  # filled once: these are the most bytes
        torch.index_select(state.rows, 0, old.to(place, non_blocking=True), out=rows[: len(old)])
        torch.index_select(cut.rows.to(rows.dtype), 0, new.to(place, non_blocking=True), out=rows[len(old) :])
        crossed = products[np.ix_(chosen, len(cohort.clients) + stay)]
        A, C = state.products.numpy()[np.ix_(stay, stay)], products[np.ix_(chosen, chosen)]
        return CacheState(
            rows,
            torch.cat([state.rate[old], torch.tensor(cut.rates)[new]]),
            torch.cat([state.reached[old], torch.tensor(cut.reached)[new]]),
            torch.cat([state.loss[old], torch.tensor(cut.losses)[new]]),
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

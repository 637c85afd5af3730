"""The last replies of clients that are absent, so that a step of few clients does not ignore the others.

A row g_j with its rate d_j is a cut through the model of that time: g_j'(theta_j - theta) >= d_j. What has been reached
of it since is credited, so that the same is not asked for again and again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.core.seeds import newest_last
from dqnfed.maths.gramian import combine, cross_products

IntArray = NDArray[np.int64]
LEAST = 0.3  # of a rate stays when all of it was reached: a client that is asked again asks for more than nothing
SWEEPS = 4  # entries older than so many sweeps of the federation are dropped; by chance one in fifty is
FREE = -1  # the number of the client whose slot nobody has


class CacheState(NamedTuple):
    """S slots, each free or with one client's last reply; rows lie where theta is, the numbers on the host."""

    rows: Tensor  # [S, n]     gradients, or model changes of local training; zeros in slots that were always free
    rate: Tensor  # [S]        the decrease that the client asked for then
    reached: Tensor  # [S]     g_j'(theta_j - theta): what the model has brought of it since
    loss: Tensor  # [S]        at the model of that time
    client: Tensor  # [S]      FREE: nobody's
    round: Tensor  # [S]       of the reply
    products: Tensor  # [S, S] of the rows with each other


class Cut(NamedTuple):
    """A cohort's replies beside their rows, as the cache keeps them."""

    rates: FloatArray  # [K]
    reached: FloatArray  # [K]  by this round's step
    losses: FloatArray  # [K]


@dataclass(frozen=True)
class Cache:
    """The newest replies of at most `size` clients; 0: none."""

    size: int

    def init(self, theta: Tensor) -> CacheState:
        """Return an empty cache."""
        numbers, rounds = torch.zeros(self.size, dtype=torch.float64), torch.zeros(self.size, dtype=torch.int64)
        rows, products = theta.new_zeros(self.size, len(theta)), numbers.new_zeros(self.size, self.size)
        return CacheState(rows, numbers, numbers, numbers, torch.full_like(rounds, FREE), rounds, products)

    def emptied(self, state: CacheState) -> CacheState:
        """Return the cache without any reply."""
        return state._replace(client=torch.full_like(state.client, FREE))

    def absent(self, state: CacheState, cohort: Cohort) -> IntArray:
        """Return the slots of clients that are not in the cohort."""
        client = state.client.numpy()
        is_here = (client[:, None] == cohort.clients.numpy()).any(1)
        return np.flatnonzero((client != FREE) & ~is_here)

    def rates(self, state: CacheState, absent: IntArray) -> FloatArray:
        """Return what is left of the rates in these slots."""
        rate, reached = state.rate.numpy()[absent], state.reached.numpy()[absent]
        left = 1.0 - reached / np.where(rate > 0.0, rate, 1.0)
        return np.asarray(rate * np.clip(left, LEAST, 1.0))

    def combine(self, state: CacheState, absent: IntArray, weights: FloatArray) -> Tensor:
        """Return the weighted sum of the rows in these slots; hardly any weight is zero, so that all rows are read."""
        of_slots = np.zeros(self.size)
        of_slots[absent] = weights
        return combine(torch.from_numpy(of_slots), state.rows)

    def moved(self, state: CacheState, change: FloatArray) -> CacheState:
        """Return the cache after a step that changes g_j'(theta_j - theta) by `change` [S]."""
        return state._replace(reached=state.reached + torch.from_numpy(change))

    def moved_by(self, state: CacheState, move: Tensor) -> CacheState:
        """Return the cache after theta became theta + move."""
        return self.moved(state, -cross_products(state.rows, move[None]).numpy()[:, 0])

    def insert(
        self, state: CacheState, cohort: Cohort, replies: Replies[Any], cut: Cut, products: FloatArray
    ) -> CacheState:
        """Return the cache with the cohort's replies; the oldest others are dropped where it would overflow.

        `products` [K, K + S] are those of the replies with each other and with the rows of all slots.
        """
        stay, chosen = self._kept(state, cohort)
        is_free, among, K = np.ones(self.size, dtype=np.bool_), state.products.numpy().copy(), len(cohort.clients)
        is_free[stay] = False
        slots = np.flatnonzero(is_free)[: len(chosen)]
        among[slots] = products[chosen, K:]
        among[:, slots] = products[chosen, K:].T
        among[np.ix_(slots, slots)] = products[np.ix_(chosen, chosen)]

        def replaced(values: Tensor, by: FloatArray | IntArray) -> Tensor:
            changed = values.numpy().copy()
            changed[slots] = by[chosen]
            return torch.from_numpy(changed)

        freed = np.where(is_free, FREE, state.client.numpy())
        return CacheState(
            replies.put("gradient", torch.from_numpy(chosen), state.rows, torch.from_numpy(slots)),
            replaced(state.rate, cut.rates),
            replaced(state.reached, cut.reached),
            replaced(state.loss, cut.losses),
            replaced(torch.from_numpy(freed), cohort.clients.numpy()),
            replaced(state.round, np.full(K, cohort.round)),
            torch.from_numpy(among),
        )

    def _kept(self, state: CacheState, cohort: Cohort) -> tuple[IntArray, IntArray]:
        """Return which slots keep their rows and which replies are kept, ascending: the newest ones."""
        K, client, round = len(cohort.clients), state.client.numpy(), state.round.numpy()
        stay, new = self.absent(state, cohort), np.arange(K)
        stay = stay[cohort.round - round[stay] < SWEEPS * -(-cohort.n_clients // K)]
        n_stay = max(0, self.size - K)
        if len(stay) > n_stay:
            stay = np.sort(stay[newest_last(client[stay], round[stay])[len(stay) - n_stay :]])
        if self.size < K:
            new = np.sort(newest_last(cohort.clients.numpy(), cohort.round)[K - self.size :])
        return stay, new

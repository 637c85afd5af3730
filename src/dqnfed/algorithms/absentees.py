"""What the clients who are absent said last: a step that forgets them is paid for by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.maths.transfer import sent_to

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Absentees(NamedTuple):
    """The gradients of the clients who were asked last, a row for each of them; rows that do not count are free.

    A round's new rows are written into free ones of the same matrix, which is too large to be copied every round. So a
    state before still finds what it counted, but only the last one: the rows that it lost are free to the next.
    """

    gradient: Tensor  # [R, n]
    rate: Tensor  # [R]        the decrease that it was promised then
    curvature: Tensor  # [R]   along the step before; NaN: not known
    client: Tensor  # [R]      -1: the row does not count
    asked: Tensor  # [R]       the round of the visit
    products: Tensor  # [R, R] of the rows with each other, where both count


PATIENCE = 4  # with clients drawn at random, one in fifty stays away for longer by chance


def nobody(theta: Tensor) -> Absentees:
    """Return no rows; those to come lie with theta, the numbers about them on the host."""
    numbers = torch.zeros(0, dtype=torch.float64)
    nowhere = torch.zeros(0, dtype=torch.int64)
    rows = theta.new_zeros(0, len(theta))
    return Absentees(rows, numbers, numbers.clone(), nowhere, nowhere.clone(), numbers.new_zeros(0, 0))


def rows_of_absent(kept: Absentees, cohort: Cohort) -> IntArray:
    """Return the rows of clients who are not here."""
    client = kept.client.numpy()
    is_here = np.zeros(cohort.n_clients, dtype=np.bool_)
    is_here[cohort.clients.numpy()] = True
    return np.flatnonzero((client >= 0) & ~is_here[client])


def with_present(
    kept: Absentees,
    cohort: Cohort,
    G: Tensor,
    rates: FloatArray,
    curvature: FloatArray,
    GG: FloatArray,
    GA: FloatArray,
    absent: IntArray,
    *,
    most: int,
) -> tuple[Absentees, IntArray]:
    """Return what is kept after a round, and the rows of those who were here, in order; -1: not kept.

    They are kept, and before them those who were asked last, `most` in all. GG [K, K] and GA [K, R] are the products of
    the new gradients with each other and with the rows so far, `absent` the rows of those who are not here. A client
    that has missed four times as many rounds as it takes to ask everybody is forgotten: what it said must not bind the
    steps for ever if it has left, or has nothing more to learn, so that its answers of no length are not used.
    """
    here, K = cohort.clients.numpy(), cohort.clients.shape[0]
    kept = kept if kept.client.shape[0] >= most + min(K, most) else _with_rows(kept, most + min(K, most))
    client, asked = kept.client.numpy(), kept.asked.numpy()
    stay = absent[cohort.round - asked[absent] < PATIENCE * -(-cohort.n_clients // K)]
    chosen = np.arange(K)
    if most <= K:
        stay, chosen = stay[:0], np.sort(_shuffled(here, cohort.round)[K - most :])
    elif len(stay) > most - K:
        stay = stay[_shuffled(client[stay], asked[stay])[len(stay) - (most - K) :]]
    free = np.flatnonzero(client < 0)[: len(chosen)]
    _write(kept.gradient, free, G.detach(), chosen)

    def updated(old: Tensor, new: NDArray[np.generic]) -> Tensor:
        values = old.numpy().copy()
        values[free] = new
        return torch.from_numpy(values)

    whose = np.full(len(client), -1)
    whose[stay], whose[free] = client[stay], here[chosen]
    products = kept.products.numpy().copy()
    new = np.zeros((len(free), len(client)))
    new[:, : GA.shape[1]] = GA.take(chosen, 0)
    new[:, free] = GG.take(chosen, 0).take(chosen, 1)
    products[free], products[:, free] = new, new.T
    now = Absentees(
        kept.gradient,
        updated(kept.rate, rates[chosen]),
        updated(kept.curvature, curvature[chosen]),
        torch.from_numpy(whose),
        updated(kept.asked, np.full(len(free), cohort.round)),
        torch.from_numpy(products),
    )
    rows = np.full(K, -1)
    rows[chosen] = free
    return now, rows


def bordered(A: FloatArray, B: FloatArray, C: FloatArray) -> FloatArray:
    """Return [A B; B' C]."""
    k = len(A)
    joined = np.empty((k + len(C),) * 2)
    joined[:k, :k], joined[:k, k:], joined[k:, :k], joined[k:, k:] = A, B, B.T, C
    return joined


def _shuffled(clients: IntArray, asked: IntArray | int) -> IntArray:
    """Return an order by the round of the visit; within one, not always the same clients come first."""
    return np.argsort(asked * 2**32 + (clients * 2654435761 + asked * 40503) % 2**32, kind="stable")


def _with_rows(kept: Absentees, n_rows: int) -> Absentees:
    """Return the same with so many rows, free ones at the end."""
    more, at_the_end = n_rows - len(kept.client), torch.nn.functional.pad
    return Absentees(
        torch.cat([kept.gradient, kept.gradient.new_zeros(more, kept.gradient.shape[1])]),
        at_the_end(kept.rate, (0, more)),
        at_the_end(kept.curvature, (0, more)),
        at_the_end(kept.client, (0, more), value=-1),
        at_the_end(kept.asked, (0, more)),
        at_the_end(kept.products, (0, more, 0, more)),
    )


def _write(rows: Tensor, places: IntArray, G: Tensor, chosen: IntArray) -> None:
    """Write the chosen rows of G to these places."""
    if len(chosen) < G.shape[0]:
        G = G.index_select(0, sent_to(G.device, torch.from_numpy(chosen)))
    rows.index_copy_(0, sent_to(rows.device, torch.from_numpy(places)), G)

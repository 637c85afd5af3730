"""What the clients who are absent said last: a step that forgets them is paid for by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.core.tensors import sent_to

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
    return np.flatnonzero(_still_counting(kept, cohort))


def with_present(
    kept: Absentees,
    cohort: Cohort,
    G: Tensor,
    rates: FloatArray,
    curvature: FloatArray,
    GG: FloatArray,
    GA: FloatArray,
    *,
    most: int,
) -> Absentees:
    """Return what is kept after a round: those who were here, and before them those who were asked last, `most` in all.

    GG [K, K] and GA [K, R] are the products of the new gradients with each other and with the rows so far. A client
    that has missed four times as many rounds as it takes to ask everybody is forgotten: what it said must not bind the
    steps for ever if it has left, or has nothing more to learn, so that its answers of no length are not used.
    """
    here, n_before = cohort.clients.numpy(), len(kept.client)
    counts = _still_counting(kept, cohort)
    counts &= cohort.round - kept.asked.numpy() < PATIENCE * -(-cohort.n_clients // len(here))
    client = np.concatenate([np.where(counts, kept.client.numpy(), -1), here])
    asked = np.concatenate([kept.asked.numpy(), np.full(len(here), cohort.round)])
    counting = np.flatnonzero(client >= 0)
    if len(counting) > most:
        # of a cohort that is kept in part, not always the clients with the largest numbers
        shuffled = (client[counting] * 2654435761 + asked[counting] * 40503) % 2**32
        client[counting[np.lexsort((shuffled, asked[counting]))[:-most]]] = -1
    chosen = np.flatnonzero(client[n_before:] >= 0)
    grown = _with_room(kept, len(chosen))
    free = np.flatnonzero(grown.client.numpy() < 0)[: len(chosen)]
    _written(grown.gradient, free, G.detach(), chosen)

    def updated(old: Tensor, counted: NDArray[np.generic], new: NDArray[np.generic]) -> Tensor:
        values = old.numpy().copy()
        values[: len(counted)] = counted
        values[free] = new[chosen]
        return torch.from_numpy(values)

    products = grown.products.numpy().copy()
    with_rows = np.zeros((len(chosen), len(products)))
    with_rows[:, :n_before] = GA[chosen]
    with_rows[:, free] = GG[np.ix_(chosen, chosen)]
    products[free], products[:, free] = with_rows, with_rows.T
    return Absentees(
        grown.gradient,
        updated(grown.rate, kept.rate.numpy(), rates),
        updated(grown.curvature, kept.curvature.numpy(), curvature),
        updated(grown.client, client[:n_before], here),
        updated(grown.asked, kept.asked.numpy(), asked[n_before:]),
        torch.from_numpy(products),
    )


def bordered(A: FloatArray, B: FloatArray, C: FloatArray) -> FloatArray:
    """Return [A B; B' C]."""
    k = len(A)
    joined = np.empty((k + len(C),) * 2)
    joined[:k, :k], joined[:k, k:], joined[k:, :k], joined[k:, k:] = A, B, B.T, C
    return joined


def _still_counting(kept: Absentees, cohort: Cohort) -> NDArray[np.bool_]:
    """Return which rows count and are not of a client who is here, [R]."""
    client = kept.client.numpy()
    is_here = np.zeros(max(cohort.n_clients, int(client.max(initial=0)) + 1), dtype=np.bool_)
    is_here[cohort.clients.numpy()] = True
    return np.asarray((client >= 0) & ~is_here[client])


def _with_room(kept: Absentees, wanted: int) -> Absentees:
    """Return the same rows with at least so many free ones."""
    missing = wanted - int(np.count_nonzero(kept.client.numpy() < 0))
    if missing <= 0:
        return kept
    at_the_end = torch.nn.functional.pad
    return Absentees(
        torch.cat([kept.gradient, kept.gradient.new_zeros(missing, kept.gradient.shape[1])]),
        at_the_end(kept.rate, (0, missing)),
        at_the_end(kept.curvature, (0, missing)),
        at_the_end(kept.client, (0, missing), value=-1),
        at_the_end(kept.asked, (0, missing)),
        at_the_end(kept.products, (0, missing, 0, missing)),
    )


def _written(rows: Tensor, places: IntArray, G: Tensor, chosen: IntArray) -> None:
    """Write the chosen rows of G to these places."""
    if len(chosen) < len(G):
        G = G.index_select(0, sent_to(G.device, torch.from_numpy(chosen)))
    rows.index_copy_(0, sent_to(rows.device, torch.from_numpy(places)), G)

"""What the clients who are absent said last: a step that forgets them is paid for by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.maths.gramian import cross_products

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Rows(NamedTuple):
    """A matrix in five parts, the oldest rows first: new ones are put at its end without copying the parts before."""

    a: Tensor  # [R_a, n]
    b: Tensor
    c: Tensor
    d: Tensor
    e: Tensor


class Absentees(NamedTuple):
    """The gradients of the clients who were asked last, a row for each visit; only a client's newest row counts."""

    gradient: Rows  # [R, n]
    rate: Tensor  # [R]        the decrease that it was promised then
    curvature: Tensor  # [R]   along the step before; NaN: not known
    client: Tensor  # [R]      -1: the row does not count
    asked: Tensor  # [R]       the round of the visit
    products: Tensor  # [R, R] of the rows with each other


PARTS = len(Rows._fields)
PATIENCE = 4  # with clients drawn at random, one in fifty stays away for longer by chance


def nobody(theta: Tensor) -> Absentees:
    """Return no rows; those to come lie with theta, the numbers about them on the host."""
    parts = Rows(*(theta.new_zeros(0, len(theta)) for _ in range(PARTS)))
    numbers = torch.zeros(0, dtype=torch.float64)
    nowhere = torch.zeros(0, dtype=torch.int64)
    return Absentees(parts, numbers, numbers.clone(), nowhere, nowhere.clone(), numbers.new_zeros(0, 0))


def rows_of_absent(kept: Absentees, present: Tensor) -> IntArray:
    """Return the rows of clients who are not here."""
    client = kept.client.numpy()
    return np.flatnonzero((client >= 0) & ~np.isin(client, present.numpy()))


def chosen_rows(kept: Absentees, rows: IntArray) -> list[Tensor]:
    """Return the rows named, [n] each."""
    ends = np.cumsum([len(part) for part in kept.gradient])
    parts = np.searchsorted(ends, rows, side="right")
    from_its_end = (rows - ends[parts]).tolist()
    return [kept.gradient[p][place] for p, place in zip(parts.tolist(), from_its_end, strict=True)]


def products_with_rows(G: Tensor, kept: Absentees) -> FloatArray:
    """Return G times the rows [K, R]."""
    if G.is_cuda:  # one launch for all
        return cross_products(G, torch.cat(kept.gradient)).numpy()
    return np.concatenate([cross_products(G, part).numpy() for part in kept.gradient], axis=1)


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
    here = cohort.clients.numpy()
    before = np.where(np.isin(kept.client.numpy(), here), -1, kept.client.numpy())
    before[cohort.round - kept.asked.numpy() >= PATIENCE * -(-cohort.n_clients // len(here))] = -1
    client = np.concatenate([before, here])
    asked = np.concatenate([kept.asked.numpy(), np.full(len(here), cohort.round)])
    # of a cohort that is kept in part, not always the clients with the largest numbers
    shuffled = (client * 2654435761 + asked * 40503) % 2**32
    by_age = np.lexsort((shuffled, asked))
    counting = by_age[client[by_age] >= 0]
    client[counting[: max(len(counting) - most, 0)]] = -1
    chosen = np.flatnonzero(client[len(before) :] >= 0)
    rows = G.detach() if len(chosen) == len(here) else G.detach()[torch.from_numpy(chosen).to(G.device)]
    parts, stay = _appended(kept.gradient, client[: len(before)] >= 0, rows, length=-(-2 * most // PARTS))
    products = bordered(
        kept.products.numpy()[np.ix_(stay, stay)], GA[np.ix_(chosen, stay)].T, GG[np.ix_(chosen, chosen)]
    )
    all_rows = np.concatenate([stay, len(before) + chosen])
    numbers = ((kept.rate, rates), (kept.curvature, curvature))
    rate, curved = (torch.from_numpy(np.concatenate([old.numpy(), new])[all_rows]) for old, new in numbers)
    who, when = torch.from_numpy(client[all_rows]), torch.from_numpy(asked[all_rows])
    return Absentees(parts, rate, curved, who, when, torch.from_numpy(products))


def bordered(A: FloatArray, B: FloatArray, C: FloatArray) -> FloatArray:
    """Return [A B; B' C]."""
    return np.concatenate([np.concatenate([A, B], axis=1), np.concatenate([B.T, C], axis=1)])


def _appended(rows: Rows, counts: NDArray[np.bool_], G: Tensor, *, length: int) -> tuple[Rows, IntArray]:
    """Return the rows with G's at the end, and which of those before are still there.

    Parts of which no row counts are emptied. The last part is closed at the length; then the first one makes room, of
    which rows that count go to the second.
    """
    ends = np.cumsum([len(part) for part in rows])
    places = np.split(np.arange(len(counts)), ends[:-1])
    # nothing, and not a view of nothing, which would hold the whole part in memory
    parts = [p if counts[where].any() else p.new_empty(0, p.shape[1]) for p, where in zip(rows, places, strict=True)]
    places = [where if counts[where].any() else where[:0] for where in places]
    first, second, *others, last = parts
    if len(last) < length:
        return Rows(*[first, second, *others, torch.cat([last, G])]), np.concatenate(places)
    still = np.flatnonzero(counts[places[0]])
    if still.size:
        second = torch.cat([first[torch.from_numpy(still).to(first.device)], second])
    return Rows(*[second, *others, last, G.clone()]), np.concatenate([places[0][still], *places[1:]])

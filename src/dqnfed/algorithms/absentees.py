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
    """A matrix in eight parts, so that a change of some rows copies some parts and not all of it."""

    a: Tensor  # [R / 8, n]
    b: Tensor
    c: Tensor
    d: Tensor
    e: Tensor
    f: Tensor
    g: Tensor
    h: Tensor


class Absentees(NamedTuple):
    """The gradients of the clients who were asked last, a row each; what is in a row without a client means nothing."""

    gradient: Rows  # [R, n]
    rate: Tensor  # [R]        the decrease that it was promised then
    curvature: Tensor  # [R]   along the step before; NaN: not known
    client: Tensor  # [R]      -1: nobody
    asked: Tensor  # [R]       the round in which it was here
    products: Tensor  # [R, R] of the rows with each other


PARTS = len(Rows._fields)


def nobody(theta: Tensor, n_clients: int) -> Absentees:
    """Return room for so many clients and half as many again, for those who come while others are still kept."""
    part = -(-3 * n_clients // (2 * PARTS))
    n_rows = PARTS * part
    numbers = torch.zeros(n_rows, dtype=torch.float64)
    nowhere = torch.full((n_rows,), -1)
    products = torch.zeros(n_rows, n_rows, dtype=torch.float64)
    parts = Rows(*(theta.new_zeros(part, len(theta)) for _ in range(PARTS)))
    return Absentees(parts, numbers, numbers.clone(), nowhere, nowhere.clone(), products)


def rows_of_absent(kept: Absentees, present: Tensor) -> IntArray:
    """Return the rows of clients who are not here."""
    client = kept.client.numpy()
    return np.flatnonzero((client >= 0) & ~np.isin(client, present.numpy()))


def row_gradient(kept: Absentees, row: int) -> Tensor:
    """Return one row [n]."""
    part, place = divmod(row, len(kept.gradient.a))
    return kept.gradient[part][place]


def products_with_rows(G: Tensor, kept: Absentees) -> FloatArray:
    """Return G times the rows [K, R]; zero where a part of them holds nobody."""
    if G.is_cuda:  # one launch for all
        return cross_products(G, torch.cat(kept.gradient)).numpy()
    used = [bool((part >= 0).any()) for part in kept.client.split(len(kept.gradient.a))]
    nothing = np.zeros((len(G), len(kept.gradient.a)))
    pairs = zip(kept.gradient, used, strict=True)
    return np.concatenate([cross_products(G, part).numpy() if is_used else nothing for part, is_used in pairs], axis=1)


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
    """Return what is kept after a round: those who were here, and before them those who were asked last.

    At most `most` clients; of a cohort with more than the empty rows hold, the first ones. GG [K, K] and GA [K, R] are
    the products of the new gradients with each other and with the rows so far.
    """
    client, asked = kept.client.numpy().copy(), kept.asked.numpy().copy()
    empty = (client < 0).reshape(PARTS, -1)
    emptiest = np.argsort(-empty.sum(axis=1), kind="stable")  # whole parts first, so that few are copied
    rows = np.concatenate([p * empty.shape[1] + np.flatnonzero(empty[p]) for p in emptiest])[: len(cohort.clients)]
    K = len(rows)
    here = cohort.clients.numpy()[:K]
    client[np.isin(client, here)] = -1  # what they said before
    client[rows], asked[rows] = here, cohort.round
    held = np.flatnonzero(client >= 0)
    client[held[np.argsort(asked[held], kind="stable")[: max(len(held) - most, 0)]]] = -1
    rate, curved, products = (t.numpy().copy() for t in (kept.rate, kept.curvature, kept.products))
    rate[rows], curved[rows] = rates[:K], curvature[:K]
    products[rows, :], products[:, rows] = GA[:K], GA[:K].T
    products[np.ix_(rows, rows)] = GG[:K, :K]
    numbers = (torch.from_numpy(v) for v in (rate, curved, client, asked, products))
    return Absentees(_written(kept.gradient, rows, G.detach()), *numbers)


def _written(parts: Rows, rows: IntArray, G: Tensor) -> Rows:
    """Return the rows with the first ones of G in the places named."""
    length = len(parts.a)
    found = list(parts)
    for p in np.unique(rows // length).tolist():
        theirs = np.flatnonzero(rows // length == p)
        places = torch.from_numpy(rows[theirs] % length).to(G.device)
        found[p] = found[p].index_copy(0, places, G[int(theirs[0]) : int(theirs[-1]) + 1])  # part by part: in a row
    return Rows(*found)

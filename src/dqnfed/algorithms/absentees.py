"""What the clients who are absent said last: a step that forgets them is paid for by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.maths.gramian import cross_products

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Rows(NamedTuple):
    """A matrix in five parts, the oldest rows first: new ones are put at its end without copying the others."""

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
    products: Tensor  # [R, R] of the rows with each other


PARTS = len(Rows._fields)


def nobody(theta: Tensor) -> Absentees:
    """Return no rows; those to come lie with theta, the numbers about them on the host."""
    parts = Rows(*(theta.new_zeros(0, len(theta)) for _ in range(PARTS)))
    numbers = torch.zeros(0, dtype=torch.float64)
    return Absentees(parts, numbers, numbers.clone(), torch.zeros(0, dtype=torch.int64), numbers.new_zeros(0, 0))


def rows_of_absent(kept: Absentees, present: Tensor) -> IntArray:
    """Return the rows of clients who are not here."""
    client = kept.client.numpy()
    return np.flatnonzero((client >= 0) & ~np.isin(client, present.numpy()))


def chosen_rows(kept: Absentees, rows: IntArray) -> list[Tensor]:
    """Return the rows named, [n] each."""
    ends = np.cumsum([len(part) for part in kept.gradient])
    parts = np.searchsorted(ends, rows, side="right")
    return [kept.gradient[p][row - int(ends[p])] for p, row in zip(parts.tolist(), rows.tolist(), strict=True)]


def products_with_rows(G: Tensor, kept: Absentees) -> FloatArray:
    """Return G times the rows [K, R]; zero in a part of which no row counts."""
    if G.is_cuda:  # one launch for all
        return cross_products(G, torch.cat(kept.gradient)).numpy()
    found = [np.zeros((len(G), 0))]
    for part, client in zip(kept.gradient, kept.client.split([len(part) for part in kept.gradient]), strict=True):
        counts = bool((client >= 0).any())
        found.append(cross_products(G, part).numpy() if counts else np.zeros((len(G), len(part))))
    return np.concatenate(found, axis=1)


def with_present(
    kept: Absentees,
    present: Tensor,
    G: Tensor,
    rates: FloatArray,
    curvature: FloatArray,
    GG: FloatArray,
    GA: FloatArray,
    *,
    most: int,
) -> Absentees:
    """Return what is kept after a round: those who were here, and before them those who were asked last, `most` in all.

    GG [K, K] and GA [K, R] are the products of the new gradients with each other and with the rows so far.
    """
    here = present.numpy()
    client = np.concatenate([np.where(np.isin(kept.client.numpy(), here), -1, kept.client.numpy()), here])
    counting = np.flatnonzero(client >= 0)
    client[counting[: max(len(counting) - most, 0)]] = -1
    n_rows = len(kept.client)
    parts, stay = _appended(kept.gradient, client[:n_rows] >= 0, G.detach(), length=-(-2 * most // PARTS))
    products = bordered(kept.products.numpy()[np.ix_(stay, stay)], GA[:, stay].T, GG)
    numbers = ((kept.rate, rates), (kept.curvature, curvature))
    rate, curved = (torch.from_numpy(np.concatenate([old.numpy()[stay], new])) for old, new in numbers)
    clients = np.concatenate([client[stay], client[n_rows:]])
    return Absentees(parts, rate, curved, torch.from_numpy(clients), torch.from_numpy(products))


def bordered(A: FloatArray, B: FloatArray, C: FloatArray) -> FloatArray:
    """Return [A B; B' C]."""
    return np.concatenate([np.concatenate([A, B], axis=1), np.concatenate([B.T, C], axis=1)])


def _appended(rows: Rows, counts: NDArray[np.bool_], G: Tensor, *, length: int) -> tuple[Rows, IntArray]:
    """Return the rows with G's at the end, and which of those before are still there.

    A part is closed at the length; then the first one makes room, of which rows that count go to the second.
    """
    first, second, *others, last = rows
    everybody = np.arange(len(counts))
    if len(last) < length:
        return Rows(*[first, second, *others, torch.cat([last, G])]), everybody
    still = np.flatnonzero(counts[: len(first)])
    if still.size:
        second = torch.cat([first[torch.from_numpy(still).to(first.device)], second])
    return Rows(*[second, *others, last, G.clone()]), np.concatenate([still, everybody[len(first) :]])

"""What the clients who are absent said last: a step that forgets them is paid for by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Absentees(NamedTuple):
    """The gradients of the clients who were asked last, a row each; a row without a client is empty."""

    gradient: Tensor  # [A, n]
    rate: Tensor  # [A]        the decrease that it was promised then
    curvature: Tensor  # [A]   along the step before; NaN: not known
    client: Tensor  # [A]      -1: nobody
    asked: Tensor  # [A]       the round in which it was here
    products: Tensor  # [A, A] of the rows with each other


def nobody(theta: Tensor, n_rows: int) -> Absentees:
    """Return room for so many clients, all of it empty; the gradients lie with theta, the rest on the host."""
    numbers = torch.zeros(n_rows, dtype=torch.float64)
    return Absentees(
        gradient=theta.new_zeros(n_rows, len(theta)),
        rate=numbers,
        curvature=torch.full_like(numbers, torch.nan),
        client=torch.full((n_rows,), -1),
        asked=torch.full((n_rows,), -1),
        products=torch.zeros(n_rows, n_rows, dtype=torch.float64),
    )


def rows_of_absent(kept: Absentees, present: Tensor) -> IntArray:
    """Return the rows of clients who are not here."""
    client = kept.client.numpy()
    return np.flatnonzero((client >= 0) & ~np.isin(client, present.numpy()))


def with_present(
    kept: Absentees,
    present: Tensor,
    when: int,
    G: Tensor,
    rates: FloatArray,
    curvature: FloatArray,
    GG: FloatArray,
    GA: FloatArray,
) -> Absentees:
    """Return what is kept after a round: who was here takes its own row, or the row of who was asked longest ago.

    GG [K, K] and GA [K, A] are the products of the new gradients with each other and with the rows so far. With more
    clients than rows, the first ones are kept.
    """
    client, asked = kept.client.numpy().copy(), kept.asked.numpy().copy()
    K = min(len(present), len(client))
    here = present.numpy()[:K]
    own = {int(c): row for row, c in enumerate(client.tolist())}
    others = iter([row for row in np.argsort(asked, kind="stable").tolist() if client[row] not in here])
    rows = np.array([own[c] if c in own else next(others) for c in here.tolist()], dtype=np.int64)
    client[rows], asked[rows] = here, when
    rate, curved, products = (t.numpy().copy() for t in (kept.rate, kept.curvature, kept.products))
    rate[rows], curved[rows] = rates[:K], curvature[:K]
    products[rows, :], products[:, rows] = GA[:K], GA[:K].T
    products[np.ix_(rows, rows)] = GG[:K, :K]
    index = torch.from_numpy(rows).to(G.device, non_blocking=True)
    return Absentees(
        gradient=kept.gradient.index_copy(0, index, G[:K].detach().to(kept.gradient.dtype)),
        rate=torch.from_numpy(rate),
        curvature=torch.from_numpy(curved),
        client=torch.from_numpy(client),
        asked=torch.from_numpy(asked),
        products=torch.from_numpy(products),
    )

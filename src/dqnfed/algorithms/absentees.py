"""What the clients who are absent said last: a step that forgets them is paid for by them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Absentees(NamedTuple):
    """The gradients of the clients who were asked last, a row each; what is in a row without a client means nothing."""

    gradient: Tensor  # [R, n]
    rate: Tensor  # [R]        the decrease that it was promised then
    curvature: Tensor  # [R]   along the step before; NaN: not known
    client: Tensor  # [R]      -1: nobody
    asked: Tensor  # [R]       the round in which it was here
    products: Tensor  # [R, R] of the rows with each other


def nobody(theta: Tensor, n_rows: int) -> Absentees:
    """Return so many empty rows; the gradients lie with theta, the rest on the host."""
    numbers = torch.zeros(n_rows, dtype=torch.float64)
    nowhere = torch.full((n_rows,), -1)
    products = torch.zeros(n_rows, n_rows, dtype=torch.float64)
    return Absentees(theta.new_zeros(n_rows, len(theta)), numbers, numbers.clone(), nowhere, nowhere.clone(), products)


def rows_of_absent(kept: Absentees, present: Tensor) -> IntArray:
    """Return the rows of clients who are not here."""
    client = kept.client.numpy()
    return np.flatnonzero((client >= 0) & ~np.isin(client, present.numpy()))


def with_present(
    kept: Absentees,
    cohort: Cohort,
    G: Tensor,
    rates: FloatArray,
    curvature: FloatArray,
    GG: FloatArray,
    GA: FloatArray,
) -> Absentees:
    """Return what is kept after a round: those who were here, and before them those who were asked last.

    GG [K, K] and GA [K, R] are the products of the new gradients with each other and with the rows so far.

    Gradients are written where they lie, into rows that are empty, since a copy of all of them would take longer than
    everything else: who still holds `kept` sees no change in any row that has a client there. As many rows as clients
    were here are empty afterwards.
    """
    client, asked = kept.client.numpy().copy(), kept.asked.numpy().copy()
    rows = np.flatnonzero(client < 0)[: len(cohort.clients)]
    K = len(rows)
    here = cohort.clients.numpy()[:K]
    kept.gradient.index_copy_(0, torch.from_numpy(rows).to(G.device), G[:K].detach())
    client[np.isin(client, here)] = -1  # what they said before
    client[rows], asked[rows] = here, cohort.round
    held = np.flatnonzero(client >= 0)
    n_too_many = max(len(held) + K - len(client), 0)
    client[held[np.argsort(asked[held], kind="stable")[:n_too_many]]] = -1
    rate, curved, products = (t.numpy().copy() for t in (kept.rate, kept.curvature, kept.products))
    rate[rows], curved[rows] = rates[:K], curvature[:K]
    products[rows, :], products[:, rows] = GA[:K], GA[:K].T
    products[np.ix_(rows, rows)] = GG[:K, :K]
    numbers = (torch.from_numpy(v) for v in (rate, curved, client, asked, products))
    return Absentees(kept.gradient, *numbers)

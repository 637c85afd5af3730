"""Short sketches of the clients' rows, from which the server sees who sends an old row again, or turns from row to row.

A sketch is linear in the row: signed sums of every `LENGTH`-th entry. Equal rows have equal sketches, and the length of
a difference of rows is seen in the difference of their sketches to about a tenth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LENGTH = 128
KEPT = 8  # of a client: the first one and the newest
# A turn is the length of the difference of two rows over that of the longer: 1.4 for a new random row, 2 for a reversed
# one. Honest clients turn alike, since they have seen the same step: at most 1.1, and about twice the median.
TURNS = ((1.25, 1.4), (0.6, 3.0))  # more than this, and than so many times the cohort's median, is no honest turn
REPLAYED = "update is one that it has sent before, for another model"


class SketchState(NamedTuple):
    """By client number."""

    rows: Tensor  # [C, KEPT, LENGTH]  in slot 0 the first one
    models: Tensor  # [C, KEPT]  a number that tells apart the models that they were for; NaN: nothing is kept
    newest: Tensor  # [C]  the slot of the newest one


def no_sketches(n_clients: int) -> SketchState:
    """Return the record before the first round."""
    rows = torch.zeros(n_clients, KEPT, LENGTH, dtype=torch.float64)
    return SketchState(
        rows, torch.full((n_clients, KEPT), torch.nan, dtype=torch.float64), rows.new_zeros(n_clients).long()
    )


def sketched(rows: Tensor) -> Tensor:
    """Return sketches [K, LENGTH] of rows [K, n]."""
    K, n = rows.shape
    signs = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(0)).to(rows) * 2 - 1
    signed = torch.nn.functional.pad(rows * signs, (0, -n % LENGTH))
    return signed.view(K, -1, LENGTH).sum(1, dtype=torch.float64).cpu()


def model_number(theta: Tensor) -> float:
    """Return a number that two different models hardly share."""
    return float(sketched(theta[None])[0] @ torch.arange(1, LENGTH + 1, dtype=torch.float64))


def replayed(state: SketchState, found: Tensor, model: float, clients: Tensor) -> NDArray[np.bool_]:
    """Return which clients send a row that they have sent before for another model, [K]."""
    kept, models = state.rows[clients], state.models[clients]
    again = (kept == found[:, None]).all(-1) & models.isfinite() & (models != model)
    result: NDArray[np.bool_] = (again.any(1) & (found != 0.0).any(1)).numpy()
    return result


def turned(state: SketchState, found: Tensor, clients: Tensor) -> NDArray[np.bool_]:
    """Return whose row has turned since its newest one as no other client's has, [K]."""
    places = state.newest[clients]
    before = state.rows[clients, places]
    known = state.models[clients, places].isfinite()
    longer = torch.maximum(before.norm(dim=1), found.norm(dim=1))
    turns = torch.where(known & (longer > 0.0), (found - before).norm(dim=1) / longer, torch.nan)
    usual = turns.nanmedian()
    far = torch.stack([(turns > least) & (turns > factor * usual) for least, factor in TURNS]).any(0)
    result: NDArray[np.bool_] = (far & (known.sum() >= 3)).numpy()
    return result


def with_rows(state: SketchState, found: Tensor, model: float, clients: Tensor) -> SketchState:
    """Return the record with the sketches of these clients' rows; the first is kept, and of the others the newest."""
    is_new = state.models[clients, 0].isnan()
    places = torch.where(is_new, 0, state.newest[clients] % (KEPT - 1) + 1)
    rows, models, newest = state.rows.clone(), state.models.clone(), state.newest.clone()
    rows[clients, places], models[clients, places], newest[clients] = (
        found,
        torch.tensor(model, dtype=torch.float64),
        places,
    )
    return SketchState(rows, models, newest)

"""Clipping and Gaussian noise on what a client sends up."""

from __future__ import annotations

from math import inf
from typing import Any, TypeVar

import torch
from flwr.app import ConfigRecord, Context

from dqnfed.core.tensors import map_tensors
from dqnfed.flower.app import client_number
from dqnfed.flower.client_memory import node_file
from dqnfed.secure.accounting import Ledger, SpentFile
from dqnfed.secure.noise import Privacy as Privacy
from dqnfed.secure.noise import clipped_rows, noised_rows

U = TypeVar("U", bound=tuple[Any, ...])
COUNTED = "dqnfed-releases"  # in the state of a client: by run


def noised(update: U, privacy: Privacy, generator: torch.Generator | None = None, *, floor: float = -inf) -> U:
    """Return one client's reply, clipped and, where the noise is its own, with Gaussian noise on every number of it.

    Where the noise is on its examples' parts, or shares of it are added in the pads' ring, the reply stays as it is.
    """
    if privacy.unit == "record" or privacy.noise == "distributed":
        return update
    rows = map_tensors(lambda t: t[None], update)
    rows = (
        noised_rows(rows, privacy, generator, floor=floor)
        if privacy.noise == "local"
        else clipped_rows(rows, privacy.clip)
    )
    return map_tensors(lambda t: t[0], rows)


def count_releases(context: Context, run: str, privacy: Privacy, n: int) -> None:
    """Count what this client releases in a run; raise, before it leaves, where that would exceed the budget.

    Other runs in between do not end the count and, where the node has a `memory-dir`, nor does a restart.
    """
    kept, file = context.state.get(COUNTED), node_file(context, run, client_number(context), "releases.json")
    counted: dict[str, Any] = dict(kept) if isinstance(kept, ConfigRecord) else {}
    spent_file = None if file is None else SpentFile(file)
    before = max(int(counted.get(run, 0)), 0 if spent_file is None else spent_file.read())
    ledger = Ledger(privacy, before, spent_file=spent_file)
    ledger.spend(n)
    context.state[COUNTED] = ConfigRecord({**counted, run: ledger.n_releases})

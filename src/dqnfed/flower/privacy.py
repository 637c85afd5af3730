"""Clipping and Gaussian noise on what a client sends up."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from dqnfed.core.tensors import map_tensors
from dqnfed.secure.noise import Privacy as Privacy
from dqnfed.secure.noise import clipped_rows, noised_rows

U = TypeVar("U", bound=tuple[Any, ...])


def noised(update: U, privacy: Privacy, generator: torch.Generator | None = None) -> U:
    """Return one client's reply, clipped and, where the noise is its own, with Gaussian noise on every number of it."""
    rows = map_tensors(lambda t: t[None], update)
    rows = noised_rows(rows, privacy, generator) if privacy.noise == "local" else clipped_rows(rows, privacy.clip)
    return map_tensors(lambda t: t[0], rows)

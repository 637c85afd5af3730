"""The only source of randomness: every draw is a function of (run seed, round, client, purpose)."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray


def seed_number(seed: int, round: int = 0, client: int = 0, purpose: str = "") -> int:
    """Return a 63-bit number that no other (seed, round, client, purpose) shares, the same on every machine."""
    key = f"{seed}/{round}/{client}/{purpose}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


def seed_for(seed: int, round: int = 0, client: int = 0, purpose: str = "") -> torch.Generator:
    """Return a host generator for torch draws."""
    return torch.Generator().manual_seed(seed_number(seed, round, client, purpose))


def numpy_seed_for(seed: int, round: int = 0, client: int = 0, purpose: str = "") -> np.random.Generator:
    """Return a generator for NumPy draws."""
    return np.random.default_rng(seed_number(seed, round, client, purpose))


def newest_last(clients: NDArray[np.int64], round: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Return an order by round; within one round a hash decides, so that not always the same clients come first."""
    return np.argsort(round * 2**32 + ((clients + 40503 * round) * 2654435761) % 2**32, kind="stable")

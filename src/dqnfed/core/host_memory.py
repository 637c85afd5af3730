"""How much memory the machine has free, and tensors that go to a file where that is too little."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SMALL = 2**28  # bytes that are taken without a look at how many are free

logger = logging.getLogger("dqnfed")


def free_bytes() -> float:
    """Return how much memory is free for a large tensor; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), math.inf)


def large_tensor(shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    """Return an empty tensor: in memory or, where it would take more than half of what is free, in a temporary file.

    The server reads the clients' rows in order, a block of columns at a time, for which a file is fast enough.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes <= SMALL or n_bytes <= free_bytes() / 2:
        return torch.empty(shape, dtype=dtype)
    logger.info("%s take %.1f GB: they go to a temporary file", what, n_bytes / 1e9)
    with tempfile.NamedTemporaryFile(prefix="dqnfed-rows-") as file:  # its blocks stay for as long as it is mapped
        os.truncate(file.fileno(), n_bytes)
        return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype).view(shape)

"""How much memory the machine has free."""

from __future__ import annotations

import math
from pathlib import Path


def free_bytes() -> float:
    """Return how much memory is free for a large tensor; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), math.inf)

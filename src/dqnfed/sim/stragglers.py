"""Clients that are slow: how much of its local work each has done at the deadline, drawn from the run's seed."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import exp, floor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dqnfed.core.algorithm import check_choice, check_range, check_types
from dqnfed.core.local_work import LocalWork
from dqnfed.core.seeds import numpy_seed_for

if TYPE_CHECKING:
    from dqnfed.core.algorithm import AnyAlgorithm

logger = logging.getLogger("dqnfed")
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """A deadline, and clients of different speed.

    A client's time for a round is its number of examples over the median client's, times exp(spread a + jitter b): a is
    drawn once for a client, b in every round, both standard normal. Who is later than the deadline is left out
    (`late` = "drop"), or sends what it has after the local steps that it could make ("partial"; none: left out).
    """

    deadline: float  # times the time of the median client at the median speed, > 0
    spread: float = 0.5  # standard deviation of the logarithm of the clients' speed, >= 0
    jitter: float = 0.0  # the same of one client's speed from round to round, >= 0
    late: str = "drop"  # drop | partial

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "deadline", low=0.0, open_low=True)
        check_range(self, "spread", low=0.0)
        check_range(self, "jitter", low=0.0)
        check_choice(self, "late", ("drop", "partial"))

    def check(self, algorithm: AnyAlgorithm, seed: int, sizes: FloatArray, *, is_secure: bool) -> None:
        """Refuse partial work of methods whose clients make one step, and say how many clients are always late."""
        if is_secure:
            raise ValueError("Stragglers: deadlines are not simulated with `privacy.secure`; switch one of them off.")
        trains = isinstance(algorithm, LocalWork) and algorithm.batch_size is not None
        if self.late == "partial" and (not trains or "batch_size" in algorithm.unused()):  # type: ignore[attr-defined]
            raise ValueError(
                "Stragglers: `late` = 'partial' needs local training with mini-batches, whose steps can be counted, "
                f"but {type(algorithm).__name__} makes full passes here; set `batch_size`, or `late` = 'drop'."
            )
        if self.jitter == 0.0 and self.late == "drop":
            n_late = sum(self.share(seed, 0, c, sizes) < 1.0 for c in range(len(sizes)))
            if n_late:
                logger.warning("%d of %d clients are late in every round and never take part", n_late, len(sizes))

    def share(self, seed: int, round: int, client: int, sizes: FloatArray) -> float:
        """Return which share of its round's work a client has done at the deadline, at most 1."""
        own = float(numpy_seed_for(seed, client=client, purpose="speed").standard_normal())
        now = float(numpy_seed_for(seed, round, client, "speed in a round").standard_normal()) if self.jitter else 0.0
        time = float(sizes[client] / np.median(sizes)) * exp(self.spread * own + self.jitter * now)
        return min(1.0, self.deadline / time)

    def steps(self, share: float, n_steps: int) -> int:
        """Return how many of its local steps a client makes until the deadline."""
        return n_steps if share >= 1.0 else floor(share * n_steps)

"""Everything that is only fast: the same results as the plain forms but for rounding.

`dqnfed.sim.accelerate` is the one module that chooses from here. Without this package, everything runs in plain form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dqnfed.accel.kernels import FastKernels
from dqnfed.accel.memory import Heap, frozen_gc, keep_freed_blocks
from dqnfed.accel.replies import FastReplies
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies


class Accelerated:
    """The faster forms, for one run."""

    replies: type[Replies[Any]] = FastReplies

    def __init__(self) -> None:
        keep_freed_blocks()

    def problem(self, problem: Problem) -> Problem:
        """Return the problem with kernels of its own; what was compiled for it stays."""
        own = problem.kernels.fresh() if isinstance(problem.kernels, FastKernels) else FastKernels()
        return replace(problem, kernels=own)

    @contextmanager
    def memory(self) -> Iterator[Callable[[], None]]:
        """Manage the process's memory during a run; gives a function to be called after every round."""
        heap = Heap()
        try:
            with frozen_gc():
                yield heap.trim_malloc
        finally:
            heap.trim_now()

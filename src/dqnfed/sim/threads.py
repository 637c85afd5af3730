"""Clients shared out over threads, each of which computes with one core."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import ModuleModel, Problem, Task
from dqnfed.core.tensors import map_tensors
from dqnfed.sim.cohort import Answers, stacked_answers

logger = logging.getLogger("dqnfed")
SMALL = 2**28  # bytes for which nobody asks whether they are free


@dataclass(frozen=True)
class Threads:
    """Independent workers of one core each: torch lets go of Python's lock while it computes, so they run side by side.

    The clients' data and the model are read where they are. Every client is computed by one core, so that the answers
    have the same bits whatever the number of workers is.
    """

    workers: int | None = None  # None: as many as torch would use threads
    _replicas: threading.local = field(default_factory=threading.local, repr=False, compare=False)

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Answers:
        return stacked_answers(self, algorithm, problem, tasks, sent, memory)

    def apart(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        updates, lock = _Rows(len(tasks)), threading.Lock()

        def one(k: int) -> Any:
            update, kept = algorithm.client_step(self._replica(problem), tasks[k], sent, memories[k])
            with lock:
                updates.make_room(update)
            updates.put(k, update)
            return kept

        workers = self._n_workers(problem)
        kept = list(one_core_workers(workers).map(one, range(len(tasks))))
        return updates.stacked, kept

    def _n_workers(self, problem: Problem) -> int:
        if not isinstance(problem.predict, ModuleModel):
            return 1  # a function of the user's own may not bear to be called twice at a time
        return self.workers or torch.get_num_threads()

    def _replica(self, problem: Problem) -> Problem:
        """Return this thread's own copy of the problem's module, which a forward pass borrows."""
        if getattr(self._replicas, "problem", None) is not problem:
            self._replicas.problem, self._replicas.copy = problem, problem.replica()
        copy: Problem = self._replicas.copy
        return copy


class _Rows:
    """The stacked record that workers fill row by row."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.stacked: Any = None

    def make_room(self, first: Any) -> None:
        if self.stacked is None:
            self.stacked = map_tensors(lambda t: room_for((self._n, *t.shape), t.dtype), first)

    @torch.no_grad()
    def put(self, k: int, record: Any) -> None:
        def filled(rows: Tensor, mine: Tensor) -> Tensor:
            rows[k].copy_(mine)
            return rows

        map_tensors(filled, self.stacked, record)


def room_for(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an empty tensor: in memory or, where it would take more than half of what is free, in a temporary file.

    The server reads the clients' rows in order, a block of columns at a time, which a file bears well.
    """
    n_bytes = math.prod(shape) * dtype.itemsize
    if n_bytes <= SMALL or n_bytes <= free_bytes() / 2:
        return torch.empty(shape, dtype=dtype)
    logger.info("the clients' answers take %.1f GB: they go to a temporary file", n_bytes / 1e9)
    with tempfile.NamedTemporaryFile(prefix="dqnfed-rows-") as file:  # which lives on for as long as it is mapped
        os.truncate(file.fileno(), n_bytes)
        return torch.from_file(file.name, shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def free_bytes() -> float:
    """Return how much memory is free for a large tensor; no limit where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.inf
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), math.inf)


@cache
def one_core_workers(n: int) -> ThreadPoolExecutor:
    """Return n threads that compute with one core each; they live as long as the process."""
    before = torch.get_num_threads()
    barrier = threading.Barrier(n + 1)
    pool = ThreadPoolExecutor(n, thread_name_prefix="dqnfed")

    def begin() -> None:
        torch.get_num_threads()  # a thread takes over the general setting at its first use, which must be behind it
        torch.set_num_threads(1)
        barrier.wait()

    for _ in range(n):
        pool.submit(begin)
    barrier.wait()
    torch.set_num_threads(before)  # the threads' setting is their own, but that of threads to come is not
    return pool


def threads(workers: int | None = None) -> Threads:
    """Return the runner that shares the clients out over the cores, for models whose work is worth a thread."""
    return Threads(workers)

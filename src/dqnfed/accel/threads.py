"""Clients on threads, each of which computes with one core."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.host_memory import large_tensor
from dqnfed.core.problem import ModuleModel, Problem, Task
from dqnfed.core.runners import Stacked, stacked_replies
from dqnfed.core.tensors import map_tensors


@dataclass(frozen=True)
class Threads:
    """Independent workers of one core each: torch releases Python's lock while it computes, so they run in parallel.

    The clients' data and the model are read in place. Every client is computed by one core, so that the replies have
    the same bits whatever the number of workers is.
    """

    workers: int | None = None  # None: as many as torch would use threads
    _replicas: threading.local = field(default_factory=threading.local, repr=False, compare=False)

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Stacked:
        return stacked_replies(self, algorithm, problem, tasks, sent, memory)

    def per_client(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        updates, lock = _Rows(len(tasks)), threading.Lock()

        def one(k: int) -> Any:
            update, kept = algorithm.client_step(self._replica(problem), tasks[k], sent, memories[k])
            with lock:
                updates.allocate(update)
            updates.put(k, update)
            return kept

        workers = self._n_workers(problem)
        kept = list(one_core_workers(workers).map(one, range(len(tasks))))
        return updates.stacked, kept

    def _n_workers(self, problem: Problem) -> int:
        if not isinstance(problem.predict, ModuleModel):
            return 1  # a function of the user's own may not be safe to call from two threads
        return self.workers or torch.get_num_threads()

    def _replica(self, problem: Problem) -> Problem:
        """Return this thread's own copy of the problem's module, which a forward pass changes for a while."""
        if getattr(self._replicas, "problem", None) is not problem:
            self._replicas.problem, self._replicas.copy = problem, problem.replica()
        copy: Problem = self._replicas.copy
        return copy


class _Rows:
    """The stacked record that workers fill row by row."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.stacked: Any = None

    def allocate(self, first: Any) -> None:
        if self.stacked is None:
            self.stacked = map_tensors(
                lambda t: large_tensor((self._n, *t.shape), t.dtype, "the clients' replies"), first
            )

    @torch.no_grad()
    def put(self, k: int, record: Any) -> None:
        def filled(rows: Tensor, mine: Tensor) -> Tensor:
            rows[k].copy_(mine)
            return rows

        map_tensors(filled, self.stacked, record)


@cache
def one_core_workers(n: int) -> ThreadPoolExecutor:
    """Return n threads that compute with one core each; they live as long as the process."""
    before = torch.get_num_threads()
    barrier = threading.Barrier(n + 1)
    pool = ThreadPoolExecutor(n, thread_name_prefix="dqnfed")

    def limit() -> None:
        torch.get_num_threads()  # a thread copies the general setting at its first use, which must come before
        torch.set_num_threads(1)
        barrier.wait()

    for _ in range(n):
        pool.submit(limit)
    barrier.wait()
    torch.set_num_threads(before)  # the threads' setting is their own, but later threads would copy it
    return pool


def threads(workers: int | None = None) -> Threads:
    """Return the runner that spreads the clients over the cores, for models whose work is worth a thread."""
    return Threads(workers)

"""Client memories: rows for those clients only that have taken part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import concatenated, gather, map_tensors, n_rows, row, stack, tensors


class MemoryStore:
    """The stacked memories of all clients seen so far, and which row is whose."""

    def __init__(
        self, algorithm: AnyAlgorithm, problem: Problem, n_clients: int, kind: type[Any] | None = None
    ) -> None:
        self._algorithm, self._problem = algorithm, problem
        self.kind: type[Any] = kind or algorithm.Memory  # of a row
        self.row_of = torch.full((n_clients,), -1)
        self.rows: Any = None
        self._room: Any = None  # tensors that `rows` are the beginning of, with space for all clients
        self._is_shared = False  # others may hold these very tensors, or parts of them may share memory (vmap's views)

    def get(self, clients: Tensor, tasks: Task) -> Any:
        """Return the stacked memories of the clients; newcomers get a fresh one, which is not yet stored."""
        known = self.row_of[clients] >= 0
        if bool(known.all()):
            return self._stored(self.row_of[clients])
        newcomers = (~known).nonzero().flatten()
        fresh = self._fresh(gather(tasks, newcomers))
        if not bool(known.any()):
            return fresh
        place = torch.empty(len(clients), dtype=torch.long)
        place[known] = torch.arange(int(known.sum()))
        place[newcomers] = torch.arange(int(known.sum()), len(clients))
        return gather(concatenated([self._stored(self.row_of[clients[known]]), fresh]), place)

    def put(self, clients: Tensor, memory: Any) -> None:
        """Keep the clients' memories."""
        if len(clients) == 0:
            return
        known = self.row_of[clients] >= 0
        if self.rows is not None and bool(known.all()) and len(clients) == n_rows(self.rows):
            order = torch.empty_like(clients)
            order[self.row_of[clients]] = torch.arange(len(clients))
            in_place = bool((order == torch.arange(len(order))).all())
            self.rows, self._is_shared = (memory, True) if in_place else (gather(memory, order), False)
            return
        if bool(known.any()):
            if self._is_shared:
                self.rows, self._is_shared = map_tensors(Tensor.clone, self.rows), False
            index, chosen = self.row_of[clients[known]], known.nonzero().flatten()

            def overwrite(mine: Tensor, theirs: Tensor) -> Tensor:
                return mine.index_copy_(0, index.to(mine.device), theirs.index_select(0, chosen.to(mine.device)))

            map_tensors(overwrite, self.rows, memory)
        if not bool(known.all()):
            newcomers = (~known).nonzero().flatten()
            n_before = 0 if self.rows is None else n_rows(self.rows)
            self.row_of[clients[newcomers]] = torch.arange(n_before, n_before + len(newcomers))
            self.rows = self._grown(memory if bool((~known).all()) else gather(memory, newcomers), n_before)
            self._is_shared = False

    def _grown(self, fresh: Any, n_before: int) -> Any:
        """Return the rows with the fresh ones behind them, copied.

        On the host, room for every client is reserved at the first call: pages that nobody has written to cost nothing,
        and growing never holds the old and the new rows at once.
        """
        n_after = n_before + n_rows(fresh)
        if self._room is None or self._is_shared or n_before == 0 or not _begins_with(self._room, self.rows):
            self._room = _reserved(fresh, len(self.row_of)) if n_after < len(self.row_of) else None
            if self._room is None:
                return map_tensors(Tensor.clone, fresh) if n_before == 0 else concatenated([self.rows, fresh])
            if n_before:
                map_tensors(lambda room, mine: room[:n_before].copy_(mine), self._room, self.rows)
        map_tensors(lambda room, new: room[n_before:n_after].copy_(new), self._room, fresh)
        return map_tensors(lambda room: room[:n_after], self._room)

    def _stored(self, index: Tensor) -> Any:
        whole = len(index) == n_rows(self.rows) and bool((index == torch.arange(len(index))).all())
        self._is_shared |= whole
        return self.rows if whole else gather(self.rows, index)

    def _fresh(self, tasks: Task) -> Any:
        if self._algorithm.vectorises:
            return vmap(lambda task: self._algorithm.init_memory(self._problem, task))(tasks)
        return stack([self._algorithm.init_memory(self._problem, row(tasks, k)) for k in range(n_rows(tasks))])


def _reserved(rows: Any, n_clients: int) -> Any:
    """Return empty tensors like the rows for all clients, or None on a device that would have to pay for them at
    once.
    """
    if any(t.device.type != "cpu" for t in tensors(rows)):
        return None
    try:
        return map_tensors(lambda t: torch.empty((n_clients, *t.shape[1:]), dtype=t.dtype), rows)
    except RuntimeError:  # more than the system promises to anybody
        return None


def _begins_with(room: Any, rows: Any) -> bool:
    return all(a.data_ptr() == b.data_ptr() for a, b in zip(tensors(room), tensors(rows), strict=True))

"""Client memories, for those clients only that have taken part: stacked, or one by one where clients are run apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.algorithm import AnyAlgorithm, Empty
from dqnfed.core.host_memory import large_tensor
from dqnfed.core.problem import Problem, Task
from dqnfed.core.shares import MANY
from dqnfed.core.tensors import (
    OnDevice,
    concatenated,
    from_named_tensors,
    gather,
    map_tensors,
    n_rows,
    named_tensors,
    on_devices,
    row,
    tensors,
)

LARGE = 2**20  # bytes of one client's memory from which on a second copy of all is to be avoided


class Places(NamedTuple):
    """Where the memories of some clients are."""

    rows: Tensor  # [K] -1: nowhere
    all_known: bool
    there: OnDevice  # the rows on a device


class MemoryStore:
    """The stacked memories of all clients seen so far, and which row is whose."""

    def __init__(
        self, algorithm: AnyAlgorithm, problem: Problem, n_clients: int, kind: type[Any] | None = None
    ) -> None:
        self._algorithm, self._problem = algorithm, problem
        self.kind: type[Any] = kind or algorithm.info.memory  # of a row
        self.row_of = torch.full((n_clients,), -1)
        self._are_many = n_clients > MANY  # memories of so many stay on the host, or in a file
        self.rows: Any = None
        self._room: Any = None  # tensors of which `rows` are the first part, with space for all clients
        self._each: dict[int, Any] = {}  # memories that came one by one; they stand before the client's row
        self._is_shared = False  # others may hold these very tensors, or parts of them may share memory (vmap's views)
        self.staged: list[tuple[Tensor, Any]] = []  # in the present round: memories after phases, and whose
        self._asked: list[tuple[Tensor, Places]] = []  # the last two cohorts that were asked for, and their rows

    def stage(self, clients: Tensor, memory: Any) -> None:
        """Give these memories (stacked, or a list) to the next phase of the round, without keeping them yet."""
        if self.staged and len(self.staged[-1][0]) == len(clients):  # the same clients, who now know more
            self.staged.pop()
        self.staged.append((clients, memory))

    def commit_or_rollback(self, *, keep: bool) -> None:
        """Keep what clients learnt in the round that is over, or have it never happen."""
        phases, self.staged = self.staged, []
        for clients, memory in phases if keep else []:
            if isinstance(memory, list):
                self.keep(clients.tolist(), memory)
            else:
                self.put(clients, memory)

    def knows(self, clients: Tensor) -> bool:
        """Return whether `get` has a memory of every one of the clients, and no need of their tasks."""
        return self.kind is Empty or bool(self.staged) or (not self._each and self._places(clients).all_known)

    def prefetch(self, clients: Tensor) -> None:
        """Send the numbers of rows that will be asked for next to where these are, while a GPU is at work there."""
        if self.rows is not None and not self._each and (places := self._places(clients)).all_known:
            places.there(tensors(self.rows)[0].device)

    def get(self, clients: Tensor, tasks: Task) -> Any:
        """Return the stacked memories of the clients; newcomers get a fresh one, which is not yet stored."""
        if self.kind is Empty:
            return Empty(self._problem.theta0.new_zeros(len(clients), 0))
        if self.staged:  # later phases ask those who took part in the one before
            before, memory = self.staged[-1]
            return memory if len(before) == len(clients) else gather(memory, torch.searchsorted(before, clients))
        if self._each:
            return _stacked([self.one(c, row(tasks, k)) for k, c in enumerate(clients.tolist())])
        places, all_known, there = self._places(clients)
        if all_known:
            return self._stored(places, there)
        known = places >= 0
        newcomers = (~known).nonzero().flatten()
        fresh = self._fresh(gather(tasks, newcomers))
        if not bool(known.any()):
            return fresh
        place = torch.empty(len(clients), dtype=torch.long)
        place[known] = torch.arange(int(known.sum()))
        place[newcomers] = torch.arange(int(known.sum()), len(clients))
        return gather(concatenated([self._stored(places[known], on_devices(places[known])), fresh]), place)

    def put(self, clients: Tensor, memory: Any) -> None:
        """Keep the clients' memories."""
        n_clients = clients.shape[0]
        if n_clients == 0 or self.kind is Empty:
            return
        if self._are_many:
            memory = map_tensors(Tensor.cpu, memory)
        if self._each:
            self._stack_each()
        places, all_known, there = self._places(clients)
        if all_known and n_clients == n_rows(self.rows):
            order = torch.empty_like(clients)
            order[places] = torch.arange(n_clients)
            in_place = bool((order == torch.arange(len(order))).all())
            self.rows, self._is_shared = (memory, True) if in_place else (gather(memory, order), False)
            return
        if all_known:
            self._overwrite(there, memory)
            return
        known = places >= 0
        if bool(known.any()):
            self._overwrite(on_devices(places[known]), gather(memory, known.nonzero().flatten()))
            memory = gather(memory, (~known).nonzero().flatten())
        newcomers = clients[~known]
        n_before = 0 if self.rows is None else n_rows(self.rows)
        self._asked = []
        self.row_of[newcomers] = torch.arange(n_before, n_before + len(newcomers))
        self.rows = self._grown(memory, n_before)
        self._is_shared = False

    def _places(self, clients: Tensor) -> Places:
        """Return the clients' rows; those of one cohort are asked for several times in a round."""
        for asked, places in self._asked:
            if asked is clients:
                return places
        rows = self.row_of[clients]
        self._asked = [*self._asked[-1:], (clients, Places(rows, int(rows.min()) >= 0, on_devices(rows)))]
        return self._asked[-1][1]

    def _overwrite(self, there: OnDevice, memory: Any) -> None:
        """Put memories in the place of those in some of the rows."""
        if self._is_shared:
            self.rows, self._is_shared = map_tensors(Tensor.clone, self.rows), False
        for mine, new in zip(tensors(self.rows), tensors(memory), strict=True):
            if mine.numel():
                mine.index_copy_(0, there(mine.device), new)

    def one(self, client: int, task: Task) -> Any:
        """Return one client's memory; a newcomer gets a fresh one, which is not yet stored."""
        if self.staged:
            before, memories = self.staged[-1]
            return memories[int(torch.searchsorted(before, client))]
        if client in self._each:
            return self._each[client]
        place = int(self.row_of[client])
        if place < 0:
            return self._algorithm.init_memory(self._problem, task)
        found = row(self.rows, place)
        return map_tensors(lambda t: t.to(self._problem.theta0.device), found) if self._are_many else found

    def keep(self, clients: Sequence[int], memories: Sequence[Any]) -> None:
        """Keep the clients' memories as they are, without a copy."""
        if self.kind is Empty:
            return
        if self._are_many and not self._each and _fits(self.rows, memories):
            self.put(torch.tensor(clients), _stacked(memories))
            return
        self._is_shared = True  # a memory that did not change is a view of its row
        self._each.update(zip(clients, memories, strict=True))

    def named(self) -> dict[str, Tensor]:
        """Return everything as named tensors, for a file; large memories are not copied."""
        shapes = {tuple((t.shape, t.nbytes) for t in tensors(memory)) for memory in self._each.values()}
        if len(shapes) == 1 and sum(n_bytes for _, n_bytes in shapes.pop()) < LARGE:
            self._stack_each()
        seen = (self.row_of >= 0).nonzero().flatten()
        found = {"memory_seen": seen, "memory_row_of_seen": self.row_of[seen]}
        found = found if self._are_many else {"memory_row_of": self.row_of}
        if self.rows is not None:
            found.update(named_tensors(self.rows, "memory."))
        for client, memory in self._each.items():
            found.update(named_tensors(map_tensors(Tensor.contiguous, memory), f"memory_of.{client}."))
        return found

    def load(self, named: dict[str, Tensor], device: torch.device) -> None:
        """Take what `named` gave."""
        self.rows, self._room, self._asked = None, None, []
        if self._are_many:
            self.row_of.fill_(-1)[named["memory_seen"]] = named["memory_row_of_seen"]
        else:
            self.row_of = named["memory_row_of"]

        def read(prefix: str) -> Any:
            there = torch.device("cpu") if self._are_many else device
            return map_tensors(lambda t: t.to(there), from_named_tensors(self.kind, named, prefix))

        if bool((self.row_of >= 0).any()):
            self.rows = read("memory.")
        apart = {int(name.split(".")[1]) for name in named if name.startswith("memory_of.")}
        self._each = {client: read(f"memory_of.{client}.") for client in sorted(apart)}

    def _stack_each(self) -> None:
        """Put the memories that came one by one into the stacked rows."""
        apart, self._each = self._each, {}
        clients = sorted(apart)
        self.put(torch.tensor(clients), _stacked([apart[c] for c in clients]))

    def _grown(self, fresh: Any, n_before: int) -> Any:
        """Return the rows with the fresh ones behind them, copied.

        On the host, room for every client is reserved at the first call: pages that nobody has written to cost nothing,
        and growing never holds the old and the new rows at once. Room for very many is doubled as they come, and goes
        to a file where it would take half of the free memory.
        """
        n_after = n_before + n_rows(fresh)
        is_usable = self._room is not None and not self._is_shared and n_before and _begins_with(self._room, self.rows)
        if not is_usable or n_rows(self._room) < n_after:
            wanted = min(len(self.row_of), 2 * n_after) if self._are_many else len(self.row_of)
            self._room = _reserved(fresh, wanted) if n_after < wanted else None
            if self._room is None:
                return map_tensors(Tensor.clone, fresh) if n_before == 0 else concatenated([self.rows, fresh])
            if n_before:
                map_tensors(lambda room, mine: room[:n_before].copy_(mine), self._room, self.rows)
        map_tensors(lambda room, new: room[n_before:n_after].copy_(new), self._room, fresh)
        return map_tensors(lambda room: room[:n_after], self._room)

    def _stored(self, index: Tensor, there: OnDevice) -> Any:
        n_asked = index.shape[0]
        whole = n_asked == n_rows(self.rows) and bool((index == torch.arange(n_asked)).all())
        self._is_shared |= whole
        found = self.rows if whole else gather(self.rows, index, there)
        return map_tensors(lambda t: t.to(self._problem.theta0.device), found) if self._are_many else found

    def _fresh(self, tasks: Task) -> Any:
        return vmap(lambda task: self._algorithm.init_memory(self._problem, task))(tasks)


def _fits(rows: Any, memories: Sequence[Any]) -> bool:
    """Return whether all memories have one shape, that of the rows where there are any."""
    shapes = {tuple(t.shape for t in tensors(memory)) for memory in memories}
    return len(shapes) == 1 and (rows is None or tuple(t.shape[1:] for t in tensors(rows)) in shapes)


def _stacked(memories: Sequence[Any]) -> Any:
    """Return the memories stacked; what clients keep for each of their examples is padded with zeros to the longest."""

    def padded(*rows: Tensor) -> Tensor:
        longest = max(t.shape[0] if t.dim() else 0 for t in rows)
        return torch.stack([t if not t.dim() or len(t) == longest else _lengthened(t, longest) for t in rows])

    return map_tensors(padded, memories[0], *memories[1:])


def _lengthened(t: Tensor, length: int) -> Tensor:
    return torch.cat([t, t.new_zeros(length - len(t), *t.shape[1:])])


def _reserved(rows: Any, n_clients: int) -> Any:
    """Return empty tensors like the rows for all clients, or None on a device that would have to pay for them at
    once.
    """
    if any(t.device.type != "cpu" for t in tensors(rows)):
        return None
    try:
        if n_clients > MANY:
            return map_tensors(lambda t: large_tensor((n_clients, *t.shape[1:]), t.dtype, "clients' memories"), rows)
        return map_tensors(lambda t: torch.empty((n_clients, *t.shape[1:]), dtype=t.dtype), rows)
    except RuntimeError:  # more than the system promises to anybody
        return None


def _begins_with(room: Any, rows: Any) -> bool:
    return all(a.data_ptr() == b.data_ptr() for a, b in zip(tensors(room), tensors(rows), strict=True))

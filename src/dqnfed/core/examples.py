"""The examples of all clients: in memory, or read where they are when a client is asked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

Part = Literal["train", "validation", "test"]
Arrays = Tensor | np.ndarray[Any, Any]
Pair = tuple[Tensor, Tensor]  # inputs and targets, a row an example

SAMPLE = 4096  # rows of stored arrays that a checksum reads


class Examples(NamedTuple):
    """The examples of all clients, one client after the other: client c has rows starts[c]:starts[c + 1]."""

    inputs: Tensor  # [T, ...]
    targets: Tensor  # [T, ...]
    starts: Tensor  # [C + 1], on the host

    @property
    def is_lazy(self) -> bool:
        """Whether the examples are elsewhere, so that `inputs` and `targets` have no rows."""
        return False

    @property
    def sizes(self) -> Tensor:
        return self.starts.diff()

    def sizes_of(self, clients: Tensor) -> Tensor:
        """Return the numbers of examples of these clients, at a cost that goes with them alone."""
        return self.starts[clients + 1] - self.starts[clients]

    def rows(self, clients: Tensor) -> Tensor:
        """Return the row numbers of the given clients' examples, client after client."""
        sizes = self.sizes_of(clients)
        ends = sizes.cumsum(0)
        return torch.arange(int(ends[-1])) + (self.starts[clients] - ends + sizes).repeat_interleave(sizes)

    def padded_rows(self, clients: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
        """Return row numbers [K, N] and a mask [K, N]; shorter clients repeat their first row under mask 0.

        N is that of the largest client, or the width, which is no smaller.
        """
        all_starts, chosen = self.starts.numpy(), clients.numpy()
        starts, ends = all_starts[chosen, None], all_starts[chosen + 1, None]
        rows = starts + np.arange((ends - starts).max() if width is None else width)
        real = rows < ends
        return torch.from_numpy(np.where(real, rows, starts)), torch.from_numpy(real)

    def taken(self, clients: Tensor) -> Pair:
        """Return these clients' inputs and targets, client after client."""
        rows = self.rows(clients).to(self.inputs.device, non_blocking=True)
        return self.inputs[rows], self.targets[rows]

    def checksums(self) -> dict[str, str]:
        """Return SHA-256 of what is held, by name."""
        return {what: tensor_checksum(getattr(self, what), self.starts) for what in ("inputs", "targets")}


class Source(Protocol):
    """Where the examples of lazy clients are."""

    like: Pair  # inputs and targets without rows: their shapes and types

    def read(self, clients: Tensor) -> Pair:
        """Return these clients' inputs and targets, client after client."""

    def checksums(self) -> dict[str, str]:
        """Return SHA-256 of what can be read at a small cost, by name."""


class LazyExamples(Examples):
    """Examples that are read when their client is asked; in memory there are only the clients' numbers of them."""

    source: Source

    def __new__(cls, source: Source, starts: Tensor) -> Self:
        found = super().__new__(cls, *source.like, starts)
        found.source = source
        return found

    @property
    def is_lazy(self) -> bool:
        return True

    def taken(self, clients: Tensor) -> Pair:
        return self.source.read(clients)

    def checksums(self) -> dict[str, str]:
        return {"sizes": tensor_checksum(self.starts), **self.source.checksums()}


class StoredRows:
    """Rows of arrays that stay where they are: in memory, or mapped from a file."""

    def __init__(
        self, inputs: Tensor, targets: Tensor, order: Tensor | None, starts: Tensor, check: Callable[..., None]
    ) -> None:
        self._inputs, self._targets, self._order, self._check = inputs, targets, order, check
        self._places = Examples(inputs[:0], targets[:0], starts)
        self.like = (inputs[:0], targets[:0])

    def read(self, clients: Tensor) -> Pair:
        rows = self._places.rows(clients)
        rows = rows if self._order is None else self._order[rows]
        found = self._inputs[rows], self._targets[rows]
        self._check(clients, self._places.sizes_of(clients), found)
        return found

    def checksums(self) -> dict[str, str]:
        rows = torch.arange(0, len(self._inputs), max(1, len(self._inputs) // SAMPLE))
        found = {"sampled inputs": self._inputs[rows], "sampled targets": self._targets[rows]}
        return {what: tensor_checksum(rows_of) for what, rows_of in found.items()}


class CalledClients:
    """What a function gives for a client's number; the data of the clients that were asked last are kept."""

    def __init__(self, read: Callable[[int], dict[Part, Pair]], like: Pair) -> None:
        self._read, self.like = read, like
        self._kept: dict[int, dict[Part, Pair]] = {}

    def of(self, clients: list[int]) -> list[dict[Part, Pair]]:
        """Return the clients' data by part."""
        before = self._kept
        self._kept = {c: before[c] if c in before else self._read(c) for c in clients}
        return [self._kept[c] for c in clients]


class CalledPart:
    """One part of what a function gives."""

    def __init__(self, called: CalledClients, part: Part) -> None:
        self._called, self._part, self.like = called, part, called.like

    def read(self, clients: Tensor) -> Pair:
        each = [found[self._part] for found in self._called.of(clients.tolist())]
        return torch.cat([x for x, _ in each]), torch.cat([y for _, y in each])

    def checksums(self) -> dict[str, str]:
        return {}


def tensor_checksum(values: Tensor, *more: Tensor) -> str:
    """Return the SHA-256 of the tensors' types, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in (values, *more):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def joined(pairs: Sequence[Pair]) -> Examples:
    """Return the examples of clients given one by one."""
    sizes = torch.tensor([0] + [len(x) for x, _ in pairs])
    return Examples(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), sizes.cumsum(0))

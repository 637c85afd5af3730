"""Replies that are asked with few waits for a GPU, and with all cores of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.accel.products import fast_cross_products, fast_gramian
from dqnfed.accel.reply_stats import NO_STATS, ReplyStats, packed_stats, stats_plan, unpacked_stats
from dqnfed.accel.transfer import to_device_async
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import tensors

FloatArray = NDArray[np.float64]
U = TypeVar("U", bound=tuple[Any, ...])


class FastReplies(Replies[U]):
    """Replies whose products are computed by all cores of a CPU or in one launch of a GPU.

    Scalars and norms of all fields come from a GPU together, when the first of them is asked for.
    """

    def __init__(self, updates: U) -> None:
        super().__init__(updates)
        self._stats: ReplyStats | None = None
        self._norms: dict[str, FloatArray] = {}  # that were computed here

    @property
    def stats(self) -> ReplyStats:
        """What is known of the fields; on the host nothing, since there every question is answered on its own."""
        if self._stats is None:
            self._stats = self._computed_stats()
        return self._stats

    def scalars(self, field: str) -> FloatArray:
        known = self.stats.scalars.get(field)
        return super().scalars(field) if known is None else known

    def norms(self, field: str) -> FloatArray:
        known = self.stats.norms.get(field)
        if known is None and field not in self._norms:
            self._norms[field] = super().norms(field)
        return self._norms[field] if known is None else known

    def gram(self, field: str, extra: Tensor | Sequence[Tensor] | None = None) -> FloatArray:
        rows, known = super().rows(field).flatten(1), self.stats.grams.get(field)
        if known is None:
            found: FloatArray = fast_gramian(rows, extra).numpy()
            return found
        others = [other for other in listed(extra) if len(other)]
        products = [self._known_products(field, other) for other in others]
        unknown = [other for other, ready in zip(others, products, strict=True) if ready is None]
        computed = iter(fast_cross_products(rows, unknown))  # which a GPU sends together
        return np.concatenate([known, *(next(computed) if p is None else p for p in products)], axis=1)

    def _known_products(self, field: str, other: Tensor) -> FloatArray | None:
        """Return the products of a field with these rows of the server where they came with the replies."""
        return None

    def combine(self, field: str, weights: Tensor | FloatArray) -> Tensor:
        rows = super().rows(field)
        if rows.device.type == "cpu":
            return super().combine(field, weights)
        return super().combine(field, to_device_async(rows.device, torch.as_tensor(weights), rows.dtype))

    def put(self, field: str, places: Tensor, store: Tensor, slots: Tensor) -> Tensor:
        """Write into the store itself: a run never goes back to a state before, and a copy takes most of a round."""
        there = slots.to(store.device, non_blocking=True)
        return store.index_copy_(0, there, self._rows_at(field, places).to(store.dtype))

    def take(self, places: Tensor) -> Self:
        taken = super().take(places)
        taken._stats = self.stats.take(places.numpy())
        return taken

    def scaled(self, factors: Tensor, fields: tuple[str, ...]) -> Self:
        scaled = super().scaled(factors, fields)
        scaled._stats = self.stats.scaled(factors.double().numpy(), fields)
        return scaled

    def _computed_stats(self) -> ReplyStats:
        if all(t.device.type == "cpu" for t in tensors(self.updates)):
            return NO_STATS
        plan = stats_plan(self.updates)
        return unpacked_stats(plan, packed_stats(plan, self.updates).cpu().numpy(), len(self))


class KeptRows(NamedTuple):
    """Rows of the server that are one tensor in every round, and the version of its numbers that was read."""

    rows: Tensor  # [M, n]
    version: int

    def are(self, asked: Tensor) -> bool:
        """Return whether these are the rows asked for, with the same numbers."""
        return asked is self.rows and asked._version == self.version


class GraphReplies(FastReplies[U]):
    """Replies whose statistics were computed with them in a CUDA graph, and are on their way to the host.

    They are waited for at the first question. `on_gram` is called with every field whose products are asked for, and
    the further rows, so that the next round's graph can compute them too; `kept` are rows with which it has.
    """

    def __init__(
        self,
        updates: U,
        wait: Callable[[], ReplyStats] = lambda: NO_STATS,
        on_gram: Callable[[str, list[Tensor]], None] = lambda *_: None,
        kept: Mapping[str, Sequence[KeptRows]] | None = None,
    ) -> None:
        super().__init__(updates)
        self._wait, self._on_gram, self._kept = wait, on_gram, kept or {}

    def gram(self, field: str, extra: Tensor | Sequence[Tensor] | None = None) -> FloatArray:
        self._on_gram(field, listed(extra))
        return super().gram(field, extra)

    def take(self, places: Tensor) -> Self:
        taken = super().take(places)
        taken._on_gram, taken._kept = self._on_gram, self._kept
        return taken

    def scaled(self, factors: Tensor, fields: tuple[str, ...]) -> Self:
        scaled = super().scaled(factors, fields)
        scaled._on_gram, scaled._kept = self._on_gram, self._kept
        return scaled

    def _known_products(self, field: str, other: Tensor) -> FloatArray | None:
        products, first = self.stats.beside.get(field), 0
        if products is None:
            return None
        for kept in self._kept.get(field, ()):
            last = first + len(kept.rows)
            if kept.are(other):
                return products[:, first:last]
            first = last
        return None

    def _computed_stats(self) -> ReplyStats:
        return self._wait()


def listed(extra: Tensor | Sequence[Tensor] | None) -> list[Tensor]:
    """Return the further rows of a question about products, as matrices."""
    return [] if extra is None else [extra] if isinstance(extra, Tensor) else list(extra)

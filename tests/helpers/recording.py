"""Replies that note what a server asks of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm, Cohort, ServerStep
from dqnfed.core.replies import FloatArray, Replies

U = TypeVar("U", bound=tuple[Any, ...])
LEVELS = ("sum", "gram", "rows")  # each includes those before it; one number a client is allowed at every level


class Asked:
    """Makes replies from stacked updates, and notes the strongest question that any of them is asked."""

    def __init__(self) -> None:
        self.level = LEVELS[0]

    def __call__(self, updates: Any) -> Replies[Any]:
        return Recorded(updates, self)

    def note(self, level: str) -> None:
        self.level = max(self.level, level, key=LEVELS.index)


class Recorded(Replies[U], Generic[U]):
    """Replies whose rows are behind questions; to reach for `updates` is to ask for all rows."""

    are_padded = False

    def __init__(self, updates: U, asked: Asked) -> None:
        self._plain, self._asked = Replies(updates), asked

    @property
    def updates(self) -> U:  # type: ignore[override]
        self._asked.note("rows")
        return self._plain.updates

    @property
    def kind(self) -> type[U]:
        return self._plain.kind

    @property
    def fields(self) -> tuple[str, ...]:
        return self._plain.fields

    def dtype(self, field: str) -> torch.dtype:
        return self._plain.dtype(field)

    def __len__(self) -> int:
        return len(self._plain)

    def scalars(self, field: str) -> FloatArray:
        found = self._plain.scalars(field)
        assert found.ndim == 1, f"'{field}' is no number a client, but has the shape {found.shape}"
        return found

    def norms(self, field: str) -> FloatArray:
        return self._plain.norms(field)

    def combine(self, field: str, weights: Tensor | FloatArray) -> Tensor:
        return self._plain.combine(field, weights)

    def mean(self, field: str, weights: Tensor | None = None) -> Tensor:
        return self._plain.mean(field, weights)

    def gram(self, field: str, extra: Tensor | Sequence[Tensor] | None = None) -> FloatArray:
        self._asked.note("gram")
        return self._plain.gram(field, extra)

    def form(self, field: str, vectors: Tensor, middle: FloatArray) -> FloatArray:
        self._asked.note("gram")
        return self._plain.form(field, vectors, middle)

    def rows(self, field: str) -> Tensor:
        self._asked.note("rows")
        return self._plain.rows(field)

    def put(self, field: str, places: Tensor, store: Tensor, slots: Tensor) -> Tensor:
        self._asked.note("rows")
        return self._plain.put(field, places, store, slots)

    def take(self, places: Tensor) -> Self:
        return type(self)(self._plain.take(places).updates, self._asked)

    def replaced(self, field: str, values: Tensor) -> Self:
        return type(self)(self._plain.replaced(field, values).updates, self._asked)

    def for_step(self, server: Any, cohort: Any) -> Self:
        return self

    def scaled(self, factors: Tensor, fields: tuple[str, ...]) -> Self:
        return type(self)(self._plain.scaled(factors, fields).updates, self._asked)


UNRECORDED = {name for name in vars(Replies) if not name.startswith("_")} - set(vars(Recorded))
assert not UNRECORDED, f"`Replies` can be asked for {UNRECORDED}: say in `Recorded` at which level that is"


def recorded(prepared: AnyAlgorithm, asked: Asked) -> AnyAlgorithm:
    """Return the method with a server that notes what it asks of the replies; what the engine asks is not noted."""

    def server_step(self: AnyAlgorithm, server: Any, replies: Replies[Any], cohort: Cohort) -> ServerStep[Any]:
        return type(prepared).server_step(self, server, Recorded(replies.updates, asked), cohort)

    observed = copy.copy(prepared)
    kind = type(type(prepared).__name__, (type(prepared),), {"server_step": server_step})
    object.__setattr__(observed, "__class__", kind)  # not built anew: its settings may be those of a prepared method
    return observed

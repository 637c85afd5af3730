"""What a server may ask of the clients' replies: numbers, products of rows, weighted sums and, last, the rows."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.tensors import gather, n_rows
from dqnfed.maths.gramian import combine, gramian

FloatArray = NDArray[np.float64]
U = TypeVar("U", bound=tuple[Any, ...])


class Replies(Generic[U]):
    """The replies of K clients, in client order; `updates` is the record of their stacked fields, [K, ...] each.

    A method that asks for `scalars` and `combine` alone needs no more than sums; `gram` needs the products of every two
    replies; a method that asks for `rows` sees every reply. A field inside a record of the reply is "record.field".
    """

    are_padded = False  # a method then asks for no product of a single row that it can do without

    def __init__(self, updates: U) -> None:
        self.updates = updates

    def __len__(self) -> int:
        return n_rows(self.updates)

    @property
    def kind(self) -> type[U]:
        """The type of the replies."""
        return type(self.updates)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of the replies' fields."""
        record: Any = self.updates
        names: tuple[str, ...] = record._fields
        return names

    def scalars(self, field: str) -> FloatArray:
        """Return a field that is one number a client, [K], in float64 on the host."""
        found: FloatArray = attrgetter(field)(self.updates).double().cpu().numpy()
        return found

    def gram(self, field: str, extra: Tensor | Sequence[Tensor] | None = None) -> FloatArray:
        """Return the products of the field's rows with each other [K, K]; then with the `extra` rows [K, K + R]."""
        found: FloatArray = gramian(attrgetter(field)(self.updates).flatten(1), extra).numpy()
        return found

    def form(self, field: str, vectors: Tensor, middle: FloatArray) -> FloatArray:
        """Return G V' C V G' for the rows G of the field, vectors V [R, n] and the symmetric C = `middle`, [K, K]."""
        products = self.gram(field, vectors)[:, len(self) :]
        found: FloatArray = products @ middle @ products.T
        return found

    def combine(self, field: str, weights: Tensor | FloatArray) -> Tensor:
        """Return sum_k weights_k row_k, in the shape, the precision and on the device of one row."""
        rows: Tensor = attrgetter(field)(self.updates)
        return combine(torch.as_tensor(weights), rows.reshape(len(rows), -1)).view(rows.shape[1:])

    def rows(self, field: str) -> Tensor:
        """Return the field of every client, [K, ...]."""
        rows: Tensor = attrgetter(field)(self.updates)
        return rows

    def put(self, field: str, places: Tensor, store: Tensor, slots: Tensor) -> Tensor:
        """Return the store [S, n] with the rows at these places of the field in these slots."""
        there = slots.to(store.device, non_blocking=True)
        return store.index_copy(0, there, self._rows_at(field, places).to(store.dtype))

    def _rows_at(self, field: str, places: Tensor) -> Tensor:
        rows = self.rows(field)
        return rows if len(places) == len(rows) else rows.index_select(0, places.to(rows.device, non_blocking=True))

    def mean(self, field: str, weights: Tensor | None = None) -> Tensor:
        """Return the mean of the field's rows, weighted by `weights` / sum(weights) if given."""
        if weights is None:
            weights = torch.ones(len(self), dtype=torch.float64)
        total = weights.sum()
        if not bool(total > 0) or bool((weights < 0).any()):
            raise ValueError(
                f"weights of a mean must be non-negative with a positive sum, but they are {weights.tolist()}; "
                "use example counts, or None for equal weights."
            )
        return self.combine(field, weights.double() / total)

    def dtype(self, field: str) -> torch.dtype:
        """Return the precision in which clients sent the field."""
        precision: torch.dtype = attrgetter(field)(self.updates).dtype
        return precision

    def norms(self, field: str) -> FloatArray:
        """Return the Euclidean norm of the field of every client, [K]."""
        rows: Tensor = attrgetter(field)(self.updates)
        found: FloatArray = torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1).double().cpu().numpy()
        return found

    def take(self, places: Tensor) -> Self:
        """Return the replies at these places."""
        return type(self)(gather(self.updates, places))

    def replaced(self, field: str, values: Tensor) -> Self:
        """Return the replies with other numbers in one field."""
        record: Any = self.updates
        return type(self)(record._replace(**{field: values.to(getattr(record, field))}))

    def for_step(self, server: Any, cohort: Any) -> Self:
        """Return the replies as the step of this server asks them; for replies that tell clients why they are asked."""
        return self

    def scaled(self, factors: Tensor, fields: tuple[str, ...]) -> Self:
        """Return the replies with these fields of theirs multiplied by the clients' factors [K]."""

        def by_factor(t: Tensor) -> Tensor:
            return t * factors.to(t.device, t.dtype).view(-1, *[1] * (t.dim() - 1))

        record: Any = self.updates
        changed = {name: by_factor(getattr(record, name)) for name in fields if name in self.fields}
        return type(self)(record._replace(**changed))

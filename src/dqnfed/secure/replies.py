"""Replies of which the server sees scalars, products and the sums that were released to it, never a row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import from_named_tensors, gather, named_tensors
from dqnfed.secure.forms import Form, form_of
from dqnfed.secure.ring import FloatArray

U = TypeVar("U", bound=tuple[Any, ...])


class Like(NamedTuple):
    """What a row of a field looks like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


class Source(Protocol):
    """Where answers about the rows come from; clients in the order of those who replied."""

    def norms(self, field: str) -> FloatArray:
        """Return the rows' norms, [K]."""

    def gram(self, field: str) -> FloatArray:
        """Return the products of the rows, [K, K]."""

    def products(self, field: str, vectors: Tensor) -> FloatArray:
        """Return the rows' products with vectors that everybody may know [R, n], as [K, R]."""

    def form(self, field: str, form: Form) -> FloatArray:
        """Return the rows' products in a form of their products with such vectors, [K, K]."""

    def combine(self, field: str, weights: FloatArray) -> FloatArray:
        """Return the sum of the rows times the weights [K], as [n]."""

    def begin(self, server: Any, cohort: Cohort, view: View) -> None:
        """Note for which server step the next questions are."""


@dataclass(frozen=True)
class View:
    """Which replies are looked at, and what they are multiplied by."""

    updates: Any  # the record of stacked fields; in place of a row, its norm [K, 1]
    places: tuple[int, ...]  # of those who replied
    factors: Mapping[str, FloatArray]  # [K] by field, where it is not 1


def norms_in_place(updates: U, norms: Mapping[str, FloatArray]) -> U:
    """Return the stacked record with the rows' norms [K, 1] in place of the rows, in their precision."""
    named = named_tensors(updates)
    changed = {name: torch.from_numpy(values).to(named[name])[:, None] for name, values in norms.items()}
    return from_named_tensors(type(updates), {**named, **changed})


def row_fields(updates: tuple[Any, ...]) -> list[str]:
    """Return the names of the fields that hold a row for every client: these are padded, single numbers are not."""
    return [name for name, t in named_tensors(updates).items() if t.dim() > 1 and t.numel()]


class SecureReplies(Replies[U]):
    """Replies whose rows are behind a source; `updates` holds norms in their place."""

    are_padded = True

    def __init__(self, source: Source, likes: Mapping[str, Like], view: View) -> None:
        super().__init__(view.updates)
        self._source, self._likes, self._view = source, likes, view

    def norms(self, field: str) -> FloatArray:
        if field not in self._likes:
            return super().norms(field)
        return np.abs(self._source.norms(field)[list(self._view.places)] * self._factors(field))

    def gram(self, field: str, extra: Tensor | Sequence[Tensor] | None = None) -> FloatArray:
        places, factors = list(self._view.places), self._factors(field)
        found = self._source.gram(field)[np.ix_(places, places)] * np.outer(factors, factors)
        others = [] if extra is None else [extra] if isinstance(extra, Tensor) else list(extra)
        vectors = torch.cat([other.flatten(1) for other in others if len(other)] or [torch.zeros(0, 1)])
        told = vectors.abs().amax(1).gt(0.0).nonzero().flatten()  # of zeros, nobody need be asked
        products = np.zeros((len(places), len(vectors)))
        if len(told):
            known = self._source.products(field, vectors[told])[places] * factors[:, None]
            products[:, told.cpu().numpy()] = known
        return np.concatenate([found, products], axis=1)

    def form(self, field: str, vectors: Tensor, middle: FloatArray) -> FloatArray:
        places, factors = list(self._view.places), self._factors(field)
        if not middle.any():
            return np.zeros((len(places), len(places)))
        found = self._source.form(field, form_of(vectors, middle))
        return found[np.ix_(places, places)] * np.outer(factors, factors)

    def combine(self, field: str, weights: Tensor | FloatArray) -> Tensor:
        given = torch.as_tensor(weights).double().cpu().numpy()
        if field not in self._likes:
            return super().combine(field, given)
        n_replies, like = len(self._source.norms(field)), self._likes[field]
        spread = np.zeros(n_replies)
        spread[list(self._view.places)] = given * self._factors(field)
        found = torch.from_numpy(self._source.combine(field, spread))
        return found.to(like.device, like.dtype).view(like.shape)

    def rows(self, field: str) -> Tensor:
        if field in self._likes:
            raise ValueError(
                f"a row of '{field}' was asked for, but with `privacy.secure` the server sees none; the method "
                "declares that it does not need them."
            )
        return super().rows(field)

    def take(self, places: Tensor) -> Self:
        chosen = places.tolist()
        return self._with(
            updates=gather(self.updates, places),
            places=tuple(self._view.places[k] for k in chosen),
            factors={name: values[chosen] for name, values in self._view.factors.items()},
        )

    def replaced(self, field: str, values: Tensor) -> Self:
        assert field not in self._likes, f"'{field}' holds rows, which the server cannot replace"
        return self._with(updates=super_replaced(self.updates, field, values))

    def scaled(self, factors: Tensor, fields: tuple[str, ...]) -> Self:
        by = factors.double().cpu().numpy()
        changed = {name: self._factors(name) * by for name in fields if name in self._likes}
        scalars = Replies(self.updates).scaled(factors, fields).updates
        return self._with(updates=scalars, factors={**self._view.factors, **changed})

    def for_step(self, server: Any, cohort: Cohort) -> Self:
        self._source.begin(server, cohort, self._view)
        return self

    def _factors(self, field: str) -> FloatArray:
        return self._view.factors.get(field, np.ones(len(self._view.places)))

    def _with(self, **changes: Any) -> Self:
        return type(self)(self._source, self._likes, replace(self._view, **changes))


def super_replaced(updates: Any, field: str, values: Tensor) -> Any:
    """Return the record with other numbers in one field."""
    old: Tensor = attrgetter(field)(updates)
    return updates._replace(**{field: values.to(old)})


def likes_of(updates: tuple[Any, ...]) -> dict[str, Like]:
    """Return what the rows of every padded field look like."""
    named = named_tensors(updates)
    return {name: Like(named[name].shape[1:], named[name].dtype, named[name].device) for name in row_fields(updates)}

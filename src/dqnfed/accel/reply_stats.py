"""Scalars, norms and products of a cohort's replies, in one vector that a GPU sends to the host at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.accel.products import device_gramian, device_products
from dqnfed.core.tensors import named_tensors

FloatArray = NDArray[np.float64]


class StatsPlan(NamedTuple):
    """Which fields of the replies the statistics are of."""

    scalars: tuple[str, ...]  # one number a client each
    vectors: tuple[str, ...]  # whose norms are computed
    grams: tuple[str, ...]  # whose rows' products are computed; their diagonal holds the squared norms
    n_beside: tuple[int, ...]  # for each of these: how many rows of the server there are products with, too


class ReplyStats(NamedTuple):
    """The scalars, norms and products of K stacked replies, in float64 on the host, by field."""

    scalars: dict[str, FloatArray]  # [K]
    norms: dict[str, FloatArray]  # [K] Euclidean
    grams: dict[str, FloatArray]  # [K, K]
    beside: dict[str, FloatArray] = {}  # noqa: RUF012  # [K, M] products with rows that the server keeps

    def take(self, places: NDArray[np.int64]) -> ReplyStats:
        """Return the statistics of the replies at these places."""
        return ReplyStats(
            {name: values[places] for name, values in self.scalars.items()},
            {name: values[places] for name, values in self.norms.items()},
            _finite({name: products[np.ix_(places, places)] for name, products in self.grams.items()}),
            _finite({name: products[places] for name, products in self.beside.items()}),
        )

    def scaled(self, factors: FloatArray, fields: tuple[str, ...]) -> ReplyStats:
        """Return the statistics of the replies after these fields of theirs were multiplied by the factors."""

        def multiplied(by_field: dict[str, FloatArray], by: FloatArray) -> dict[str, FloatArray]:
            return {name: values * by if name in fields else values for name, values in by_field.items()}

        return ReplyStats(
            multiplied(self.scalars, factors),
            multiplied(self.norms, factors),
            multiplied(_finite(self.grams), np.outer(factors, factors)),
            multiplied(_finite(self.beside), factors[:, None]),
        )


NO_STATS = ReplyStats({}, {}, {})


def _finite(grams: dict[str, FloatArray]) -> dict[str, FloatArray]:
    """Return the products without those of replies too long to be squared, which are computed anew once clipped."""
    return {name: products for name, products in grams.items() if np.isfinite(products).all()}


def stats_plan(
    updates: tuple[Any, ...],
    nan_ok: tuple[str, ...] = (),
    gram_fields: tuple[str, ...] = (),
    beside: Mapping[str, Sequence[Tensor]] | None = None,
) -> StatsPlan:
    """Return the fields of these stacked replies that have statistics; none of an integer, and none that is empty."""
    fields = {name: t for name, t in named_tensors(updates).items() if t.is_floating_point() and t.numel()}
    grams = tuple(name for name, t in fields.items() if name in gram_fields and t.dim() > 1)
    return StatsPlan(
        tuple(name for name, t in fields.items() if t.dim() == 1),
        tuple(name for name, t in fields.items() if t.dim() > 1 and name not in (*nan_ok, *grams)),
        grams,
        tuple(sum(len(rows) for rows in (beside or {}).get(name, ())) for name in grams),
    )


def packed_stats(
    plan: StatsPlan, updates: tuple[Any, ...], beside: Mapping[str, Sequence[Tensor]] | None = None
) -> Tensor:
    """Return the statistics as one float64 vector, on the device of the replies; `beside` are rows that are kept there.

    Nothing waits for a GPU, so that a CUDA graph may hold it. Norms are in the precision of their field, as
    `Replies.norms` computes them, and the products as `gramian` does.
    """
    fields = named_tensors(updates)
    columns = [
        *(fields[name] for name in plan.scalars),
        *(torch.linalg.vector_norm(fields[name].flatten(1), dim=1) for name in plan.vectors),
    ]
    packed = [torch.cat(columns).double()] if columns else []  # converted together: on a GPU every launch counts
    for name in plan.grams:
        rows = fields[name].flatten(1)
        packed.append(device_gramian(rows).reshape(-1))
        if others := (beside or {}).get(name, ()):
            packed.append(torch.cat([device_products(rows, other) for other in others], dim=1).reshape(-1))
    return torch.cat(packed) if packed else next(iter(fields.values())).new_empty(0, dtype=torch.float64)


def unpacked_stats(plan: StatsPlan, packed: FloatArray, n_replies: int) -> ReplyStats:
    """Return the statistics that `packed_stats` computed of so many replies."""
    names = (*plan.scalars, *plan.vectors)
    first = len(names) * n_replies
    columns = packed[:first].reshape(len(names), n_replies)
    grams: dict[str, FloatArray] = {}
    beside: dict[str, FloatArray] = {}
    for name, n_beside in zip(plan.grams, plan.n_beside, strict=True):
        middle = first + n_replies**2
        grams[name] = packed[first:middle].reshape(n_replies, n_replies)
        first = middle + n_replies * n_beside
        if n_beside:
            beside[name] = packed[middle:first].reshape(n_replies, n_beside)
    norms = dict(zip(names, np.abs(columns), strict=True))
    norms.update((name, np.sqrt(products.diagonal())) for name, products in grams.items())
    return ReplyStats(dict(zip(plan.scalars, columns, strict=False)), norms, grams, beside)

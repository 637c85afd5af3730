"""What a server asks first about a cohort's answers, in a few numbers that a GPU sends to the host all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.tensors import named_tensors
from dqnfed.maths.gramian import cross_products, gramian, resident_cross_products, resident_gramian

FloatArray = NDArray[np.float64]


class DigestPlan(NamedTuple):
    """Which fields of an answer a digest is of."""

    numbers: tuple[str, ...]  # one number a client each
    vectors: tuple[str, ...]  # longer ones in which every number must be finite, but for those with a Gramian
    gramians: tuple[str, ...]  # whose rows' products are wanted


class Digest(NamedTuple):
    """The numbers, lengths and products of K stacked answers, in float64 on the host, by field."""

    theta_norm: float  # of the model that was sent; NaN: none was
    numbers: dict[str, FloatArray]  # [K]
    norms: dict[str, FloatArray]  # [K] Euclidean
    gramians: dict[str, FloatArray]  # [K, K]
    products: dict[str, FloatArray]  # [K, R] of those fields with the rows that the method compares them with

    def chosen(self, places: NDArray[np.int64]) -> Digest:
        """Return the digest of the answers at these places."""
        return Digest(
            self.theta_norm,
            {name: values[places] for name, values in self.numbers.items()},
            {name: values[places] for name, values in self.norms.items()},
            {name: products[np.ix_(places, places)] for name, products in self.gramians.items()},
            {name: products[places] for name, products in self.products.items()},
        )

    def scaled(self, factors: FloatArray, scales: tuple[str, ...]) -> Digest:
        """Return the digest of the answers after these fields of theirs were multiplied by the factors."""

        def multiplied(by_field: dict[str, FloatArray], by: FloatArray) -> dict[str, FloatArray]:
            return {name: values * by if name in scales else values for name, values in by_field.items()}

        return Digest(
            self.theta_norm,
            multiplied(self.numbers, factors),
            multiplied(self.norms, factors),
            multiplied(self.gramians, np.outer(factors, factors)),
            multiplied(self.products, factors[:, None]),
        )

    def moved_norm(self, field: str, factor: float) -> float:
        """Return a length that the model is not beyond after a step of `factor` times a mean of the field's rows."""
        return self.theta_norm + factor * float(self.norms[field].max())


def digest_plan(updates: tuple[Any, ...], optional: tuple[str, ...], gramian_of: str) -> DigestPlan:
    """Return which fields of these stacked answers are digested; none of an integer, and none that is empty."""
    fields = {name: t for name, t in named_tensors(updates).items() if t.is_floating_point() and t.numel()}
    return DigestPlan(
        tuple(name for name, t in fields.items() if t.dim() == 1),
        tuple(name for name, t in fields.items() if t.dim() > 1 and name not in (*optional, gramian_of)),
        tuple(name for name in fields if name == gramian_of),
    )


def packed_digest(
    plan: DigestPlan, updates: tuple[Any, ...], theta: Tensor | None, rows: Tensor | None = None
) -> Tensor:
    """Return the digest as one float64 vector, where the answers are; a GPU is not waited for, so a graph may hold it.

    Norms are in the precision of their field, as `screen` takes them, and the products as `gramian` does; of these the
    diagonal holds the squared norms.
    """
    fields = named_tensors(updates)
    if theta is None:
        length = next(iter(fields.values())).new_full((), torch.nan, dtype=torch.float64)
    else:
        length = torch.linalg.vector_norm(theta, dtype=torch.float64)
    crossed: list[Tensor] = []
    if plan.gramians and rows is not None and len(rows):  # half of all that is done here, and it does not fill a GPU
        with _beside(rows):
            crossed = [resident_cross_products(fields[name].flatten(1), rows).reshape(-1) for name in plan.gramians]
    columns = [
        *(fields[name] for name in plan.numbers),
        *(torch.linalg.vector_norm(fields[name].flatten(1), dim=1) for name in plan.vectors),
    ]
    products = [resident_gramian(fields[name].flatten(1)).reshape(-1) for name in plan.gramians]
    if crossed and crossed[0].is_cuda:
        torch.cuda.current_stream(crossed[0].device).wait_stream(_second_stream(crossed[0].device))
    joined = [torch.cat(columns).double()] if columns else []  # converted together: on a GPU every call counts
    return torch.cat([length.reshape(1), *joined, *products, *crossed])


@contextmanager
def _beside(t: Tensor) -> Iterator[None]:
    """Have a GPU do what is launched here side by side with what comes next.

    Its second stream has to be waited for: a graph whose streams do not come together again cannot be captured.
    """
    if not t.is_cuda:
        yield
        return
    second = _second_stream(t.device)
    second.wait_stream(torch.cuda.current_stream(t.device))
    with torch.cuda.stream(second):
        yield


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def unpacked_digest(plan: DigestPlan, packed: FloatArray, n_answers: int, n_rows: int = 0) -> Digest:
    """Return the digest that `packed_digest` made of so many answers, compared with so many rows."""
    n_columns = len(plan.numbers) + len(plan.vectors)
    first = 1 + n_columns * n_answers
    columns = packed[1:first].reshape(n_columns, n_answers)
    last = first + len(plan.gramians) * n_answers * n_answers
    squares, crossed = packed[first:last], packed[last:]
    numbers = dict(zip(plan.numbers, columns, strict=False))
    norms = dict(zip((*plan.numbers, *plan.vectors), np.abs(columns), strict=True))
    gramians = dict(zip(plan.gramians, squares.reshape(-1, n_answers, n_answers), strict=True))
    norms.update((name, np.sqrt(products.diagonal())) for name, products in gramians.items())
    products = dict(zip(plan.gramians, crossed.reshape(-1, n_answers, n_rows), strict=True)) if n_rows else {}
    return Digest(float(packed[0]), numbers, norms, gramians, products)


def field_numbers(values: Tensor, digest: Digest | None, field: str) -> FloatArray:
    """Return a field that is one number a client, in float64 on the host: from the digest where there is one."""
    known = None if digest is None else digest.numbers.get(field)
    found: FloatArray = values.double().cpu().numpy() if known is None else known
    return found


def field_gramian(rows: Tensor, digest: Digest | None, field: str) -> FloatArray:
    """Return the Gramian of a field's rows: from the digest of the answers where there is one."""
    known = None if digest is None else digest.gramians.get(field)
    return gramian(rows).numpy() if known is None else known


def field_products(rows: Tensor, others: Tensor, digest: Digest | None, field: str) -> FloatArray:
    """Return the products of a field's rows with those it is compared with: from the digest where there is one."""
    known = None if digest is None else digest.products.get(field)
    return cross_products(rows, others).numpy() if known is None else known

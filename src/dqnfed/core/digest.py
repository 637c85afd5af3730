"""What a server asks first about a cohort's answers, in a few numbers that a GPU sends to the host all at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
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


class Products:
    """The products that a digest needs of the field with a Gramian: taken as soon as the clients have it.

    They are half of all that comes after the gradients, and do not fill a GPU. So they run beside the rest.
    """

    def __init__(self, rows: Tensor | None) -> None:
        self._rows = rows if rows is not None and len(rows) else None
        self.found: list[Tensor] = []

    def take(self, field: Tensor) -> None:
        """Begin with the products of these stacked answers [K, ...], unless that was done."""
        if self.found:
            return
        with _beside(field):
            crossed = [] if self._rows is None else [resident_cross_products(field.flatten(1), self._rows)]
            self.found = [t.reshape(-1) for t in (resident_gramian(field.flatten(1)), *crossed)]

    def arrived(self) -> list[Tensor]:
        """Return them, the Gramian first, after waiting for them on the GPU."""
        if self.found and self.found[0].is_cuda:
            torch.cuda.current_stream(self.found[0].device).wait_stream(_second_stream(self.found[0].device))
        return self.found


_listening: ContextVar[Products | None] = ContextVar("products", default=None)


@contextmanager
def early_products(rows: Tensor | None) -> Iterator[Products]:
    """Have `announced` begin with products for a digest that compares with these rows."""
    products = Products(rows)
    token = _listening.set(products)
    try:
        yield products
    finally:
        _listening.reset(token)


def announced(field: Tensor) -> Tensor:
    """Return a client's field with a Gramian as it is; where all clients are computed together, its products begin."""
    if _listening.get() is None:
        return field
    found: Tensor = _Announced.apply(field)  # type: ignore[no-untyped-call]
    return found


class _Announced(torch.autograd.Function):
    """Does nothing, but under vmap it sees all clients; nothing is differentiated through it."""

    @staticmethod
    def forward(field: Tensor) -> Tensor:
        return field

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None: ...

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], field: Tensor) -> tuple[Tensor, int | None]:
        products, dim = _listening.get(), in_dims[0]
        if products is not None and dim is not None:
            products.take(field.movedim(dim, 0))
        return field, dim


def packed_digest(
    plan: DigestPlan,
    updates: tuple[Any, ...],
    theta: Tensor | None,
    rows: Tensor | None = None,
    products: Products | None = None,
) -> Tensor:
    """Return the digest as one float64 vector, where the answers are; a GPU is not waited for, so a graph may hold it.

    Norms are in the precision of their field, as `screen` takes them, and the products as `gramian` does; of these the
    diagonal holds the squared norms. `products` may have been begun with before.
    """
    fields = named_tensors(updates)
    products = products or Products(rows)
    for name in plan.gramians:
        products.take(fields[name])
    if theta is None:
        length = next(iter(fields.values())).new_full((), torch.nan, dtype=torch.float64)
    else:
        length = torch.linalg.vector_norm(theta, dtype=torch.float64)
    columns = [
        *(fields[name] for name in plan.numbers),
        *(torch.linalg.vector_norm(fields[name].flatten(1), dim=1) for name in plan.vectors),
    ]
    joined = [torch.cat(columns).double()] if columns else []  # converted together: on a GPU every call counts
    return torch.cat([length.reshape(1), *joined, *products.arrived()])


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

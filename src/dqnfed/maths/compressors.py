"""Compressors of symmetric matrices: what FedNL's clients send instead of a Hessian.

A compressor takes the upper triangle v [T] of a d x d matrix and returns a `Code`, the numbers that travel; `expanded`
turns a code back into an upper triangle, `mean_expanded` a whole stack of codes into the mean of their matrices.
Contractive compressors (top, rank) obey ||C(M) - M||^2 <= (1 - delta) ||M||^2 in the Frobenius norm; unbiased ones
(random) have E C(M) = M and E ||C(M)||^2 <= (w + 1) ||M||^2 over the upper triangle.
"""

from math import ceil, log2
from typing import NamedTuple

import torch
from torch import Tensor

from dqnfed.maths.symmetric import eigenpairs, n_packed, packed, unpacked

KINDS = ("rank", "top", "random", "identity")


class Code(NamedTuple):
    """A compressed symmetric matrix."""

    values: Tensor  # [k] entries (top, random), [R (d + 1)] eigenvalues then eigenvectors (rank), [T] (identity)
    places: Tensor  # [k] int32 positions in the upper triangle (top, random), else [0]


class Compressor(NamedTuple):
    """Which compressor, and how much it keeps."""

    kind: str  # rank | top | random | identity
    size: int  # R eigenpairs, or k entries; ignored by identity
    d: int  # the matrices are d x d

    @property
    def is_unbiased(self) -> bool:
        return self.kind in ("random", "identity")

    @property
    def delta(self) -> float:
        """The contraction constant: R / d, k / d^2 (a safe one, as off-diagonal entries count twice), or 1."""
        if self.kind == "rank":
            return self.size / self.d
        return self.size / self.d**2 if self.kind == "top" and self.size < n_packed(self.d) else 1.0

    @property
    def variance(self) -> float:
        """The w of an unbiased compressor: T / k - 1; 0 for the others."""
        return n_packed(self.d) / self.size - 1.0 if self.kind == "random" else 0.0

    @property
    def default_alpha(self) -> float:
        """The Hessian learning rate: 1 / (w + 1) for unbiased compressors, 1 for contractive ones."""
        return 1.0 / (self.variance + 1.0)

    def bits(self, float_bits: int) -> int:
        """Return the size of a code, each place taking ceil(log2 T) bits."""
        per_place = max(1, ceil(log2(n_packed(self.d))))
        if self.kind == "rank":
            return self.size * (self.d + 1) * float_bits
        if self.kind == "identity":
            return n_packed(self.d) * float_bits
        return self.size * (float_bits + per_place)


def compressor(kind: str, size: int, d: int) -> Compressor:
    """Return the compressor, refusing sizes that do not fit: ranks up to d, entries up to T."""
    most = {"rank": d, "top": n_packed(d), "random": n_packed(d), "identity": size}
    if kind not in most:
        raise ValueError(f"a compressor is one of {', '.join(KINDS)}, not '{kind}'.")
    if not 1 <= size <= most[kind]:
        raise ValueError(
            f"the '{kind}' compressor of {d} x {d} matrices keeps 1 to {most[kind]} "
            f"{'eigenpairs' if kind == 'rank' else 'entries'}, but was asked for {size}."
        )
    return Compressor(kind, size, d)


def compressed(how: Compressor, v: Tensor, noise: Tensor) -> Code:
    """Return the code of the matrix with upper triangle v; `noise` [T] is uniform and used by `random` alone."""
    if how.kind == "rank":
        return Code(*_top_eigenpairs(unpacked(v, how.d), how.size))
    if how.kind == "identity":
        return Code(v, v.new_zeros(0, dtype=torch.int32))
    chosen = torch.topk(v.abs() if how.kind == "top" else noise, how.size).indices
    scale = 1.0 if how.kind == "top" else n_packed(how.d) / how.size
    return Code(scale * v[chosen], chosen.to(torch.int32))


def expanded(how: Compressor, code: Code) -> Tensor:
    """Return the upper triangle [T] that the code stands for."""
    if how.kind == "identity":
        return code.values
    if how.kind == "rank":
        values, vectors = _eigenpairs(how, code.values)
        return packed(vectors.T @ (values[:, None] * vectors))
    zeros = code.values.new_zeros(n_packed(how.d))
    return zeros.scatter(0, code.places.long(), code.values)


def moved_by(how: Compressor, v: Tensor, code: Code, alpha: float) -> Tensor:
    """Return v + alpha times what the code stands for, in as few passes over v as there can be."""
    if how.kind in ("top", "random"):
        return v.scatter_add(0, code.places.long(), alpha * code.values)
    return torch.add(v, expanded(how, code), alpha=alpha)


def mean_expanded(how: Compressor, codes: Code, n: int) -> Tensor:
    """Return the sum of the stacked codes' matrices over n, as an upper triangle, without a matrix per client."""
    if how.kind == "identity":
        return codes.values.sum(0) / n
    if how.kind == "rank":
        values, vectors = _eigenpairs(how, codes.values)
        rows = vectors.reshape(-1, how.d)
        return packed(rows.T @ (values.reshape(-1, 1) * rows)) / n
    zeros = codes.values.new_zeros(n_packed(how.d))
    return zeros.scatter_add(0, codes.places.reshape(-1).long(), codes.values.reshape(-1)) / n


def _top_eigenpairs(M: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    values, vectors = eigenpairs(M)  # M is symmetric: never the general solver, whose answers may be complex
    chosen = torch.topk(values.abs(), rank).indices
    return torch.cat([values[chosen], vectors.T[chosen].reshape(-1)]), values.new_zeros(0, dtype=torch.int32)


def _eigenpairs(how: Compressor, values: Tensor) -> tuple[Tensor, Tensor]:
    leading = values.shape[:-1]
    return values[..., : how.size], values[..., how.size :].reshape(*leading, how.size, how.d)

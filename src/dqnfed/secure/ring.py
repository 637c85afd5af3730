"""Numbers as words of the ring of whole numbers modulo 2^64: encoding with a stated bound, products, weighted sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Whole = NDArray[np.int64]
FloatArray = NDArray[np.float64]
MODULUS = 2**64
FRACTION_BITS = 30  # of the entries of a unit vector: products of two need 60 bits, below the 63 that a word has
SUM_BITS = 62  # that a weighted sum of unit vectors may need, sign excluded


class RingOverflow(ValueError):
    """A number does not fit into the ring."""


def encoded(values: FloatArray, *, bits: int = FRACTION_BITS, bound: float = 1.0) -> Words:
    """Return the values as words of `bits` binary places; refuses a value above `bound` or not finite."""
    largest = largest_size(values)
    if not largest <= bound * (1.0 + 1e-9):  # a unit vector's entry may be rounded up; NaN is refused too
        raise RingOverflow(
            f"values in the ring must be finite and at most {bound:g} in size, but the largest is {largest:g}; "
            "scale the vector, or state a larger bound with fewer bits."
        )
    if bound * 2.0**bits >= 2.0**62:
        raise RingOverflow(
            f"a bound of {bound:g} with {bits} binary places needs more than 62 bits, but a word has 64 and one is for "
            "the sign; use fewer bits."
        )
    scaled = values * 2.0**bits
    return np.rint(scaled, out=scaled).astype(np.int64).view(np.uint64)


def largest_size(values: FloatArray) -> float:
    """Return the largest absolute value, 0 for none; NaN where one is NaN."""
    return float(np.maximum(values.max(initial=0.0), -values.min(initial=0.0)))


def decoded(words: Words, *, bits: int = FRACTION_BITS) -> FloatArray:
    """Return the values of words with `bits` binary places; words of 2^63 and above are negative."""
    values: FloatArray = words.view(np.int64).astype(np.float64) / 2.0**bits
    return values


def product(one: Words, other: Words) -> int:
    """Return the inner product in the ring."""
    return int(np.dot(one, other))


def signed(word: int) -> int:
    """Return the whole number between -2^63 and 2^63 that a word stands for."""
    return word - MODULUS if word >= MODULUS // 2 else word


def whole_weights(weights: FloatArray, *, bits: int = FRACTION_BITS) -> tuple[Whole, float]:
    """Return the weights of unit vectors as whole numbers times one scale, as exact as their sum fits into the ring."""
    largest = float(np.abs(weights).max(initial=0.0))
    if not math.isfinite(largest):
        raise RingOverflow(f"weights must be finite, but they are {weights.tolist()}.")
    if largest == 0.0:
        return np.zeros(len(weights), dtype=np.int64), 0.0
    spread = float(np.abs(weights).sum()) / largest  # between 1 and K
    places = SUM_BITS - bits - math.ceil(math.log2(spread) + 1e-9) - 1
    if places < 8:
        raise RingOverflow(
            f"{len(weights)} weights leave {places} bits for each, but at least 8 are needed; ask fewer clients."
        )
    return np.rint(weights / largest * 2.0**places).astype(np.int64), largest / 2.0**places


def check_sum(weights: Whole, *, bits: int = FRACTION_BITS) -> None:
    """Refuse whole weights with which a sum of unit vectors may leave the ring."""
    total = sum(abs(int(w)) for w in weights)
    if total << bits >= 2**63:
        raise RingOverflow(
            f"weights that sum to {total} with {bits} binary places may exceed 2^63; use smaller whole weights."
        )


def weighted_sum(weights: Whole, rows: Sequence[Words]) -> Words:
    """Return the sum of the rows times whole weights, in the ring."""
    total = np.zeros_like(rows[0])
    for weight, row in zip(weights.view(np.uint64), rows, strict=True):
        if weight:
            total += weight * row
    return total

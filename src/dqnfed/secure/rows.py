"""A padded row with its correction terms, and what the server makes of K of them: products and one weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dqnfed.secure.pads import AT_ONCE, Message, PadKey
from dqnfed.secure.ring import (
    FRACTION_BITS,
    MODULUS,
    FloatArray,
    RingOverflow,
    Whole,
    Words,
    check_sum,
    encoded,
    product,
    signed,
    weighted_sum,
)

Pads = Callable[[int, int], Words]  # the pad of a client, so many words


class PaddedRow(NamedTuple):
    """What a client sends in place of a row: nothing of it but its norm can be told from random words."""

    words: Words  # [n]  the unit row plus the client's pad
    corrections: Words  # [K], by the clients asked, 0 for itself; [0] where no products are asked for
    norm: float


def unit_row(row: FloatArray) -> tuple[FloatArray, float]:
    """Return a row over its Euclidean norm, and the norm; squares neither overflow nor vanish."""
    largest = float(np.abs(row).max(initial=0.0))
    if not np.isfinite(largest):
        raise RingOverflow("a row that is not finite cannot be padded; the client's update has NaN or infinity.")
    if largest == 0.0:
        return row, 0.0
    scaled = row / largest
    length = float(np.sqrt(scaled @ scaled))
    return scaled / length, largest * length


def padded_row(
    key: PadKey,
    message: Message,
    name: str,
    row: FloatArray,
    client: int,
    *,
    with_products: bool,
    pads: Pads | None = None,
    norm: float | None = None,
) -> PaddedRow:
    """Return a client's row in the form that the server may see.

    With x_k the unit row, r_k the pads and z_kj the masks, the words are x_k + r_k and the correction for client j is
    x_k.r_j + z_kj, for k < j also + r_k.r_j, for k > j with - z_kj. `pads` replaces the key's own where they are known,
    `norm` the row's where another one is stated.
    """
    unit, norm = unit_row(row) if norm is None else (row / norm, norm)
    x = encoded(unit)
    words = x + (pads(client, len(row)) if pads else key.pad(message, name, client, len(row)))
    corrections = np.zeros(len(message.asked) if with_products else 0, dtype=np.uint64)
    for place, other in enumerate(message.asked if with_products else ()):
        if other == client:
            continue
        mine = words if client < other else x
        mask = key.mask(message, name, client, other)
        found = product(mine, pads(other, len(row))) if pads else product_with_pad(key, message, name, mine, other)
        corrections[place] = (found + mask if client < other else found - mask) % MODULUS
    return PaddedRow(words, corrections, norm)


def product_with_pad(key: PadKey, message: Message, name: str, mine: Words, other: int) -> int:
    """Return the product of words with another client's pad, which is made and used piece by piece."""
    total, products = 0, np.empty(AT_ONCE, dtype=np.uint64)
    for first, words in key.pieces(message, name, other, len(mine)):
        np.multiply(mine[first : first + len(words)], words, out=products[: len(words)])
        total += int(products[: len(words)].sum())
    return total % MODULUS


def cosines(rows: Sequence[PaddedRow], places: Sequence[int]) -> FloatArray:
    """Return the products of the unit rows of the clients at these places of those asked, [K, K]."""
    found = np.eye(len(rows))
    for k, (one, place) in enumerate(zip(rows, places, strict=True)):
        found[k, k] = 1.0 if one.norm > 0.0 else 0.0
        for j in range(k):
            other = rows[j]
            word = product(one.words, other.words) - int(one.corrections[places[j]]) - int(other.corrections[place])
            found[k, j] = found[j, k] = signed(word % MODULUS) / 2.0 ** (2 * FRACTION_BITS)
    return found


def unpadding(
    key: PadKey, message: Message, name: str, weights: Whole, clients: Sequence[int], n: int, pads: Pads | None = None
) -> Words:
    """Return the weighted sum of the clients' pads, which a client gives to the server once a message."""
    check_sum(weights)
    total = np.zeros(n, dtype=np.uint64)
    for weight, client in zip(weights.view(np.uint64), clients, strict=True):
        if not weight:
            continue
        if pads is not None:
            total += weight * pads(client, n)
            continue
        for first, words in key.pieces(message, name, client, n):
            total[first : first + len(words)] += weight * words
    return total


def unpadded_sum(rows: Sequence[PaddedRow], weights: Whole, pads: Words) -> FloatArray:
    """Return the sum of the unit rows times whole weights, from the same sum of the pads."""
    check_sum(weights)
    total = weighted_sum(weights, [row.words for row in rows]) - pads
    found: FloatArray = total.view(np.int64).astype(np.float64) / 2.0**FRACTION_BITS
    return found

"""A padded row with its correction terms, and what the server makes of K of them: products and one weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.ring import (
    FRACTION_BITS,
    MODULUS,
    FloatArray,
    RingOverflow,
    Whole,
    Words,
    check_sum,
    encoded,
    largest_size,
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
    largest = largest_size(row)
    if not np.isfinite(largest):
        raise RingOverflow("a row that is not finite cannot be padded; the client's update has NaN or infinity.")
    if largest == 0.0:
        return row, 0.0
    scaled = row / largest
    length = float(np.sqrt(scaled @ scaled))
    scaled /= length
    return scaled, largest * length


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
    place_of = {asked: place for place, asked in enumerate(message.asked)}
    corrections = np.zeros(len(message.asked) if with_products else 0, dtype=np.uint64)
    for mine, is_later in ((words, True), (x, False)) if with_products else ():
        others = [other for other in message.asked if other != client and (client < other) == is_later]
        products = (
            [product(mine, pads(other, len(row))) for other in others]
            if pads
            else products_with_pads(key, message, name, mine, others)
        )
        for other, found in zip(others, products, strict=True):
            mask = key.mask(message, name, client, other)
            corrections[place_of[other]] = (found + mask if is_later else found - mask) % MODULUS
    return PaddedRow(words, corrections, norm)


def products_with_pads(key: PadKey, message: Message, name: str, mine: Words, others: Sequence[int]) -> list[int]:
    """Return the products of words with the pads of other clients, which are made and used block by block."""
    totals = np.zeros(len(others), dtype=np.uint64)
    for group, block, pads in key.blocks(message, name, others, len(mine)):
        totals[group] += np.einsum("kn,n->k", pads, mine[block])
    return [int(total) for total in totals]


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
    used = weights.nonzero()[0]
    whole, whose = weights[used].view(np.uint64), [clients[place] for place in used.tolist()]
    if pads is not None:
        return weighted_sum(weights[used], [pads(client, n) for client in whose]) if whose else total
    for group, block, words in key.blocks(message, name, whose, n):
        for weight, pad in zip(whole[group], words, strict=True):
            pad *= weight
            total[block] += pad
    return total


def unpadded_sum(rows: Sequence[PaddedRow], weights: Whole, pads: Words) -> FloatArray:
    """Return the sum of the unit rows times whole weights, from the same sum of the pads."""
    check_sum(weights)
    total = weighted_sum(weights, [row.words for row in rows]) - pads
    found: FloatArray = total.view(np.int64).astype(np.float64) / 2.0**FRACTION_BITS
    return found

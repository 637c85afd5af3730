"""Whole numbers modulo 2^256, four words each, for sums and products that 64 bits do not hold exactly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.ring import Words

LIMBS = 4  # words that a number takes
BYTES = 8 * LIMBS
MODULUS = 1 << (8 * BYTES)


def words_of(wholes: Sequence[int]) -> Words:
    """Return whole numbers as words, [n, LIMBS]."""
    each = b"".join((whole % MODULUS).to_bytes(BYTES, "little") for whole in wholes)
    return np.frombuffer(each, dtype="<u8").astype(np.uint64).reshape(len(wholes), LIMBS)


def wholes_of(words: Words) -> list[int]:
    """Return the whole numbers that words stand for."""
    each = words.astype("<u8").tobytes()
    return [int.from_bytes(each[first : first + BYTES], "little") for first in range(0, len(each), BYTES)]


def signed_whole(whole: int) -> int:
    """Return the number between -2^255 and 2^255 that a whole number stands for."""
    whole %= MODULUS
    return whole - MODULUS if whole >= MODULUS // 2 else whole


def whole_pads(key: PadKey, message: Message, name: str, client: int, n: int) -> list[int]:
    """Return the pads of a client's n numbers."""
    return wholes_of(key.pad(message, name, client, LIMBS * n).reshape(n, LIMBS))

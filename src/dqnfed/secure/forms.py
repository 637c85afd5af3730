"""Products of rows in a metric under pads: the server gets p_k' C p_j of every two clients, and nobody's p_k.

p_k are the products of client k's row with R vectors that everybody may know, C is a symmetric matrix. A method with an
L-BFGS metric needs these K x K numbers, with past steps and changes of the mean gradient for vectors. The p_k
themselves would tell most of a row, since gradients lie near the span of such vectors.

Whole numbers modulo 2^256 with 80 binary places make the products as exact as those of float64, where terms cancel too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.ring import FloatArray, RingOverflow, Words
from dqnfed.secure.wholes import BYTES, signed_whole, whole_pads, wholes_of, words_of

PLACES = 80  # binary places of a product over the length of row and vector, and of C over its largest entry
FOR = "products in a form"  # what the pads are for
BLOCK = 16384  # numbers of a vector that are float64 at a time, which stay in a processor's cache
MOST_VECTORS = 128  # R^2 terms of 240 bits stay below 2^255


class Form(NamedTuple):
    """The question: C for products with these vectors, each over a power of two that is no shorter than it."""

    vectors: Tensor  # [R, n]
    exponents: tuple[int, ...]  # of the powers of two, [R]
    middle: FloatArray  # [R, R] symmetric, for products over the powers


class PaddedProducts(NamedTuple):
    """A client's reply: of its products with the vectors nothing can be told but `square`."""

    words: Words  # [R, LIMBS]
    corrections: Words  # [K, LIMBS] by the clients asked, 0 for itself
    square: float  # p' C p of the client itself


def form_of(vectors: Tensor, middle: FloatArray) -> Form:
    """Return the question for rows' products in a symmetric form of their products with the vectors."""
    if len(vectors) > MOST_VECTORS:
        raise RingOverflow(
            f"the ring has room for products with {MOST_VECTORS} vectors, but there are {len(vectors)}; set a smaller "
            "`metric_memory`."
        )
    lengths = torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64).tolist()
    exponents = tuple(math.frexp(length)[1] + 1 for length in lengths)
    powers = np.array([math.ldexp(1.0, e) for e in exponents])
    return Form(vectors, exponents, (middle + middle.T) / 2.0 * np.outer(powers, powers))


def products_with(row: FloatArray, form: Form) -> FloatArray:
    """Return a row's products with the vectors over their powers of two, [R]."""
    found, numbers = torch.zeros(len(form.vectors), dtype=torch.float64), torch.from_numpy(row)
    for vectors, part in zip(form.vectors.cpu().split(BLOCK, dim=1), numbers.split(BLOCK), strict=True):
        found += vectors.double() @ part
    products: FloatArray = np.ldexp(found.numpy(), [-e for e in form.exponents])
    return products


def padded_products(
    key: PadKey,
    message: Message,
    field: str,
    row: FloatArray,
    norm: float,
    client: int,
    form: Form,
    *,
    pads: Callable[[int], list[int]] | None = None,
) -> PaddedProducts:
    """Return a client's part of the products in the form; `norm` is the row's, which the server knows.

    With x_k the products over the norm, r_k the pads and z_kj the masks, the words are x_k + r_k and the correction for
    client j is x_k' C r_j + z_kj, for k < j also + r_k' C r_j, for k > j with - z_kj. `pads` replaces the key's own
    where they are known.
    """
    p, name = products_with(row, form), f"{field}|{FOR}"
    pads = pads or form_pads(key, message, field, len(p))
    x = _wholes(p / norm if norm > 0.0 else p)
    C = _middle(form)
    a = [value + pad for value, pad in zip(x, pads(client), strict=True)]
    earlier, later = _times(C, x), _times(C, a)
    corrections = []
    for other in message.asked:
        if other == client:
            corrections.append(0)
            continue
        found = _dot(later if client < other else earlier, pads(other))
        mask = key.mask(message, name, client, other, n_bytes=BYTES)
        corrections.append(found + mask if client < other else found - mask)
    return PaddedProducts(words_of(a), words_of(corrections), float(p @ form.middle @ p))


def form_pads(key: PadKey, message: Message, field: str, n: int) -> Callable[[int], list[int]]:
    """Return the pads of n products by client."""
    return lambda client: whole_pads(key, message, f"{field}|{FOR}", client, n)


def form_products(
    replies: Sequence[PaddedProducts], norms: FloatArray, places: Sequence[int], form: Form
) -> FloatArray:
    """Return p_k' C p_j of the clients at these places of those asked, [K, K]."""
    C = _middle(form)
    words = [wholes_of(reply.words) for reply in replies]
    corrections = [wholes_of(reply.corrections) for reply in replies]
    weighted = [_times(C, a) for a in words]
    unit = math.ldexp(1.0, _exponent(form.middle))
    found = np.diag([reply.square for reply in replies])
    for k, a in enumerate(words):
        for j in range(k):
            whole = _dot(a, weighted[j]) - corrections[k][places[j]] - corrections[j][places[k]]
            value = math.ldexp(float(signed_whole(whole)), -3 * PLACES) * unit
            found[k, j] = found[j, k] = value * norms[k] * norms[j]
    return found


def _middle(form: Form) -> list[list[int]]:
    """Return C as whole numbers, the same for everybody who has its bytes."""
    shift = PLACES - _exponent(form.middle)
    return [[round(math.ldexp(value, shift)) for value in line] for line in form.middle.tolist()]


def _exponent(middle: FloatArray) -> int:
    """Return that of a power of two above C's largest entry."""
    return math.frexp(float(np.abs(middle).max(initial=0.0)))[1]


def _wholes(x: FloatArray) -> list[int]:
    if not bool((np.abs(x) <= 1.0).all()):
        raise RingOverflow("products with the vectors are above their lengths, or not finite; they cannot be padded.")
    return [round(math.ldexp(value, PLACES)) for value in x.tolist()]


def _times(C: Sequence[Sequence[int]], x: Sequence[int]) -> list[int]:
    return [_dot(line, x) for line in C]


def _dot(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(a * b for a, b in zip(one, other, strict=True))

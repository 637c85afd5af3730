"""Numbers that clients measured, under pads: the server gets the sum of each, or of it and its square; nobody's own.

A number and its square are whole numbers modulo 2^256, so that their sums are exact and mean and standard deviation
follow without cancellation. The sum is over all who replied, each with the weight 1.

Exact sums of fractions whose denominators are known and differ would give every numerator away, as with a knapsack:
scores in percent, shares of so many test examples, are therefore rounded before they are summed. Of three or four
clients the sums of such numbers and of their squares leave hardly a choice; squares are summed of five or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.release import FEWEST, Revealing
from dqnfed.secure.ring import RingOverflow, Words
from dqnfed.secure.wholes import signed_whole, whole_pads, wholes_of, words_of

FEWEST_SQUARED = 5  # clients whose numbers and squares are summed
SCORE_PLACES = 7  # binary places of a score in percent
PLACES = 48  # binary places of a number; its square has twice as many
LARGEST = 2.0**60  # of a number: the squares of 2^30 clients sum up to less than 2^247
FIELD = "numbers"  # what the pads are for


class Number(NamedTuple):
    """A number that a client measured."""

    value: float
    squared: bool = False  # its square is summed too


class Moments(NamedTuple):
    """What follows from the sums of n clients."""

    n: int
    mean: float
    std: float  # divided by n; NaN where squares were not summed


def n_wholes(squared: Sequence[bool]) -> int:
    """Return how many whole numbers stand for numbers, some of which are squared."""
    return len(squared) + sum(squared)


def fewest(squared: Sequence[bool]) -> int:
    """Return of how many clients numbers are summed at least."""
    return FEWEST_SQUARED if any(squared) else FEWEST


def rounded_score(score: float) -> float:
    """Return a score in percent as it is summed."""
    return round(score * 2.0**SCORE_PLACES) / 2.0**SCORE_PLACES if math.isfinite(score) else score


def padded_numbers(key: PadKey, message: Message, client: int, numbers: Sequence[Number]) -> Words:
    """Return a client's numbers as the server may see them, [n_wholes, LIMBS]: whole numbers plus pads."""
    _check_clients(message.asked, client, message.asked, fewest([squared for _, squared in numbers]))
    wholes: list[int] = []
    for value, squared in numbers:
        if not math.isfinite(value) or abs(value) > LARGEST:
            raise RingOverflow(
                f"a loss or score of {value:g} cannot be summed under pads: it must be finite and at most {LARGEST:g}."
            )
        whole = round(value * 2.0**PLACES)
        wholes += [whole, whole * whole] if squared else [whole]
    pads = whole_pads(key, message, FIELD, client, len(wholes))
    return words_of([whole + pad for whole, pad in zip(wholes, pads, strict=True)])


def unpadding_numbers(
    key: PadKey, message: Message, client: int, clients: Sequence[int], squared: Sequence[bool]
) -> Words:
    """Return the sum of the pads of those who replied, which one of them gives to the server."""
    _check_clients(clients, client, message.asked, fewest(squared))
    each = [whole_pads(key, message, FIELD, other, n_wholes(squared)) for other in clients]
    return words_of([sum(pads) for pads in zip(*each, strict=True)])


def _check_clients(clients: Sequence[int], client: int, asked: Sequence[int], least: int) -> None:
    if len(set(clients)) != len(clients) or not set(clients) <= set(asked) or client not in clients:
        raise Revealing(f"client {client} gives sums over clients that were asked, itself among them, not {clients}.")
    if len(clients) < least:
        raise Revealing(f"client {client} gives such sums over {least} clients or more, not over {clients}.")


def moments(padded: Sequence[Words], pads: Words, squared: Sequence[bool], counts: Sequence[int]) -> list[Moments]:
    """Return mean and standard deviation of every number; `counts` says how many clients have it, others sent 0."""
    totals = [sum(column) for column in zip(*map(wholes_of, padded), strict=True)]
    sums = iter([signed_whole(total - pad) for total, pad in zip(totals, wholes_of(pads), strict=True)])
    found = []
    for is_squared, n in zip(squared, counts, strict=True):
        total = next(sums)
        squares = next(sums) if is_squared else None
        found.append(Moments(n, float(Fraction(total, n << PLACES)), _deviation(total, squares, n)))
    return found


def _deviation(total: int, squares: int | None, n: int) -> float:
    if squares is None:
        return math.nan
    if (spread := n * squares - total * total) < 0:
        raise ValueError("the sums of numbers and of their squares contradict each other: a client's are wrong.")
    return math.sqrt(Fraction(spread, (n << PLACES) ** 2))

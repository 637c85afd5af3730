"""Which weighted sums may be released: none that is, alone or together with the others, nearly one client's row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import comb

import numpy as np

from dqnfed.secure.ring import FloatArray

FEWEST = 3  # clients: of two, each learns the other's row from the sum
LEAST_EFFECTIVE = 1.2  # of one sum: about a tenth of its length is from other clients than the largest one
LEAST_TOGETHER = 1.01  # of what can be computed from several sums of one message
MOST_CHECKED = 20_000  # combinations of sums


class Revealing(ValueError):
    """A sum that would give a client's row away."""


class LostClients(Revealing):
    """A sum that cannot be made any more, since clients were lost while the step was computed."""


def effective_number(weights: FloatArray) -> float:
    """Return (sum |w|)^2 / sum w^2: how many rows have a part in a sum of unit rows; 0 for no weights."""
    squares = float(weights @ weights)
    return float(np.abs(weights).sum()) ** 2 / squares if squares > 0.0 else 0.0


def least_effective_number(sums: FloatArray) -> float:
    """Return the least effective number among the combinations of several sums, [q, K] their weights on unit rows.

    It is that of a combination in which q - 1 clients' weights vanish: in between, sum |w| is linear and the root of
    sum w^2 convex. Where these are too many, pairs of sums are looked at.
    """
    q, K = sums.shape
    if q == 1:
        return effective_number(sums[0])
    if comb(K, q - 1) > MOST_CHECKED:
        return min(least_effective_number(sums[list(pair)]) for pair in combinations(range(q), 2))
    found = float(K)
    for places in combinations(range(K), q - 1):
        _, sizes, kept = np.linalg.svd(sums[:, places].T)
        rank = int((sizes > 1e-12 * max(1.0, float(sizes.max(initial=0.0)))).sum())
        for mixture in kept[rank:] @ sums:  # whose weights at the places vanish
            if np.abs(mixture).max() > 1e-9 * np.abs(sums).max():
                found = min(found, effective_number(mixture))
    return found


def check_release(weights: FloatArray, before: Sequence[FloatArray]) -> None:
    """Refuse a sum of unit rows with these weights [K] after those that were released of the same message."""
    number = effective_number(weights)
    if number < LEAST_EFFECTIVE:
        place = int(np.abs(weights).argmax())
        raise Revealing(
            f"the sum is nearly the row of one client, the reply at place {place}: the effective number of clients is "
            f"{number:.3f}, below {LEAST_EFFECTIVE:g}. Ask more clients a round, or take a method that spreads its "
            "weights."
        )
    if not before:
        return
    sums = _independent(np.stack([*before, weights]))
    n_clients = int((np.abs(sums).max(axis=0) > 0.0).sum())
    if len(sums) > n_clients - 2:
        raise Revealing(
            f"{len(sums)} different sums of {n_clients} clients' rows leave too little unknown; at most "
            f"{max(1, n_clients - 2)} may be released of one message. Ask more clients a round, or a method or setting "
            "that needs fewer sums (dqn-fed: metric = 'identity')."
        )
    together = least_effective_number(sums)
    if together < LEAST_TOGETHER:
        raise Revealing(
            f"{len(sums)} sums of one message together give one client's row: an effective number of {together:.4f}, "
            f"below {LEAST_TOGETHER:g}. The round cannot be used."
        )


def _independent(sums: FloatArray) -> FloatArray:
    """Return the sums, each of length 1, without those that follow from the others."""
    kept: list[FloatArray] = []
    for weights in sums / np.linalg.norm(sums, axis=1, keepdims=True):
        if np.linalg.matrix_rank(np.stack([*kept, weights]), tol=1e-7) > len(kept):
            kept.append(weights)
    return np.stack(kept)

"""Which weighted sums may be released: none that is, alone or together with the others, nearly one client's row."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dqnfed.secure.ring import FloatArray

FEWEST = 3  # clients: of two, each learns the other's row from the sum
LEAST_EFFECTIVE = 1.2  # of one sum
LEAST_OTHERS = 0.05  # length of the other clients' part in a sum of unit rows, over the part of any one client
LEAST_OTHERS_TOGETHER = 0.01  # the same in what can be computed from several sums of one message
MOST_PRODUCTS = 4  # of one row with vectors of the server's choice: as many numbers of it leave its client


class Revealing(ValueError):
    """A sum that would give a client's row away."""


class LostClients(Revealing):
    """A sum that cannot be made any more, since clients were lost while the step was computed."""


def effective_number(weights: FloatArray) -> float:
    """Return (sum |w|)^2 / sum w^2: how many rows have a part in a sum of unit rows; 0 for no weights."""
    squares = float(weights @ weights)
    return float(np.abs(weights).sum()) ** 2 / squares if squares > 0.0 else 0.0


def least_part_of_others(sums: FloatArray) -> tuple[float, int]:
    """Return how short the other clients' part can be over that of one client, and whose, in a mixture of the sums.

    [q, K] are their weights on unit rows. Among the mixtures in which client k has the weight 1 the least square of the
    others' weights is 1 / h_k - 1, with h_k the leverage of k: the squared length of its axis within the sums' span.
    """
    _, sizes, axes = np.linalg.svd(sums / np.linalg.norm(sums, axis=1, keepdims=True), full_matrices=False)
    leverages = np.square(axes[sizes > 1e-7]).sum(0)
    place = int(leverages.argmax())
    return math.sqrt(max(0.0, 1.0 / float(leverages[place]) - 1.0)), place


def check_release(weights: FloatArray, before: Sequence[FloatArray]) -> None:
    """Refuse a sum of unit rows with these weights [K] after those that were released of the same message."""
    number, (others, place) = effective_number(weights), least_part_of_others(weights[None])
    if number < LEAST_EFFECTIVE or others < LEAST_OTHERS:
        raise Revealing(
            f"the sum is nearly the row of one client, the reply at place {place}: the effective number of clients is "
            f"{number:.3f} (at least {LEAST_EFFECTIVE:g}), and the others' part is {others:.3f} of that client's (at "
            f"least {LEAST_OTHERS:g}). Ask more clients a round, or take a method that spreads its weights."
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
    others, place = least_part_of_others(sums)
    if others < LEAST_OTHERS_TOGETHER:
        raise Revealing(
            f"{len(sums)} sums of one message together give one client's row, the reply at place {place}: the others' "
            f"part is {others:.4f} of it, below {LEAST_OTHERS_TOGETHER:g}. The round cannot be used."
        )


def _independent(sums: FloatArray) -> FloatArray:
    """Return the sums, each of length 1, without those that follow from the others."""
    kept: list[FloatArray] = []
    for weights in sums / np.linalg.norm(sums, axis=1, keepdims=True):
        if np.linalg.matrix_rank(np.stack([*kept, weights]), tol=1e-7) > len(kept):
            kept.append(weights)
    return np.stack(kept)

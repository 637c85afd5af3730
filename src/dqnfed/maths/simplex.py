"""Quadratic problems over the probability simplex with a linear term, or with one more condition."""

from __future__ import annotations

import numpy as np

from dqnfed.maths.solvers import FloatArray, min_norm_weights

HALVINGS = 100  # of a multiplier's interval


def quadratic_on_simplex(slope: FloatArray, Q: FloatArray) -> FloatArray:
    """Return argmin slope'p + p'Qp/2 over the simplex, Q positive definite.

    Where the entries of p sum to 1, slope'p is p'(slope 1' + 1 slope')p/2 and p'(11')p is constant: the minimiser is
    the shortest point of a hull, once 11' is added often enough for its Gramian to be positive definite.
    """
    slope = slope - slope.mean()  # a constant in it changes nothing
    cross = np.outer(slope, np.ones(len(slope)))
    enough = 2.0 * float(slope @ slope) / float(np.linalg.eigvalsh(Q)[0])
    return np.asarray(min_norm_weights(Q + cross + cross.T + enough), dtype=np.float64)


def min_norm_in_half_space(M: FloatArray, a: FloatArray) -> FloatArray | None:
    """Return argmin z'Mz over the simplex subject to a'z >= 0, M positive semidefinite; None: no z fulfils it.

    The multiplier of the condition is found by bisection: a'z grows with it.
    """
    free = min_norm_weights(M)
    if a @ free >= 0.0:
        return free
    if a.max() < 0.0:
        return None
    size = max(float(np.trace(M)) / len(M), 1e-300)
    Q = 2.0 * (M / size + 1e-10 * np.eye(len(M)))
    slope = a / float(np.abs(a).max())
    low, high = 0.0, 1.0
    while slope @ quadratic_on_simplex(-high * slope, Q) < 0.0 and high < 1e12:
        low, high = high, 4.0 * high
    for _ in range(HALVINGS):
        middle = 0.5 * (low + high)
        if high - low <= 1e-13 * high:
            break
        low, high = (middle, high) if slope @ quadratic_on_simplex(-middle * slope, Q) < 0.0 else (low, middle)
    return quadratic_on_simplex(-high * slope, Q)

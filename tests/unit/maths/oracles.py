"""Slow, independent solutions of the quadratic programs in `dqnfed.maths.solvers`."""

from itertools import product

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def enumerated_box_weights(M: FloatArray, lower: FloatArray, upper: FloatArray) -> FloatArray:
    """Return the box-constrained min-norm weights by trying each of the 3^K patterns of bounds; M must be regular."""
    K = len(M)
    best, best_value = np.full(K, np.nan), np.inf
    for pattern in product((-1, 0, 1), repeat=K):
        state = np.array(pattern)
        x = np.where(state < 0, lower, np.where(state > 0, upper, 0.0))
        free = np.flatnonzero(state == 0)
        if len(free) == 0:
            if abs(x.sum() - 1.0) > 1e-12:
                continue
        else:
            system = np.block(
                [[M[np.ix_(free, free)], np.ones((len(free), 1))], [np.ones((1, len(free))), np.zeros((1, 1))]]
            )
            fixed = np.flatnonzero(state != 0)
            right = np.append(-M[np.ix_(free, fixed)] @ x[fixed], 1.0 - x[fixed].sum())
            x[free] = np.linalg.solve(system, right)[:-1]
        if (x < lower - 1e-12).any() or (x > upper + 1e-12).any():
            continue
        value = float(x @ M @ x)
        if value < best_value:
            best, best_value = x, value
    return best


def enumerated_at_least_step(G: FloatArray, d: FloatArray) -> FloatArray | None:
    """Return the shortest u with G u >= d by trying each subset of rows as the tight ones; None if none works."""
    best: FloatArray | None = None
    for tight in product((False, True), repeat=len(G)):
        rows = G[list(tight)]
        u = np.linalg.pinv(rows) @ d[list(tight)] if len(rows) else np.zeros(G.shape[1])
        if (G @ u >= d - 1e-9).all() and (best is None or u @ u < best @ best):
            best = u
    return best


def frank_wolfe_gap(M: FloatArray, weights: FloatArray) -> float:
    """Return lambda'M lambda - min_k (M lambda)_k, which bounds the distance to the optimal value from above."""
    return float(weights @ M @ weights - (M @ weights).min())


def slice_kkt_residual(M: FloatArray, weights: FloatArray, lower: FloatArray, upper: FloatArray) -> float:
    """Return the largest violation of the KKT conditions of min w'Mw/2, sum w = 1, lower <= w <= upper.

    Entry k is measured against ||g_k|| sum_j w_j ||g_j||, the size of the terms that (M w)_k adds up; what rounding the
    weights themselves to eps does to it is forgiven.
    """
    lengths = np.sqrt(np.diag(M))
    size = np.maximum(lengths * (weights @ lengths), 1e-300)
    rounding = 2 * np.finfo(np.float64).eps * lengths * lengths.sum()
    slope = M @ weights
    can_rise, can_fall = weights < upper, weights > lower
    infeasible = max(abs(weights.sum() - 1.0), (lower - weights).max(), (weights - upper).max())
    if not can_rise.any() or not can_fall.any():
        return float(infeasible)
    # some nu must lie below the slope of each entry that may rise and above that of each entry that may fall
    gap = (slope - rounding)[None, can_fall] - (slope + rounding)[can_rise, None]
    return float(max(infeasible, (gap / (size[None, can_fall] + size[can_rise, None])).max()))

"""Fairness measures of one vector of client accuracies, with equal or with given client weights."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Measure(NamedTuple):
    """How one measure is named, printed and ranked."""

    key: str
    title: str
    latex: str
    decimals: int
    higher_is_better: bool
    explains: str


MEASURES: tuple[Measure, ...] = (
    Measure("mean", "Mean", r"$\bar{a}$", 2, True, "mean accuracy over clients, in percent"),
    Measure("std", "Std", r"$\sigma_a$", 2, False, "population standard deviation over clients"),
    Measure("worst5", "Worst 5 %", r"W(5\%)", 2, True, "mean accuracy of the worst 5 % of clients"),
    Measure("worst10", "Worst 10 %", r"W(10\%)", 2, True, "mean accuracy of the worst 10 % of clients"),
    Measure("best5", "Best 5 %", r"B(5\%)", 2, True, "mean accuracy of the best 5 % of clients"),
    Measure("best10", "Best 10 %", r"B(10\%)", 2, True, "mean accuracy of the best 10 % of clients"),
    Measure("angle", "Angle °", r"Angle ($^{\circ}$)", 2, False, "angle between the accuracies and equal accuracies"),
    Measure("kl", "KL", r"KL($a\|u$)", 4, False, "KL divergence of the normalised accuracies from equal ones"),
    Measure("jain", "Jain", "Jain", 4, True, "Jain's index: 1 when all accuracies are equal"),
    Measure("gini", "Gini", "Gini", 4, False, "Gini coefficient: 0 when all accuracies are equal"),
    Measure(
        "improved", "Improved %", r"$\rho$ (\%)", 1, True, "share of participants whose training loss did not rise"
    ),
)
MEASURE = {measure.key: measure for measure in MEASURES}


def measures(accuracy: Floats, weights: Floats | None = None) -> dict[str, float]:
    """Return every accuracy measure of K clients, each client counted in proportion to its weight (default: equally).

    The definitions follow the DQN-Fed paper (Hamidi & Ye, TMLR 2025, Sec. 5): population standard deviation, and tails
    of max(1, floor(p K)) clients. A weighted tail holds as much weight as that number of average clients. With equal
    weights all values are those of `dqnfed.maths.fairness`, the tests' oracle, without loading torch for a report.
    Clients whose accuracy is NaN (no test data) are left out.
    """
    measured = np.isfinite(accuracy)
    a = accuracy[measured]
    if a.size == 0:
        return {}
    w = np.ones_like(a) if weights is None else np.asarray(weights, dtype=np.float64)[measured]
    if not w.sum() > 0:
        return {}
    share = w / w.sum()
    mean = float(share @ a)
    std = float(np.sqrt(share @ (a - mean) ** 2))
    return {
        "mean": mean,
        "std": std,
        "worst5": tail_mean(a, share, 0.05),
        "worst10": tail_mean(a, share, 0.10),
        "best5": -tail_mean(-a, share, 0.05),
        "best10": -tail_mean(-a, share, 0.10),
        "angle": _angle(a, mean, std),
        "kl": _kl(a, share),
        "jain": _jain(a, share),
        "gini": _gini(a, share),
        "min": float(a.min()),
        "max": float(a.max()),
    }


def tail_size(n_clients: int, share: float) -> int:
    """Return how many of `n_clients` make up a tail of the given share: at least one."""
    return max(1, int(share * n_clients + 1e-9))  # 0.05 * 100 is a little less than 5 in binary


def tail_mean(a: Floats, share: Floats, tail: float) -> float:
    """Return the mean of the lowest accuracies, taking clients until their shares add up to the tail."""
    wanted = tail_size(a.size, tail) / a.size
    order = np.argsort(a, kind="stable")
    filled = np.cumsum(share[order])
    taken = np.clip(share[order] - (filled - wanted), 0.0, share[order])
    return float(taken @ a[order] / taken.sum())


def _angle(a: Floats, mean: float, std: float) -> float:
    if (a < 0).any():
        return math.nan
    return float(np.degrees(np.arctan2(std, mean))) if a.any() else 90.0


def _kl(a: Floats, share: Floats) -> float:
    if (a < 0).any():
        return math.nan
    if not a.any():
        return -math.log(share.min())
    ratio = a / float(share @ a)
    logs = np.log(np.where(ratio > 0, ratio, 1.0))
    return max(0.0, float((share * ratio) @ logs))


def _jain(a: Floats, share: Floats) -> float:
    if (a < 0).any():
        return math.nan
    if not a.any():
        return float(share.min())
    return float(share @ a) ** 2 / float(share @ a**2)


def _gini(a: Floats, share: Floats) -> float:
    if (a < 0).any():
        return math.nan
    if not a.any():
        return 1.0 - float(share.min())
    order = np.argsort(a, kind="stable")
    p, cumulated = share[order], np.cumsum(share[order])
    # mean absolute difference of sorted values: each pair counted through the cumulated share below and above it
    spread = float((p * (2 * cumulated - p - 1.0)) @ a[order])
    return max(0.0, spread / float(share @ a))

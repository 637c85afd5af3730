"""How evenly a [K] vector of client values (accuracies, losses) is spread.

Angle, KL, Jain, Gini and the coefficient of variation compare the vector with a uniform one. A vector of zeros serves
nobody, so it gets each measure's worst value instead of a division by zero; KL, Jain and Gini have no meaning for
negative values and are NaN there.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

FloatArray = NDArray[np.float64]
Values = ArrayLike | Tensor


SHARES = {"10": 0.10, "5": 0.05}  # of the clients whose mean is reported


def fairness_summary(
    values: Values, weights: Values | None = None, *, higher_is_better: bool = True
) -> dict[str, float]:
    """Return every measure of the vector under its short name, in a fixed order.

    mean, std (divided by K), the means of the worst and best 10 % and 5 % (one client at least), angle (in degrees,
    between the values and the uniform vector), kl (divergence of a / sum a from uniform, in nats), jain ((sum a)^2 / (K
    sum a^2)), gini, cov (std / |mean|), min, max, weighted_mean (by example counts).
    """
    a = _checked(values)
    K, ordered = len(a), np.sort(a if higher_is_better else -a) * (1.0 if higher_is_better else -1.0)
    with np.errstate(over="ignore"):  # the squares of values near the largest number
        average, spread = float(a.mean()), float(a.std())
    found = {"mean": average, "std": spread}
    for name, share in SHARES.items():
        n_tail = max(1, math.floor(share * K + 1e-9))  # 0.29 * 100 must give 29
        found[f"worst{name}"], found[f"best{name}"] = float(ordered[:n_tail].mean()), float(ordered[-n_tail:].mean())
    if not a.any():  # nobody is served
        found |= {"angle": 90.0, "kl": math.log(K), "jain": 1 / K, "gini": 1 - 1 / K, "cov": math.sqrt(K - 1)}
    else:
        found["angle"] = math.degrees(math.atan2(spread, average))
        found |= dict.fromkeys(("kl", "jain", "gini"), math.nan)
        if not (a < 0).any():
            rising = np.sort(a) / a.max()  # the sum of the raw values could overflow
            shares = rising[rising > 0] / rising.sum()
            found["kl"] = max(float(np.sum(shares * np.log(K * shares))), 0.0)
            found["jain"] = float(rising.sum() ** 2 / (K * np.square(rising).sum()))
            found["gini"] = max(float((2 * np.arange(1, K + 1) - K - 1) @ rising / (K * rising.sum())), 0.0)
        found["cov"] = spread / abs(average) if average != 0.0 else math.inf
    found |= {"min": float(a.min()), "max": float(a.max())}
    found["weighted_mean"] = average if weights is None else weighted_mean(a, weights)
    return found


def summary_of_moments(mean: float, std: float, n: int, *, nonnegative: bool) -> dict[str, float]:
    """Return the measures that follow from mean and standard deviation of n values; NaN for all others."""
    found = dict.fromkeys(fairness_summary(np.ones(1)), math.nan)
    found |= {"mean": mean, "std": std, "angle": math.degrees(math.atan2(std, mean))}
    found["cov"] = std / abs(mean) if mean != 0.0 else math.inf
    if nonnegative:
        found["jain"] = mean**2 / (mean**2 + std**2) if mean != 0.0 else 1 / n
    if nonnegative and mean == 0.0:  # nobody is served
        found |= {"angle": 90.0, "cov": math.sqrt(n - 1)}
    return found


def known_measures(summary: Mapping[str, float | None], names: Sequence[str]) -> list[str]:
    """Return the names of the measures that are known; of sums over the clients, neither the worst nor the best are."""
    unknown = {name for name in names if (value := summary.get(name)) is None or math.isnan(value)}
    return [name for name in names if name not in unknown] or list(names)


def worst(values: Values, share: float, *, higher_is_better: bool = True) -> float:
    """Return the mean of the worst max(1, floor(share K)) values."""
    return _tail_mean(_checked(values), share, lowest=higher_is_better)


def best(values: Values, share: float, *, higher_is_better: bool = True) -> float:
    """Return the mean of the best max(1, floor(share K)) values."""
    return _tail_mean(_checked(values), share, lowest=not higher_is_better)


def mean(values: Values) -> float:
    """Return the unweighted mean over clients."""
    return fairness_summary(values)["mean"]


def std(values: Values) -> float:
    """Return the population standard deviation over clients (divided by K, not K - 1)."""
    return fairness_summary(values)["std"]


def angle(values: Values) -> float:
    """Return the angle in degrees between the values and the uniform vector: atan(std / mean); 90 for zeros."""
    return fairness_summary(values)["angle"]


def kl(values: Values) -> float:
    """Return the divergence KL(a / sum a || uniform) in nats: 0 for equal values, ln K if one client has everything."""
    return fairness_summary(values)["kl"]


def jain(values: Values) -> float:
    """Return Jain's index (sum a)^2 / (K sum a^2): 1 for equal values, 1 / K if one client has everything."""
    return fairness_summary(values)["jain"]


def gini(values: Values) -> float:
    """Return the Gini coefficient: 0 for equal values, 1 - 1/K if one client has everything."""
    return fairness_summary(values)["gini"]


def coefficient_of_variation(values: Values) -> float:
    """Return std / |mean|; sqrt(K - 1), the most that non-negative values can have, for zeros."""
    return fairness_summary(values)["cov"]


def weighted_mean(values: Values, weights: Values) -> float:
    """Return the mean weighted by example counts."""
    a, w = _checked(values), _checked(weights)
    if w.shape != a.shape or (w < 0).any() or not w.sum() > 0:
        raise ValueError(
            f"one non-negative weight per client is needed, with a positive sum, but {len(a)} values came with "
            f"weights {w.tolist()[:5]}{'...' if len(w) > 5 else ''} ({len(w)}); pass the example counts."
        )
    return float(a @ (w / w.sum()))


def improved_share(before: Values, after: Values) -> float:
    """Return rho, the share of clients whose loss did not rise (equal counts as not risen, NaN as risen)."""
    f, f_after = _checked(before, finite=False), _checked(after, finite=False)
    if f.shape != f_after.shape:
        raise ValueError(
            f"losses before and after must be of the same clients, but there are {len(f)} and {len(f_after)}."
        )
    return float(np.mean(f_after <= f))


def _checked(values: Values, *, finite: bool = True) -> FloatArray:
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    a = np.asarray(values, dtype=np.float64)
    if a.ndim != 1 or len(a) == 0:
        raise ValueError(f"one value per client is needed, [K] with K >= 1, but the shape is {a.shape}.")
    bad = ~np.isfinite(a)
    if finite and bad.any():
        k = int(np.flatnonzero(bad)[0])
        raise ValueError(
            f"every client needs a finite value, but client {k} of {len(a)} has {a[k]}; "
            "leave clients that could not be evaluated out of the vector and say so."
        )
    return a


def _tail_mean(a: FloatArray, share: float, *, lowest: bool) -> float:
    if not 0.0 < share <= 1.0:
        raise ValueError(f"a share of the clients lies in (0, 1], but is {share}.")
    n_tail = max(1, math.floor(share * len(a) + 1e-9))  # 0.29 * 100 must give 29
    a = np.sort(a)
    return float((a[:n_tail] if lowest else a[-n_tail:]).mean())

"""Noise in shares: every client adds a part of it in the pads' ring, and only a sum over many is noisy enough.

A row is clipped, written in whole numbers towards zero (which makes no row longer), and a discrete Gaussian is added
before the pad. Sums of discrete Gaussians of this size are as private as one Gaussian of the sum's variance: what they
differ by (Kairouz, Liu & Steinke, ICML 2021, Theorem 1) is below exp(-10^6).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dqnfed.secure.noise import Privacy
from dqnfed.secure.release import Revealing
from dqnfed.secure.ring import FRACTION_BITS, FloatArray, RingOverflow, Whole

FAR = 12.0  # deviations of the noise that a word has room for: further out with a probability below 1e-32
LEAST_DEVIATION = 1024.0  # of a share, in steps of the ring
Bits = NDArray[np.uint64]


def share_multiplier(privacy: Privacy, n_asked: int) -> float:
    """Return the deviation of one client's noise over `clip`: all others' together are the noise that counts."""
    return privacy.noise_multiplier / math.sqrt(n_asked - 1)


def room_bits(multiplier: float) -> int:
    """Return the binary places by which rows are scaled down, so that row and noise stay within a unit row's bound."""
    return math.ceil(math.log2(1.0 + FAR * multiplier))


def noised_unit(row: FloatArray, privacy: Privacy, n_asked: int) -> tuple[FloatArray, float]:
    """Return a row with its client's share of the noise over a norm, and that norm: the same for everybody."""
    length = float(np.linalg.norm(row))
    if not math.isfinite(length):
        raise RingOverflow("a row that is not finite cannot be padded; the client's update has NaN or infinity.")
    multiplier = share_multiplier(privacy, n_asked)
    room = room_bits(multiplier)
    steps = 2.0 ** (FRACTION_BITS - room)  # of one `clip`
    clipped = row / max(length, privacy.clip)
    whole = np.trunc(clipped * steps)
    if multiplier:
        if multiplier * steps < LEAST_DEVIATION:
            raise RingOverflow(f"a share of the noise of {multiplier:g} clips is too fine for the ring; raise it.")
        whole = whole + discrete_gaussian(len(row), multiplier * steps)
    if float(np.abs(whole).max(initial=0.0)) > 2.0**FRACTION_BITS:
        raise RingOverflow(f"a noisy number is above {2.0**room:g} clips, for which the ring has no room.")
    return whole / 2.0**FRACTION_BITS, privacy.clip * 2.0**room


def discrete_gaussian(n: int, deviation: float) -> FloatArray:
    """Return n draws from the discrete Gaussian, from the system's generator (Canonne, Kamath & Steinke 2020, Alg. 3).

    Bernoulli trials are of 53 bits.
    """
    scale = math.floor(deviation) + 1
    found = np.empty(n)
    missing = np.arange(n)
    while len(missing):
        drawn = _discrete_laplace(len(missing), scale)
        away = (np.abs(drawn) - deviation**2 / scale) ** 2 / (2.0 * deviation**2)
        kept = _uniform(len(missing)) < np.exp(-away)
        found[missing[kept]] = drawn[kept]
        missing = missing[~kept]
    return found


def _discrete_laplace(n: int, scale: int) -> FloatArray:
    """Return n draws with probabilities in proportion to exp(-|x| / scale)."""
    found = np.empty(n)
    missing = np.arange(n)
    while len(missing):
        size = np.floor(-np.log1p(-_uniform(len(missing))) * scale)  # geometric: P(size >= m) = exp(-m / scale)
        negative = (_words(len(missing)) & np.uint64(1)).astype(bool)
        kept = ~(negative & (size == 0.0))  # zero once, not twice
        found[missing[kept]] = np.where(negative, -size, size)[kept]
        missing = missing[~kept]
    return found


def _words(n: int) -> Bits:
    return np.frombuffer(secrets.token_bytes(8 * n), dtype=np.uint64)


def _uniform(n: int) -> FloatArray:
    return (_words(n) >> np.uint64(11)) / 2.0**53


def check_noise(weights: FloatArray | Whole, n_asked: int) -> None:
    """Refuse a sum with less noise than is counted: its shares are for equal weights of all who were asked.

    What counts is the noise of all but the one client whose own share an observer may know.
    """
    sizes = np.abs(np.asarray(weights, dtype=np.float64))
    largest = float(sizes.max(initial=0.0))
    if largest == 0.0:
        return
    others = float(np.square(sizes / largest).sum()) - 1.0
    if others < (n_asked - 1) * (1.0 - 1e-6):
        raise Revealing(
            f"the sum has {others / (n_asked - 1):.3f} of the variance that `privacy.noise` = 'distributed' counts, "
            f"whose shares are for equal weights of all {n_asked} clients asked; set `algorithm.weighting` = "
            "'uniform', and see that no client is missing."
        )


def with_shares(
    rows: Mapping[str, FloatArray], scalars: Sequence[str], privacy: Privacy | None, n_asked: int
) -> tuple[dict[str, FloatArray], dict[str, float]]:
    """Return a reply's rows with the client's shares of the noise, and the norms that are stated for them.

    Without distributed noise the rows are as they were, and no norms are stated. Single numbers, which no pad hides,
    are refused with it.
    """
    if privacy is None or privacy.noise != "distributed":
        return dict(rows), {}
    if scalars:
        raise ValueError(
            f"the method's clients also send numbers of their own ({', '.join(scalars)}), which `privacy.noise` = "
            "'distributed' does not cover; choose one that sends updates alone (FedAvg, FedProx, FedAvgM, FedAdam), "
            "or 'local' noise."
        )
    found = {name: noised_unit(row, privacy, n_asked) for name, row in rows.items()}
    return {name: unit * norm for name, (unit, norm) in found.items()}, {
        name: norm for name, (_, norm) in found.items()
    }

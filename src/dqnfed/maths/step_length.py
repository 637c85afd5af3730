"""How far to go along a step u: theta' = theta - alpha u. Every rule returns alpha, from K-sized float64 numbers.

`slopes` are the first-order decreases g_k'u along the whole step, `squared_norm` is ||u||^2. A step of zero length has
alpha 0 under every rule but the paper's, which has no choice.
"""

from statistics import median

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


def paper_length() -> float:
    """Return 1: the paper's eta = sum 1/||g~_k||^2 = ||u||^2 on the direction u/||u||^2 is the step u itself."""
    return 1.0


def paper_length_is_safe(rates: FloatArray, squared_norm: float, smoothness: float) -> bool:
    """Return whether Theorem 4.2 promises that no loss rises: ||u||^2 <= (2 / L) min_k d_k for L-smooth losses."""
    return bool(squared_norm <= 2.0 / smoothness * np.min(rates))


def fixed_length(eta: float, squared_norm: float) -> float:
    """Return the alpha of a free learning rate eta on the paper's direction u/||u||^2."""
    return eta / squared_norm if squared_norm > 0.0 else 0.0


def diminishing_length(eta: float, squared_norm: float, round: int, *, power: float = 1.0) -> float:
    """Return the alpha of the learning rate eta / (round + 1)^power; power 1 is the paper's example (App. B)."""
    return fixed_length(eta / (round + 1) ** power, squared_norm)


def floored_curvature(curvature: FloatArray, lengths: FloatArray, *, share: float = 0.1) -> FloatArray:
    """Return the clients' curvatures s'y/s's with those below `share` of what is usual raised to it.

    A secant of a non-convex loss may be negative or nearly zero and is not trusted to allow a long step. Usual is the
    median |c| or, if less, the median |c| per length of gradient times the client's: a client that is fitted has
    neither gradient nor curvature. NaN, a client that has none, becomes the usual. All NaN stays NaN.
    """
    c, lengths = np.asarray(curvature, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
    known = np.isfinite(c)
    if not known.any():
        return np.full_like(c, np.nan)
    usual = np.full_like(c, median(np.abs(c[known]).tolist()))
    if (lengths[known] > 0.0).all():
        usual = np.minimum(usual, lengths * median((np.abs(c[known]) / lengths[known]).tolist()))
    return np.where(known, np.maximum(np.where(known, c, 0.0), share * usual), usual)


def curvature_length(
    slopes: FloatArray,
    curvature: FloatArray,
    squared_norm: float,
    *,
    largest: float = 1.0,
    allowance: float = 0.0,
    least: float = 0.0,
) -> float:
    """Return the longest alpha up to `largest` at which every client's parabola along u still falls.

    f_k(theta - alpha u) ~ f_k - alpha g_k'u + alpha^2 c_k ||u||^2 / 2 is lowest at g_k'u / (c_k ||u||^2); the smallest
    of these is taken, so that each loss falls by alpha g_k'u / 2 at least where c_k is exact. Clients of unknown (NaN)
    or zero curvature set no limit; a client that would lose (g_k'u <= 0) makes it 0. With an `allowance` every slope
    counts as this share of the mean gain higher: a client may lose half of it. With `least` alpha is at least this
    share of what the median client allows: no client, and no few of them, can stop the others.
    """
    if not squared_norm > 0.0 or not len(slopes):
        return 0.0
    slopes, c = np.asarray(slopes, dtype=np.float64), np.asarray(curvature, dtype=np.float64)
    slopes = slopes + allowance * float(np.clip(slopes, 0.0, None).mean())
    limiting, limits = c > 0.0, np.full(len(slopes), np.inf)  # NaN is not
    limits[limiting] = np.maximum(slopes[limiting], 0.0) / (c[limiting] * squared_norm)
    limits[slopes <= 0.0] = 0.0
    alpha = float(limits.min())
    return min(largest, max(alpha, least * float(np.median(limits))) if least > 0.0 else alpha)


def mean_step_norm(GG: FloatArray, rates: FloatArray) -> float:
    """Return the length of the mean of the clients' own steps, each the shortest that reaches the client's rate alone.

    Row g_k reaches d_k by d_k / ||g_k||^2 g_k; a model change of local training, whose rate is its square, by itself.
    """
    squares = np.diagonal(GG)
    per_square = np.where(squares > 0.0, rates / np.where(squares > 0.0, squares, 1.0), 0.0)
    return float(np.sqrt(max(float(per_square @ GG @ per_square), 0.0))) / len(rates)


def loss_ratio(losses: FloatArray, before: FloatArray, *, least: float = 0.0, robust: bool = False) -> float:
    """Return the clients' mean loss over their mean loss `before`, which counts as `least` if it is lower.

    With `robust` no client's loss counts for more than 0.2 K times the median, so that one of them cannot raise the
    ratio above 1.2.
    """
    if robust:
        losses, before = _held(losses), _held(before)
    return float(losses.mean()) / max(float(before.mean()), least, float(np.finfo(np.float64).tiny))


def votes_for_longer(along: FloatArray, losses: FloatArray, known: FloatArray) -> float:
    """Return the share of clients whose row points along the last step and whose loss has not risen (NaN: new)."""
    return float(np.mean((along > 0.0) & ~(losses > known)))


def _held(losses: FloatArray) -> FloatArray:
    return np.minimum(losses, max(1.0, 0.2 * len(losses)) * np.median(losses))


def growth_limit(step_norm: float, previous_norm: float | None, *, growth: float = 2.0) -> float:
    """Return the alpha at which the step is `growth` times the previous one; no limit in the first round (None).

    A secant along another cohort's step may see no curvature at all; this guard keeps such a round from exploding.
    A previous step of zero length sets no limit either, or a held round would freeze the run for ever.
    """
    if previous_norm is None or previous_norm <= 0.0 or step_norm <= 0.0:
        return float("inf")
    return growth * previous_norm / step_norm


def match_length(step_norm: float, mean_norm: float, *, ratio: float = 1.0) -> float:
    """Return the alpha that gives the step `ratio` times the length of the mean update, FedAvg's length at 1."""
    return ratio * mean_norm / step_norm if step_norm > 0.0 else 0.0


def line_search_start(curvature_alpha: float, *, largest: float = 1.0) -> float:
    """Return where the all-client line search starts: twice the curvature rule's alpha, at most `largest`."""
    return min(largest, 2.0 * curvature_alpha)


def armijo_holds(
    losses: FloatArray,
    trial_losses: FloatArray,
    slopes: FloatArray,
    alpha: float,
    *,
    sufficient: float = 1e-4,
    rounding: float = 0.0,
) -> bool:
    """Return whether every client's loss falls by at least `sufficient` times its first-order decrease.

    A rise of `rounding` times the loss counts as none: in single precision a client that has nearly converged cannot
    show a smaller fall.
    """
    before = np.asarray(losses)
    needed = before - sufficient * alpha * np.asarray(slopes) + rounding * np.abs(before)
    return bool(np.all(np.asarray(trial_losses) <= needed))


def trapezoid_shortfall(
    before: FloatArray, after: FloatArray, change: FloatArray, rounding: float, *, informative: float = 0.5
) -> FloatArray:
    """Return how far each loss fell short of the change that its slopes at both ends of a step say, over their size.

    The trapezoid rule: a loss changes by the mean of the two slopes, up to terms of third order. 0 is as said, 1 no
    change at all, 2 the opposite; a larger change than said counts as none. NaN where nothing can be said: a slope is
    not known, or the slopes nearly cancel (`informative`: their mean over the mean of their sizes) or are within the
    losses' rounding, and the loss does not contradict them either.
    """
    mean, size = 0.5 * (before + after), 0.5 * (np.abs(before) + np.abs(after))
    with np.errstate(divide="ignore", invalid="ignore"):
        missing = (np.abs(mean) - np.sign(mean) * change) / size
        says_something = np.abs(mean) >= informative * size
    is_seen = size > 100.0 * rounding  # NaN is not
    return np.where(is_seen & (says_something | (missing > informative)), missing, np.nan)


def rate_excess(rates: FloatArray, room: FloatArray) -> FloatArray:
    """Return the share of each rate above twice what its loss can fall by (`room`); an unknown rate has no excess."""
    known = rates > 0.0  # NaN is not
    return np.where(known, (rates - 2.0 * np.maximum(room, 0.0)) / np.where(known, rates, 1.0), 0.0)


def is_stationary(alpha: float, step_norm: float, theta_norm: float, *, rtol: float = 1e-10) -> bool:
    """Return whether the move alpha ||u|| is lost in the model's own size: the cohort is Pareto-stationary."""
    return alpha * step_norm <= rtol * (1.0 + theta_norm)

"""Small quadratic programs over the weights of K clients: exact, in float64, on the host."""

import warnings
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

DEAD = 1e-12  # a row this share of the longest one is stationary: it cannot set the step, and no step moves it
_ROUND_OFF = 2e-14  # multipliers below this share of their terms are rounding, not violations


class UnitGramian(NamedTuple):
    """A Gramian whose rows were scaled to unit length, which is as well conditioned as scaling rows can make it."""

    matrix: FloatArray  # [K, K]  ones on the diagonal, zeros for rows of no length
    lengths: FloatArray  # [K]     the rows' lengths; one where a row has none
    live: BoolArray  # [K]     rows that have a length


def unit_gramian(M: FloatArray, *, dead: float = 0.0) -> UnitGramian:
    """Return the Gramian of the rows scaled to unit length; rows up to `dead` times the longest count as zero."""
    M = np.asarray(M, dtype=np.float64)
    if M.ndim != 2 or M.shape[0] != M.shape[1]:
        raise ValueError(f"a Gramian is square, but this one has shape {M.shape}; pass G G'.")
    if not np.isfinite(M).all():
        k = int(np.flatnonzero(~np.isfinite(M).all(axis=1))[0])
        raise ValueError(f"a Gramian must be finite, but row {k} is not; drop clients with non-finite gradients first.")
    lengths = np.sqrt(np.maximum(M.diagonal(), 0.0))
    live = lengths > dead * lengths.max(initial=0.0)
    lengths = np.where(live, lengths, 1.0)
    matrix = M + M.T
    matrix /= 2.0 * lengths[:, None]
    matrix /= lengths
    if not live.all():
        matrix = np.where(np.outer(live, live), matrix, 0.0)
    return UnitGramian(matrix, lengths, live)


SHRINKING_RIDGE = (1.0, 1e-3, 1e-6)  # shares of the ridge, tried in turn


class AtLeast(NamedTuple):
    """Weights of the "at least" step, and whether such a step exists."""

    weights: FloatArray  # [K]  non-negative; zeros if no step exists
    feasible: bool


def at_least_weights(M: FloatArray, d: FloatArray, *, ridge: float = 1e-6, rtol: float = 1e-12) -> AtLeast:
    """Return weights z >= 0 such that u = G'z (W^-1 G'z in a metric) is the shortest step with G u >= d.

    `ridge` is added to the Gramian of the unit rows: a rate may then be missed by ridge * z_k times its row's length,
    and near a Pareto-stationary point z stays bounded. The answer is infeasible when the convex hull of the unit rows
    comes within sqrt(rtol) of zero. A ridge under which a client would lose is made smaller; if that does not help
    either the answer is infeasible too. Rows of no length are left out: no step moves them.
    """
    rows, lengths, live = unit_gramian(M, dead=DEAD)
    weights, rates = np.zeros(len(lengths)), np.asarray(d, dtype=np.float64)
    if not live.all():
        rows, lengths, rates = rows[live][:, live], lengths[live], rates[live]
    per_length = rates / lengths
    largest = float(per_length.max(initial=0.0))
    if largest <= 0.0:
        return AtLeast(weights, feasible=True)
    for share in SHRINKING_RIDGE if ridge > 0.0 else (1.0,):
        ridged = rows.copy()
        ridged.flat[:: len(rows) + 1] += share * ridge
        z, v = cone_weights(ridged, per_length / largest)
        if not v > rtol * z.sum() ** 2:
            break
        if (rows @ z)[per_length > 0.0].min() > 0.0:
            weights[live] = z * (largest / v) / lengths
            return AtLeast(weights, feasible=True)
    return AtLeast(weights, feasible=False)


def serving_weights(
    M: FloatArray, d: FloatArray, kept: BoolArray, n_first: int, *, ridge: float = 1e-6
) -> tuple[FloatArray, BoolArray]:
    """Return the weights [K] of the "at least" step for the kept rows, and which rows it is for.

    Where no step serves all of them it is for those among the first `n_first` rows alone.
    """
    first = np.arange(len(d)) < n_first
    weights, chosen = np.zeros(len(d)), kept
    found = at_least_weights(M[np.ix_(kept, kept)], d[kept], ridge=ridge)
    if not found.feasible and (kept & ~first).any():
        chosen = kept & first
        found = at_least_weights(M[np.ix_(chosen, chosen)], d[chosen], ridge=ridge)
    weights[chosen] = found.weights
    return weights, chosen


class Common(NamedTuple):
    """Weights of a step for several clients, and for whom it is."""

    weights: FloatArray  # [K]
    served: BoolArray  # [K]  rows that do not lose by it, up to the slack
    beyond: bool  # whether it lowers the mean at the expense of the others, since no step serves everybody


def common_weights(
    M: FloatArray,
    d: FloatArray,
    losses: FloatArray,
    kept: BoolArray,
    *,
    ridge: float = 1e-6,
    slack: float = 1e-3,
    least_cosine: float = 0.1,
) -> Common:
    """Return the "at least" step for the kept rows or, near a Pareto-stationary point, one that lowers their mean.

    Every rate is lowered by `slack` times the mean rate, so that a client with nothing left to gain does not hold back
    the others. Where no step serves everybody, or one that does is nearly perpendicular to the mean gradient, the step
    is `sparing_weights`; all weights are 0 where the mean gradient vanishes too.
    """
    weights, served = np.zeros(len(d)), kept.copy()
    if not kept.any():
        return Common(weights, served, beyond=False)
    M, d, losses = M[np.ix_(kept, kept)], d[kept], losses[kept]
    found, mean = at_least_weights(M, d - slack * d.mean(), ridge=ridge), np.full(len(d), 1.0 / len(d))
    slopes = M @ found.weights
    least = least_cosine * np.sqrt(np.clip(mean @ M @ mean, 0.0, None) * np.clip(found.weights @ slopes, 0.0, None))
    if found.feasible and mean @ slopes >= least:
        weights[kept] = found.weights
        return Common(weights, served, beyond=False)
    weights[kept], served[kept] = sparing_weights(M, d, losses, ridge=ridge)
    return Common(weights, served, beyond=True)


def sparing_weights(
    M: FloatArray, d: FloatArray, losses: FloatArray, *, ridge: float = 1e-6
) -> tuple[FloatArray, BoolArray]:
    """Return the weights of the shortest step that lowers the mean at the mean rate, and whom it spares.

    Nobody with a loss above the average loses by it if that is possible within 0.3 of the mean gradient's direction;
    else the client with the largest loss does not; else it is the mean gradient. All are 0 where that vanishes.
    """
    K, losses = len(d), np.where(np.isfinite(losses), losses, np.inf)
    mean, nobody = np.full(K, 1.0 / K), np.zeros(K, dtype=np.bool_)
    square = float(mean @ M @ mean)
    if not square > 1e-12 * float(np.diagonal(M).mean()):
        return np.zeros(K), nobody
    wanted = max(float(d.mean()), np.finfo(np.float64).tiny)
    for spared in (losses >= losses.mean(), losses >= losses.max(), nobody):
        rows = np.concatenate([np.eye(K)[spared], mean[None]])
        found = at_least_weights(rows @ M @ rows.T, np.append(np.zeros(int(spared.sum())), wanted), ridge=ridge)
        weights = rows.T @ found.weights
        slopes, norm = M @ weights, np.sqrt(np.clip(weights @ M @ weights, 0.0, None))
        ahead = float(mean @ slopes)
        is_spared = slopes[spared].min(initial=0.0) >= -0.05 * ahead
        if found.feasible and is_spared and ahead >= 0.3 * np.sqrt(square) * norm:
            return weights, spared
    return mean * (wanted / square), nobody


def bounded_rates(
    rates: FloatArray, squares: FloatArray, bounds: float, others: FloatArray | None = None
) -> FloatArray:
    """Return the rates, unknown ones (NaN) filled in, held within a factor of the median rate per squared row.

    `others` are further rates per squared row that the median is taken over.
    """
    per_square = rates / np.where(squares > 0, squares, 1.0)
    sample = np.concatenate([per_square, others if others is not None else per_square[:0]])
    sample = sample[np.isfinite(sample) & (sample > 0)]
    if not len(sample):
        return squares.copy()
    middle = median(sample.tolist())
    held = np.clip(np.where(np.isfinite(per_square), per_square, middle), middle / bounds, middle * bounds)
    return np.asarray(held * squares)


def simplex_projection(y: FloatArray) -> FloatArray:
    """Return the point of the probability simplex nearest to y, by sorting (Held, Wolfe & Crowder 1974)."""
    y = np.asarray(y, dtype=np.float64)
    falling = np.sort(y)[::-1]
    shifts = (1.0 - np.cumsum(falling)) / np.arange(1, len(y) + 1)
    n_positive = int(np.flatnonzero(falling + shifts > 0)[-1]) + 1
    x = np.clip(y + shifts[n_positive - 1], 0.0, None)
    return np.asarray(x / x.sum())


def box_simplex_projection(y: FloatArray, lower: FloatArray, upper: FloatArray) -> FloatArray:
    """Return the point nearest to y with lower <= x <= upper and entries that sum to one.

    It is clip(y - nu, lower, upper) for the one nu that makes the sum right; the sum is piecewise linear in nu, so nu
    is found exactly between two neighbours of the sorted breakpoints y - upper and y - lower.
    """
    y, lower, upper = _checked_box(y, lower, upper)
    breakpoints = np.concatenate([y - upper, y - lower])
    order = np.argsort(breakpoints, kind="stable")
    nus = breakpoints[order]
    slopes = np.cumsum(np.concatenate([-np.ones(len(y)), np.ones(len(y))])[order])
    sums = upper.sum() + np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(nus))])
    right = int(np.searchsorted(-sums, -1.0))  # sums fall with nu; the first breakpoint at or below one
    if right == 0:
        return upper.copy()
    if right == len(sums):
        return lower.copy()
    slope = slopes[right - 1]
    nu = nus[right] if slope == 0.0 else nus[right - 1] + (1.0 - sums[right - 1]) / slope
    return np.asarray(np.clip(y - nu, lower, upper))


def _checked_box(y: FloatArray, lower: FloatArray, upper: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    y = np.asarray(y, dtype=np.float64)
    low = np.broadcast_to(np.asarray(lower, dtype=np.float64), y.shape).copy()
    high = np.broadcast_to(np.asarray(upper, dtype=np.float64), y.shape).copy()
    slack = 1e-9  # bounds such as prior -+ radius are feasible up to rounding
    if (low > high).any() or low.sum() > 1.0 + slack or high.sum() < 1.0 - slack:
        raise ValueError(
            "no weights fit the box: lower bounds must not exceed upper ones and their sums must enclose 1, but the "
            f"sums are {low.sum():.6g} and {high.sum():.6g}; widen the box."
        )
    return y, low, high


def nnls(A: FloatArray, b: FloatArray) -> FloatArray | None:
    """Return argmin ||A z - b|| over z >= 0 (Lawson & Hanson 1974), or None where the iteration limit is reached."""
    from scipy import optimize  # half a second, and most runs never come here

    try:
        z, _ = optimize.nnls(A, b, maxiter=10 * A.shape[1] + 100)
    except RuntimeError:
        return None
    return np.asarray(z, dtype=np.float64)


def factor(M: FloatArray, *, rtol: float = 1e-15) -> FloatArray:
    """Return R [K, p] with R R' = M, M positive semidefinite; eigenvalues up to rtol times the largest are dropped."""
    values, vectors = np.linalg.eigh(M)
    kept = values > rtol * max(values[-1], 0.0)
    return np.asarray(vectors[:, kept] * np.sqrt(values[kept]))


def _root(M: FloatArray) -> FloatArray:
    """Return R with R R' = M, by Cholesky's algorithm; with pivots where M is singular or indefinite by rounding."""
    from scipy.linalg import lapack

    try:
        return np.asarray(np.linalg.cholesky(M), dtype=np.float64)
    except np.linalg.LinAlgError:
        found, places, rank, _ = lapack.dpstrf(M, lower=1)
        R = np.empty((len(M), rank))
        R[places - 1] = np.tril(found)[:, :rank]
        return R


def cone_weights(M: FloatArray, r: FloatArray) -> tuple[FloatArray, float]:
    """Return z = argmin z'Mz subject to r'z = 1, z >= 0, and the multiplier v = z'Mz of its equation.

    The dual of min ||u||^2 subject to G u >= r, with M = G G': u = G'z / v where v > 0; v = 0 says that no u exists
    (Lawson & Hanson 1974, ch. 23, "LDP"). Pivoting finds it, or NNLS where that does not end, and an active-set method
    finishes what is not there to round-off. Needs max r > 0; accurate when M has a unit diagonal and r a maximum of
    one.
    """
    found = _pivoted(M, r)
    if found is not None and found.is_exact:
        total = float(r @ found.weights)
        return found.weights / total, 1.0 / total
    z = _of_least_distance(M, r) if found is None else found.weights
    if z is None or not r @ z > 0.0:
        best = int(np.argmax(np.where(r > 0.0, r / np.sqrt(np.clip(np.diag(M), 1e-300, None)), -np.inf)))
        z = np.where(np.arange(len(r)) == best, 1.0, 0.0)
    return _sliced_box_minimiser(M, r, np.zeros(len(r)), np.full(len(r), np.inf), z / (r @ z))


class Pivoted(NamedTuple):
    """Weights but for a factor, and whether nothing but rounding is left of their conditions."""

    weights: FloatArray  # [K]
    is_exact: bool


def _pivoted(M: FloatArray, r: FloatArray) -> Pivoted | None:
    """Return z >= 0 with M z >= r, equal where z > 0, and whether that is to round-off; None if none is found.

    All entries that are wrong change sides at once (Judice & Pires 1994, "block principal pivoting"), a few times as a
    rule; where fewer are not wrong soon, only the last of them does, until fewer are (Murty 1974: this cannot cycle).
    It gives up where M is not positive, and after so many changes that rounding leads it in circles.
    """
    from scipy.linalg import lapack

    free, n_wrong, n_tries = r > 0.0, len(r) + 1, 3
    for _ in range(10 * len(r) + 10):
        places = free.nonzero()[0]
        z = np.zeros(len(r))
        if len(places):
            held = M.take(places, 0).take(places, 1).T  # symmetric: as LAPACK wants it, without one more copy
            _, z[places], failed = lapack.dposv(held, r[places], overwrite_a=True)
            if failed:
                return None
        excess = M @ z - r
        wrong = np.where(free, z < 0.0, excess < -1e-12)
        n_now = int(np.count_nonzero(wrong))
        if n_now == 0:
            excess[places] = -np.abs(excess[places])
            return Pivoted(z, bool((excess >= -_ROUND_OFF * (np.abs(M) @ z + np.abs(r))).all()))
        n_tries = 3 if n_now < n_wrong else n_tries - 1
        n_wrong = min(n_now, n_wrong)
        if n_tries <= 0:
            wrong[: wrong.nonzero()[0][-1]] = False
        free = free ^ wrong
    return None


def _of_least_distance(M: FloatArray, r: FloatArray) -> FloatArray | None:
    """Return the weights sought but for a factor, by NNLS on a root of M, which may be singular; None if it fails."""
    R = _root(M)
    p = R.shape[1]
    rows, wanted = np.empty((p + 1, len(r))), np.zeros(p + 1)
    rows[:p], rows[p], wanted[p] = R.T, r, 1.0
    return nnls(rows, wanted)


def min_norm_weights(M: FloatArray) -> FloatArray:
    """Return the convex weights of the shortest vector in the convex hull of the rows whose Gramian is M.

    Solves min lambda'M lambda over the simplex (Desideri 2012, "MGDA"). Exact to round-off for every row's own scale;
    rows of zero length share the weight equally, since they are the answer.
    """
    unit = unit_gramian(M)
    if not unit.live.all():
        return np.where(unit.live, 0.0, 1.0) / np.count_nonzero(~unit.live)
    z, _ = cone_weights(unit.matrix, unit.lengths.min() / unit.lengths)
    weights = z / unit.lengths
    return np.asarray(weights / weights.sum())


def min_norm_box_weights(M: FloatArray, lower: FloatArray, upper: FloatArray) -> FloatArray:
    """Return argmin lambda'M lambda over convex weights with lower <= lambda <= upper (FedMGDA+, Hu et al. 2022).

    Accelerated projected gradients find the active bounds, an active-set method finishes to round-off.
    """
    unit = unit_gramian(M)
    K = len(unit.lengths)
    start, low, high = _checked_box(np.full(K, 1.0 / K), lower, upper)
    low, high = np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
    if (low == 0.0).all() and (high == 1.0).all():
        return min_norm_weights(M)
    start = box_simplex_projection(start, low, high)
    if not unit.live.any():
        return start
    start = _projected_gradient_weights(np.asarray(M, dtype=np.float64), start, low, high)
    scale = unit.lengths / unit.lengths.min()  # z = scale * lambda has a unit-diagonal Gramian
    z, _ = _sliced_box_minimiser(unit.matrix, 1.0 / scale, low * scale, high * scale, start * scale)
    return np.where(z <= low * scale, low, np.where(z >= high * scale, high, z / scale))


def _projected_gradient_weights(
    M: FloatArray, start: FloatArray, lower: FloatArray, upper: FloatArray, *, n_steps: int = 200
) -> FloatArray:
    largest = float(np.linalg.eigvalsh(M)[-1])
    if not largest > 0.0:
        return start
    x, ahead, momentum = start, start, 1.0
    for _ in range(n_steps):
        x_next = box_simplex_projection(ahead - M @ ahead / largest, lower, upper)
        momentum_next = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        ahead = x_next + (momentum - 1.0) / momentum_next * (x_next - x)
        moved = float(np.abs(x_next - x).max())
        x, momentum = x_next, momentum_next
        if moved <= 1e-15:
            break
    return x


def _sliced_box_minimiser(
    M: FloatArray, r: FloatArray, lower: FloatArray, upper: FloatArray, start: FloatArray
) -> tuple[FloatArray, float]:
    """Return argmin z'Mz/2 subject to r'z = 1, lower <= z <= upper, and the multiplier of the equation.

    A primal active-set method (Nocedal & Wright 2006, sec. 16.5) from a feasible start: Newton moves of the free
    entries, repeated until only rounding is left of their conditions; an entry whose bound blocks a move is fixed, a
    fixed one that would lower the value is freed.
    """
    K = len(r)
    z = np.minimum(np.maximum(start, lower), upper)
    free = (z > lower) & (z < upper)
    movable = upper > lower
    n_refined = 0
    multiplier = 0.0
    for n_done in range(20 * K + 100):
        slope = M @ z
        multiplier = _multiplier(slope, r, free, z, lower, upper)
        excess = slope - multiplier * r
        rounding = _ROUND_OFF * (np.abs(M) @ np.abs(z) + np.abs(multiplier * r))
        missing = 1.0 - float(r @ z)
        unsettled = (np.abs(excess) > rounding)[free].any() or abs(missing) > _ROUND_OFF
        if free.any() and n_refined < 3 and unsettled:
            move = _newton_move(M[np.ix_(free, free)], r[free], excess[free], missing)
            blocking, share = _first_bound(z[free], move, lower[free], upper[free])
            z[free] += share * move
            n_refined += 1
            if blocking is not None:
                index = np.flatnonzero(free)[blocking]
                z[index] = lower[index] if move[blocking] < 0.0 else upper[index]
                free[index] = False
                n_refined = 0
            continue
        gain = np.where(z <= lower, -excess, excess)
        releasable = movable & ~free & (gain > rounding)
        if not releasable.any():
            break
        # the steepest entry usually; the first one after many steps, which cannot cycle (Bland 1977)
        index = np.argmax(np.where(releasable, gain, -np.inf)) if n_done < 10 * K else np.argmax(releasable)
        free[index] = True
        n_refined = 0
    return z, multiplier


def _multiplier(
    slope: FloatArray, r: FloatArray, free: BoolArray, z: FloatArray, lower: FloatArray, upper: FloatArray
) -> float:
    """Return the multiplier that fits the free entries best; at a vertex, one between what its neighbours pay."""
    if free.any():
        return float(r[free] @ slope[free] / (r[free] @ r[free]))
    price = slope / r
    movable = upper > lower
    rise = float(np.min(price[movable & (z < upper)], initial=np.inf))
    fall = float(np.max(price[movable & (z > lower)], initial=-np.inf))
    ends = [end for end in (rise, fall) if np.isfinite(end)]
    return sum(ends) / len(ends) if ends else 0.0


def _newton_move(M: FloatArray, r: FloatArray, slope: FloatArray, missing: float) -> FloatArray:
    """Return the move p to argmin p'Mp/2 + slope'p subject to r'p = missing.

    By the bordered system, which stays regular where M alone is singular; if that is singular too, by eigenvectors,
    going far along a direction in which the value falls without curving.
    """
    from scipy import linalg

    along = r / np.linalg.norm(r)
    ahead = missing / float(np.linalg.norm(r))
    system = np.block([[M, -along[:, None]], [along[None, :], np.zeros((1, 1))]])
    right = np.append(-slope, ahead)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", linalg.LinAlgWarning)
        solution = linalg.lu_solve(linalg.lu_factor(system), right, check_finite=False)
    if np.isfinite(solution).all() and np.abs(system @ solution - right).max() <= 1e-6 * np.abs(right).max():
        return np.asarray(solution[:-1])
    tangent = np.eye(len(r)) - np.outer(along, along)
    values, vectors = np.linalg.eigh(tangent @ M @ tangent)
    falls = -(vectors.T @ (tangent @ slope))
    falls[np.abs(falls) <= _ROUND_OFF * np.linalg.norm(slope)] = 0.0
    floor = 1e-14 * float(np.trace(M)) + np.finfo(np.float64).tiny
    return np.asarray(tangent @ (vectors @ (falls / np.maximum(values, floor))) + ahead * along)


def _first_bound(z: FloatArray, move: FloatArray, lower: FloatArray, upper: FloatArray) -> tuple[int | None, float]:
    """Return the entry whose bound ends the move first and the share of the move until then; None and 1 if none."""
    room = np.full(len(z), np.inf)
    falling, rising = move < 0.0, move > 0.0
    room[falling] = (lower - z)[falling] / move[falling]
    room[rising] = (upper - z)[rising] / move[rising]
    blocking = int(np.argmin(room))
    return (blocking, max(float(room[blocking]), 0.0)) if room[blocking] < 1.0 else (None, 1.0)

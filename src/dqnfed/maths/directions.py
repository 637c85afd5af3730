"""How the server turns client gradients G [K, n] and wanted rates d [K] into one step."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.maths.gramian import combine, gramian
from dqnfed.maths.solvers import DEAD, BoolArray, FloatArray, cone_weights, unit_gramian
from dqnfed.maths.solvers import at_least_weights as at_least_weights  # users import it from here


class RateMatch(NamedTuple):
    """A step, what it is made of, and what it leaves unmet."""

    step: Tensor  # [n]  to be subtracted from theta
    weights: Tensor  # [K]  step = weights @ G
    residual: Tensor  # []   the largest rate missed; zero when every rate is reached


class GramSchmidtStep(NamedTuple):
    """The two stages of the paper's server step."""

    step: Tensor  # [n]  eta * direction, to be subtracted from theta
    direction: Tensor  # [n]  shortest vector in the hull of the orthogonalised, scaled gradients
    eta: Tensor  # []   the paper's global learning rate
    weights: Tensor  # [K]  lambda*, on the orthogonalised gradients


def rate_matching_step(G: Tensor, d: Tensor, *, ridge: float = 0.0, rtol: float | None = None) -> RateMatch:
    r"""Return the shortest step that lowers client k's loss at rate d_k, to first order.

    Solves :math:`\min \|u\|^2` subject to :math:`G u = d`, that is :math:`u = G^\top (G G^\top)^+ d`: the server step
    of DQN-Fed (Hamidi & Ye, TMLR 2025, Sec. 4.2), whose Gram-Schmidt form is `gram_schmidt_step`. Where the rates
    contradict each other the step is the least-squares compromise, and the residual says by how much it fails.

    Rows are scaled to unit length for the solve. Directions of the Gramian below `rtol` times its largest eigenvalue
    count as dependent (default 1e-12 for float64 rows, 1e-6 otherwise: what the products are worth); `ridge` is added
    to its unit diagonal. Float64 rows get one step of iterative refinement against G itself; for others the residual
    is that of the float64 Gramian, so that G is read only twice.
    """
    d = _checked_rates(G, d)
    M = gramian(G).numpy()
    rates = d.numpy()
    cutoff = _rtol(G, rtol)
    weights = rate_matching_weights(M, rates, ridge=ridge, rtol=cutoff)
    step = combine(torch.from_numpy(weights), G)
    if G.dtype == torch.float64 and ridge == 0.0:
        correction = rate_matching_weights(M, rates - (G @ step).cpu().numpy(), rtol=cutoff)
        # to the step itself: nearly parallel rows have weights that are far longer than it, and so is their rounding
        weights, step = weights + correction, step + combine(torch.from_numpy(correction), G)
    reached = (G @ step).cpu().double().numpy() if G.dtype == torch.float64 else M @ weights
    return _rate_match(G, step, weights, np.abs(reached - rates))


def rate_matching_weights(M: FloatArray, d: FloatArray, *, ridge: float = 0.0, rtol: float = 1e-12) -> FloatArray:
    """Return weights z with M z = d, M = G G' (or G W^-1 G' in a metric W); the step is G'z (or W^-1 G'z).

    Where M is singular, z gives the step of the pseudo-inverse: least squares in d, shortest in the metric.
    """
    unit = unit_gramian(M, dead=DEAD)
    live, lengths = unit.live, unit.lengths[unit.live]
    weights = np.zeros(len(unit.lengths))
    if not live.any():
        return weights
    wanted = np.asarray(d, dtype=np.float64)[live]
    values, vectors = np.linalg.eigh(unit.matrix[np.ix_(live, live)])
    values = values + ridge
    kept = values > rtol * values[-1]
    values, vectors = values[kept], vectors[:, kept]
    if kept.all():
        inner = vectors @ ((vectors.T @ (wanted / lengths)) / values)
    else:
        # u = Q a with unit rows R Q', R = V sqrt(L): the unscaled rows decide which compromise is least squares
        R = vectors * np.sqrt(values)
        a = np.linalg.lstsq(lengths[:, None] * R, wanted, rcond=None)[0]
        inner = vectors @ (a / np.sqrt(values))
    weights[live] = inner / lengths
    return weights


def at_least_step(G: Tensor, d: Tensor, *, ridge: float = 0.0, rtol: float | None = None) -> RateMatch:
    r"""Return the shortest step that lowers client k's loss at rate d_k or faster, to first order.

    Solves :math:`\min \|u\|^2` subject to :math:`G u \ge d` through its dual, a non-negative least squares problem of
    size K; weights are its multipliers. Unlike the paper, a client that would gain more than its rate is not held
    back. If no step gives everybody its rate (Pareto-stationary rows) the step is zero and the residual is max d.
    """
    d = _checked_rates(G, d)
    M = gramian(G).numpy()
    rates = d.numpy()
    weights, feasible = at_least_weights(M, rates, ridge=ridge, rtol=_rtol(G, rtol))
    if feasible and G.dtype == torch.float64 and ridge == 0.0:
        active = weights > 0.0
        missed = rates - (G @ combine(torch.from_numpy(weights), G)).cpu().numpy()
        correction = np.zeros_like(weights)
        correction[active] = rate_matching_weights(M[np.ix_(active, active)], missed[active])
        weights = np.clip(weights + correction, 0.0, None)
    step = combine(torch.from_numpy(weights), G)
    reached = (G @ step).cpu().double().numpy() if G.dtype == torch.float64 else M @ weights
    return _rate_match(G, step, weights, np.clip(rates - reached, 0.0, None))


def compatible_rows(
    M: FloatArray, d: FloatArray, *, ridge: float = 1e-6, rtol: float = 1e-12, max_share: float = 0.2
) -> BoolArray:
    """Return which rows to keep so that an "at least" step exists, dropping as few as a greedy search finds.

    The row with the largest weight in the combination that cancels all progress goes first (a sign-flipped client
    carries about half of it). If dropping `max_share` of the rows does not help, the conflict is real: all are kept.
    """
    unit = unit_gramian(M, dead=DEAD)
    d = np.asarray(d, dtype=np.float64)
    kept = np.ones(len(d), dtype=np.bool_)
    for _ in range(int(max_share * len(d) + 1e-9) + 1):
        if at_least_weights(M[np.ix_(kept, kept)], d[kept], ridge=ridge, rtol=rtol).feasible:
            return kept
        against = kept & unit.live
        per_length = np.where(against, d / unit.lengths, -np.inf)
        z, _ = cone_weights(unit.matrix[np.ix_(against, against)], (per_length / per_length.max())[against])
        kept = kept.copy()
        kept[np.flatnonzero(against)[int(np.argmax(z))]] = False
    return np.ones(len(d), dtype=np.bool_)


FEW_ROWS = 3  # of so few none is usual


def drop_outlier_rows(
    M: FloatArray, d: FloatArray, *, ridge: float = 1e-6, rtol: float = 1e-12, max_share: float = 0.2, stretch: float
) -> BoolArray:
    """Return which rows to keep so that no single row makes the "at least" step `stretch` times as long as it would be.

    A row with a false rate, or one that points against the others, is met at their expense: the step grows long for its
    sake, and every curvature bound then shortens it. The row without which the step would be shortest goes first; at
    most `max_share` of all rows are dropped, after those that leave no step at all (`compatible_rows`).
    """
    d = np.asarray(d, dtype=np.float64)
    kept = compatible_rows(M, d, ridge=ridge, rtol=rtol, max_share=max_share)
    n_left = int(max_share * len(d) + 1e-9) - int((~kept).sum())

    def solved(rows: BoolArray) -> tuple[FloatArray, float]:
        weights = np.zeros(len(d))
        found = at_least_weights(M[np.ix_(rows, rows)], d[rows], ridge=ridge, rtol=rtol)
        weights[rows] = found.weights
        return weights, float(weights @ M @ weights) if found.feasible else np.inf

    weights, square = solved(kept)
    while n_left > 0 and np.isfinite(square) and kept.sum() > 1:
        without = {int(k): solved(kept & (np.arange(len(d)) != k)) for k in np.flatnonzero(weights > 0.0)}
        k = min(without, key=lambda row: without[row][1])
        if not square > stretch**2 * without[k][1]:
            break
        kept = kept & (np.arange(len(d)) != k)
        (weights, square), n_left = without[k], n_left - 1
    return kept


def bounded_by_others(
    M: FloatArray,
    d: FloatArray,
    kept: BoolArray,
    *,
    ridge: float = 1e-6,
    n_most: int,
    stretch: float,
    n_halvings: int = 8,
) -> FloatArray:
    """Return the rates with which no row makes the "at least" step more than `stretch` times as long as without it.

    The rate of the row that lengthens the step most is lowered, to what the others' step gives it at the least; of at
    most `n_most` rows. Nothing is changed where no step serves all kept rows.
    """
    d = np.asarray(d, dtype=np.float64).copy()

    def squared(rates: FloatArray, rows: BoolArray) -> tuple[FloatArray, float]:
        weights = np.zeros(len(rates))
        found = at_least_weights(M[np.ix_(rows, rows)], rates[rows], ridge=ridge)
        weights[rows] = found.weights
        return weights, float(weights @ M @ weights) if found.feasible else np.inf

    for _ in range(n_most if kept.sum() > FEW_ROWS else 0):
        weights, square = squared(d, kept)
        active = np.flatnonzero(weights > 0.0)
        if not np.isfinite(square) or not len(active):
            break
        without = {int(k): squared(d, kept & (np.arange(len(d)) != k)) for k in active}
        k = min(without, key=lambda row: without[row][1])
        longest = stretch**2 * without[k][1]
        if not square > longest:
            break
        low, high = min(float(M[k] @ without[k][0]), d[k]), d[k]
        for _ in range(n_halvings):
            d[k] = 0.5 * (low + high)
            low, high = (d[k], high) if squared(d, kept)[1] <= longest else (low, d[k])
        d[k] = low
    return d


def gram_schmidt_step(G: Tensor, d: Tensor) -> GramSchmidtStep:
    """Return the paper's server step, literally: scaled Gram-Schmidt, lambda*, direction, eta (Sec. 4.2, eq. 9-16).

    The oracle of `rate_matching_step`, to which it is equal in exact arithmetic. Needs independent rows; a scaled
    denominator that happens to be zero makes it NaN although the step itself is finite.
    """
    d = _checked_rates(G, d).to(dtype=G.dtype, device=G.device)
    scaled: list[Tensor] = []
    for g, rate in zip(G, d, strict=True):
        remainder, denominator = g, rate
        for other in scaled:
            share = (g @ other) / (other @ other)
            remainder = remainder - share * other
            denominator = denominator - share
        scaled.append(remainder / denominator)
    rows = torch.stack(scaled)
    inverse_squares = 1.0 / rows.square().sum(dim=1)
    eta = inverse_squares.sum()
    weights = inverse_squares / eta
    direction = weights @ rows
    return GramSchmidtStep(eta * direction, direction, eta, weights)


def mean_step(G: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the average of the rows, weighted by `weights` / sum(weights) if given: FedAvg's step on updates."""
    if weights is None:
        weights = torch.ones(len(G), dtype=torch.float64)
    weights = weights.to(torch.float64)
    total = weights.sum()
    if not bool(total > 0) or bool((weights < 0).any()):
        raise ValueError(
            f"weights of a mean must be non-negative with a positive sum, but they are {weights.tolist()}; "
            "use example counts, or None for equal weights."
        )
    return combine(weights / total, G)


def _checked_rates(G: Tensor, d: Tensor) -> Tensor:
    if G.ndim != 2 or d.shape != (len(G),):
        raise ValueError(f"one rate per gradient row is needed, but G is {tuple(G.shape)} and d is {tuple(d.shape)}.")
    d = d.detach().to(dtype=torch.float64, device="cpu")
    if not bool(torch.isfinite(d).all()):
        k = int((~torch.isfinite(d)).nonzero()[0])
        raise ValueError(f"every rate must be finite, but row {k} has {d[k].item()}; drop that client first.")
    return d


def _rtol(G: Tensor, rtol: float | None) -> float:
    return rtol if rtol is not None else 1e-12 if G.dtype == torch.float64 else 1e-6


def _rate_match(G: Tensor, step: Tensor, weights: FloatArray, missed: FloatArray) -> RateMatch:
    worst = torch.tensor(missed.max(initial=0.0), dtype=G.dtype, device=G.device)
    return RateMatch(step, torch.from_numpy(weights).to(dtype=G.dtype, device=G.device), worst)

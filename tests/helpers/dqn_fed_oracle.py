"""Whole runs of DQN-Fed in gradient mode, written again from its mathematics: nothing is shared with the package.

Dense n x n matrices instead of limited memories, whole vectors instead of their products, a dictionary of cached
replies instead of a matrix of rows, and least-distance programming by SciPy's NNLS instead of pivoting. Every client
replies, with finite numbers and a gradient that is not zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

FloatArray = NDArray[np.float64]
ValueAndGradient = Callable[[int, FloatArray], tuple[float, FloatArray]]  # client and theta in, loss and gradient out


class Settings(NamedTuple):
    """The settings of DQN-Fed that a run in gradient mode depends on, with their defaults."""

    metric_memory: int = 10  # secant pairs of the mean loss
    growth: float = 2.0  # the longest step, in lengths of the one before
    ridge: float = 1e-6  # on the Gramian of the unit rows
    rate_bounds: float = 1000.0  # how far a rate per squared gradient may be from the median
    cached_clients: int = 50  # clients whose last replies are kept
    cap: bool = True  # rates at most twice the loss above its floor
    floor: float = 0.0  # no loss is below this


class Pair(NamedTuple):
    """A move and the change of a gradient along it."""

    s: FloatArray
    y: FloatArray

    @property
    def scale(self) -> float:
        """The c for which c y is nearest to s."""
        return float(self.s @ self.y / (self.y @ self.y))

    @property
    def curvature(self) -> float:
        return float(self.s @ self.y / (self.s @ self.s))

    @property
    def is_curved(self) -> bool:
        return bool(self.s @ self.y > 1e-8 * np.linalg.norm(self.s) * np.linalg.norm(self.y))


class ClientReply(NamedTuple):
    """What a client sends in one round."""

    round: int
    gradient: FloatArray
    rate: float  # NaN: not known
    curvature: float  # along the last step; NaN: not known
    change: FloatArray  # of its gradient along the last step


class OracleRun(NamedTuple):
    """Theta and the status after every round, and how often each rule decided something."""

    thetas: list[FloatArray]
    statuses: list[str]
    rules: Counter[str]


def damped(pair: Pair, scale: float) -> Pair:
    """Return the pair with y mixed with s / scale until s'y is at least a tenth of s's / scale (Powell 1978)."""
    expected, seen = float(pair.s @ pair.s) / scale, float(pair.s @ pair.y)
    if seen >= 0.1 * expected:
        return pair
    share = 0.9 * expected / (expected - seen)
    return Pair(pair.s, share * pair.y + (1.0 - share) * pair.s / scale)


def inverse_hessian(pairs: Sequence[Pair], n: int) -> FloatArray:
    """Return the dense inverse BFGS matrix of the pairs, oldest first, started at the newest one's scale."""
    H = (pairs[-1].scale if pairs else 1.0) * np.eye(n)
    for s, y in pairs:
        V = np.eye(n) - np.outer(y, s) / (s @ y)
        H = V.T @ H @ V + np.outer(s, s) / (s @ y)
    return np.asarray(H)


def probe(theta: FloatArray, direction: FloatArray) -> FloatArray:
    """Return the small move along the direction over which a curvature is measured before the first step."""
    return np.asarray(1e-4 * (1.0 + np.linalg.norm(theta)) * direction / np.linalg.norm(direction))


def shortest_step(G: FloatArray, d: FloatArray, H: FloatArray, ridge: float) -> FloatArray | None:
    """Return the u of least u'H^-1 u with g_k'u >= d_k up to the ridge; None where some client would not gain.

    With H = LL' and u = Lv the unit rows a_k ask for a_k'v >= r_k. The ridge gives every row one coordinate of its own,
    of length sqrt(ridge), so that there always is a solution; what a row gets along its own coordinate, v misses.
    """
    L = np.linalg.cholesky(H)
    lengths = np.linalg.norm(G @ L, axis=1)
    A, r = G @ L / lengths[:, None], d / lengths
    v = r.max() * least_distance(np.hstack([A, math.sqrt(ridge) * np.eye(len(A))]), r / r.max())[: G.shape[1]]
    return np.asarray(L @ v) if (A @ v).min() > 0.0 else None


def least_distance(A: FloatArray, r: FloatArray) -> FloatArray:
    """Return the shortest x with A x >= r (Lawson & Hanson 1974, ch. 23), checked against its own conditions."""
    active = nnls(np.vstack([A.T, r]), np.append(np.zeros(A.shape[1]), 1.0))[0] > 0.0
    x, *_ = np.linalg.lstsq(A[active], r[active], rcond=None)  # to full precision on the active rows
    multipliers, *_ = np.linalg.lstsq(A[active].T, x, rcond=None)
    assert (A @ x - r).min() > -1e-9, "a constraint is violated"
    assert multipliers.min() > -1e-9 * multipliers.max(), "a constraint is active that should not be"
    return np.asarray(x)


def floored(curvatures: FloatArray) -> FloatArray:
    """Return the curvatures, none below a tenth of the median of their sizes, which stands for unknown ones."""
    known = np.isfinite(curvatures)
    middle = float(np.median(np.abs(curvatures[known])))
    return np.where(known, np.maximum(curvatures, 0.1 * middle), middle)


class DQNFedOracle:
    """DQN-Fed: rates from one damped secant pair a client, the metric of the mean loss, lengths from curvatures."""

    def __init__(self, start: FloatArray, f: ValueAndGradient, n_clients: int, cohort_size: int, settings: Settings):
        self.f, self.n_clients, self.settings = f, n_clients, settings
        self.has_metric = 4 * cohort_size >= n_clients
        self.cache_size = 0 if cohort_size == n_clients else settings.cached_clients
        self.theta = self.before = start.copy()
        self.last_length: float | None = None  # of the last step; None before the first one
        self.scales: dict[int, float] = {}  # of every client's newest pair
        self.metric: list[Pair] = []
        self.cache: dict[int, ClientReply] = {}
        self.run = OracleRun([], [], Counter())

    def play(self, round: int, cohort: Sequence[int]) -> None:
        """Play one round, and write down theta and the status."""
        new = self.bounded({k: self.reply(k, round) for k in cohort})
        if self.has_metric and self.last_length is not None:
            self.learn_metric(np.mean([a.change for a in new.values()], axis=0))
        u, served = self.step(list(new.values()), [a for k, a in self.cache.items() if k not in new])
        length = self.length(u, served, cohort) if u.any() else 0.0
        if self.cache_size:
            self.refresh_cache(new, round)
        if length <= 1e-10 * (1.0 + np.linalg.norm(self.theta)):
            self.run.statuses.append("stop" if len(cohort) == self.n_clients else "hold")
        else:
            self.run.statuses.append("next")
            self.theta, self.before = self.theta - length * u / np.linalg.norm(u), self.theta
            self.last_length = length
        self.run.thetas.append(self.theta)

    def reply(self, k: int, round: int) -> ClientReply:
        """Return what client k sends at theta: before the first step it probes its curvature along its gradient."""
        loss, g = self.f(k, self.theta)
        if self.last_length is None:
            move = probe(self.theta, g)
            curvature = abs(Pair(move, g - self.f(k, self.theta - move)[1]).curvature)
            return ClientReply(round, g, self.capped(float(g @ g) / curvature, loss), math.nan, np.zeros_like(g))
        pair = Pair(self.theta - self.before, g - self.f(k, self.before)[1])
        return ClientReply(round, g, self.capped(self.learnt_rate(k, pair, g), loss), pair.curvature, pair.y)

    def learnt_rate(self, k: int, pair: Pair, g: FloatArray) -> float:
        """Return g'Hg, H from the client's newest pair alone; of the one before it, only the scale is kept."""
        used = damped(pair, self.scales[k]) if k in self.scales else pair
        self.run.rules["damped"] += used is not pair
        self.run.rules["no pair"] += not used.is_curved
        if not used.is_curved:
            return self.scales.get(k, math.nan) * float(g @ g)
        self.scales[k] = used.scale
        return float(g @ inverse_hessian([used], len(g)) @ g)

    def capped(self, rate: float, loss: float) -> float:
        most = 2.0 * (loss - self.settings.floor)
        is_capped = self.settings.cap and rate > most
        self.run.rules["capped"] += is_capped
        return most if is_capped else rate

    def bounded(self, replies: dict[int, ClientReply]) -> dict[int, ClientReply]:
        """Return the replies with rates whose ratios to g'g are held to the cohort's median; unknown ones become it."""
        squares = {k: float(a.gradient @ a.gradient) for k, a in replies.items()}
        ratios = {k: a.rate / squares[k] for k, a in replies.items()}
        known = [ratio for ratio in ratios.values() if ratio > 0.0]  # NaN is not
        middle = float(np.median(known)) if known else 1.0
        least, most = middle / self.settings.rate_bounds, middle * self.settings.rate_bounds
        trusted = {k: min(max(ratio, least), most) if ratio > 0.0 else middle for k, ratio in ratios.items()}
        self.run.rules["bounded"] += sum(trusted[k] != ratio for k, ratio in ratios.items() if ratio > 0.0)
        self.run.rules["no known rate"] += not known
        return {k: a._replace(rate=trusted[k] * squares[k]) for k, a in replies.items()}

    def learn_metric(self, change: FloatArray) -> None:
        """Add the change of the cohort's mean gradient along the last step."""
        pair = Pair(self.theta - self.before, change)
        used = damped(pair, self.metric[-1].scale) if self.metric else pair
        self.run.rules["damped metric"] += used is not pair
        if used.is_curved:
            self.metric = [*self.metric, used]
            self.run.rules["forgotten pair"] += len(self.metric) > self.settings.metric_memory
            self.metric = self.metric[-self.settings.metric_memory :]

    def step(self, present: list[ClientReply], absent: list[ClientReply]) -> tuple[FloatArray, list[ClientReply]]:
        """Return the step and whom it is for: everybody, else those who are present, else it is zero."""
        H = inverse_hessian(self.metric, len(self.theta))
        for served in [present + absent, present] if absent else [present]:
            G, d = np.array([a.gradient for a in served]), np.array([a.rate for a in served])
            u = shortest_step(G, d, H, self.settings.ridge)
            if u is not None:
                self.run.rules["absent served"] += served is not present
                return u, served
            self.run.rules["absent left out"] += served is not present
        return np.zeros_like(self.theta), present

    def length(self, u: FloatArray, served: list[ClientReply], cohort: Sequence[int]) -> float:
        """Return the length of the move along u; before the first one, the cohort measures its curvature along u."""
        curvatures = [a.curvature for a in served]
        if self.last_length is None:
            move, served = probe(self.theta, u), served[: len(cohort)]
            nearby = [self.f(k, self.theta - move)[1] for k in cohort]
            curvatures = [Pair(move, a.gradient - g).curvature for a, g in zip(served, nearby, strict=True)]
        slopes, norm = np.array([a.gradient @ u for a in served]), float(np.linalg.norm(u))
        trusted = floored(np.array(curvatures))
        lowest = slopes / (trusted * norm**2)  # the share of u at which each client's parabola is lowest
        share = min(1.0, float(lowest.min()))
        limit = math.inf if self.last_length is None else self.settings.growth * self.last_length
        rule = "by growth" if limit < share * norm else "whole step" if share == 1.0 else "by curvature"
        self.run.rules[rule] += 1
        decides = int(lowest.argmin())
        self.run.rules["by floored curvature"] += rule == "by curvature" and trusted[decides] != curvatures[decides]
        return min(share * norm, limit)

    def refresh_cache(self, new: dict[int, ClientReply], round: int) -> None:
        """Keep the new replies, and of the others the newest that are not too old; a hash decides within a round."""

        def age(item: tuple[int, ClientReply]) -> tuple[int, int]:
            k, reply = item
            return -reply.round, -(((k + 40503 * reply.round) * 2654435761) % 2**32)

        patience = 4 * math.ceil(self.n_clients / len(new))
        absent = [(k, a) for k, a in self.cache.items() if k not in new]
        young = sorted(((k, a) for k, a in absent if round - a.round < patience), key=age)
        room = max(0, self.cache_size - len(new))
        self.cache = dict(sorted(new.items(), key=age)[: self.cache_size] + young[:room])
        self.run.rules["too old"] += len(absent) - len(young)
        self.run.rules["evicted"] += max(0, len(young) - room)
        self.run.rules["not cached"] += max(0, len(new) - self.cache_size)


def oracle_run(
    start: FloatArray,
    value_and_gradient: ValueAndGradient,
    cohorts: Sequence[Sequence[int]],
    n_clients: int,
    settings: Settings | None = None,
) -> OracleRun:
    """Return theta and the status after every round of the given cohorts; a stop is the last."""
    oracle = DQNFedOracle(start, value_and_gradient, n_clients, len(cohorts[0]), settings or Settings())
    for t, cohort in enumerate(cohorts):
        oracle.play(t, cohort)
        if oracle.run.statuses[-1] == "stop":
            break
    return oracle.run

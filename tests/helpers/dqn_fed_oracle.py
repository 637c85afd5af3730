"""Whole runs of DQN-Fed and AdaFed, written again from their mathematics: nothing is shared with the package.

Dense n x n matrices instead of limited memories, whole vectors instead of their products, a dictionary of cached
replies with the models that they were computed at instead of running credits, SGD in plain loops, and least-distance
programming by SciPy's NNLS instead of pivoting. Replies are finite, and no row is zero.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
Batches = Callable[[int, int], Sequence[IntArray | None]]  # client and round in, the rows of each step out; None: all

SLACK = 1e-3  # of the mean rate, by which every rate is lowered
ALLOWANCE = 0.03  # of the mean slope, by which every slope counts as higher when the length is set


class ValueAndGradient(Protocol):
    """A client's loss and gradient at a model, on all its examples or on some of them."""

    def __call__(self, k: int, theta: FloatArray, rows: IntArray | None = None) -> tuple[float, FloatArray]: ...


class Settings(NamedTuple):
    """The settings that these runs depend on, with the package's defaults."""

    rates: str = "bfgs"  # bfgs: DQN-Fed, loss: AdaFed
    gamma: float = 1.0  # of AdaFed
    beyond: str = "mean"  # mean | stop
    cap: bool = True  # rates at most twice the loss above its floor
    metric_memory: int = 10  # secant pairs of the mean loss
    growth: float = 3.0  # the longest step, in lengths of the one before
    step_size: float = 1.0  # the first m
    ridge: float = 1e-6  # on the Gramian of the unit rows
    rate_bounds: float = 1000.0  # how far a rate per squared row may be from the median
    cached_clients: int = 100  # clients whose last replies are kept
    epochs: int = 1
    batch_size: int | None = None
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    lr_decay: float = 1.0
    floor: float = 0.0  # of the losses; belongs to the problem

    @property
    def trains(self) -> bool:
        """Whether clients train instead of sending one gradient."""
        return self.epochs > 1 or self.batch_size is not None


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
        return float(self.s @ self.y / (self.s @ self.s)) if self.s.any() else math.nan

    @property
    def is_curved(self) -> bool:
        return bool(self.s @ self.y > 1e-8 * np.linalg.norm(self.s) * np.linalg.norm(self.y))


class Cut(NamedTuple):
    """A client's reply, the model that it was computed at, and what it asks a step for."""

    round: int
    at: FloatArray  # the model
    row: FloatArray  # a gradient, or the model change of local training with its sign turned
    rate: float  # NaN: not known
    loss: float
    curvature: float = math.nan  # along the client's last move; NaN: not known

    def reached(self, theta: FloatArray) -> float:
        """What the way from the reply's model to theta has brought."""
        return float(self.row @ (self.at - theta))

    def left(self, theta: FloatArray) -> float:
        """What is left of the rate at theta: all of it at most, and three tenths at least."""
        return min(max(self.rate - self.reached(theta), 0.3 * self.rate), self.rate)


class Found(NamedTuple):
    """A step for some clients, in the given order."""

    u: FloatArray
    served: BoolArray
    beyond: bool = False


class OracleRound(NamedTuple):
    """What the server has after a round."""

    theta: FloatArray
    status: str
    notes: dict[str, float]


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


def least_distance(A: FloatArray, r: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the shortest x with A x >= r (Lawson & Hanson 1974, ch. 23) and the y >= 0 with x = A'y."""
    active = nnls(np.vstack([A.T, r]), np.append(np.zeros(A.shape[1]), 1.0))[0] > 0.0
    x, *_ = np.linalg.lstsq(A[active], r[active], rcond=None)  # to full precision on the active rows
    y = np.zeros(len(r))
    y[active], *_ = np.linalg.lstsq(A[active].T, x, rcond=None)
    assert (A @ x - r).min() > -1e-9 * max(1.0, float(np.linalg.norm(x))), "a constraint is violated"
    assert y.min() > -1e-9 * y.max(), "a constraint is active that should not be"
    return np.asarray(x), y


def at_least(A: FloatArray, d: FloatArray, ridge: float, rules: Counter[str]) -> FloatArray | None:
    """Return the shortest x with a_k'x >= d_k for all k, up to the ridge; None where there is none.

    The ridge gives every unit row one coordinate of its own, of length sqrt(ridge), so that there always is a solution;
    what a row gets along its own coordinate, x misses. Where a client then would not gain the ridge is made smaller.
    """
    lengths = np.linalg.norm(A, axis=1)
    live = lengths > 1e-12 * lengths.max()
    rows, wanted = A[live] / lengths[live, None], d[live] / lengths[live]
    most = float(wanted.max())
    if most <= 0.0:
        return np.zeros(A.shape[1])
    for share in (1.0, 1e-3, 1e-6):
        own = math.sqrt(share * ridge) * np.eye(len(rows))
        x, y = least_distance(np.hstack([rows, own]), wanted / most)
        if not x @ x > 1e-12 * y.sum() ** 2:  # the hull of the rows comes to zero
            return None
        if (rows @ x[: A.shape[1]])[wanted > 0.0].min() > 0.0:
            rules["smaller ridge"] += share < 1.0
            return np.asarray(most * x[: A.shape[1]])
    return None


def for_everybody(A: FloatArray, d: FloatArray, losses: FloatArray, ridge: float, rules: Counter[str]) -> Found:
    """Return the step for all rows, or the one that lowers their mean where that one hardly does or is not there."""
    mean, everybody = A.mean(axis=0), np.ones(len(d), dtype=np.bool_)
    x = at_least(A, d - SLACK * d.mean(), ridge, rules)
    if x is not None and mean @ x >= 0.1 * np.linalg.norm(mean) * np.linalg.norm(x):
        return Found(x, everybody)
    rules["perpendicular" if x is not None else "opposed"] += 1
    if mean @ mean <= 1e-12 * np.square(A).sum(axis=1).mean():
        rules["mean vanishes"] += 1
        return Found(np.zeros(A.shape[1]), ~everybody, beyond=True)
    for name, spared in (("above average", losses >= losses.mean()), ("the worst", losses >= losses.max())):
        x = at_least(np.vstack([A[spared], mean]), np.append(np.zeros(spared.sum()), d.mean()), ridge, rules)
        if x is None:
            continue
        ahead = float(mean @ x)
        is_near = ahead >= 0.3 * np.linalg.norm(mean) * np.linalg.norm(x)
        if is_near and (A[spared] @ x).min() >= -0.05 * ahead:
            rules[f"spares {name}"] += 1
            return Found(x, spared, beyond=True)
    rules["spares nobody"] += 1
    return Found(mean * d.mean() / (mean @ mean), ~everybody, beyond=True)


def floored(curvatures: FloatArray, lengths: FloatArray) -> FloatArray:
    """Return the curvatures, none below a tenth of what is usual for the row's length, which stands for unknown ones.

    Usual is the median size, or the median size per length of row times the row's own length if that is less.
    """
    known = np.isfinite(curvatures)
    if not known.any():
        return curvatures
    sizes = np.abs(curvatures[known])
    usual = np.minimum(np.median(sizes), lengths * np.median(sizes / lengths[known]))
    return np.asarray(np.where(known, np.maximum(np.nan_to_num(curvatures), 0.1 * usual), usual))


class DQNFedOracle:
    """The method: rows and rates of the clients, one step for all of them, and its length."""

    def __init__(
        self,
        start: FloatArray,
        f: ValueAndGradient,
        n_clients: int,
        cohort_size: int,
        settings: Settings,
        batches: Batches | None = None,
    ):
        self.f, self.n_clients, self.settings, self.batches = f, n_clients, settings, batches
        self.by_curvature = not settings.trains and cohort_size == n_clients
        self.cache_size = 0 if cohort_size == n_clients else min(settings.cached_clients, n_clients)
        self.theta = self.before = self.start = start.copy()
        self.step_length: float | None = None  # of the last step; None before the first one
        self.alpha = 0.0  # of the last step; 0 before the first one
        self.n_steps, self.log_m, self.is_back = 0, 0.0, False
        self.depth = 0  # steps that lead from the start to theta
        self.losses: dict[int, tuple[int, float]] = {}  # depth and loss above the floor at every client's last reply
        self.start_losses: dict[int, float] = {}  # above the floor, at the start
        self.scales: dict[int, float] = {}  # of every client's newest pair
        self.kept: dict[int, tuple[FloatArray, FloatArray]] = {}  # model and gradient of every client's last reply
        self.metric: list[Pair] = []
        self.rows_before: dict[int, FloatArray] = {}  # of those whom the last step was for
        self.cache: dict[int, Cut] = {}
        self.rounds: list[OracleRound] = []
        self.rules: Counter[str] = Counter()  # how often each rule decided something

    @property
    def enough_clients(self) -> int:
        """How many must be known before m rises: all but a quarter, or ten."""
        return min(math.ceil(0.75 * self.n_clients), 10)

    # A round.

    def play(self, round: int, cohort: Sequence[int]) -> None:
        """Play one round, and write down theta, the status and the notes."""
        replies = {k: self.reply(k, round) for k in cohort}
        if not self.by_curvature and self.is_above_start(replies):
            self.start_again()
            return
        factor = self.retreat_factor(replies)
        if factor > 1.0:
            self.go_back(replies, factor)
            return
        absent = {k: cut for k, cut in self.cache.items() if k not in replies}
        present = self.with_rates(replies, absent)
        self.learn_metric(present)
        cuts = [*present.values(), *absent.values()]
        rates = np.array([*(c.rate for c in present.values()), *(c.left(self.theta) for c in absent.values())])
        self.rules["absent"] += len(absent)
        self.rules["credited"] += sum(c.left(self.theta) < c.rate for c in absent.values())
        self.rules["fully credited"] += sum(c.reached(self.theta) >= c.rate for c in absent.values())
        found, notes = self.step(cuts, rates, len(present)), dict[str, float]()
        if self.by_curvature:
            self.record_losses(present)
            length = self.length_by_curvature(found, present)
            self.rows_before = {k: cut.row for k, cut in present.items()}
        else:
            length, notes = self.length_by_votes(found, present, rates[: len(present)])
            self.refresh_cache(present, round)
            self.record_losses(present)
        self.rules["beyond"] += found.beyond
        self.move(found, length, {**notes, "beyond": float(found.beyond)}, len(present))

    def move(self, found: Found, length: float, notes: dict[str, float], n_present: int) -> None:
        norm = float(np.linalg.norm(found.u))
        strict = self.settings.beyond == "stop"
        notes["step_norm"] = length
        notes["alpha"] = length / norm if norm > 0.0 else 0.0
        if norm == 0.0 or (strict and length <= 1e-10 * (1.0 + np.linalg.norm(self.theta))):
            status = "stop" if n_present == self.n_clients else "hold"
            self.rounds.append(OracleRound(self.theta, status, notes))
            return
        self.theta, self.before = self.theta - length * found.u / norm, self.theta
        self.step_length, self.alpha, self.is_back = length, length / norm, False
        self.n_steps, self.depth = self.n_steps + 1, self.depth + 1
        self.rounds.append(OracleRound(self.theta, "next", notes))

    def go_back(self, replies: dict[int, Cut], factor: float) -> None:
        """Take the last step back; what is learnt of this round is the gradients of everybody."""
        self.theta, self.before = self.before, self.theta
        assert self.step_length is not None
        self.step_length /= factor
        self.log_m, self.is_back = max(self.log_m - math.log(factor), -9.0), True
        self.depth -= 1
        if self.by_curvature:
            self.rows_before = {k: cut.row for k, cut in replies.items()}
        self.rules["retreat"] += 1
        self.rounds.append(OracleRound(self.theta, "next", {"retreat": factor}))

    def start_again(self) -> None:
        """Go back to the start with steps of a quarter; nothing is kept of the replies since."""
        self.theta, self.before = self.start, self.theta
        assert self.step_length is not None
        self.step_length /= 4.0
        self.log_m, self.is_back = max(self.log_m - math.log(4.0), -9.0), True
        self.depth, self.losses, self.cache = 0, {}, {}
        self.rules["restart"] += 1
        self.rounds.append(OracleRound(self.theta, "next", {"restart": 4.0}))

    # The clients.

    def reply(self, k: int, round: int) -> Cut:
        loss, g = self.f(k, self.theta)
        if self.settings.trains:
            row, model = self.theta - self.trained(k, round), float(np.linalg.norm(self.theta))
            if np.linalg.norm(row) > model > 0.0:
                row = row * (model / np.linalg.norm(row))
                self.rules["shortened row"] += 1
            rate = self.loss_rate(loss) if self.settings.rates == "loss" else math.nan
            return Cut(round, self.theta, row, rate, loss)
        curvature = math.nan
        pair = Pair(np.zeros_like(g), np.zeros_like(g))
        if k in self.kept:
            pair = Pair(self.theta - self.kept[k][0], g - self.kept[k][1])
        self.kept[k] = self.theta, g
        if self.settings.rates == "loss":
            rate = self.loss_rate(loss)
        elif self.n_steps == 0:
            move = probe(self.theta, g)
            rate = float(g @ g) / abs(Pair(move, g - self.f(k, self.theta - move)[1]).curvature)
        else:
            rate = self.learnt_rate(k, pair, g)
        if self.n_steps > 0:
            curvature = pair.curvature
        return Cut(round, self.theta, g, self.capped(rate, loss), loss, curvature)

    def trained(self, k: int, round: int) -> FloatArray:
        """Return the model after the client's SGD with momentum and weight decay."""
        s = self.settings
        assert self.batches is not None
        theta, velocity, lr = self.theta, np.zeros_like(self.theta), s.lr * s.lr_decay**round
        for rows in self.batches(k, round):
            velocity = s.momentum * velocity + self.f(k, theta, rows)[1] + s.weight_decay * theta
            theta = theta - lr * velocity
        return theta

    def loss_rate(self, loss: float) -> float:
        return float(max(loss - self.settings.floor, 0.0) ** self.settings.gamma)

    def learnt_rate(self, k: int, pair: Pair, g: FloatArray) -> float:
        """Return g'Hg, H from the client's newest pair alone; of the one before it, only the scale is kept."""
        used = damped(pair, self.scales[k]) if k in self.scales and pair.s.any() else pair
        self.rules["damped"] += used is not pair
        if not used.is_curved:
            self.rules["no pair"] += 1
            return self.scales[k] * float(g @ g) if k in self.scales else math.nan
        self.scales[k] = used.scale
        return float(g @ inverse_hessian([used], len(g)) @ g)

    def capped(self, rate: float, loss: float) -> float:
        most = 2.0 * max(loss - self.settings.floor, 0.0)
        is_capped = self.settings.cap and rate > most  # NaN is not
        self.rules["capped"] += is_capped
        return most if is_capped else rate

    # The server: rates, metric, step.

    def with_rates(self, replies: dict[int, Cut], absent: dict[int, Cut]) -> dict[int, Cut]:
        """Return the replies with rates that are known and not far from those of the other clients."""
        squares = {k: float(c.row @ c.row) for k, c in replies.items()}
        if self.settings.trains and self.settings.rates != "loss":
            return {k: c._replace(rate=squares[k]) for k, c in replies.items()}
        rates = {k: c.rate for k, c in replies.items()}
        if self.settings.rates == "loss" and (self.settings.trains or self.settings.gamma != 1.0):
            wanted = sum(squares.values() if self.settings.trains else (c.loss for c in replies.values()))
            if not self.settings.trains:
                wanted -= self.settings.floor * len(replies)
            total = sum(rates.values())
            rates = {k: rate * wanted / total for k, rate in rates.items()}
        ratios = {k: rate / squares[k] for k, rate in rates.items()}
        sample = [*ratios.values(), *(c.rate / float(c.row @ c.row) for c in absent.values())]
        sample = [ratio for ratio in sample if ratio > 0.0]  # NaN is not
        self.rules["no known rate"] += not sample
        if not sample:
            return {k: c._replace(rate=squares[k]) for k, c in replies.items()}
        middle, bound = float(np.median(sample)), self.settings.rate_bounds
        held = {k: min(max(q, middle / bound), middle * bound) if q >= 0.0 else middle for k, q in ratios.items()}
        self.rules["filled in"] += sum(math.isnan(q) for q in ratios.values())
        self.rules["bounded"] += sum(held[k] != q for k, q in ratios.items() if q >= 0.0)
        return {k: c._replace(rate=self.capped(held[k] * squares[k], c.loss)) for k, c in replies.items()}

    def learn_metric(self, present: dict[int, Cut]) -> None:
        """Add the change along the last move of the mean gradient of those whom it was for, if all of them are here."""
        if not self.by_curvature or not self.rows_before:
            return
        if not self.rows_before.keys() <= present.keys():
            self.rules["no metric pair"] += 1
            return
        change = np.mean([present[k].row - row for k, row in self.rows_before.items()], axis=0)
        pair = Pair(self.theta - self.before, change)
        used = damped(pair, self.metric[-1].scale) if self.metric else pair
        self.rules["damped metric"] += used is not pair
        if used.is_curved:
            self.metric = [*self.metric, used]
            self.rules["forgotten pair"] += len(self.metric) > self.settings.metric_memory
            self.metric = self.metric[-self.settings.metric_memory :]

    def step(self, cuts: list[Cut], rates: FloatArray, n_present: int) -> Found:
        """Return the step u = L x with H = LL' the inverse of the metric, so that x is shortest in the usual sense."""
        L = np.linalg.cholesky(inverse_hessian(self.metric, len(self.theta)))
        A, losses = np.array([c.row for c in cuts]) @ L, np.array([c.loss for c in cuts])
        if self.settings.beyond == "mean":
            found = for_everybody(A, rates, losses, self.settings.ridge, self.rules)
            return found._replace(u=L @ found.u)
        for n in [len(cuts), n_present] if len(cuts) > n_present else [n_present]:
            x = at_least(A[:n], rates[:n], self.settings.ridge, self.rules)
            if x is not None:
                self.rules["absent left out"] += n < len(cuts)
                return Found(L @ x, np.arange(len(cuts)) < n)
        return Found(np.zeros_like(self.theta), np.arange(len(cuts)) < n_present)

    # The server: length of the step.

    def length_by_curvature(self, found: Found, replies: dict[int, Cut]) -> float:
        """Return the length of the move along u; before the first one, clients measure their curvature along u."""
        norm, present = float(np.linalg.norm(found.u)), list(replies.values())
        if norm == 0.0:
            return 0.0
        growth = self.settings.growth if self.rows_before.keys() == replies.keys() else 1.0
        curvatures = np.array([c.curvature for c in present])
        if self.step_length is None:
            move = probe(self.theta, found.u)
            nearby = [self.f(k, self.theta - move)[1] for k in replies]
            curvatures = np.array([Pair(move, c.row - g).curvature for c, g in zip(present, nearby, strict=True)])
        slopes = np.array([c.row @ found.u for c in present])
        lengths = np.array([np.linalg.norm(c.row) for c in present])
        if found.beyond:  # the limits are those of the spared clients and of the mean
            assert self.step_length is not None, "the first step is for everybody in these runs"
            mean = np.mean([c.row for c in present], axis=0)
            slopes = np.append(slopes[found.served], mean @ found.u)
            lengths = np.append(lengths[found.served], np.linalg.norm(mean))
            curvatures = np.append(curvatures[found.served], curvatures.mean())
        return self.limited(slopes, floored(curvatures, lengths), curvatures, norm, growth)

    def limited(
        self, slopes: FloatArray, trusted: FloatArray, curvatures: FloatArray, norm: float, growth: float
    ) -> float:
        """Return the length at which the first parabola is lowest, at most u's, at most `growth` times the last."""
        allowed = slopes + (0.0 if self.settings.beyond == "stop" else ALLOWANCE * np.maximum(slopes, 0.0).mean())
        if allowed.min() <= 0.0:
            self.rules["nobody may lose"] += 1
            return 0.0
        lowest = allowed / (trusted * norm**2) if np.isfinite(trusted).all() else np.full(len(slopes), np.inf)
        share, limit = min(1.0, float(lowest.min())), math.inf
        if self.step_length:
            limit = self.step_length * (growth if np.isfinite(trusted).all() else 1.0)
        if self.alpha > 0.0 and growth * self.alpha * norm < limit:
            limit = growth * self.alpha * norm
            self.rules["by growth of alpha"] += limit < share * norm
        elif self.step_length:
            self.rules["by growth"] += limit < share * norm
        self.rules["after a retreat, by growth"] += self.is_back and limit < share * norm
        is_of_others = self.step_length is not None and growth != self.settings.growth
        self.rules["last step of others, by growth"] += is_of_others and limit < share * norm
        rule = "limit" if limit < share * norm else "whole step" if share == 1.0 else "by curvature"
        self.rules[rule] += 1
        decides = int(lowest.argmin())
        self.rules["by floored curvature"] += rule == "by curvature" and trusted[decides] != curvatures[decides]
        self.rules["by allowance"] += rule == "by curvature" and slopes[decides] <= 0.0
        return min(share * norm, limit)

    def length_by_votes(
        self, found: Found, present: dict[int, Cut], rates: FloatArray
    ) -> tuple[float, dict[str, float]]:
        """Return m times the length of the clients' mean step, each its row scaled to what reaches its rate."""
        n_known = len(self.losses.keys() | present.keys())
        share = self.count_votes(present, n_known)
        own = [rate / float(c.row @ c.row) * c.row for rate, c in zip(rates, present.values(), strict=True)]
        m = self.settings.step_size * math.exp(self.log_m)
        self.rules["beyond, at most the mean step"] += found.beyond and m > 1.0
        length = (min(m, 1.0) if found.beyond else m) * float(np.linalg.norm(np.mean(own, axis=0)))
        enough, norm = self.enough_clients, float(np.linalg.norm(found.u))
        if not self.settings.trains and n_known < enough:
            length *= n_known / enough * min(1.0, n_known / (len(present) * (self.n_steps + 1)))
            self.rules["slow start"] += 1
        if found.beyond and self.alpha > 0.0 and length > 2.0 * self.alpha * norm:
            length = 2.0 * self.alpha * norm
            self.rules["beyond, by growth of alpha"] += 1
        if self.is_back and self.step_length is not None and length > self.step_length:
            length = self.step_length
            self.rules["after a retreat, by growth"] += 1
        notes = {"m": m} if math.isnan(share) else {"votes": share, "m": m}
        return (length, notes) if norm > 0.0 else (0.0, notes)

    def count_votes(self, present: dict[int, Cut], n_known: int) -> float:
        """Change m by the votes of those for whom the last step was too short or too long; return the share of 'too
        short'."""
        if self.alpha == 0.0 or self.is_back:
            return math.nan
        last, votes, again = self.before - self.theta, [], []
        for k, cut in present.items():
            now = cut.loss - self.settings.floor
            has_risen = k in self.losses and now > self.losses[k][1]
            votes.append(bool(cut.row @ last > 0.0) and not has_risen)
            again += [(now, self.losses[k][1])] if k in self.losses else []
        share = float(np.mean(votes))
        log_m = self.log_m + max(0.3, 1.0 / self.n_steps) * (share - 0.5)
        if again and sum(now for now, _ in again) > 1.3 * sum(then for _, then in again):
            log_m -= math.log(2.0)
            self.rules["halved m"] += 1
        highest = 9.0 if n_known >= self.enough_clients else 0.0
        self.rules["m held back"] += log_m > highest
        self.log_m = min(max(log_m, -9.0), highest)
        return share

    # The server: losses and cache.

    def record_losses(self, present: dict[int, Cut]) -> None:
        now = {k: c.loss - self.settings.floor for k, c in present.items()}
        self.losses |= {k: (self.depth, loss) for k, loss in now.items()}
        self.start_losses |= now if self.depth == 0 else {}

    def is_above_start(self, replies: dict[int, Cut]) -> bool:
        """Return whether the clients that replied at the start are on average clearly worse off, and not just now.

        While few are known, a client that never replied counts as the worst at the start.
        """
        if self.alpha == 0.0 or self.is_back or not self.start_losses:
            return False
        then = {k: self.start_losses[k] for k in replies if k in self.start_losses}
        unknown = [k for k in replies if k not in self.start_losses and k not in self.losses]
        if len(self.losses) < self.enough_clients:
            then |= dict.fromkeys(unknown, max(self.start_losses.values()))
        self.rules["start not known"] += len(then) < len(replies)
        self.rules["asked for the first time"] += len(unknown)
        now = {k: replies[k].loss - self.settings.floor for k in then}
        lower = {k: min(loss, self.losses[k][1]) if k in self.losses else loss for k, loss in now.items()}
        most = (1.2 if len(replies) == self.n_clients else 2.0) * sum(then.values())
        self.rules["above the start by the last step alone"] += sum(lower.values()) <= most < sum(now.values())
        return sum(lower.values()) > most

    def is_told_by_all(self, replies: dict[int, Cut]) -> bool:
        """Return whether every client has sent a gradient, so that the last step alone has changed the losses."""
        return len(replies) == self.n_clients and not self.settings.trains

    def allowed_rise(self, replies: dict[int, Cut]) -> float:
        return 1.05 if self.is_told_by_all(replies) else 2.0

    def retreat_factor(self, replies: dict[int, Cut]) -> float:
        """Return by how much steps must be shorter; 1 where the losses do not say that the last one was too long."""
        if self.alpha == 0.0 or self.is_back:
            return 1.0
        usual = float(np.mean([loss for _, loss in self.losses.values()]))
        at_start = float(np.mean([*self.start_losses.values()]))
        then = [self.losses.get(k, (0, max(usual, at_start))) for k in replies]
        now = float(np.mean([c.loss for c in replies.values()])) - self.settings.floor
        ratio = now / max(float(np.mean([loss for _, loss in then])), usual)
        n_steps = max(1.0, float(np.mean([self.depth - depth for depth, _ in then])))
        if ratio <= 1.0 + (self.allowed_rise(replies) - 1.0) * n_steps:
            return 1.0
        return min(max(2.0, math.sqrt(ratio)), 100.0)

    def refresh_cache(self, new: dict[int, Cut], round: int) -> None:
        """Keep the new replies, and of the others the newest that are not too old; a hash decides within a round."""

        def age(item: tuple[int, Cut]) -> tuple[int, int]:
            k, cut = item
            return -cut.round, -(((k + 40503 * cut.round) * 2654435761) % 2**32)

        patience = 4 * math.ceil(self.n_clients / len(new))
        absent = [(k, cut) for k, cut in self.cache.items() if k not in new]
        young = sorted(((k, cut) for k, cut in absent if round - cut.round < patience), key=age)
        room = max(0, self.cache_size - len(new))
        self.cache = dict(sorted(new.items(), key=age)[: self.cache_size] + young[:room])
        self.rules["too old"] += len(absent) - len(young)
        self.rules["evicted"] += max(0, len(young) - room)
        self.rules["not cached"] += max(0, len(new) - self.cache_size)


def oracle_run(
    start: FloatArray,
    value_and_gradient: ValueAndGradient,
    cohorts: Sequence[Sequence[int]],
    n_clients: int,
    settings: Settings,
    batches: Batches | None = None,
) -> DQNFedOracle:
    """Return the oracle after rounds of the given cohorts; a stop is the last."""
    size = max(len(cohort) for cohort in cohorts)  # in some rounds some may not have replied
    oracle = DQNFedOracle(start, value_and_gradient, n_clients, size, settings, batches)
    for t, cohort in enumerate(cohorts):
        oracle.play(t, cohort)
        if oracle.rounds[-1].status == "stop":
            break
    return oracle

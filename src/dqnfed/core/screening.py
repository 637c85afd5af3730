"""What happens to bad replies before any method sees them: dropped, clipped, and written down."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm, Info, check_choice, check_range, check_types
from dqnfed.core.problem import Problem, check_norms
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import named_tensors

FloatArray = NDArray[np.float64]
R = TypeVar("R", bound=Replies[Any])
BoolArray = NDArray[np.bool_]
UPDATE_NOT_FINITE = "update is not finite"  # why such a reply is dropped
UNCHECKED = 3.0  # times the median: scalars of clients whose replies could not be compared with earlier ones
UNCHECKED_LENGTH = 1.5  # times the median: rows of such clients
JUMP_LENGTH = 2.0  # times the median and the client's own rows before: rows of the others
SQUARABLE = 0.1  # longer replies than this share of the square root of the largest number are dropped
A = TypeVar("A", bound=AnyAlgorithm)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the server treats clients that fail, send false values or disappear."""

    on_nonfinite: str = "drop"  # drop | fail
    max_update_norm: float = 10.0  # times the cohort's median norm; longer updates are clipped to it; inf: never
    min_replies: int = 1  # a round with fewer usable replies keeps the model as it is
    on_missing: str = "proceed"  # proceed | fail: a client that does not reply; simulated clients always do
    timeout: float = 3600.0  # seconds that a deployed client has for a reply
    rate_bounds: float | None = None  # replaces the method's own `rate_bounds` where it has any; None: as it is there
    scalar_bounds: float | None = None  # on reported losses, rates, curvatures: times their median; None: no bound
    max_size_ratio: float = 100.0  # times the median of claimed sizes; a deployed client's weight is held there; >= 1
    on_worse: str | None = None  # best | last: of a run that ends above its start; None: best on Flower without noise
    drop_share: float | None = None  # likewise: share of a cohort that may be left out for inconsistent replies

    def __post_init__(self) -> None:
        check_types(self)
        check_choice(self, "on_nonfinite", ("drop", "fail"))
        check_choice(self, "on_missing", ("proceed", "fail"))
        if self.on_worse is not None:
            check_choice(self, "on_worse", ("best", "last"))
        check_range(self, "timeout", low=0.0, high=math.inf, open_low=True)
        if self.rate_bounds is not None:
            check_range(self, "rate_bounds", low=1.0, high=math.inf)
        if self.scalar_bounds is not None:
            check_range(self, "scalar_bounds", low=1.0, high=math.inf)
        if self.drop_share is not None:
            check_range(self, "drop_share", low=0.0, high=1.0, open_high=True)
        check_range(self, "max_update_norm", low=1.0, high=math.inf)
        check_range(self, "max_size_ratio", low=1.0, high=math.inf)
        check_range(self, "min_replies", low=1)


def prepared_with(algorithm: A, policy: Policy, problem: Problem, n_clients: int, cohort_size: int) -> A:
    """Return the prepared method with the policy's bounds on what clients report, where they have an effect on it."""
    check_norms(problem, type(algorithm).__name__, algorithm.info.problem_kinds)
    prepared = algorithm.prepare(problem, n_clients, cohort_size)
    given = {"rate_bounds": policy.rate_bounds, "drop_share": policy.drop_share}
    bounds: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    has = {f.name for f in fields(algorithm)}
    if getattr(prepared, "local", None) == "sgd":  # updates of local SGD come without rates
        has -= set(getattr(prepared, "gradient_settings", ()))
    bounds = {key: value for key, value in bounds.items() if key in has}
    return replace(algorithm, **bounds).prepare(problem, n_clients, cohort_size) if bounds else prepared


def check_min_replies(policy: Policy, cohort_size: int) -> None:
    """Refuse a policy that no round can meet."""
    if policy.min_replies > cohort_size:
        raise ValueError(
            f"`policy.min_replies` is {policy.min_replies}, but only {cohort_size} clients are asked each round, so no "
            "round could ever change the model; raise `participation` or lower `min_replies`."
        )


class Screened(NamedTuple):
    """Which replies are kept, and what was done to them."""

    kept: Tensor  # [K'] positions in the cohort, ascending
    factors: Tensor  # [K'] factor on each kept update; 1 = unchanged
    dropped: list[tuple[int, str]]  # (position, why)
    unchanged: bool = False  # whether it is known that nothing was dropped or clipped


def screen(replies: Replies[Any], policy: Policy, info: Info) -> Screened:
    """Return which replies are usable: finite, not of zero norm; and how far the longest are to be clipped."""
    n, fields_sent = len(replies), named_tensors(replies.updates).items()
    finite = {k: t for k, t in fields_sent if k not in info.nan_ok_fields and t.is_floating_point() and t.numel()}
    norms = {name: replies.norms(name) for name in finite}
    if _all_fine(replies.updates, norms, policy, info.clip_fields):
        return _untouched(n)
    usable = np.ones(n, dtype=np.bool_)
    for name, t in finite.items():
        for k in (~np.isfinite(norms[name])).nonzero()[0]:
            usable[k] &= bool(torch.isfinite(t[int(k)]).all())  # a norm may overflow where no number does
    measured = finite.get(info.clip_fields[0]) if info.clip_fields else None
    lengths = np.ones(n) if measured is None else _safe_lengths(norms[info.clip_fields[0]], measured)
    dropped = [(k, UPDATE_NOT_FINITE) for k in (~usable).nonzero()[0]]
    dropped += [(k, "update has zero norm") for k in (usable & (lengths == 0)).nonzero()[0]]
    usable &= lengths > 0
    kept = usable.nonzero()[0]
    factors = np.ones(len(kept))
    if len(kept) and measured is not None:
        longest = policy.max_update_norm * median(lengths[kept].tolist())
        clipped = np.minimum(lengths[kept], longest)
        squarable = clipped < SQUARABLE * math.sqrt(torch.finfo(measured.dtype).max)
        dropped += [(k, "update is too long to be squared") for k in kept[~squarable]]
        factors = (clipped / lengths[kept])[squarable]
        kept = kept[squarable]
    return Screened(torch.from_numpy(kept), torch.from_numpy(factors), [(int(k), why) for k, why in dropped])


def clip_unusual(replies: Replies[Any], found: Screened, policy: Policy, field: str, usual: FloatArray) -> Screened:
    """Return the factors with which no row is far longer than the cohort's median and than this client's rows before.

    `usual` [K'] are the lengths of its rows before; NaN: they could not be checked yet. Like scalars, rows are held
    only where the policy sets `scalar_bounds`.
    """
    lengths = kept_lengths(replies, found, field)
    if policy.scalar_bounds is None or len(lengths) < 3 or not np.isfinite(lengths).all():
        return found
    middle = median(lengths.tolist())
    known = np.isfinite(usual)
    longest = np.where(known, JUMP_LENGTH * np.fmax(usual, middle), UNCHECKED_LENGTH * middle)
    shorter = np.where(lengths > longest, longest / np.where(lengths > 0.0, lengths, 1.0), 1.0)
    if (shorter == 1.0).all():
        return found
    return found._replace(factors=found.factors * torch.from_numpy(shorter), unchanged=False)


def kept_lengths(replies: Replies[Any], found: Screened, field: str) -> FloatArray:
    """Return the lengths of the rows that are kept, as they are clipped."""
    lengths: FloatArray = replies.norms(field)[found.kept.numpy()] * found.factors.numpy()
    return lengths


def hold_scalars(
    replies: R, policy: Policy, info: Info, checked: BoolArray | None = None
) -> tuple[R, list[tuple[int, str, float]]]:
    """Return the replies with scalars that steer the step held near the cohort's, and whose were: place, field, limit.

    No size may be more than `scalar_bounds` times the cohort's median size, and `UNCHECKED` times where nothing that
    the client said before could be compared with it (`checked`); of fewer than three clients nobody's is usual.
    """
    held: list[tuple[int, str, float]] = []
    if policy.scalar_bounds is None or len(replies) < 3:
        return replies, held
    for name in info.bounded_fields:
        if name not in replies.fields:
            continue
        sizes = np.abs(replies.scalars(name))
        known = sizes[np.isfinite(sizes)]
        usual = median(known.tolist()) if len(known) >= 3 else math.inf
        limits = np.full(len(sizes), usual * policy.scalar_bounds)
        if checked is not None:
            limits = np.where(checked, limits, usual * min(UNCHECKED, policy.scalar_bounds))
        outside = np.flatnonzero(sizes > limits)  # NaN is not
        if len(outside):
            held += [(int(k), name, float(limits[k])) for k in outside]
            values = replies.scalars(name)
            replies = replies.replaced(name, torch.from_numpy(np.clip(values, -limits, limits)))
    return replies, held


def screened_replies(replies: R, found: Screened, info: Info) -> R:
    """Return the kept replies, the clipped ones scaled down in every field that is homogeneous in their size."""
    if found.unchanged:
        return replies
    if len(found.kept) < len(replies):
        replies = replies.take(found.kept)
    if all(factor == 1 for factor in found.factors.tolist()):
        return replies
    return replies.scaled(found.factors, info.clip_fields)


@lru_cache(maxsize=8)  # nearly every round has this outcome
def _untouched(n: int) -> Screened:
    return Screened(torch.arange(n), torch.ones(n, dtype=torch.float64), [], unchanged=True)


def _all_fine(
    updates: tuple[Any, ...], norms: dict[str, FloatArray], policy: Policy, clip_fields: tuple[str, ...]
) -> bool:
    """Return whether the norms alone show that every reply is finite and of a usual length, as nearly all are."""
    if not all(np.isfinite(lengths).all() for lengths in norms.values()):
        return False
    if not clip_fields or clip_fields[0] not in norms:
        return True
    lengths: list[float] = norms[clip_fields[0]].tolist()
    longest, largest = max(lengths), torch.finfo(getattr(updates, clip_fields[0]).dtype).max
    is_usual = min(lengths) > 1e-18 and longest < min(1e18, SQUARABLE * math.sqrt(largest))
    return is_usual and longest <= policy.max_update_norm * median(lengths)


def _safe_lengths(lengths: FloatArray, updates: Tensor) -> FloatArray:
    """Return the rows' Euclidean norms; those whose squares may overflow or vanish are measured again, scaled."""
    lengths, rows = lengths.copy(), updates.flatten(1)
    for k in ((lengths < 1e-18) | (lengths > 1e18)).nonzero()[0]:
        largest = rows[int(k)].abs().amax().double()
        scaled = largest * torch.linalg.vector_norm(rows[int(k)] / largest)
        lengths[k] = float(scaled) if largest > 0 else 0.0
    return np.minimum(lengths, np.finfo(np.float64).max)

"""What happens to bad answers before any method sees them: dropped, clipped, and written down."""

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

from dqnfed.core.algorithm import AnyAlgorithm, check_choice, check_range
from dqnfed.core.digest import Digest
from dqnfed.core.tensors import gather, n_rows, named_tensors

FloatArray = NDArray[np.float64]
U = TypeVar("U", bound=tuple[Any, ...])
A = TypeVar("A", bound=AnyAlgorithm)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How the server treats clients that fail, lie or disappear."""

    on_nonfinite: str = "drop"  # drop | fail
    max_update_norm: float = 10.0  # times the cohort's median norm; longer updates are clipped to it; inf: never
    min_replies: int = 1  # a round with fewer usable answers keeps the model as it is
    on_missing: str = "proceed"  # proceed | fail: a client that gives no answer; simulated clients always do
    timeout: float = 3600.0  # seconds that a deployed client has for an answer
    rate_bounds: float | None = None  # replaces the method's own `rate_bounds` where it has any; None: as it is there
    drop_share: float | None = None  # likewise: share of a cohort that may be left out for contradicting itself

    def __post_init__(self) -> None:
        check_choice(self, "on_nonfinite", ("drop", "fail"))
        check_choice(self, "on_missing", ("proceed", "fail"))
        check_range(self, "timeout", low=0.0, open_low=True)
        if self.rate_bounds is not None:
            check_range(self, "rate_bounds", low=1.0)
        if self.drop_share is not None:
            check_range(self, "drop_share", low=0.0, high=1.0, open_high=True)
        check_range(self, "max_update_norm", low=1.0)
        check_range(self, "min_replies", low=1)


def guarded(algorithm: A, policy: Policy) -> A:
    """Return the method with the policy's bounds on what clients say, where the method has such bounds."""
    has = {f.name for f in fields(algorithm)}
    given = {"rate_bounds": policy.rate_bounds, "drop_share": policy.drop_share}
    bounds: dict[str, Any] = {name: value for name, value in given.items() if value is not None and name in has}
    return replace(algorithm, **bounds) if bounds else algorithm


def check_replies(policy: Policy, cohort_size: int) -> None:
    """Refuse a policy that no round can meet."""
    if policy.min_replies > cohort_size:
        raise ValueError(
            f"`policy.min_replies` is {policy.min_replies}, but only {cohort_size} clients are asked each round, so no "
            "round could ever change the model; raise `participation` or lower `min_replies`."
        )


class Screened(NamedTuple):
    """Who is left, and what was done to whom."""

    kept: Tensor  # [K'] positions in the cohort, ascending
    factors: Tensor  # [K'] factor on each kept update; 1 = as it came
    dropped: list[tuple[int, str]]  # (position, why)
    as_they_came: bool = False  # whether it is known that nobody was dropped or clipped


def screen(
    updates: tuple[Any, ...],
    policy: Policy,
    scales: tuple[str, ...],
    optional: tuple[str, ...] = (),
    *,
    digest: Digest | None = None,  # of these answers, where there is one: then nothing is measured again
) -> Screened:
    """Return which stacked answers are usable: finite, not of zero norm; and how far the longest are to be clipped."""
    n = n_rows(updates)
    required = _required(updates, optional) if digest is None else {}
    norms = _norms(required) if digest is None else digest.norms
    if _all_fine(updates, norms, policy, scales, optional):
        return _untouched(n)
    required = required or _required(updates, optional)
    usable = np.ones(n, dtype=np.bool_)
    for name, rows in required.items():
        for k in (~np.isfinite(norms[name])).nonzero()[0]:
            usable[k] &= bool(torch.isfinite(rows[int(k)]).all())  # a norm may overflow where no number does
    measured = required.get(scales[0]) if scales else None
    lengths = np.ones(n) if measured is None else _trusted_lengths(norms[scales[0]], measured)
    dropped = [(k, "update is not finite") for k in (~usable).nonzero()[0]]
    dropped += [(k, "update has zero norm") for k in (usable & (lengths == 0)).nonzero()[0]]
    usable &= lengths > 0
    kept = usable.nonzero()[0]
    factors = np.ones(len(kept))
    if len(kept) and measured is not None:
        longest = policy.max_update_norm * median(lengths[kept].tolist())
        clipped = np.minimum(lengths[kept], longest)
        squarable = clipped < _squarable(measured.dtype)
        dropped += [(k, "update is too long to be squared") for k in kept[~squarable]]
        factors = (clipped / lengths[kept])[squarable]
        kept = kept[squarable]
    return Screened(torch.from_numpy(kept), torch.from_numpy(factors), [(int(k), why) for k, why in dropped])


def screened_updates(updates: U, found: Screened, scales: tuple[str, ...]) -> U:
    """Return the kept answers, the clipped ones scaled down in every field that is homogeneous in their size."""
    if found.as_they_came:
        return updates
    if len(found.kept) < n_rows(updates):
        updates = gather(updates, found.kept)
    if all(factor == 1 for factor in found.factors.tolist()):
        return updates

    def scaled(t: Tensor) -> Tensor:
        factors = found.factors.to(t.device, t.dtype)
        return t * factors.view(-1, *[1] * (t.dim() - 1))

    changed = {name: scaled(getattr(updates, name)) for name in scales if name in _fields(updates)}
    replaced: U = updates._replace(**changed)  # type: ignore[attr-defined]
    return replaced


def screened_digest(digest: Digest, found: Screened, scales: tuple[str, ...], n_answers: int) -> Digest:
    """Return the digest of the answers that `screened_updates` gives."""
    if found.as_they_came:
        return digest
    if len(found.kept) < n_answers:
        digest = digest.chosen(found.kept.numpy())
    # products of answers too long to be squared are taken anew, once these are cut
    known = {name: products for name, products in digest.gramians.items() if np.isfinite(products).all()}
    digest, factors = digest._replace(gramians=known), found.factors.numpy()
    return digest if (factors == 1).all() else digest.scaled(factors, scales)


@lru_cache(maxsize=8)  # nearly every round has this outcome
def _untouched(n: int) -> Screened:
    return Screened(torch.arange(n), torch.ones(n, dtype=torch.float64), [], as_they_came=True)


def _required(updates: tuple[Any, ...], optional: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the fields in which every number must be finite, each with a row for each answer."""
    return {
        name: t.reshape(t.shape[0], -1)
        for name, t in named_tensors(updates).items()
        if name not in optional and t.is_floating_point() and t.numel()
    }


def _all_fine(
    updates: tuple[Any, ...],
    norms: dict[str, FloatArray],
    policy: Policy,
    scales: tuple[str, ...],
    optional: tuple[str, ...],
) -> bool:
    """Return whether the norms alone show that every answer is finite and of a usual length, as nearly all are."""
    if not all(np.isfinite(lengths).all() for name, lengths in norms.items() if name not in optional):
        return False
    if not scales or scales[0] not in norms:
        return True
    lengths: list[float] = norms[scales[0]].tolist()
    longest, dtype = max(lengths), getattr(updates, scales[0]).dtype
    is_usual = min(lengths) > 1e-18 and longest < min(1e18, _squarable(dtype))
    return is_usual and longest <= policy.max_update_norm * median(lengths)


def _squarable(dtype: torch.dtype) -> float:
    return 0.1 * math.sqrt(torch.finfo(dtype).max)


def _norms(fields: dict[str, Tensor]) -> dict[str, FloatArray]:
    """Return the Euclidean norms of every field's rows, in one transfer from the device."""
    if not fields:
        return {}
    found = torch.stack([torch.linalg.vector_norm(rows, dim=1) for rows in fields.values()])
    return dict(zip(fields, found.double().cpu().numpy(), strict=True))


def _trusted_lengths(lengths: FloatArray, rows: Tensor) -> FloatArray:
    """Return the rows' Euclidean norms; those whose squares may be no numbers are measured again, scaled."""
    lengths = lengths.copy()
    for k in ((lengths < 1e-18) | (lengths > 1e18)).nonzero()[0]:
        largest = rows[int(k)].abs().amax().double()
        scaled = largest * torch.linalg.vector_norm(rows[int(k)] / largest)
        lengths[k] = float(scaled) if largest > 0 else 0.0
    return np.minimum(lengths, np.finfo(np.float64).max)


def _fields(record: tuple[Any, ...]) -> tuple[str, ...]:
    names: tuple[str, ...] = record._fields  # type: ignore[attr-defined]
    return names

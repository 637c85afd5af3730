"""Consistency of a client's replies: over a step s its loss must change by (g + g')'s / 2, up to terms of third order.

g and g' are its gradients at the two ends. A client that turns or enlarges its gradient but reports its true loss is
inconsistent; one that makes up a loss to match cannot be told from a client with unusual data.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.core.consistency import FEW, may_drop
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.maths.directions import bounded_by_others, drop_outlier_rows
from dqnfed.maths.solvers import BoolArray
from dqnfed.maths.step_length import rate_excess, trapezoid_shortfall

MAX_SHORTFALL = 0.5  # honest clients stay below 0.3 on networks, a reversed gradient is above 1 where slopes agree
AGREES = 0.3  # of its size and the cohort's: by so much a curvature may differ from what the gradients show
STRETCH = 1.5  # times the length of the step without a client: it is no longer for any client's sake
JUMP = 30.0  # times the cohort's median change: no loss changes so much a short way ahead
OK, LOSS, RATE, CONFLICT = range(4)  # verdicts
REASONS = (
    "",
    "loss does not change as its gradient says",
    "rate is larger than its loss allows",
    "rate leaves the others no common descent, or a far longer one",
)


class TrustState(NamedTuple):
    """What clients claimed about the last step, and how far it was true; [C] by client number, or [0] if unused."""

    floor: Tensor  # []     no loss is below it
    scale: Tensor  # []     the largest median loss so far: differences of losses are rounded like it
    losses: Tensor  # [C]   at the model before the last step; NaN: no reply then
    slopes: Tensor  # [C]   first-order changes over the last step, by the gradients before it
    shortfalls: Tensor  # [C] share of the claimed change that the losses did not show, at the last reply
    curvatures: Tensor  # [C] along the last step, by the gradients at both ends of it; NaN: not known
    verdicts: Tensor  # [C] whether and why the client is left out of this round's step


@dataclass(frozen=True)
class Trust:
    """At most `drop_share` of a cohort is left out: inconsistent clients, then those that distort the step."""

    drop_share: float = 0.0  # 0: everybody is trusted
    drop_stretch: float = inf  # a client that makes the step this many times longer may be left out too
    checks_rates: bool = True  # whether a rate above twice what the loss can fall by is inconsistent
    checks_losses: bool = True  # whether rows are gradients, which losses can be compared with

    def init(self, n_clients: int, floor: float) -> TrustState:
        """Return the record before the first round."""
        unknown = torch.full((n_clients if self.drop_share > 0.0 else 0,), torch.nan, dtype=torch.float64)
        scale, verdicts = torch.zeros((), dtype=torch.float64), torch.full(unknown.shape, OK, dtype=torch.int64)
        zeros = torch.zeros_like(unknown)
        return TrustState(torch.tensor(floor), scale, unknown, unknown.clone(), zeros, unknown.clone(), verdicts)

    def check_replies(self, state: TrustState, replies: Replies[Any], cohort: Cohort, move: Tensor) -> TrustState:
        """Return the record with the verdicts on this round's replies; `move` is theta's last change."""
        if not self.drop_share or not self.checks_losses:  # updates of local SGD claim nothing
            return state._replace(verdicts=torch.full_like(state.verdicts, OK))
        losses = replies.scalars("loss")
        state = state._replace(scale=state.scale.clamp(min=float(np.median(np.abs(losses)))))
        slopes = unclipped(replies.gram("gradient", move[None])[:, -1], cohort)
        state = self._with_curvatures(state, cohort, slopes, float(move.double().square().sum()))
        found = self._shortfall(state, replies, "loss", cohort, state.slopes[cohort.clients].numpy(), slopes)
        excess = np.zeros(len(losses))
        if self.checks_rates:
            excess = rate_excess(unclipped(replies.scalars("rate"), cohort), losses - float(state.floor))
        return self._with_verdicts(state, cohort, found, excess)

    def check_ahead(
        self, state: TrustState, replies: Replies[Any], field: str, cohort: Cohort, length: float
    ) -> TrustState | None:
        """Return the record after clients measured losses a share `length` of u ahead; None: nobody new stands out."""
        if not self.drop_share:
            return None
        claimed = length * state.slopes[cohort.clients].numpy()
        found = self._shortfall(state, replies, field, cohort, claimed, claimed)
        if "probed_slope" in replies.fields:
            found = np.fmax(found, slope_mismatch(replies.scalars("probed_slope"), claimed))
        change = replies.scalars(field) - state.losses[cohort.clients].numpy()
        found = np.fmax(found, jump_sizes(claimed, change, 100.0 * self._rounding(state, replies, field)))
        known_rates = np.where(state.verdicts[cohort.clients].numpy() == RATE, np.inf, 0.0)
        checked = self._with_verdicts(state, cohort, found, known_rates)
        n_before, n_after = (int(((s.verdicts == LOSS) | (s.verdicts == RATE)).sum()) for s in (state, checked))
        return checked if n_after > n_before else None

    def trusted(self, state: TrustState, cohort: Cohort) -> BoolArray:
        """Return which clients of the cohort are not left out."""
        everybody = np.ones(len(cohort.clients), dtype=np.bool_)
        return (state.verdicts[cohort.clients] == OK).numpy() if self.drop_share else everybody

    def without_untrusted(
        self, state: TrustState, replies: Replies[Any], cohort: Cohort
    ) -> tuple[Replies[Any], Cohort]:
        """Return the trusted clients' replies, and their cohort of a federation without the others.

        Curvatures that contradict the gradients at both ends of the last step are replaced by what these show.
        """
        replies = self._own_curvature(state, replies, cohort)
        kept = torch.from_numpy(np.flatnonzero(self.trusted(state, cohort)))
        n_dropped = len(cohort.clients) - len(kept)
        if not n_dropped:
            return replies, cohort
        part = Cohort(cohort.clients[kept], cohort.n_examples[kept], cohort.n_clients - n_dropped, cohort.round)
        return replies.take(kept), part

    def without_outliers(
        self, state: TrustState, M: FloatArray, rates: FloatArray, cohort: Cohort, ridge: float
    ) -> BoolArray:
        """Return which rows the step is for: without those that leave no step, or only a far longer one."""
        n_more = self._may_drop(cohort) - int((state.verdicts != OK).sum())
        if n_more <= 0:
            return np.ones(len(rates), dtype=np.bool_)
        share = n_more / len(rates)
        return drop_outlier_rows(M, rates, ridge=ridge, max_share=share, stretch=self.drop_stretch)

    def bounded(self, M: FloatArray, rates: FloatArray, kept: BoolArray, cohort: Cohort, ridge: float) -> FloatArray:
        """Return the rates with which no client makes the step `STRETCH` times as long as it is without this client."""
        return bounded_by_others(M, rates, kept, ridge=ridge, n_most=self._may_drop(cohort), stretch=STRETCH)

    def believed(self, cohort: Cohort) -> Cohort:
        """Return the cohort as all clients of a federation, where no more of it are missing than may be left out."""
        n, C = len(cohort.clients), cohort.n_clients
        return cohort._replace(n_clients=n) if C - n <= may_drop(self.drop_share, C) else cohort

    def all_again(self, before: Tensor, now: Tensor) -> bool:
        """Return whether a step is of the clients of the last one; with them may be those that had been left out.

        All curvatures that limited the last step then limit this one, too.
        """
        if len(before) != len(now) or bool((before & ~now).any()):
            return False
        return int(now.sum() - before.sum()) <= may_drop(self.drop_share, len(now))

    def record_claims(
        self, state: TrustState, replies: Replies[Any], cohort: Cohort, u: Tensor, conflicting: Tensor
    ) -> TrustState:
        """Return the record of losses and slopes along u before the step; `conflicting` clients are left out of it."""
        if not self.drop_share:
            return state
        state = state._replace(verdicts=state.verdicts.index_fill(0, conflicting, CONFLICT))
        if not self.checks_losses:
            return state
        unknown = torch.full_like(state.losses, torch.nan)
        slopes = unclipped(replies.gram("gradient", u[None])[:, -1], cohort)
        return state._replace(
            losses=unknown.index_copy(0, cohort.clients, torch.from_numpy(replies.scalars("loss"))),
            slopes=unknown.index_copy(0, cohort.clients, torch.from_numpy(-slopes)),
        )

    def left_out(self, state: TrustState) -> tuple[tuple[int, str], ...]:
        """Return the clients that are left out of this round's step, and why."""
        clients = (state.verdicts != OK).nonzero().flatten().tolist()
        return tuple((client, REASONS[int(state.verdicts[client])]) for client in clients)

    def _may_drop(self, cohort: Cohort) -> int:
        return may_drop(self.drop_share, len(cohort.clients))

    def _with_curvatures(self, state: TrustState, cohort: Cohort, after: FloatArray, square: float) -> TrustState:
        """Return the record with every client's s'y / s's over the last step s."""
        before, unknown = state.slopes[cohort.clients].numpy(), torch.full_like(state.curvatures, torch.nan)
        found = (after - before) / square if square > 0.0 else np.full(len(after), np.nan)
        return state._replace(curvatures=unknown.index_copy(0, cohort.clients, torch.from_numpy(found)))

    def _own_curvature(self, state: TrustState, replies: Replies[Any], cohort: Cohort) -> Replies[Any]:
        if "curvature" not in replies.fields or not self.drop_share or not self.checks_losses:
            return replies
        found = state.curvatures[cohort.clients]
        found = found if cohort.factors is None else found * cohort.factors
        claimed = torch.from_numpy(replies.scalars("curvature"))
        allowed = AGREES * (found.abs() + found.abs().nanmedian())
        false = found.isfinite() & ~((claimed - found).abs() <= allowed)
        return replies.replaced("curvature", torch.where(false, found, claimed)) if bool(false.any()) else replies

    def _shortfall(
        self,
        state: TrustState,
        replies: Replies[Any],
        field: str,
        cohort: Cohort,
        before: FloatArray,
        after: FloatArray,
    ) -> FloatArray:
        change = replies.scalars(field) - state.losses[cohort.clients].numpy()
        return trapezoid_shortfall(before, after, change, self._rounding(state, replies, field))

    def _rounding(self, state: TrustState, replies: Replies[Any], field: str) -> float:
        return torch.finfo(replies.dtype(field)).eps * float(state.scale)

    def _with_verdicts(self, state: TrustState, cohort: Cohort, found: FloatArray, excess: FloatArray) -> TrustState:
        """Return the record with new shortfalls, old ones where these are unknown (NaN), the worst clients left out."""
        clients = cohort.clients
        shortfalls = np.where(np.isfinite(found), found, state.shortfalls[clients].numpy())
        worst = np.maximum(shortfalls, excess)
        largest = np.argsort(-worst, kind="stable")[: self._may_drop(cohort)]
        verdicts = torch.full_like(state.verdicts, OK)
        for k in largest[worst[largest] > MAX_SHORTFALL]:
            verdicts[clients[k]] = RATE if excess[k] > MAX_SHORTFALL else LOSS
        return state._replace(
            shortfalls=state.shortfalls.index_copy(0, clients, torch.from_numpy(shortfalls)), verdicts=verdicts
        )


def jump_sizes(claimed: FloatArray, change: FloatArray, rounding: float) -> FloatArray:
    """Return how far losses a short way ahead are from what slopes say, over `JUMP` times the cohort's usual change."""
    off = np.abs(change - claimed)
    usual = float(np.nanmedian(np.abs(claimed))) if np.isfinite(claimed).any() else 0.0
    return off / (JUMP * max(usual, rounding, np.finfo(np.float64).tiny)) * MAX_SHORTFALL


def slope_mismatch(measured: FloatArray, claimed: FloatArray) -> FloatArray:
    """Return by how much the slopes along a step differ from those that the gradients said, over the larger; or NaN.

    The two are in the same ratio for everybody, the length of the step, which is taken from the cohort's median.
    """
    known = np.isfinite(measured) & np.isfinite(claimed) & (claimed != 0.0)
    if known.sum() < FEW:
        return np.full(len(measured), np.nan)
    ratio = float(np.median(measured[known] / claimed[known]))
    said = ratio * claimed
    size = np.maximum(np.abs(said), np.abs(measured))
    small = 0.1 * float(np.median(size[known]))  # steps that are nearly perpendicular to a gradient say little
    return np.where(known & (size > small), np.abs(said - measured) / np.where(size > 0.0, size, 1.0), np.nan)


def unclipped(values: FloatArray, cohort: Cohort) -> FloatArray:
    """Return numbers that grow with a reply's size as they were before replies were clipped."""
    return values if cohort.factors is None else values / cohort.factors.numpy()

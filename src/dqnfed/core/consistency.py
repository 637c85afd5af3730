"""Do a client's losses change as its own rows say? A check of every method whose rows are gradients or local updates.

Over a step s of the model a client's loss changes by r (g + g')'s / 2, g and g' its rows before and after, up to terms
of third order; r is 1 for gradients and one over the local learning rate for updates, and the same for everybody. It is
the cohort's median here, so that nothing about the clients' work needs to be known. Who reverses or enlarges its rows,
replays old ones, makes them up or sends a false loss stands out. Who makes up a loss to match its rows does not: it
cannot be told from a client with unusual data, and only the bounds of the policy hold it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Info
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.maths.gramian import cross_products

ROWS = ("delta", "gradient")  # the fields along which a client's own loss falls
FEW = 3  # clients; among fewer there is no majority to compare with
LEAST, MOST = 0.8, 1.5  # honest: 0.6 in both directions with local SGD on skewed clients; a reversed row is at 2
CANCELLING = 0.6  # in both directions where the slopes at both ends nearly cancel: a row that is reversed in turns
SPREAD = 2.5  # times the cohort's median fault is usual too
MEMORY = 0.7  # of a fault after a round without one
CLEAR = 2.5  # a fault counts for at least so much: after it a client is out for three rounds
WORST = 4.0  # a fault counts at most so much: after it a client is out for four rounds
REASON = "loss does not change as its updates say"


class ConsistencyState(NamedTuple):
    """What the clients' last replies said about the last step; [0] before the first one."""

    theta: Tensor  # [n]   the model before that step
    losses: Tensor  # [C]  there, by client number; NaN: not known
    slopes: Tensor  # [C]  products of the rows with the step
    faults: Tensor  # [C]  above 1: inconsistent


def no_claims(n_clients: int) -> ConsistencyState:
    """Return the record before the first round."""
    unknown = torch.full((n_clients,), torch.nan, dtype=torch.float64)
    return ConsistencyState(torch.zeros(0), unknown, unknown.clone(), torch.zeros_like(unknown))


def checked_field(info: Info, replies: Replies[Any]) -> str:
    """Return the field whose rows can be compared with losses; nothing where a method has none."""
    field = info.clip_fields[0] if info.clip_fields and info.own_descent else ""
    return field if field in ROWS and field in replies.fields else ""


def reported_losses(replies: Replies[Any], evaluated: Tensor, cohort: Cohort) -> FloatArray:
    """Return the clients' losses at the present model: from their replies, else as they evaluated it (NaN: unknown)."""
    if "loss" in replies.fields:
        return replies.scalars("loss")
    found: FloatArray = evaluated[cohort.clients].double().numpy()
    return found


def may_drop(share: float, n_clients: int) -> int:
    """Return how many of a cohort may be left out: its share, but one of three or more; nobody of two."""
    if n_clients < FEW or share <= 0.0:
        return 0
    return max(1, int(share * n_clients + 1e-9))


def judged(
    state: ConsistencyState, rows: Tensor, losses: FloatArray, theta: Tensor, cohort: Cohort
) -> ConsistencyState:
    """Return the record with the faults of this cohort's replies."""
    clients = cohort.clients
    faults = MEMORY * state.faults[clients].numpy()
    if len(state.theta):
        after = products(rows, theta - state.theta, cohort)
        before, change = state.slopes[clients].numpy(), losses - state.losses[clients].numpy()
        scale = float(np.nanmedian(np.abs(losses))) if np.isfinite(losses).any() else 0.0
        found = fault_sizes(before, after, change, 100.0 * torch.finfo(rows.dtype).eps * scale)
        faults = np.maximum(faults, found)
    return state._replace(faults=state.faults.index_copy(0, clients, torch.from_numpy(faults)))


def inconsistent(state: ConsistencyState, cohort: Cohort, share: float) -> NDArray[np.bool_]:
    """Return which clients of the cohort are left out: the most inconsistent ones, as many as may be."""
    faults = state.faults[cohort.clients].numpy()
    worst = np.argsort(-faults, kind="stable")[: may_drop(share, len(faults))]
    out = np.zeros(len(faults), dtype=np.bool_)
    out[worst[faults[worst] > 1.0]] = True
    return out


def with_claims(
    state: ConsistencyState, rows: Tensor, losses: FloatArray, before: Tensor, after: Tensor, cohort: Cohort
) -> ConsistencyState:
    """Return the record of what this cohort's replies say about the step from `before` to `after`."""
    unknown = torch.full_like(state.losses, torch.nan)
    slopes = products(rows, after - before, cohort)
    return state._replace(
        theta=before,
        losses=unknown.index_copy(0, cohort.clients, torch.from_numpy(losses).double()),
        slopes=unknown.index_copy(0, cohort.clients, torch.from_numpy(slopes)),
    )


def products(rows: Tensor, move: Tensor, cohort: Cohort) -> FloatArray:
    """Return the products of the rows with a move, [K], of the rows as they were before they were clipped."""
    found: FloatArray = cross_products(rows.flatten(1), move.to(rows)[None]).double().cpu().numpy()[:, 0]
    return found if cohort.factors is None else found / cohort.factors.numpy()


def fault_sizes(before: FloatArray, after: FloatArray, change: FloatArray, rounding: float) -> FloatArray:
    """Return how far each loss change is from what the slopes at both ends of a step say; up to 1 is usual.

    Nothing is said (0) where fewer than three clients are known, where the cohort as a whole does not follow its
    slopes, or where what is unexplained is small beside the cohort's changes.
    """
    mean, size = 0.5 * (before + after), 0.5 * (np.abs(before) + np.abs(after))
    known = np.isfinite(mean) & np.isfinite(change)
    telling = known & (np.abs(mean) >= 0.5 * size) & (size > 0.0)
    if known.sum() < FEW or telling.sum() < FEW:
        return np.zeros(len(mean))
    ratio = float(np.median(change[telling] / mean[telling]))
    if not ratio > 0.0:
        return np.zeros(len(mean))
    unexplained = np.where(known, np.abs(mean) * ratio - np.sign(mean) * change, 0.0)
    small = max(0.1 * float(np.median(np.abs(change[known]))), rounding)
    share = unexplained / np.maximum(np.where(known, size * ratio, 1.0), np.finfo(np.float64).tiny)
    found = np.where(share > 0.0, share / LEAST, -share / MOST)
    found = np.where(telling, found, np.abs(share) / CANCELLING)
    found = found / max(1.0, SPREAD * float(np.median(np.abs(share[known]))))  # a step too long for anybody's slopes
    found = np.where(found > 1.0, np.clip(found, CLEAR, WORST), found)
    return np.where(known & (np.abs(unexplained) > small), found, 0.0)

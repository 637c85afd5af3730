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
from dqnfed.core.sketches import SketchState, no_sketches
from dqnfed.maths.gramian import cross_products

ROWS = ("delta", "gradient")  # the fields along which a client's own loss falls
FEW = 3  # clients; among fewer there is no majority to compare with
LEAST = 0.8  # of what is said did not happen; honest: 0.4 with gradients; a reversed row is above 1
AHEAD = 4.0  # times what the others are ahead of what they say, and of all that they say, at least
MOST = 8.0  # times more happened than is said; honest: 5 with local SGD, whose rows are short where a model soon fits
SMALL = 0.2  # of the cohort's median change: less counts as nothing
SLIGHT = 0.5  # of the cohort's median change: what is not said counts as a share of so much at least
USUAL = 0.2  # the cohort's median share: a round above it says less about a single client, one below it enough
MEMORY = 0.7  # of the weight of a round in the next one
AGREES = 0.5  # of what is said: a change that differs from it by less confirms it
TURNED = 0.5  # of the slope before the step: one that is turned by less explains no turn of the row
WORST = 2.0 / LEAST  # one round counts for so much at most
START = 1.5  # times the median of the first losses: at the first model nobody has been served better than another
GROWTH = 2.0  # of a client's usual length in a round; an honest client that is above the cohort's came there slowly
AGAIN = (
    0.6  # faults above this keep a client out that was left out in the last round: it shall not come every other one
)
FINE = 0.5  # faults up to this do not contradict rows that are longer than usual
CLEAR = 1.2  # faults of one round above this are remembered; an honest client is seldom there
LONGEST_ABSENCE = 6  # doublings of the rounds for which a client stays left out
REASON = "loss does not change as its updates say"


class ConsistencyState(NamedTuple):
    """What the clients' last replies said about the last step; [0] before the first one."""

    theta: Tensor  # [n]   the model before that step
    losses: Tensor  # [C]  there, by client number; NaN: not known
    slopes: Tensor  # [C]  products of the rows with the step
    faults: Tensor  # [C]  weighted mean over the rounds; above 1: inconsistent
    weights: Tensor  # [C] of the rounds in it
    starts: Tensor  # [C]  the first losses
    lengths: Tensor  # [C] usual lengths of the rows, which grow by `GROWTH` a round at most
    clear: Tensor  # [C]   whether this round alone shows that the client is inconsistent
    agrees: Tensor  # [C]  whether its loss has changed as its rows before and after the step say
    past: Tensor  # [C]    whether the step went past its lowest point, as its loss confirms
    out: Tensor  # [C]     whether it was left out of the last round
    caught: Tensor  # [C]  how often it was left out for what one round shows
    until: Tensor  # [C]   the round before which it stays left out
    sketches: SketchState  # of the rows


class Faults(NamedTuple):
    """What one step says about the clients of a cohort, [K]."""

    sizes: FloatArray  # up to 1 is usual
    weights: FloatArray  # 0: nothing is known, 1: the cohort as a whole follows its slopes
    agrees: NDArray[np.bool_]  # whether the loss has changed nearly as the slopes at both ends say
    hurt: NDArray[np.bool_]  # whether it rose by more, which is no fault, but no agreement either


def no_claims(n_clients: int) -> ConsistencyState:
    """Return the record before the first round."""
    unknown = torch.full((n_clients,), torch.nan, dtype=torch.float64)
    zeros, never = torch.zeros_like(unknown), torch.zeros(n_clients, dtype=torch.int64)
    return ConsistencyState(
        theta=torch.zeros(0),
        losses=unknown,
        slopes=unknown.clone(),
        faults=zeros,
        weights=zeros.clone(),
        starts=unknown.clone(),
        lengths=unknown.clone(),
        clear=torch.zeros(n_clients, dtype=torch.bool),
        agrees=torch.zeros(n_clients, dtype=torch.bool),
        past=torch.zeros(n_clients, dtype=torch.bool),
        out=torch.zeros(n_clients, dtype=torch.bool),
        caught=never,
        until=never.clone(),
        sketches=no_sketches(n_clients),
    )


def checked_field(info: Info, replies: Replies[Any]) -> str:
    """Return the field whose rows can be compared with losses; nothing where a method has none."""
    field = info.clip_fields[0] if info.clip_fields and info.own_descent else ""
    return field if field in ROWS and field in replies.fields else ""


def reported_losses(replies: Replies[Any], evaluated: Tensor, cohort: Cohort) -> FloatArray:
    """Return the clients' losses at the present model: from their replies, else as they evaluated it (NaN: unknown)."""
    if "loss" in replies.fields:
        return replies.scalars("loss")
    found: FloatArray = evaluated.double().numpy()
    return found


def may_drop(share: float, n_clients: int) -> int:
    """Return how many of a cohort may be left out: its share, but one of three or more; nobody of two."""
    if n_clients < FEW or share <= 0.0:
        return 0
    return max(1, int(share * n_clients + 1e-9))


def scale_factors(state: ConsistencyState, clients: Tensor) -> Tensor:
    """Return factors below 1 for clients whose first loss was far above the cohort's, [K]; with them it is not.

    Who multiplies its loss and with it every row is as consistent as before. It is a client that counts for more, and
    the first model, which has served nobody, is where this shows.
    """
    known = state.starts[state.starts.isfinite()]
    ones = torch.ones(len(clients), dtype=torch.float64)
    if len(known) < FEW or not bool(known.median() > 0.0):
        return ones
    most = START * float(np.median(known.numpy()))
    return torch.where(state.starts[clients] > most, most / state.starts[clients], ones)


def with_starts(state: ConsistencyState, losses: FloatArray, clients: Tensor) -> ConsistencyState:
    """Return the record with the first losses of clients that have not been met before."""
    first, new = state.starts[clients], torch.from_numpy(losses).double()
    return state._replace(starts=state.starts.index_copy(0, clients, torch.where(first.isfinite(), first, new)))


def with_lengths(state: ConsistencyState, lengths: FloatArray, most: float, clients: Tensor) -> ConsistencyState:
    """Return the record with the usual lengths of the rows; a new client's is `most` at most."""
    before, now = state.lengths[clients], torch.from_numpy(lengths).double()
    limit = torch.where(before.isfinite(), GROWTH * before, torch.full_like(before, most))
    return state._replace(lengths=state.lengths.index_copy(0, clients, torch.minimum(now, limit)))


def judged(
    state: ConsistencyState, rows: Tensor, losses: FloatArray, theta: Tensor, cohort: Cohort, share: float
) -> ConsistencyState:
    """Return the record with the faults of this cohort's replies, of which at most this share may be false."""
    clients = cohort.clients
    faults, weights = state.faults[clients].numpy(), MEMORY * state.weights[clients].numpy()
    clear, agrees, hurt, past = np.zeros((4, len(faults)), dtype=np.bool_)
    if len(state.theta):
        after = products(rows, theta - state.theta, cohort)
        before, change = state.slopes[clients].numpy(), losses - state.losses[clients].numpy()
        scale = float(np.nanmedian(np.abs(losses))) if np.isfinite(losses).any() else 0.0
        rounding = 100.0 * torch.finfo(rows.dtype).eps * scale
        found, weight, agrees, hurt = fault_sizes(before, after, change, rounding, share)
        past = (agrees | hurt) & (before < 0.0) & (after > -TURNED * before)
        total = weights + weight
        faults = (weights * faults + weight * found) / np.where(total > 0.0, total, 1.0)
        faults = np.where(weight == 1.0, np.maximum(faults, found), faults)  # a clear round needs no second one
        weights, clear = total, (weight == 1.0) & (found > CLEAR)
    return state._replace(
        past=torch.zeros_like(state.past).index_copy(0, clients, torch.from_numpy(past)),
        clear=torch.zeros_like(state.clear).index_copy(0, clients, torch.from_numpy(clear)),
        agrees=torch.zeros_like(state.agrees).index_copy(0, clients, torch.from_numpy(agrees)),
        faults=state.faults.index_copy(0, clients, torch.from_numpy(faults)),
        weights=state.weights.index_copy(0, clients, torch.from_numpy(weights)),
    )


def inconsistent(state: ConsistencyState, cohort: Cohort, share: float) -> NDArray[np.bool_]:
    """Return which clients of the cohort are left out: the most inconsistent ones, as many as may be.

    Those that were left out before are among them for a while; the first time until their losses agree with their rows.
    """
    clients = cohort.clients
    faults = (state.faults * state.weights.clamp(max=1.0))[clients].numpy()  # old and vague evidence fades
    cleared = state.agrees & (state.caught <= 1)  # the first time one round in agreement is enough
    waits = ((state.until > cohort.round) & ~cleared)[clients].numpy()
    faults = np.where(waits, np.maximum(faults, 1.0 + state.caught[clients].numpy()), faults)
    worst = np.argsort(-faults, kind="stable")[: may_drop(share, len(faults))]
    most = np.where((state.out & ~cleared)[clients].numpy(), AGAIN, 1.0)
    out = np.zeros(len(faults), dtype=np.bool_)
    out[worst[faults[worst] > most[worst]]] = True
    return out


def with_turned(state: ConsistencyState, turned: NDArray[np.bool_], clients: Tensor) -> ConsistencyState:
    """Return the record in which rows that have turned as no other client's are a fault that this round alone shows.

    But for those that the step has taken past their lowest point, which turns a row, too, if their losses say so.
    """
    there = clients[torch.from_numpy(turned)]
    there = there[~state.past[there]]
    return state._replace(
        faults=state.faults.index_fill(0, there, WORST),
        weights=state.weights.index_copy(0, there, state.weights[there].clamp(min=1.0)),
        clear=state.clear.index_fill(0, there, True),
    )


def with_left_out(state: ConsistencyState, clients: list[int]) -> ConsistencyState:
    """Return the record after the method itself left clients out: they do not come every other round either."""
    there = torch.tensor(clients, dtype=torch.long)
    return state._replace(
        faults=state.faults.index_copy(0, there, state.faults[there].clamp(min=2.0 * AGAIN)),
        weights=state.weights.index_copy(0, there, state.weights[there].clamp(min=1.0 / MEMORY)),
        out=state.out.index_fill(0, there, True),
    )


def with_absence(state: ConsistencyState, out: NDArray[np.bool_], cohort: Cohort) -> ConsistencyState:
    """Return the record after clients were left out: who is caught again stays out twice as long.

    A client that lies in turns would else be back for every second lie; one that was caught by mistake is soon back.
    """
    clients = cohort.clients
    again = torch.from_numpy(out) & state.clear[clients]
    caught = state.caught[clients] + again.long()
    until = cohort.round + 1 + 2 ** caught.clamp(max=LONGEST_ABSENCE)
    return state._replace(
        out=torch.zeros_like(state.out).index_copy(0, clients, torch.from_numpy(out)),
        caught=state.caught.index_copy(0, clients, caught),
        until=state.until.index_copy(0, clients, torch.where(again, until, state.until[clients])),
    )


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


def fault_sizes(before: FloatArray, after: FloatArray, change: FloatArray, rounding: float, out: float = 0.0) -> Faults:
    """Return how far each loss change is from what the slopes at both ends of a step say, and what weight that has.

    Up to 1 is usual. Nothing is said (weight 0) where fewer than three clients are known or where the cohort as a whole
    does not follow its slopes; less is said the worse it follows them, without the share `out` of it that follows them
    least and may be false. What is small beside the cohort's changes counts as nothing.
    """
    nobody = np.zeros(len(before), dtype=np.bool_)
    nothing = Faults(np.zeros(len(before)), np.zeros(len(before)), nobody, nobody)
    mean, size = 0.5 * (before + after), 0.5 * (np.abs(before) + np.abs(after))
    known = np.isfinite(mean) & np.isfinite(change)
    telling = known & (np.abs(mean) >= 0.5 * size) & (size > 0.0)
    if known.sum() < FEW or telling.sum() < FEW:
        return nothing
    ratio = float(np.median(change[telling] / mean[telling]))
    if not ratio > 0.0:
        return nothing
    unexplained = np.where(known, np.abs(mean) * ratio - np.sign(mean) * change, 0.0)
    usual = float(np.median(np.abs(change[known])))
    small = max(SMALL * usual, rounding)
    tiny = np.finfo(np.float64).tiny  # beside the step a row says little about a small change
    least = np.where(telling, tiny, max(SLIGHT * usual, tiny))
    share = unexplained / np.where(known, np.maximum(size * ratio, least), 1.0)
    n_honest = int(known.sum()) - may_drop(out, int(known.sum()))
    spread = float(np.median(np.sort(np.abs(share[known]))[:n_honest]))
    ahead = float(np.quantile(-share[telling], 0.75))
    most = float(np.clip(AHEAD * ahead, AHEAD, MOST))
    found = np.where(telling & (share < 0.0), -share / most, np.abs(share) / LEAST)
    gained = np.maximum(ratio * before - change, 0.0) / np.where(known, np.maximum(size * ratio, least), 1.0)
    found = np.where((before < 0.0) & (after > 0.0) & (change < 0.0), gained / most, found)
    hurt = was_hurt(before, after, change / ratio) & (change <= MOST * np.maximum(size * ratio, usual))
    agrees = known & (size > 0.0) & (np.abs(change - ratio * mean) <= AGREES * size * ratio)
    curved = (before < after) & (ratio * before <= change) & (change <= ratio * after)  # what a convex loss can do
    counts = known & (np.abs(unexplained) > small) & ~hurt & ~curved
    found = np.where(counts, np.minimum(found, WORST), 0.0)
    return Faults(found, np.where(known, USUAL / max(spread, USUAL), 0.0), agrees, known & (size > 0.0) & hurt)


def was_hurt(before: FloatArray, after: FloatArray, change: FloatArray) -> NDArray[np.bool_]:
    """Return whose loss rose by more than its rows say, where their slopes have vanished or turned along the step.

    A convex loss changes by what lies between its slopes at the two ends, but local training, which stops where the
    loss is low, shows less of a slope that has turned. A step that suits the others does that to a client with unusual
    data. One that reverses its rows says that its loss still falls.
    """
    rose = (change > 0.0) & (change > 0.5 * (before + after))
    hurt: NDArray[np.bool_] = rose & (after > 0.5 * np.minimum(before, 0.0))
    return hurt

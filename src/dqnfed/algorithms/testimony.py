"""Whom to believe: a client's loss must move as its own gradients say, and no client can win more than it has.

What a server hears from one client is not independent: over a step s the loss changes by (g + g')'s / 2 up to terms of
third order, g and g' the gradients at its two ends. A client that turns its gradient round, or enlarges it, but reports
its loss as it is, contradicts itself; one that makes up a loss to match does not, and cannot be told from a client with
unusual data.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.maths.step_length import trapezoid_shortfall

FloatArray = NDArray[np.float64]
LARGEST_DOUBT = 0.5  # honest clients stay below 0.3 on networks, a reversed gradient is above 1 where the slopes agree
BELIEVED, LOSS, RATE, DESCENT = range(4)  # verdicts
REASONS = {
    LOSS: "loss does not move as its gradient says",
    RATE: "rate is larger than its loss allows",
    DESCENT: "wishes leave the others no common descent, or a far longer one",
}


class Testimony(NamedTuple):
    """What clients said about the last step, and how far it was true; [C] by client number, or [0] if nobody asks."""

    floor: Tensor  # []     no loss is below it
    scale: Tensor  # []     the largest median loss so far: losses are differences of such numbers, rounded like them
    losses: Tensor  # [C]   at the model before the last step; NaN: gave no answer then
    slopes: Tensor  # [C]   first-order changes over the last step, by the gradients before it
    doubts: Tensor  # [C]   share of what a client's gradients said that its losses did not bear out, when last seen
    verdicts: Tensor  # [C] whether and why it is left out of this round's step


def first_testimony(n_clients: int, floor: float) -> Testimony:
    """Return the record of a federation in which nobody has said anything yet; of no clients: none is kept."""
    unknown = torch.full((n_clients,), torch.nan, dtype=torch.float64)
    verdicts = torch.full((n_clients,), BELIEVED, dtype=torch.int64)
    scale = torch.zeros((), dtype=torch.float64)
    return Testimony(torch.tensor(floor), scale, unknown, unknown.clone(), torch.zeros_like(unknown), verdicts)


def is_silent(record: Testimony) -> bool:
    """Return whether nobody is asked, so that there is nothing to judge."""
    return record.verdicts.numel() == 0


def heard(
    record: Testimony,
    clients: Tensor,
    losses: Tensor,
    rates: Tensor | None,  # where clients never ask for more than twice what their loss can fall by
    slopes: Tensor,  # first-order changes over the last step, by the gradients after it
    *,
    may_drop: int,
) -> Testimony:
    """Return the record with the verdicts on this round's answers: who contradicts itself most is not believed."""
    now, known = _numbers(losses), record.losses[clients].numpy()
    record = record._replace(scale=record.scale.clamp(min=float(np.median(np.abs(now)))))
    rounding = _rounding(record, losses)
    found = trapezoid_shortfall(record.slopes[clients].numpy(), _numbers(slopes), now - known, rounding)
    claims = np.zeros(len(now)) if rates is None else _rate_doubts(_numbers(rates), now - float(record.floor))
    return _judged(record, clients, found, claims, may_drop)


def measured(record: Testimony, clients: Tensor, losses: Tensor, *, length: float, may_drop: int) -> Testimony:
    """Return the record after clients measured their losses a small share `length` of the step ahead."""
    said, known = length * record.slopes[clients].numpy(), record.losses[clients].numpy()
    found = trapezoid_shortfall(said, said, _numbers(losses) - known, _rounding(record, losses))
    untrue_before = np.where(record.verdicts[clients].numpy() == RATE, np.inf, 0.0)
    return _judged(record, clients, found, untrue_before, may_drop)


def acquitted(record: Testimony) -> Testimony:
    """Return the record with nobody left out."""
    if is_silent(record):
        return record
    return record._replace(verdicts=torch.full_like(record.verdicts, BELIEVED))


def without(record: Testimony, clients: Tensor) -> Testimony:
    """Return the record with the clients left out because no step, or only a far longer one, serves them too."""
    return record._replace(verdicts=record.verdicts.index_fill(0, clients, DESCENT))


def asserted(record: Testimony, clients: Tensor, losses: Tensor, slopes: Tensor) -> Testimony:
    """Return the record of what clients say about a step before it is made: their losses, g_k'u along it."""
    unknown = torch.full_like(record.losses, torch.nan)
    return record._replace(
        losses=unknown.index_copy(0, clients, losses.double().cpu()),
        slopes=unknown.index_copy(0, clients, -slopes.double().cpu()),
    )


def acted_on(record: Testimony, alpha: float) -> Testimony:
    """Return the record after the step was made alpha times as long as it was; NaN: it was not made."""
    if is_silent(record):
        return record
    return record._replace(slopes=alpha * record.slopes)


def unclipped(values: Tensor, cohort: Cohort) -> Tensor:
    """Return numbers that grow with an answer's size as they were before answers were clipped."""
    return values if cohort.factors is None else values.double().cpu() / cohort.factors.double().cpu()


def n_disbelieved(record: Testimony) -> int:
    """Return how many clients contradict themselves."""
    return int(((record.verdicts == LOSS) | (record.verdicts == RATE)).sum())


def n_left_out(record: Testimony) -> int:
    """Return how many clients this round's step does without."""
    return 0 if is_silent(record) else int((record.verdicts != BELIEVED).sum())


def left_out(record: Testimony) -> tuple[tuple[int, str], ...]:
    """Return the clients that this round's step does without, and why."""
    if is_silent(record):
        return ()
    clients = (record.verdicts != BELIEVED).nonzero().flatten().tolist()
    return tuple((client, REASONS[int(record.verdicts[client])]) for client in clients)


def _rate_doubts(rates: FloatArray, room: FloatArray) -> FloatArray:
    """Return the share of each rate above twice what the loss can fall by; an unknown rate claims nothing."""
    claimed = rates > 0.0  # NaN is not
    return np.where(claimed, (rates - 2.0 * np.maximum(room, 0.0)) / np.where(claimed, rates, 1.0), 0.0)


def _judged(record: Testimony, clients: Tensor, found: FloatArray, claims: FloatArray, may_drop: int) -> Testimony:
    """Return the record with new doubts, old ones where there are none (NaN), and at most so many left out."""
    known = np.where(np.isfinite(found), found, record.doubts[clients].numpy())
    worst = np.maximum(known, claims)
    suspects = np.argsort(-worst, kind="stable")[:may_drop]
    verdicts = torch.full_like(record.verdicts, BELIEVED)
    for k in suspects[worst[suspects] > LARGEST_DOUBT]:
        verdicts[clients[k]] = RATE if claims[k] > LARGEST_DOUBT else LOSS
    return record._replace(doubts=record.doubts.index_copy(0, clients, torch.from_numpy(known)), verdicts=verdicts)


def _rounding(record: Testimony, losses: Tensor) -> float:
    return torch.finfo(losses.dtype).eps * float(record.scale)


def _numbers(values: Tensor) -> FloatArray:
    numbers: FloatArray = values.double().cpu().numpy()
    return numbers

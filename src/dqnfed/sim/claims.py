"""Clients whose losses do not change as their rows say are left out: the check between screening and server step."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.core import consistency, sketches
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray
from dqnfed.core.screening import (
    UNCHECKED_LENGTH,
    BoolArray,
    Policy,
    Screened,
    clip_unusual,
    kept_lengths,
    screen,
    screened_replies,
)
from dqnfed.sim.clients import Answers
from dqnfed.sim.state import Record, Setup, State

logger = logging.getLogger("dqnfed")


class Claims(NamedTuple):
    """What the usable replies of a round say, also those that are left out: who lies is still listened to."""

    rows: Tensor  # [K, n]
    losses: FloatArray  # [K]
    cohort: Cohort


def checked_share(policy: Policy) -> float:
    """Return which share of a cohort may be left out for inconsistent replies; none unless the policy says so."""
    return policy.drop_share or 0.0


def few_clients(share: float, cohort_size: int) -> str:
    """Return what the check of replies can do with so many clients, in a sentence for the log."""
    n_out = consistency.may_drop(share, cohort_size)
    if share <= 0.0:
        return "replies are not checked for consistency (policy.drop_share = 0): every client is believed"
    if not n_out:
        return f"with {cohort_size} clients a round no reply can be compared with a majority: every client is believed"
    if cohort_size < 5:
        return f"of {cohort_size} clients a round one that lies can be left out; two that lie can win"
    return f"of {cohort_size} clients a round up to {n_out} can be left out for inconsistent replies"


def consistent(
    setup: Setup, state: State, answers: Answers, found: Screened, notes: Record
) -> tuple[Screened, Claims | None]:
    """Return the usable replies without those that are inconsistent, and what all of them claim."""
    share, info = checked_share(setup.policy), setup.algorithm.info
    replies = answers.replies
    if not share or replies is None or not (field := consistency.checked_field(info, replies)) or not len(found.kept):
        return found, None
    found = _without_replays(setup, state, answers, found, field, notes)
    if not len(found.kept):
        return found, None
    clients = answers.clients[found.kept]
    lengths = kept_lengths(replies, found, field)
    found = clip_unusual(replies, found, setup.policy, field, usual_lengths(state, clients))
    usable = screened_replies(replies, found, info)
    sizes = setup.federation.n_examples[clients]
    cohort = Cohort(clients, sizes, setup.federation.n_clients, state.round, found.factors)
    claims = Claims(usable.rows(field), consistency.reported_losses(usable, state.losses.at(clients), cohort), cohort)
    before = _record(setup, state)
    state.claims = consistency.judged(before, *claims[:2], state.server.theta, cohort, share)
    state.claims = _with_turns(state, sketches.sketched(replies.rows(field)[found.kept].flatten(1)), clients)
    state.claims = consistency.with_lengths(
        state.claims, lengths, UNCHECKED_LENGTH * float(np.median(lengths)), clients
    )
    out = consistency.inconsistent(state.claims, cohort, share)
    state.claims = consistency.with_absence(state.claims, out, cohort)
    if not out.any():
        return found, claims
    for client in clients[torch.from_numpy(out)].tolist():
        logger.warning("round %d: client %d dropped, its %s", state.round, client, consistency.REASON)
        notes["dropped"].append({"client": client, "why": consistency.REASON})
    stay = found.kept[torch.from_numpy(np.flatnonzero(~out))]
    left = replies.take(stay)
    again = screen(left, setup.policy, info)  # medians without those who lie
    again = clip_unusual(left, again, setup.policy, field, usual_lengths(state, answers.clients[stay[again.kept]]))
    dropped = found.dropped + [(int(stay[k]), why) for k, why in again.dropped]
    return Screened(stay[again.kept], again.factors, dropped), claims


def _record(setup: Setup, state: State) -> consistency.ConsistencyState:
    return state.claims or consistency.no_claims(setup.federation.n_clients)


def _without_replays(
    setup: Setup, state: State, answers: Answers, found: Screened, field: str, notes: Record
) -> Screened:
    """Return the usable replies without rows that their clients have sent before, for another model."""
    assert answers.replies is not None
    clients, record = answers.clients[found.kept], _record(setup, state)
    rows = sketches.sketched(answers.replies.rows(field)[found.kept].flatten(1))
    again = sketches.replayed(record.sketches, rows, sketches.model_number(state.server.theta), clients)
    if not again.any():
        return found
    for client in clients[torch.from_numpy(again)].tolist():
        logger.warning("round %d: client %d dropped, its %s", state.round, client, sketches.REPLAYED)
        notes["dropped"].append({"client": client, "why": sketches.REPLAYED})
    there = torch.zeros(len(record.clear), dtype=torch.bool).index_fill(0, clients[torch.from_numpy(again)], True)
    cohort = Cohort(clients, clients, len(record.clear), state.round)
    state.claims = consistency.with_absence(record._replace(clear=there), again, cohort)
    stay = torch.from_numpy(np.flatnonzero(~again))
    return Screened(found.kept[stay], found.factors[stay], found.dropped)


def _with_turns(state: State, rows: Tensor, clients: Tensor) -> consistency.ConsistencyState:
    """Return the record with this round's rows, and with the faults of those who have turned since the last one."""
    claims = state.claims
    assert claims is not None
    turned = sketches.turned(claims.sketches, rows, clients)
    claims = consistency.with_turned(claims, turned, clients) if turned.any() else claims
    model = sketches.model_number(state.server.theta)
    return claims._replace(sketches=sketches.with_rows(claims.sketches, rows, model, clients))


def to_usual_scale(setup: Setup, state: State, answers: Answers, notes: Record) -> Answers:
    """Return the replies with the numbers of clients whose first loss was far above the cohort's scaled down to it."""
    policy, info, replies = setup.policy, setup.algorithm.info, answers.replies
    if not policy.drop_share or policy.scalar_bounds is None or replies is None:
        return answers
    claims = state.claims or consistency.no_claims(setup.federation.n_clients)
    if "loss" in replies.fields:
        claims = consistency.with_starts(claims, replies.scalars("loss"), answers.clients)
    state.claims, factors = claims, consistency.scale_factors(claims, answers.clients)
    if bool((factors == 1.0).all()):
        return answers
    for k in (factors < 1.0).nonzero().flatten().tolist():
        note = {"client": int(answers.clients[k]), "field": "scale", "limit": float(factors[k])}
        if note not in notes.setdefault("held", []):
            logger.info("round %d: client %d scaled by %.3g, its first loss was far above the others'",
                        state.round, note["client"], note["limit"])  # fmt: skip
            notes["held"].append(note)
    scaled = tuple(dict.fromkeys((*info.clip_fields, *info.bounded_fields)))
    return answers._replace(replies=replies.scaled(factors, scaled))


def usual_lengths(state: State, clients: Tensor) -> FloatArray:
    """Return the lengths of the clients' rows in rounds before, [K]; NaN where their losses contradict them."""
    if state.claims is None:
        return np.full(len(clients), np.nan)
    fine = state.claims.slopes.isfinite() & (state.claims.agrees | (state.claims.faults <= consistency.FINE))
    found: FloatArray = torch.where(fine, state.claims.lengths, torch.nan)[clients].numpy()
    return found


def with_record(state: State, clients: Tensor) -> BoolArray | None:
    """Return which clients' replies could be compared with what they said about the last step; None: not checked."""
    if state.claims is None:
        return None
    return state.claims.slopes[clients].isfinite().numpy()


def remember(state: State, claims: Claims | None, before: Any) -> None:
    """Keep what was claimed about the step that the round made, for the check of the next one."""
    if claims is not None and state.claims is not None:
        theta = (before.theta, state.server.theta)
        state.claims = consistency.with_claims(state.claims, claims.rows, claims.losses, *theta, claims.cohort)

"""Clients whose losses do not change as their rows say are left out: the check between screening and server step."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.core import consistency
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray
from dqnfed.core.screening import BoolArray, Screened, screen, screened_replies
from dqnfed.sim.clients import Answers
from dqnfed.sim.state import Record, Setup, State

logger = logging.getLogger("dqnfed")
SHARE = 0.2  # of a cohort of deployed clients, unless the policy says otherwise; simulated clients are honest


class Claims(NamedTuple):
    """What the usable replies of a round say, also those that are left out: who lies is still listened to."""

    rows: Tensor  # [K, n]
    losses: FloatArray  # [K]
    cohort: Cohort


def checked_share(setup: Setup) -> float:
    """Return which share of a cohort may be left out for inconsistent replies."""
    if setup.policy.drop_share is not None:
        return setup.policy.drop_share
    return 0.0 if setup.clients.memory_kind is None else SHARE


def consistent(
    setup: Setup, state: State, answers: Answers, found: Screened, notes: Record
) -> tuple[Screened, Claims | None]:
    """Return the usable replies without those that are inconsistent, and what all of them claim."""
    share, info = checked_share(setup), setup.algorithm.info
    replies = answers.replies
    if not share or replies is None or not (field := consistency.checked_field(info, replies)) or not len(found.kept):
        return found, None
    usable, clients = screened_replies(replies, found, info), answers.clients[found.kept]
    sizes = setup.federation.n_examples[clients]
    cohort = Cohort(clients, sizes, setup.federation.n_clients, state.round, found.factors)
    claims = Claims(usable.rows(field), consistency.reported_losses(usable, state.losses, cohort), cohort)
    before = state.claims or consistency.no_claims(setup.federation.n_clients)
    state.claims = consistency.judged(before, *claims[:2], state.server.theta, cohort)
    out = consistency.inconsistent(state.claims, cohort, share)
    if not out.any():
        return found, claims
    for client in clients[torch.from_numpy(out)].tolist():
        logger.warning("round %d: client %d dropped, its %s", state.round, client, consistency.REASON)
        notes["dropped"].append({"client": client, "why": consistency.REASON})
    stay = found.kept[torch.from_numpy(np.flatnonzero(~out))]
    again = screen(replies.take(stay), setup.policy, info)  # medians without those who lie
    dropped = found.dropped + [(int(stay[k]), why) for k, why in again.dropped]
    return Screened(stay[again.kept], again.factors, dropped), claims


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

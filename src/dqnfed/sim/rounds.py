"""One round: clients are asked, replies are checked, the server makes its step, and all of it is measured."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import isfinite
from typing import Any

from torch import Tensor

from dqnfed.core.algorithm import (
    Cohort,
    ServerStep,
    Status,
    message_bits,
)
from dqnfed.core.consistency import with_left_out
from dqnfed.core.run_folder import ClientRow
from dqnfed.core.screening import (
    UPDATE_NOT_FINITE,
    Screened,
    hold_scalars,
    screen,
    screened_replies,
)
from dqnfed.core.tensors import all_finite, gather, row
from dqnfed.secure.accounting import BudgetSpent, Ledger
from dqnfed.secure.noise import NoisySums, SharedNoise
from dqnfed.secure.release import LostClients, Revealing
from dqnfed.sim.choice import LAST
from dqnfed.sim.claims import consistent, remember, to_usual_scale, with_record
from dqnfed.sim.clients import Answers
from dqnfed.sim.ending import NOT_FINITE
from dqnfed.sim.guard import watch_end
from dqnfed.sim.measure import divergence, measured, participant_losses
from dqnfed.sim.private import ledger_of, overspent
from dqnfed.sim.sampling import clients_of_round
from dqnfed.sim.selection import global_model, watch_validation
from dqnfed.sim.state import Record, Setup, State

logger = logging.getLogger("dqnfed")
MAX_PHASES = 200  # of one round; a method that asks for more does not end


def run_round(
    setup: Setup, state: State, *, meanwhile: Callable[[], None] | None = None
) -> tuple[Record, list[ClientRow]]:
    """Run one round: change the state, and return the round's record and its clients' rows.

    `meanwhile` is called when the clients were asked, before their replies are waited for.
    """
    started = time.perf_counter()
    clients = clients_of_round(setup, state)
    before = participant_losses(setup, state, clients)
    record: Record = {"round": state.round, "status": "next", "clients": clients.tolist()}
    notes: Record = {"bytes_up": 0, "bytes_down": 0, "passes": 0.0, "dropped": [], "clipped": [], "diagnostics": {}}
    ledger = None if setup.privacy is None else ledger_of(setup, state)
    step: ServerStep[Any] = ServerStep(state.server, Status.HOLD)
    if clients.shape[0]:  # where clients are drawn one by one, or are away, a round may have nobody
        step = train_cohort(setup, state, clients, notes, meanwhile, ledger)
    if ledger is not None:
        record["epsilon"] = ledger.epsilon if isfinite(ledger.epsilon) else None
        record["releases"] = ledger.n_releases - int(state.totals["releases"])
    if not all_finite(step.server.theta):
        step = ServerStep(state.server, Status.STOP, {}, f"{NOT_FINITE} {state.round}")
    state.stopped = step.reason or "the method ended the run" if step.status is Status.STOP else ""
    record["status"] = step.status.value
    if state.stopped:
        record["reason"] = state.stopped
    wanted, is_last = setup.evaluation, state.round == setup.rounds - 1 or bool(state.stopped)
    evaluates = is_last or (state.round + 1) % wanted.every == 0
    evaluated, rows = measured(setup, state, clients, before, evaluate_all=evaluates)
    record.update(evaluated)
    if evaluates and setup.policy.on_worse == "best":
        watch_end(setup, state, global_model(setup, state))
    if evaluates and not is_last:
        why = divergence([state.start, record])
        if why and not state.is_diverging:
            logger.warning("round %d: the run is diverging, %s", state.round, why)
        state.is_diverging = bool(why)
    validates = evaluates and (wanted.select != LAST or wanted.patience is not None)
    if validates and (reason := watch_validation(setup, state, is_last=is_last)):
        state.stopped = record["reason"] = reason
        record["status"] = Status.STOP.value
    record.update(notes)
    if refused := setup.clients.refusals():
        record["refused"] = refused
    record["seconds"] = time.perf_counter() - started
    _account(state, record)
    state.round += 1
    return record, rows


def train_cohort(
    setup: Setup,
    state: State,
    clients: Tensor,
    notes: Record,
    meanwhile: Callable[[], None] | None,
    ledger: Ledger | None = None,
) -> ServerStep[Any]:
    """Return the server step after the phases of one round; the state has its new server and memories."""
    algorithm, at_start, asked, claims = setup.algorithm, state.server, clients, None
    needed = max(1, min(setup.policy.min_replies, clients.shape[0]))  # a method may ask fewer clients than were sampled
    for phase in range(MAX_PHASES):
        sent = algorithm.send(state.server)
        by_message = ledger is not None and ledger.privacy.unit == "client"
        if ledger is not None and by_message and (spent := overspent(ledger)) is not None:
            return _back_at(state, at_start, spent)
        if ledger is not None and not by_message:
            ledger.announce()
        answers = setup.clients.train(setup, state, asked, sent, phase)
        if ledger is not None and not by_message and (spent := overspent(ledger, answers.releases)) is not None:
            return _back_at(state, at_start, spent)  # what clients computed stays with them
        if meanwhile is not None:
            meanwhile()
        _note_traffic(setup, state, asked, sent, answers, notes)
        if setup.policy.drop_share:
            answers = to_usual_scale(setup, state, answers, notes)
        found = screened(setup, state, answers, notes)
        if found is not None and phase == 0 and setup.policy.drop_share:
            found, claims = consistent(setup, state, answers, found, notes)
        n_kept = 0 if found is None else found.kept.shape[0]
        step: ServerStep[Any] = ServerStep(at_start, Status.HOLD)
        if found is not None and n_kept >= needed:
            is_private = ledger is not None or setup.clients.is_secure
            known = setup, state, answers, found, notes
            step = _released_step(*known, at_start, ledger) if is_private else server_step(*known)
        if answers.traffic is not None:
            notes["bytes_up"] += answers.traffic.up
            notes["bytes_down"] += answers.traffic.down
        state.server = step.server
        notes["diagnostics"].update(step.diagnostics)
        for client, why in step.left_out:
            logger.warning("round %d: client %d dropped, its %s", state.round, client, why)
            notes["dropped"].append({"client": client, "why": why})
        if step.left_out and state.claims is not None:
            state.claims = with_left_out(state.claims, [client for client, _ in step.left_out])
        if step.status is not Status.AGAIN or found is None:
            # a round that is held for want of replies goes back to its start, and so do its clients
            state.memory.commit_or_rollback(keep=n_kept >= needed)
            if claims is not None:
                remember(state, claims, at_start)
            return step
        asked = answers.clients[found.kept]  # a client that is dropped in one phase is not asked in the next
    raise RuntimeError(f"{type(algorithm).__name__} asked for more than {MAX_PHASES} phases in round {state.round}.")


def _back_at(state: State, server: Any, reason: str) -> ServerStep[Any]:
    """Return the end of a run whose present round is not counted."""
    state.memory.commit_or_rollback(keep=False)
    state.server = server
    return ServerStep(server, Status.STOP, {}, reason)


def _note_traffic(setup: Setup, state: State, asked: Tensor, sent: Any, answers: Answers, notes: Record) -> None:
    """Add up bytes and passes of a phase, and write down who did not reply, or end the run if the policy says so."""
    for client, why in answers.missing:
        if setup.policy.on_missing == "fail":
            raise ValueError(
                f'client {client} is missing in round {state.round} ({why}), and `policy.on_missing` is "fail"; '
                '"proceed" goes on without it.'
            )
        log = logger.warning if setup.stragglers is None else logger.info  # who is late in a simulation is as wanted
        log("round %d: client %d dropped, %s", state.round, client, why)
        notes["dropped"].append({"client": client, "why": why})
    is_federated = setup.algorithm.info.training == "federated"
    notes["bytes_down"] += message_bits(sent) * asked.shape[0] // 8 if is_federated else 0
    if answers.replies is not None:
        n_replies = answers.clients.shape[0]
        notes["passes"] += setup.algorithm.passes(sent) * n_replies
        if answers.traffic is None:
            notes["bytes_up"] += setup.algorithm.uplink_bits(row(answers.replies.updates, 0)) * n_replies // 8


def screened(setup: Setup, state: State, answers: Answers, notes: Record) -> Screened | None:
    """Return which replies are usable, after writing down which are dropped or clipped, and why; None: no replies."""
    if answers.replies is None:
        return None
    asked, found = answers.clients, screen(answers.replies, setup.policy, setup.algorithm.info)
    if found.unchanged:
        return found
    for k, why in found.dropped:
        client = int(asked[k])
        if setup.policy.on_nonfinite == "fail" and why == UPDATE_NOT_FINITE:
            raise ValueError(
                f"client {client} sent an update that is not finite in round {state.round}, and "
                '`policy.on_nonfinite` is "fail"; "drop" goes on without it.'
            )
        logger.warning("round %d: client %d dropped, its %s", state.round, client, why)
        notes["dropped"].append({"client": client, "why": why})
    for k, factor in zip(found.kept.tolist(), found.factors.tolist(), strict=True):
        if factor == 1:
            continue
        client = int(asked[k])
        note = {"client": client, "factor": factor}
        if note not in notes["clipped"]:  # a phase may be run twice
            logger.info("round %d: client %d clipped by the factor %.3g", state.round, client, factor)
            notes["clipped"].append(note)
    return found


def server_step(
    setup: Setup, state: State, answers: Answers, found: Screened, notes: Record, ledger: Ledger | None = None
) -> ServerStep[Any]:
    """Return what the server makes of the usable replies; their clients' memories wait for the end of the round."""
    algorithm, federation = setup.algorithm, setup.federation
    assert answers.replies is not None
    kept, memory = answers.clients, answers.memory
    if not found.unchanged and len(found.kept) < len(kept):
        kept = kept[found.kept]
        memory = [memory[k] for k in found.kept.tolist()] if isinstance(memory, list) else gather(memory, found.kept)
    state.memory.stage(kept, memory)
    cohort = Cohort(kept, federation.n_examples[kept], federation.n_clients, state.round, found.factors)
    replies = screened_replies(answers.replies, found, algorithm.info)
    held: list[tuple[int, str, float]] = []
    if setup.policy.scalar_bounds is not None:
        replies, held = hold_scalars(replies, setup.policy, algorithm.info, with_record(state, kept))
    for k, field, limit in held:
        logger.info("round %d: client %d held, its %s is above %.3g", state.round, int(kept[k]), field, limit)
        notes.setdefault("held", []).append({"client": int(kept[k]), "field": field, "limit": limit})
    if ledger is not None and ledger.privacy.noise == "central":
        n_expected = setup.participation * federation.n_clients if ledger.share < 1.0 else None
        replies = NoisySums(replies.updates, ledger.privacy, ledger.spend, n_expected)
    if setup.clients.is_secure:
        replies = replies.for_step(state.server, cohort)
    if ledger is not None and ledger.privacy.noise == "distributed":
        replies = SharedNoise(replies, ledger.privacy, ledger.spend)
    return algorithm.server_step(state.server, replies, cohort)


def _released_step(
    setup: Setup, state: State, answers: Answers, found: Screened, notes: Record, at_start: Any, ledger: Ledger | None
) -> ServerStep[Any]:
    """Return the server step; none where it would give a client's row away, which ends a run with all its clients."""
    try:
        return server_step(setup, state, answers, found, notes, ledger)
    except BudgetSpent as spent:
        return ServerStep(at_start, Status.STOP, {}, str(spent))
    except Revealing as revealing:
        everybody = found.kept.shape[0] == setup.federation.n_clients  # the next round would ask for the same sums
        is_over = everybody and not isinstance(revealing, LostClients)
        reason = f"round {state.round} is not released (`privacy.secure`): {revealing}"
        logger.warning("%s", reason)
        return ServerStep(at_start, Status.STOP if is_over else Status.HOLD, {"revealing": 1.0}, reason)


def _account(state: State, record: Record) -> None:
    for key in state.totals:
        state.totals[key] += record[key]
    if record["rho"] is not None:
        state.rho_sum += record["rho"]
        state.rho_n += 1
    state.n_dropped += len(record["dropped"])
    state.n_clipped += len(record["clipped"])

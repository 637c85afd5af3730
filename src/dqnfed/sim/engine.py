"""One round, one straight line: sample, send, client steps, screen, server step, evaluate, record."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dqnfed.core.algorithm import (
    AnyAlgorithm,
    Cohort,
    ServerStep,
    Status,
    default_of,
    is_number,
    is_whole,
    message_bits,
)
from dqnfed.core.checksums import damage_line, damaged_files
from dqnfed.core.federation import Federation
from dqnfed.core.local_work import LocalWork
from dqnfed.core.numerics import NUMERICS
from dqnfed.core.problem import Problem, check_fit
from dqnfed.core.result import RunResult, model_metadata
from dqnfed.core.run_folder import ClientRow, RunFolder, claimed
from dqnfed.core.runners import CohortRunner, vectorised
from dqnfed.core.screening import (
    Policy,
    Screened,
    check_min_replies,
    hold_scalars,
    prepared_with,
    screen,
    screened_replies,
)
from dqnfed.core.tensors import all_finite, gather, named_parameters, row
from dqnfed.sim.accelerate import Acceleration, acceleration, acceleration_for
from dqnfed.sim.checkpoint import checkpoint_rounds, load_checkpoint, save_checkpoint
from dqnfed.sim.choice import LAST
from dqnfed.sim.claims import consistent, remember, with_record
from dqnfed.sim.clients import Answers
from dqnfed.sim.early_stop import check_patience
from dqnfed.sim.ending import NOT_FINITE, ended
from dqnfed.sim.journal import DeferredLog, Journal
from dqnfed.sim.measure import measured, model_columns, participant_losses, start_record
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.observers import Observer, report_failure
from dqnfed.sim.selection import check_select, kept_facts, kept_model, kept_record, watch_validation
from dqnfed.sim.state import Completion, Evaluation, Record, Setup, State
from dqnfed.sim.tasks import TaskBuilder, sampled_clients

logger = logging.getLogger("dqnfed")
TRIM_SECONDS = 1.0  # between two returns of free memory to the system, which cost some hundredths of a second
IRREPLACEABLE = ("config.toml", "flower.json")  # settings, and the key to the clients' memories
MAX_PHASES = 200  # of one round; a method that asks for more does not end


def run(
    algorithm: AnyAlgorithm,
    problem: Problem,
    federation: Federation,
    *,
    rounds: int,
    participation: float = 1.0,  # share of the clients sampled each round, in (0, 1]
    seed: int = 0,
    cohort: CohortRunner | None = None,
    evaluation: Evaluation | None = None,
    policy: Policy | None = None,
    out: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    observers: Sequence[Observer] = (),
    config: Mapping[str, Any] | None = None,
    resume: bool = False,
    accelerate: bool | None = None,  # False: every computation in its plain form; None: where there is little to do
    select: str | None = None,  # which model is kept, as `Evaluation.select`, whose value it replaces
    fingerprint: Mapping[str, str] | None = None,  # of the data, by part; default: of the federation's examples
    files: Mapping[str, str] | None = None,  # further texts for the folder, by name
    complete: Completion | None = None,  # what is to be added to the summary before it is written
) -> RunResult:
    """Return the result of training for the given number of rounds; with `out`, everything is on disk as it happens.

    A run is a function of its arguments: the same call gives the same bits, and a killed run that is resumed ends
    with the bits of one that was not. Ctrl-C finishes the round, saves and returns; a second one stops at once. A
    folder that holds a run is not overwritten.
    """
    evaluation = evaluation or Evaluation()
    if not is_number(checkpoint_seconds) or not checkpoint_seconds >= 0:
        raise ValueError(f"`checkpoint_seconds` must be a number >= 0, but is {checkpoint_seconds!r}.")
    setup, faster = set_up(
        algorithm,
        problem,
        federation,
        rounds=rounds,
        participation=participation,
        seed=seed,
        cohort=cohort,
        evaluation=evaluation if select is None else replace(evaluation, select=select),
        policy=policy,
        accelerate=accelerate,
    )
    setup = replace(setup, fingerprint=fingerprint, files=files or {}, complete=complete)
    settings = dict(config) if config is not None else plain_config(setup, participation)
    return run_loop(
        setup,
        settings,
        out=out,
        checkpoint_seconds=checkpoint_seconds,
        observers=observers,
        resume=resume,
        faster=faster,
    )


def set_up(
    algorithm: AnyAlgorithm,
    problem: Problem,
    federation: Federation,
    *,
    rounds: int,
    participation: float = 1.0,
    seed: int = 0,
    cohort: CohortRunner | None = None,
    evaluation: Evaluation | None = None,
    policy: Policy | None = None,
    accelerate: bool | None = None,
) -> tuple[Setup, Acceleration]:
    """Return what stays the same during a run, and the forms in which it computes."""
    size = cohort_size(participation, federation.n_clients)
    if not is_whole(seed) or seed < 0:
        raise ValueError(f"`seed` must be a whole number >= 0, but is {seed!r}.")
    check_fit(problem, federation.train.inputs, federation.train.targets)
    policy = policy or Policy()
    faster = acceleration_for(problem, federation, algorithm, enabled=accelerate)
    problem = faster.problem(problem)
    prepared = prepared_with(algorithm, policy, problem, federation.n_clients, size)
    setup = Setup(
        prepared,
        problem,
        federation,
        rounds,
        size,
        seed,
        cohort or vectorised(),
        evaluation or Evaluation(),
        policy,
        TaskBuilder(federation, problem, prepared, seed),
        replies=faster.replies,
    )
    return setup, faster


def run_loop(
    setup: Setup,
    settings: dict[str, Any],
    *,
    out: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    observers: Sequence[Observer] = (),
    resume: bool = False,
    faster: Acceleration | None = None,
) -> RunResult:
    """Return the result of a run that is set up, wherever its clients are."""
    check_rounds(setup.rounds)
    check_min_replies(setup.policy, setup.cohort_size)
    check_patience(setup)
    check_select(setup)
    faster = faster or acceleration(enabled=False)
    if out is None:
        if resume:
            raise ValueError("`resume=True` needs `out`, the folder of the run that is to go on.")
        return _run_loop(setup, settings, None, checkpoint_seconds, observers, resume, faster)
    with claimed(Path(out)), closing(RunFolder(Path(out))) as folder:
        if not resume:
            refuse_used(folder.path)
        return _run_loop(setup, settings, folder, checkpoint_seconds, observers, resume, faster)


def _run_loop(
    setup: Setup,
    settings: dict[str, Any],
    folder: RunFolder | None,
    checkpoint_seconds: float,
    observers: Sequence[Observer],
    resume: bool,
    faster: Acceleration,
) -> RunResult:
    journal = Journal(folder, model_columns(setup))
    state = fresh_state(setup)
    identity = {} if folder is None else _identity(setup)
    damaged = refuse_or_name_damage(folder, resume=resume)
    if resume and folder is not None and load_checkpoint(folder.path, state, setup.algorithm, identity):
        journal.reopen(state.round, setup, damaged)
        logger.info("resuming after round %d", state.round - 1)
    else:
        journal.open(settings, setup)
        journal.add(*start_record(setup, state))
    for observer in observers:
        observer.start(folder.path if folder else None, settings)
    last_saved = last_trimmed = time.monotonic()
    log = DeferredLog(journal, observers)
    defers = _defers_log(setup.problem)
    with interrupt_flag() as interrupted, report_failure(observers), faster.memory() as trim, closing(log):
        while state.round < setup.rounds and not state.stopped and not interrupted.is_set():
            if defers:
                log.enqueue(*run_round(setup, state, meanwhile=log.flush))
            else:
                journal.add(*run_round(setup, state), observers)
            if time.monotonic() - last_trimmed > TRIM_SECONDS:
                trim()
                last_trimmed = time.monotonic()
            if folder is not None and time.monotonic() - last_saved > checkpoint_seconds:
                log.write()
                _save(folder, setup, state, identity)
                last_saved = time.monotonic()
        log.write()
        if folder is not None:
            _save(folder, setup, state, identity)
        result = finished(setup, state, journal, settings)
    for observer in observers:
        observer.end(result.summary)
    return result


def check_rounds(rounds: Any) -> None:
    """Raise where the number of rounds is none."""
    if not is_whole(rounds) or rounds < 1:
        raise ValueError(f"`rounds` must be a whole number >= 1, but is {rounds!r}.")


def refuse_used(folder: Path) -> None:
    """Raise where the folder holds a run that came to its end, or that can go on."""
    if (folder / "summary.json").is_file() or checkpoint_rounds(folder):
        raise FileExistsError(
            f"{folder} already holds a run, which is not overwritten; choose another `out`, go on with that run "
            "(`resume=True`), or delete the folder."
        )


def refuse_or_name_damage(folder: RunFolder | None, *, resume: bool) -> list[str]:
    """Return the damaged ones of a resumed run's files, named in the log; raise where one cannot be written anew."""
    if folder is None or not resume:
        return []
    damaged = damaged_files(folder.path)
    for name in damaged:
        logger.error("%s", damage_line(name))
    if lost := [name for name in damaged if name in IRREPLACEABLE]:
        raise ValueError(
            f"{folder.path} cannot go on: {damage_line(lost[0])}, and it cannot be written anew. Put it back from a "
            "copy, or start a new run in another folder."
        )
    return damaged


def _defers_log(problem: Problem) -> bool:
    """Return whether a round is logged while the next one's clients compute: where these are not on the host."""
    return problem.theta0.device.type != "cpu"


def cohort_size(participation: float, n_clients: int) -> int:
    """Return how many clients a share means: rounded, at least one."""
    if not is_number(participation) or not 0 < participation <= 1:
        raise ValueError(f"participation must be a share in (0, 1], but is {participation!r}.")
    return max(1, round(participation * n_clients))


def fresh_state(setup: Setup) -> State:
    """Return the state before the first round."""
    n_clients = setup.federation.n_clients
    return State(
        server=setup.algorithm.init_server(setup.problem, n_clients),
        memory=MemoryStore(setup.algorithm, setup.problem, n_clients, setup.clients.memory_kind),
        losses=torch.full((n_clients,), torch.nan, dtype=torch.float64),
    )


def run_round(
    setup: Setup, state: State, *, meanwhile: Callable[[], None] | None = None
) -> tuple[Record, list[ClientRow]]:
    """Run one round: change the state, and return the round's record and its clients' rows.

    `meanwhile` is called when the clients were asked, before their replies are waited for.
    """
    started = time.perf_counter()
    algorithm, federation = setup.algorithm, setup.federation
    sampled = sampled_clients(setup.seed, state.round, federation.n_clients, setup.cohort_size)
    clients = algorithm.select(state.server, state.round, sampled, federation.n_clients)
    before = participant_losses(setup, state, clients)
    record: Record = {"round": state.round, "status": "next", "clients": clients.tolist()}
    notes: Record = {"bytes_up": 0, "bytes_down": 0, "passes": 0.0, "dropped": [], "clipped": [], "diagnostics": {}}
    step = train_cohort(setup, state, clients, notes, meanwhile)
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
    setup: Setup, state: State, clients: Tensor, notes: Record, meanwhile: Callable[[], None] | None
) -> ServerStep[Any]:
    """Return the server step after the phases of one round; the state has its new server and memories."""
    algorithm, at_start, asked, claims = setup.algorithm, state.server, clients, None
    needed = max(1, min(setup.policy.min_replies, clients.shape[0]))  # a method may ask fewer clients than were sampled
    for phase in range(MAX_PHASES):
        sent = algorithm.send(state.server)
        answers = setup.clients.train(setup, state, asked, sent, phase)
        if meanwhile is not None:
            meanwhile()
        _note_traffic(setup, state, asked, sent, answers, notes)
        found = screened(setup, state, answers, notes)
        if found is not None and phase == 0 and setup.policy.drop_share:
            found, claims = consistent(setup, state, answers, found, notes)
        n_kept = 0 if found is None else found.kept.shape[0]
        step: ServerStep[Any] = ServerStep(at_start, Status.HOLD)
        if found is not None and n_kept >= needed:
            step = server_step(setup, state, answers, found, notes)
        state.server = step.server
        notes["diagnostics"].update(step.diagnostics)
        for client, why in step.left_out:
            logger.warning("round %d: client %d dropped, its %s", state.round, client, why)
            notes["dropped"].append({"client": client, "why": why})
        if step.status is not Status.AGAIN or found is None:
            # a round that is held for want of replies goes back to its start, and so do its clients
            state.memory.commit_or_rollback(keep=n_kept >= needed)
            if claims is not None:
                remember(state, claims, at_start)
            return step
        asked = answers.clients[found.kept]  # a client that is dropped in one phase is not asked in the next
    raise RuntimeError(f"{type(algorithm).__name__} asked for more than {MAX_PHASES} phases in round {state.round}.")


def _note_traffic(setup: Setup, state: State, asked: Tensor, sent: Any, answers: Answers, notes: Record) -> None:
    """Add up bytes and passes of a phase, and write down who did not reply, or end the run if the policy says so."""
    for client, why in answers.missing:
        if setup.policy.on_missing == "fail":
            raise ValueError(
                f'client {client} is missing in round {state.round} ({why}), and `policy.on_missing` is "fail"; '
                '"proceed" goes on without it.'
            )
        logger.warning("round %d: client %d dropped, %s", state.round, client, why)
        notes["dropped"].append({"client": client, "why": why})
    notes["bytes_down"] += message_bits(sent) * asked.shape[0] // 8
    if answers.replies is not None:
        n_replies = answers.clients.shape[0]
        notes["bytes_up"] += setup.algorithm.uplink_bits(row(answers.replies.updates, 0)) * n_replies // 8
        notes["passes"] += setup.algorithm.passes(sent) * n_replies


def screened(setup: Setup, state: State, answers: Answers, notes: Record) -> Screened | None:
    """Return which replies are usable, after writing down which are dropped or clipped, and why; None: no replies."""
    if answers.replies is None:
        return None
    asked, found = answers.clients, screen(answers.replies, setup.policy, setup.algorithm.info)
    if found.unchanged:
        return found
    for k, why in found.dropped:
        client = int(asked[k])
        if setup.policy.on_nonfinite == "fail" and why == "update is not finite":
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


def server_step(setup: Setup, state: State, answers: Answers, found: Screened, notes: Record) -> ServerStep[Any]:
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
    return algorithm.server_step(state.server, replies, cohort)


def unused_settings(algorithm: AnyAlgorithm) -> list[str]:
    """Return the shared settings that differ from their default and have no effect on this prepared method."""
    if not isinstance(algorithm, LocalWork):
        return []
    return sorted(name for name in algorithm.unused() if getattr(algorithm, name) != default_of(algorithm, name))


def finished(setup: Setup, state: State, journal: Journal, settings: dict[str, Any]) -> RunResult:
    """Return the result, after writing the model and the summary to the run's folder."""
    problem = setup.problem
    evaluated = kept_record(state, journal.history)
    status, reason = ended(state, journal.history, setup.rounds)
    summary: Record = {
        "name": settings.get("name", "run"),
        "algorithm": settings.get("algorithm", {}).get("name", type(setup.algorithm).__name__),
        "seed": setup.seed,
        "version": journal.environment["dqnfed"],
        "rounds": state.round,
        "status": status,
        "reason": reason,
        "score": problem.score_name,
        **kept_facts(setup, state),
        "accuracy": evaluated["accuracy"],
        "train_loss": evaluated["train_loss"],
        "models": evaluated.get("models", {}),
        "start": state.start,
        "rho_mean": state.rho_sum / state.rho_n if state.rho_n else None,
        "totals": state.totals,
        "n_dropped": state.n_dropped,
        "n_clipped": state.n_clipped,
        "unused": unused_settings(setup.algorithm),
        "mode": setup.algorithm.mode,
        "untested": len(setup.federation.untested),
    }
    theta = kept_model(setup, state).detach().cpu()
    if journal.folder is not None:
        journal.folder.write_model(
            named_parameters(theta, problem.layout), model_metadata(problem.layout, problem.model_spec)
        )
    if setup.complete is not None:
        summary.update(setup.complete())
    if journal.folder is not None:
        journal.folder.finish(summary)
    return RunResult(
        theta=theta,
        layout=problem.layout,
        summary=summary,
        history=journal.history,
        client_rows=journal.all_rows(),
        columns=model_columns(setup),
        config=settings,
        clients=journal.clients,
        environment=journal.environment,
        module=problem.module,
        model_spec=problem.model_spec,
    )


@contextmanager
def interrupt_flag() -> Iterator[threading.Event]:
    """Give an event that the first Ctrl-C sets; a second Ctrl-C interrupts at once."""
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return
    usual = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        logger.warning("interrupted: finishing this round and saving; press Ctrl-C again to stop at once")
        flag.set()
        signal.signal(signal.SIGINT, usual)

    signal.signal(signal.SIGINT, note)
    try:
        yield flag
    finally:
        signal.signal(signal.SIGINT, usual)


def _save(folder: RunFolder, setup: Setup, state: State, identity: Record) -> None:
    folder.settle()
    if setup.evaluation.metrics == "aggregate-only":
        state = replace(state, losses=torch.full_like(state.losses, torch.nan), claims=None)
    save_checkpoint(folder.path, state, identity, folder.lengths())
    logger.info("checkpoint after round %d", state.round - 1)


def _identity(setup: Setup) -> Record:
    """Return what must be the same when a run goes on."""
    return {
        "algorithm": repr(setup.algorithm),
        "precision": str(setup.problem.theta0.dtype),
        "seed": setup.seed,
        "clients": setup.federation.n_clients,
        "parameters": setup.problem.n_parameters,
        "clients a round": setup.cohort_size,
        "eval.select": setup.evaluation.select,
        "NUMERICS": NUMERICS,
        "data": dict(setup.federation.fingerprint if setup.fingerprint is None else setup.fingerprint),
    }


def _account(state: State, record: Record) -> None:
    for key in state.totals:
        state.totals[key] += record[key]
    if record["rho"] is not None:
        state.rho_sum += record["rho"]
        state.rho_n += 1
    state.n_dropped += len(record["dropped"])
    state.n_clipped += len(record["clipped"])


def plain_config(setup: Setup, participation: float) -> dict[str, Any]:
    """Return the settings of a run that no config file describes."""
    return {
        "name": "run",
        "algorithm": {"name": type(setup.algorithm).__name__, **_given(setup.algorithm)},
        "train": {"rounds": setup.rounds, "participation": participation},
        "eval": _given(setup.evaluation),
        "policy": _given(setup.policy),
        "run": {"seed": setup.seed},
    }


def _given(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(settings).items() if value is not None}

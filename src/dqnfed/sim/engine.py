"""One round, one straight line: sample, send, client steps, screen, server step, evaluate, record."""

from __future__ import annotations

import logging
import math
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

from dqnfed.core.algorithm import AnyAlgorithm, Cohort, ServerStep, Status, message_bits
from dqnfed.core.digest import Digest
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.result import RunResult, model_metadata
from dqnfed.core.run_folder import ClientRow, RunFolder, claimed
from dqnfed.core.screening import Policy, Screened, check_replies, guarded, screen, screened_digest, screened_updates
from dqnfed.core.tensors import all_finite, gather, named_parameters
from dqnfed.sim.checkpoint import load_checkpoint, save_checkpoint
from dqnfed.sim.clients import Answers
from dqnfed.sim.cohort import CohortRunner, vectorised
from dqnfed.sim.early_stop import check_patience, out_of_patience
from dqnfed.sim.feed import Feed, sampled_clients
from dqnfed.sim.heap import Heap, nothing_old_collected
from dqnfed.sim.journal import Journal, described_clients
from dqnfed.sim.measure import measured, model_columns, participant_losses, start_record
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.observers import Afterwards, Observer, told_of_failure
from dqnfed.sim.state import Evaluation, Record, Setup, State

logger = logging.getLogger("dqnfed")
NOBODY = Screened(torch.arange(0), torch.ones(0), [])
MAX_PHASES = 200  # of one round; a method that asks for more has lost its way


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
) -> RunResult:
    """Return the result of training for the given number of rounds; with `out`, everything is on disk as it happens.

    A run is a function of its arguments: the same call gives the same bits, and a killed run that is resumed ends
    with the bits of one that was not. Ctrl-C finishes the round, saves and returns; a second one stops at once.
    """
    size = cohort_size(participation, federation.n_clients)
    policy = policy or Policy()
    prepared = guarded(algorithm, policy).prepare(problem, federation.n_clients, size)
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
        Feed(federation, problem, prepared, seed),
    )
    settings = dict(config) if config is not None else plain_config(setup, participation)
    return played(setup, settings, out=out, checkpoint_seconds=checkpoint_seconds, observers=observers, resume=resume)


def played(
    setup: Setup,
    settings: dict[str, Any],
    *,
    out: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    observers: Sequence[Observer] = (),
    resume: bool = False,
) -> RunResult:
    """Return the result of a run that is set up, wherever its clients are."""
    check_replies(setup.policy, setup.cohort_size)
    check_patience(setup)
    if out is None:
        if resume:
            raise ValueError("`resume=True` needs `out`, the folder of the run that is to go on.")
        return _played(setup, settings, None, checkpoint_seconds, observers, resume)
    with claimed(Path(out)), closing(RunFolder(Path(out))) as folder:
        return _played(setup, settings, folder, checkpoint_seconds, observers, resume)


def _played(
    setup: Setup,
    settings: dict[str, Any],
    folder: RunFolder | None,
    checkpoint_seconds: float,
    observers: Sequence[Observer],
    resume: bool,
) -> RunResult:
    journal = Journal(folder, model_columns(setup))
    state = fresh_state(setup)
    if (
        resume
        and folder is not None
        and load_checkpoint(folder.path / "checkpoint", state, setup.algorithm, _identity(setup))
    ):
        journal.reopen(state.round)
        logger.info("resuming after round %d", state.round - 1)
    else:
        journal.open(settings, described_clients(setup), setup.problem)
        journal.add(*start_record(setup, state))
    for observer in observers:
        observer.start(folder.path if folder else None, settings)
    heap, last_saved = Heap(), time.monotonic()
    told = Afterwards(journal, observers)
    with interrupt_flag() as interrupted, told_of_failure(observers), nothing_old_collected(), closing(told):
        while state.round < setup.rounds and not state.stopped and not interrupted.is_set():
            told.later(*play_round(setup, state, meanwhile=told.now))
            if not setup.answers_come_later:
                told.now()
            heap.tidy()
            if folder is not None and time.monotonic() - last_saved > checkpoint_seconds:
                told.write()
                _save(folder, setup, state)
                last_saved = time.monotonic()
        told.write()
        if folder is not None:
            _save(folder, setup, state)
        result = finished(setup, state, journal, settings)
    for observer in observers:
        observer.end(result.summary)
    return result


def cohort_size(participation: float, n_clients: int) -> int:
    """Return how many clients a share means: rounded, at least one."""
    if not 0 < participation <= 1:
        raise ValueError(f"participation must be a share in (0, 1], but is {participation}.")
    return max(1, round(participation * n_clients))


def fresh_state(setup: Setup) -> State:
    """Return the state before the first round."""
    n_clients = setup.federation.n_clients
    return State(
        server=setup.algorithm.init_server(setup.problem, n_clients),
        memory=MemoryStore(setup.algorithm, setup.problem, n_clients, setup.clients.memory_kind),
        losses=torch.full((n_clients,), torch.nan, dtype=torch.float64),
    )


def play_round(
    setup: Setup, state: State, *, meanwhile: Callable[[], None] = lambda: None
) -> tuple[Record, list[ClientRow]]:
    """Play one round: change the state, and return the round's record and its clients' rows.

    `meanwhile` is called when the clients have been asked, before their answers are waited for.
    """
    started = time.perf_counter()
    algorithm, federation = setup.algorithm, setup.federation
    sampled = sampled_clients(setup.seed, state.round, federation.n_clients, setup.cohort_size)
    clients = algorithm.cohort(state.server, state.round, sampled, federation.n_clients)
    before = participant_losses(setup, state, clients)
    record: Record = {"round": state.round, "status": "next", "clients": clients.tolist()}
    notes: Record = {"bytes_up": 0, "bytes_down": 0, "passes": 0.0, "dropped": [], "clipped": [], "diagnostics": {}}

    at_start, asked = state.server, clients
    needed = max(1, min(setup.policy.min_replies, clients.shape[0]))  # a method may ask fewer clients than were sampled
    for phase in range(MAX_PHASES):
        sent = algorithm.send(state.server)
        answers = setup.clients.answers(setup, state, asked, sent, phase)
        n_answers = answers.clients.shape[0]
        note_missing(setup, state, answers, notes)
        notes["bytes_up"] += algorithm.uplink_bits(answers.updates) * n_answers // 8 if n_answers else 0
        notes["bytes_down"] += message_bits(sent) * asked.shape[0] // 8
        notes["passes"] += algorithm.passes(sent) * n_answers
        state.server = algorithm.tidied(state.server)
        meanwhile()
        digest = answers.arrived() if answers.arrived is not None else None  # here a GPU is waited for
        found = screened(setup, state, answers, digest, notes) if n_answers else NOBODY
        went_back = found.kept.shape[0] < needed
        if went_back:
            step: ServerStep[Any] = ServerStep(at_start, Status.HOLD)
        else:
            step = answered_step(setup, state, answers, digest, found)
        state.server = step.server
        notes["diagnostics"].update(step.diagnostics)
        note_left_out(state, step, notes)
        if step.status is not Status.AGAIN:
            break
        asked = answers.clients[found.kept]  # who is dropped in one phase knows nothing that the next could ask for
    else:
        raise RuntimeError(
            f"{type(algorithm).__name__} asked for more than {MAX_PHASES} phases in round {state.round}."
        )
    state.memory.settle(keep=not went_back)  # a server that goes back to its start takes its clients along

    if not ended_finite(step):
        step = ServerStep(state.server, Status.STOP, {}, f"the model is not finite after round {state.round}")
    state.stopped = step.reason or "the method ended the run" if step.status is Status.STOP else ""
    record["status"] = step.status.value
    if state.stopped:
        record["reason"] = state.stopped
    is_last = state.round == setup.rounds - 1 or bool(state.stopped)
    is_due = _is_due(setup, state.round)
    evaluated, rows = measured(setup, state, clients, before, evaluate_all=is_last or is_due)
    record.update(evaluated)
    if is_due and not is_last and (reason := out_of_patience(setup, state)):
        state.stopped = record["reason"] = reason
        record["status"] = Status.STOP.value
    record.update(notes)
    record["seconds"] = time.perf_counter() - started
    _account(state, record)
    state.round += 1
    return record, rows


def ended_finite(step: ServerStep[Any]) -> bool:
    """Return whether the new model is finite; a GPU is asked only where the method cannot say so itself."""
    theta = step.server.theta
    if step.norm_bound is not None and step.norm_bound < math.sqrt(torch.finfo(theta.dtype).max):
        return True
    return all_finite(theta)


def note_missing(setup: Setup, state: State, answers: Answers, notes: Record) -> None:
    """Write down who gave no answer, or end the run if the policy says so."""
    for client, why in answers.missing:
        if setup.policy.on_missing == "fail":
            raise ValueError(
                f'client {client} is missing in round {state.round} ({why}), and `policy.on_missing` is "fail"; '
                '"proceed" goes on without it.'
            )
        logger.warning("round %d: client %d dropped, %s", state.round, client, why)
        notes["dropped"].append({"client": client, "why": why})


def note_left_out(state: State, step: ServerStep[Any], notes: Record) -> None:
    """Write down whose answers the method did without."""
    for client, why in step.left_out:
        logger.warning("round %d: client %d dropped, its %s", state.round, client, why)
        notes["dropped"].append({"client": client, "why": why})


def screened(setup: Setup, state: State, answers: Answers, digest: Digest | None, notes: Record) -> Screened:
    """Return which answers are usable, after writing down who is dropped or clipped, and why."""
    asked = answers.clients
    algorithm = setup.algorithm
    found = screen(answers.updates, setup.policy, algorithm.scales, algorithm.optional, digest=digest)
    if found.as_they_came:
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
        if note not in notes["clipped"]:  # a phase may be played twice
            logger.info("round %d: client %d clipped by the factor %.3g", state.round, client, factor)
            notes["clipped"].append(note)
    return found


def answered_step(
    setup: Setup, state: State, answers: Answers, digest: Digest | None, found: Screened
) -> ServerStep[Any]:
    """Return what the server makes of the usable answers; their clients' memories wait for the end of the round."""
    algorithm, federation = setup.algorithm, setup.federation
    kept, memory = answers.clients, answers.memory
    if not found.as_they_came and len(found.kept) < len(kept):
        kept = kept[found.kept]
        memory = [memory[k] for k in found.kept.tolist()] if isinstance(memory, list) else gather(memory, found.kept)
    state.memory.lend(kept, memory)
    if digest is not None:
        digest = screened_digest(digest, found, algorithm.scales, answers.clients.shape[0])
    cohort = Cohort(kept, federation.n_examples[kept], federation.n_clients, state.round, found.factors, digest)
    return algorithm.server_step(state.server, screened_updates(answers.updates, found, algorithm.scales), cohort)


def finished(setup: Setup, state: State, journal: Journal, settings: dict[str, Any]) -> RunResult:
    """Return the result, after writing the model and the summary to the run's folder."""
    problem = setup.problem
    last = next(r for r in reversed(journal.history) if r["accuracy"] is not None)
    summary = {
        "name": settings.get("name", "run"),
        "algorithm": settings.get("algorithm", {}).get("name", type(setup.algorithm).__name__),
        "seed": setup.seed,
        "version": journal.environment["dqnfed"],
        "rounds": state.round,
        "status": "stopped" if state.stopped else "finished" if state.round >= setup.rounds else "interrupted",
        "reason": state.stopped,
        "score": problem.score_name,
        "accuracy": last["accuracy"],
        "train_loss": last["train_loss"],
        "models": last.get("models", {}),
        "start": state.start,
        "rho_mean": state.rho_sum / state.rho_n if state.rho_n else None,
        "totals": state.totals,
        "n_dropped": state.n_dropped,
        "n_clipped": state.n_clipped,
    }
    theta = _global_model(setup, state).detach().cpu()
    if journal.folder is not None:
        journal.folder.write_model(
            named_parameters(theta, problem.layout), model_metadata(problem.layout, problem.model_spec)
        )
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


def _save(folder: RunFolder, setup: Setup, state: State) -> None:
    folder.settle()
    if setup.evaluation.metrics == "aggregate-only":
        state = replace(state, losses=torch.full_like(state.losses, torch.nan))
    save_checkpoint(folder.path / "checkpoint", state, _identity(setup))
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
    }


def _is_due(setup: Setup, round: int) -> bool:
    return (round + 1) % setup.evaluation.every == 0


def _account(state: State, record: Record) -> None:
    for key in state.totals:
        state.totals[key] += record[key]
    if record["rho"] is not None:
        state.rho_sum += record["rho"]
        state.rho_n += 1
    state.n_dropped += len(record["dropped"])
    state.n_clipped += len(record["clipped"])


def _global_model(setup: Setup, state: State) -> Tensor:
    if setup.algorithm.is_personal:
        theta: Tensor = state.server.theta
        return theta
    return next(iter(setup.algorithm.evaluated(state.server, None).values()))


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

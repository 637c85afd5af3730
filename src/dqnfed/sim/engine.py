"""The loop over rounds, with a folder that is always whole: interrupted, killed or at its end."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dqnfed.core.algorithm import (
    AnyAlgorithm,
    is_number,
)
from dqnfed.core.checksums import damage_line, damaged_files
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.result import RunResult
from dqnfed.core.run_folder import RunFolder, claimed
from dqnfed.core.runners import CohortRunner
from dqnfed.core.screening import (
    Policy,
    check_min_replies,
)
from dqnfed.secure.noise import Privacy
from dqnfed.sim.accelerate import Acceleration, acceleration
from dqnfed.sim.checkpoint import checkpoint_rounds, load_checkpoint, save_checkpoint
from dqnfed.sim.early_stop import check_patience
from dqnfed.sim.ending import finished
from dqnfed.sim.guard import watch_end
from dqnfed.sim.journal import DeferredLog, Journal
from dqnfed.sim.measure import model_columns, start_record
from dqnfed.sim.observers import Observer, report_failure
from dqnfed.sim.private import go_on_counting
from dqnfed.sim.rounds import run_round
from dqnfed.sim.sample import sample_line
from dqnfed.sim.sampling import Sampling
from dqnfed.sim.selection import check_select, global_model
from dqnfed.sim.setup import check_rounds, fresh_state, identity_of, plain_config, set_up
from dqnfed.sim.state import NOBODY, Completion, Evaluation, Record, Setup, State
from dqnfed.sim.stragglers import Stragglers
from dqnfed.sim.sums import check_sums

logger = logging.getLogger("dqnfed")
IRREPLACEABLE = ("config.toml", "flower.json")  # settings, and the key to the clients' memories


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
    secure: bool = False,  # replies under one-time pads: the server sees sums and products, never a row
    privacy: Privacy | None = None,  # clipped replies, Gaussian noise, and the epsilon that a run may spend
    sampling: Sampling | str = "uniform",  # how the clients of a round are drawn, or the name of the rule
    stragglers: Stragglers | None = None,  # a deadline and clients of different speed
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
        secure=secure,
        privacy=privacy,
        sampling=sampling,
        stragglers=stragglers,
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
    check_sums(setup)
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
    if line := sample_line(len(setup.evaluated), setup.federation.n_clients):
        logger.info("%s", line)
    if setup.problem.theta0.is_cuda:
        torch.cuda.reset_peak_memory_stats(setup.problem.theta0.device)
    journal = Journal(folder, model_columns(setup))
    state = fresh_state(setup)
    identity = {} if folder is None else identity_of(setup)
    damaged = refuse_or_name_damage(folder, resume=resume)
    if resume and folder is not None and load_checkpoint(folder.path, state, setup.algorithm, identity):
        journal.reopen(state.round, setup, damaged)
        logger.info("resuming after round %d", state.round - 1)
    else:
        journal.open(settings, setup)
        journal.add(*start_record(setup, state))
        if setup.policy.on_worse == "best":
            watch_end(setup, state, global_model(setup, state))
    if folder is not None:
        go_on_counting(folder.path, setup, state, resume=resume)
    for observer in observers:
        observer.start(folder.path if folder else None, settings)
    last_saved = time.monotonic()
    log = DeferredLog(journal, observers)
    defers = _defers_log(setup.problem)
    with interrupt_flag() as interrupted, report_failure(observers), faster.memory() as trim, closing(log):
        while state.round < setup.rounds and not state.stopped and not interrupted.is_set():
            if defers:
                log.enqueue(*run_round(setup, state, meanwhile=log.flush))
            else:
                journal.add(*run_round(setup, state), observers)
            trim()
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
        guard = state.guard if setup.summing is not None else {}  # where it knows no single client's loss
        state = replace(state, losses=NOBODY, claims=None, guard=guard)
    save_checkpoint(folder.path, state, identity, folder.lengths())
    logger.info("checkpoint after round %d", state.round - 1)

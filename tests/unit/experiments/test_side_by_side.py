"""How many runs go side by side, what they tell, and that their share of the cores changes no result."""

from __future__ import annotations

import io
import logging
import math
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from rich.console import Console

from dqnfed.experiments.compare import planned_runs
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import run_experiment
from dqnfed.experiments.planned import Ending, Planned, run_planned
from dqnfed.experiments.progress import RunBoard
from dqnfed.experiments.side_by_side import automatic_jobs, threads_a_job
from dqnfed.experiments.worker import Advanced, Broken, Line, Logged, LogOverLine, Reporter, outcome, portable
from tests.helpers.quick import in_turn

GIGABYTE = 2**30
HOME = "dqnfed.experiments.side_by_side"


def planned(out: Path, *changes: str, n_seeds: int = 4) -> list[Planned]:
    small = ["train.rounds=3", "data.clients=4", "data.limit=200", "model.hidden=[4]"]
    config = read_config("digits", [*small, *changes])
    if not any(change.startswith("run.threads") for change in changes):  # which the preset gives
        config = config.model_copy(update={"run": config.run.model_copy(update={"threads": None})})
    return planned_runs(config, ["fedavg", "qffl"], range(n_seeds), out)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Pretend to have eight cores, much memory and no GPU."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(f"{HOME}.free_bytes", lambda: math.inf)
    return monkeypatch


@pytest.fixture
def pipe() -> Iterator[tuple[Connection, Line]]:
    """Give the parent's end, and the worker's line."""
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        yield ours, Line(theirs)


def heard(connection: Connection) -> list[object]:
    found = []
    while connection.poll():
        found.append(connection.recv())
    return found


def test_as_many_jobs_as_runs_cores_and_memory_allow(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert automatic_jobs(planned(tmp_path, n_seeds=2)) == 4  # runs
    assert automatic_jobs(planned(tmp_path, n_seeds=9)) == 8  # cores
    machine.setattr(f"{HOME}.free_bytes", lambda: 11.9 * GIGABYTE)
    assert automatic_jobs(planned(tmp_path, n_seeds=9)) == 3
    machine.setattr(f"{HOME}.free_bytes", lambda: 0.5 * GIGABYTE)
    assert automatic_jobs(planned(tmp_path)) == 1
    assert automatic_jobs([]) == 1


def test_a_smaller_share_of_the_machine_is_respected(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    machine.setattr(torch, "get_num_threads", lambda: 1)  # what OMP_NUM_THREADS=1 does
    assert automatic_jobs(planned(tmp_path)) == 1
    machine.setattr(torch, "get_num_threads", lambda: 8)
    machine.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert automatic_jobs(planned(tmp_path)) == 2


def test_who_has_shared_out_the_machine_gets_one_job(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for change in ("run.threads=2", "run.cohort=ray", "run.device=cuda"):
        assert automatic_jobs(planned(tmp_path, change)) == 1, change
    machine.setattr(torch.cuda, "is_available", lambda: True)
    assert automatic_jobs(planned(tmp_path)) == 1
    assert automatic_jobs(planned(tmp_path, "run.device=cpu")) == 8


@pytest.mark.parametrize(("jobs", "threads"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_cores_are_shared_out(jobs: int, threads: int, machine: pytest.MonkeyPatch) -> None:
    assert threads_a_job(jobs) == threads


@pytest.mark.parametrize(("algorithm", "cohort"), in_turn(["fedavg", "dqn-fed"], ["threads", "vectorised", "looped"]))
def test_the_share_of_the_cores_changes_no_result(algorithm: str, cohort: str) -> None:
    """Answers of threads to the bit; products that torch itself shares out over cores are added up in another order."""
    tolerance = 0.0 if (algorithm, cohort) == ("fedavg", "threads") else 1e-10
    before = torch.get_num_threads()
    changes = [
        "train.rounds=3",
        "model.hidden=[60]",
        "data.clients=8",
        "train.lr=0.1",
        "run.dtype=float64",
        f"run.cohort={cohort}",
    ]
    try:
        one, two = (
            run_experiment(read_config("digits", [*changes, f"run.threads={n}"]).with_algorithm(algorithm), None).theta
            for n in (1, 2)
        )
    finally:
        torch.set_num_threads(before)
    assert (one - two).norm() <= tolerance * one.norm()


def test_a_run_tells_how_far_it_is_but_not_too_often(pipe: tuple[Connection, Line], tmp_path: Path) -> None:
    ours, line = pipe
    reporter = Reporter(line)
    reporter.start(tmp_path, {"train": {"rounds": 1000}})
    for i in range(1000):  # in a few milliseconds
        reporter.round({"round": i, "accuracy": {"mean": 50.0, "std": 1.0, "worst10": 40.0} if i == 0 else None})
    told = heard(ours)
    assert told[:2] == [Advanced(0, 1000, ""), Advanced(1, 1000, "mean 50.0, std 1.0, worst 10 % 40.0")]
    assert len(told) < 20


def test_a_run_that_is_told_to_stop_before_it_begins_computes_nothing(
    pipe: tuple[Connection, Line], tmp_path: Path
) -> None:
    ours, line = pipe
    ours.send(None)
    run = planned(tmp_path)[0]
    assert outcome(run, line) == Ending("interrupted")
    assert not run.folder.exists()
    assert line.next_run() is None


@pytest.mark.parametrize("how", ["told", "parent gone"])
def test_a_run_that_is_told_to_stop_ends_after_its_round(
    how: str, pipe: tuple[Connection, Line], tmp_path: Path
) -> None:
    ours, line = pipe

    class StopAfterFirst(Reporter):
        def round(self, record: object) -> None:
            if how == "told":
                ours.send(None)
            else:
                ours.close()
            super().round(record)  # type: ignore[arg-type]

    run = planned(tmp_path)[0]
    try:
        assert run_planned(run, [StopAfterFirst(line)]) == Ending("interrupted")
    finally:
        logging.disable(logging.NOTSET)
    assert len((run.folder / "metrics.jsonl").read_text().splitlines()) == 2  # the start and one round


def test_logs_come_with_their_level_and_arguments_filled_in(pipe: tuple[Connection, Line]) -> None:
    ours, line = pipe
    logger = logging.Logger("dqnfed.made-up")
    logger.addHandler(LogOverLine(line))
    logger.warning("client %d dropped", 3)
    assert heard(ours) == [Logged("dqnfed.made-up", logging.WARNING, "client 3 dropped")]


class Stubborn(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def test_errors_travel_as_they_are_or_as_their_text() -> None:
    error = OSError(28, "no space")
    assert portable(error) is error
    replaced = portable(Stubborn(1, 2))  # pickle cannot make it again from its text alone
    assert isinstance(replaced, RuntimeError)
    assert str(replaced) == "Stubborn: 1 and 2"


def test_an_error_that_is_not_the_methods_own_reaches_the_parent(
    pipe: tuple[Connection, Line], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr("dqnfed.experiments.worker.run_planned", full)
    found = outcome(planned(tmp_path)[0], pipe[1])
    assert isinstance(found, Broken)
    assert isinstance(found.error, OSError)
    assert "in the process of fedavg, seed 0" in found.error.__notes__[0]


def test_the_board_shows_the_runs_under_way() -> None:
    screen = io.StringIO()
    with RunBoard(Console(file=screen, force_terminal=True, width=150), enabled=True) as board:
        board.expect(3)
        board.advance("[1/3] fedavg, seed 0", 4, 10, "mean 50.0")
        board.advance("[2/3] qffl, seed 0", 1, 10, "")
        board.end("[1/3] fedavg, seed 0")
        board.advance("[2/3] qffl, seed 0", 9, 10, "mean 70.0")
    shown = screen.getvalue()
    last = shown[shown.rindex("all runs") :]
    assert "1/3" in last
    assert "qffl, seed 0" in last
    assert "fedavg" not in last
    assert "9/10" in last.replace(" ", "").replace("\x1b[32m", "")

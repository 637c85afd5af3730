"""Runs side by side end as if they had run one after the other, whatever happens to their processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dqnfed.cli import app
from dqnfed.experiments.compare import planned_runs, run_all
from dqnfed.experiments.config import read_config
from dqnfed.experiments.planned import Planned
from tests.helpers.folders import contents, n_lines

EXPERIMENT = """
name = "digits by several"

[data]
name = "digits"
clients = 6
limit = 600
test = 0.2

[model]
name = "mlp"
hidden = [80]

[train]
rounds = {rounds}
lr = 0.5

[eval]
every = 7

[algorithms.dqn-fed]
rates = "hessian"  # of more parameters than the method bears: it cannot run
"""


class Comparison:
    """The command, and the same runs one after the other in this process."""

    def __init__(self, folder: Path, algorithms: Sequence[str], *, seeds: Sequence[int] = (0,), rounds: int) -> None:
        self.algorithms, self.seeds, self.rounds = algorithms, seeds, rounds
        self.file, self.out, self._straight = folder / "experiment.toml", folder / "runs", folder / "straight"
        self.file.write_text(EXPERIMENT.format(rounds=rounds))

    def words(self, out: Path, *, jobs: int) -> list[str]:
        words = ["compare", str(self.file), "--out", str(out), "--jobs", str(jobs)]
        return [*words, "--algorithms", ",".join(self.algorithms), "--seeds", ",".join(str(s) for s in self.seeds)]

    def started(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "dqnfed.cli", *self.words(self.out, jobs=2)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a process group of its own, as a shell gives to what it starts
            env={**os.environ, "COLUMNS": "500"},
        )

    def run(self, name: str, seed: int = 0) -> Path:
        return self.out / name / str(seed)

    def planned(self, out: Path) -> list[Planned]:
        return planned_runs(read_config(str(self.file)), self.algorithms, self.seeds, out)

    def goes_on_to_the_same_end(self) -> None:
        again = CliRunner().invoke(app, self.words(self.out, jobs=1))
        assert again.exit_code == 0, again.output
        for straight in run_all(self.planned(self._straight)):
            assert contents(self.out / straight.relative_to(self._straight)) == contents(straight)


def wait_until(happened: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 200
    while not happened():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.005)


def player_of(run: Path) -> int:
    """Return the process that plays the run."""
    return int((run / ".lock").read_text())


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()


def held_under_way(comparison: Comparison, process: subprocess.Popen[str] | None = None) -> list[int]:
    """Return the processes of the first two runs, stopped after some rounds: none ends before something happens."""
    held: dict[str, int] = {}

    def both() -> bool:
        for name in comparison.algorithms[:2]:
            if name not in held and n_lines(comparison.run(name)) > 4:
                held[name] = player_of(comparison.run(name))
                os.kill(held[name], signal.SIGSTOP)
        return len(held) == 2

    wait_until(both, process)
    return [held[name] for name in comparison.algorithms[:2]]


def let_go(*players: int) -> None:
    time.sleep(0.5)  # for the parent to notice what happened
    for player in players:
        os.kill(player, signal.SIGCONT)


def test_jobs_change_neither_the_runs_nor_the_table_nor_what_cannot_run(tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, ["dqn-fed", "fedavg", "qffl"], seeds=[0, 1], rounds=4)
    command = [sys.executable, "-m", "dqnfed.cli", *comparison.words(tmp_path / "2", jobs=2)]
    together = subprocess.run(command, capture_output=True, text=True, timeout=300)
    in_turn = CliRunner().invoke(app, comparison.words(tmp_path / "1", jobs=1))
    assert together.returncode == in_turn.exit_code == 1  # dqn-fed could not run
    assert together.stderr.count("could not run: DQNFed") == 2
    assert "report: " in together.stdout
    assert together.stdout.replace(str(tmp_path / "2"), str(tmp_path / "1")) == in_turn.stdout
    for name in ("fedavg/0", "fedavg/1", "qffl/0", "qffl/1"):
        assert contents(tmp_path / "2" / name) == contents(tmp_path / "1" / name)


def interrupted_group(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)  # what a terminal does


def interrupted_parent(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [interrupted_group, pytest.param(interrupted_parent, marks=pytest.mark.slow)])
def test_interrupted_and_gone_on(interrupt: Callable[[subprocess.Popen[str]], None], tmp_path: Path) -> None:
    """One Ctrl-C: every run ends after its round, saved, and no further one begins."""
    comparison = Comparison(tmp_path, ["fedavg", "qffl", "term"], rounds=40)
    with comparison.started() as process:
        players = held_under_way(comparison, process)
        interrupt(process)
        let_go(*players)
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert errors.count("press Ctrl-C again") == 1
    assert f"0 of 3 runs are finished; the same command with --out {comparison.out} goes on" in errors
    assert "Traceback" not in errors
    for name in ("fedavg", "qffl"):
        summary = json.loads((comparison.run(name) / "summary.json").read_text())
        assert summary["status"] == "interrupted"
        assert n_lines(comparison.run(name)) == summary["rounds"] + 1
    assert not comparison.run("term").exists()
    comparison.goes_on_to_the_same_end()


@pytest.mark.slow
def test_a_process_that_is_killed_takes_no_other_run_along(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the system does where memory is short; the worker that is left plays the rest."""
    comparison = Comparison(tmp_path, ["fedavg", "qffl", "term"], rounds=40)

    def kill() -> None:
        players = held_under_way(comparison)
        os.kill(players[0], signal.SIGKILL)
        let_go(players[1])

    with ThreadPoolExecutor() as beside:
        killed = beside.submit(kill)
        done = run_all(comparison.planned(comparison.out), jobs=2)
        killed.result()
    assert done == [comparison.run("qffl"), comparison.run("term")]
    (message,) = caplog.messages
    assert message.startswith("the process of fedavg, seed 0 was ended by SIGKILL")
    assert "--jobs 1" in message
    comparison.goes_on_to_the_same_end()


@pytest.mark.slow
def test_interrupted_twice_stops_at_once(tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, ["fedavg", "qffl", "term"], rounds=40)
    with comparison.started() as process:
        players = held_under_way(comparison, process)
        interrupted_group(process)
        time.sleep(0.5)
        interrupted_group(process)  # nobody waits for the rounds that are held
        _, errors = process.communicate(timeout=200)
    assert process.returncode == 130, errors
    assert all(is_gone(player) for player in players)
    assert not any((comparison.run(name) / "summary.json").exists() for name in comparison.algorithms)
    assert not comparison.run("term").exists()
    comparison.goes_on_to_the_same_end()


@pytest.mark.slow
def test_workers_whose_parent_is_killed_save_their_runs_and_end(tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, ["fedavg", "qffl", "term"], rounds=40)
    with comparison.started() as process:
        players = held_under_way(comparison, process)
        process.kill()
        let_go(*players)
        wait_until(lambda: all(is_gone(player) for player in players))
    for name in ("fedavg", "qffl"):
        summary = json.loads((comparison.run(name) / "summary.json").read_text())
        assert summary["status"] == "interrupted"

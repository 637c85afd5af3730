"""A run that is killed or interrupted, at whatever moment, and resumed ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dqnfed.core.checksums import damaged_files
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import run_experiment
from tests.helpers.folders import contents, n_lines
from tests.helpers.fork_server import ForkServer

COMMAND = [sys.executable, "-m", "dqnfed.cli"]


WRONG_LABELS = """
[data.noise]
share = 0.4
level_low = 0.5

[algorithms.fedcorr]
sweeps = 1
fine_tuning = 8
"""

EXPERIMENT = """
name = "digits by hand"

[data]
name = "digits"
partition = "shards"
clients = 12
shards_per_client = 2
test = 0.2

[model]
name = "mlp"
hidden = [16]

[train]
rounds = {rounds}
lr = 0.5
participation = {participation}

[eval]
every = 7

[run]
threads = 1
checkpoint_seconds = {checkpoint_seconds}
"""


class Experiment:
    """One experiment that lasts long enough to be killed, and how often it saves."""

    def __init__(
        self, folder: Path, algorithm: str, *, rounds: int, checkpoint_seconds: float, participation: float
    ) -> None:
        self.algorithm, self.rounds = algorithm, rounds
        self.file = folder / "experiment.toml"
        self.file.write_text(
            EXPERIMENT.format(rounds=rounds, participation=participation, checkpoint_seconds=checkpoint_seconds)
            + (WRONG_LABELS if algorithm.startswith("fedcorr") else "")
        )

    def command(self, out: Path) -> list[str]:
        return [*COMMAND, "run", str(self.file), "-a", self.algorithm, "--out", str(out)]

    def played_straight(self, out: Path) -> None:
        run_experiment(read_config(str(self.file)).with_algorithm(self.algorithm), out)


def stopped(command: list[str], out: Path, *, after_lines: int, delay: float, how: signal.Signals) -> tuple[int, str]:
    """Start the command, send it a signal once it has written so many lines, and return its exit code and output."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        deadline = time.monotonic() + 300
        while n_lines(out) < after_lines and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.004)
        time.sleep(delay)
        process.send_signal(how)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output


def finished(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def survives(experiment: Experiment, tmp_path: Path, *, n_kills: int) -> None:
    """Kill the run again and again at random moments, resume it to its end, and compare with an undisturbed one."""
    chance = random.Random()  # every run of this test tries other moments: the claim is about all of them
    out = tmp_path / "killed"
    moments = sorted(chance.randint(1, int(0.8 * experiment.rounds)) for _ in range(n_kills))
    command = experiment.command(out)
    for moment in moments:
        delay = chance.uniform(0, 0.02)
        code, output = stopped(command, out, after_lines=max(moment, n_lines(out) + 1), delay=delay, how=signal.SIGKILL)
        assert code == -signal.SIGKILL, output
        assert not (out / "summary.json").exists()
        command = [*COMMAND, "resume", str(out)]
    finished(command)
    experiment.played_straight(tmp_path / "straight")
    assert contents(out) == contents(tmp_path / "straight"), f"killed after {moments} lines"
    states = {path.name for path in (out / "checkpoint").glob("state-*")}
    assert f"state-{experiment.rounds}.safetensors" in states
    assert len(states) <= 2


@pytest.mark.slow
def test_killed_twice_and_resumed(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path, "dqn-fed", rounds=40, checkpoint_seconds=0.1, participation=0.3)
    survives(experiment, tmp_path, n_kills=2)


@pytest.mark.slow
def test_killed_while_labels_are_corrected_and_resumed(tmp_path: Path) -> None:
    """Rounds 0 to 13 are the sweep, 14 to 21 fine-tuning, 22 the correction: random kills fall into any of them."""
    experiment = Experiment(tmp_path, "fedcorr+dqn-fed", rounds=40, checkpoint_seconds=0.1, participation=0.5)
    survives(experiment, tmp_path, n_kills=2)
    noise = [(tmp_path / name / "noise.json").read_bytes() for name in ("killed", "straight")]
    assert noise[0] == noise[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "checkpoint_seconds", "participation"),
    [("dqn-fed", 0.0, 0.3), ("dqn-fed", 0.5, 1.0), ("scaffold", 0.0, 0.5), ("ditto", 0.1, 0.5), ("fedavg", 30.0, 1.0)],
)
def test_killed_four_times_and_resumed(
    algorithm: str, checkpoint_seconds: float, participation: float, tmp_path: Path
) -> None:
    """Twenty kills in all: with and without client memory, saving every round, sometimes, or never before the end."""
    experiment = Experiment(
        tmp_path, algorithm, rounds=150, checkpoint_seconds=checkpoint_seconds, participation=participation
    )
    survives(experiment, tmp_path, n_kills=4)


MANY_METHODS = (
    "dqn-fed", "fedavg", "scaffold", "ditto", "fedvarp",
    "fedadam", "fedheal", "server-lbfgs", "fedexp", "fedcorr+fedavg",
)  # fmt: skip


def killed_again_and_again(server: ForkServer, algorithm: str, tmp_path: Path, *, rounds: int, n_kills: int) -> None:
    """Kill a run so many times at random moments, and compare its end with that of an undisturbed one."""
    chance = random.Random()
    save = chance.choice((0.0, 0.02, 0.2))
    experiment = Experiment(tmp_path, algorithm, rounds=rounds, checkpoint_seconds=save, participation=0.5)
    out, log, killed = tmp_path / "killed", tmp_path / "log", 0
    words = experiment.command(out)[len(COMMAND) :]
    while killed < n_kills:
        pid = server.start(*words, log=log)
        moment = min(n_lines(out) + chance.randint(0, 2 * rounds // n_kills), rounds - 1)
        while server.is_running(pid) and n_lines(out) < moment:
            time.sleep(0.001)
        time.sleep(chance.choice((0.0, chance.uniform(0, 0.03))))
        if server.is_running(pid):
            os.kill(pid, signal.SIGKILL)
        code = server.wait(pid)
        if code == -signal.SIGKILL:
            killed += 1
            words = ["resume", str(out)] if (out / "config.toml").is_file() else words
            continue
        assert code == 0, log.read_text()  # it came to its end before the kill: compared, and begun again
        compare_with_straight(experiment, out, tmp_path)
        shutil.rmtree(out)
        words = experiment.command(out)[len(COMMAND) :]
    assert server.run(*words, log=log) == 0, log.read_text()
    compare_with_straight(experiment, out, tmp_path)


def compare_with_straight(experiment: Experiment, out: Path, tmp_path: Path) -> None:
    straight = tmp_path / "straight"
    if not straight.is_dir():
        experiment.played_straight(straight)
    assert contents(out) == contents(straight)
    assert damaged_files(out) == []


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as found:
        yield found


@pytest.mark.parametrize("algorithm", ["scaffold"])
def test_killed_five_times(server: ForkServer, algorithm: str, tmp_path: Path) -> None:
    killed_again_and_again(server, algorithm, tmp_path, rounds=60, n_kills=5)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", MANY_METHODS)
def test_two_hundred_kills_over_ten_methods(server: ForkServer, algorithm: str, tmp_path: Path) -> None:
    killed_again_and_again(server, algorithm, tmp_path, rounds=160, n_kills=20)


def test_killed_between_any_two_files(server: ForkServer, tmp_path: Path) -> None:
    """Between any two files, those written at the end and the noise record among them: nothing is lost."""
    experiment = Experiment(tmp_path, "fedavg", rounds=2, checkpoint_seconds=30.0, participation=0.5)
    experiment.file.write_text(experiment.file.read_text() + WRONG_LABELS)
    log, straight = tmp_path / "log", tmp_path / "straight"
    experiment.played_straight(straight)
    n_files = 0
    while True:
        n_files += 1
        out = tmp_path / str(n_files)
        code = server.run(*experiment.command(out)[len(COMMAND) :], log=log, kill_at=n_files)
        if code == 0:
            break
        assert code == -signal.SIGKILL, log.read_text()
        words = ["resume", str(out)] if (out / "config.toml").is_file() else experiment.command(out)[len(COMMAND) :]
        assert server.run(*words, log=log) == 0, log.read_text()
        assert contents(out) == contents(straight), f"killed after file {n_files}"
        assert (out / "noise.json").read_bytes() == (straight / "noise.json").read_bytes(), f"file {n_files}"
        assert damaged_files(out) == []
    assert n_files > 10  # config, clients, environment, lines, checksums, checkpoint, model, noise, summary, checksums


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C finishes the round, saves, says how to go on, and leaves a folder that can be read as it is."""
    experiment = Experiment(tmp_path, "fedavg", rounds=80, checkpoint_seconds=30.0, participation=1.0)
    out = tmp_path / "interrupted"
    code, output = stopped(experiment.command(out), out, after_lines=9, delay=0.01, how=signal.SIGINT)
    assert code == 130, output
    assert "dqnfed resume" in output
    summary = json.loads((out / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 8 <= summary["rounds"] < experiment.rounds
    assert n_lines(out) == summary["rounds"] + 1
    assert (out / "model.safetensors").is_file()

    finished([*COMMAND, "resume", str(out)])
    experiment.played_straight(tmp_path / "straight")
    assert contents(out) == contents(tmp_path / "straight")

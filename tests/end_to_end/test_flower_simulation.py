"""`flwr run` in Flower's own simulation, as the documentation says; needs Ray, which is no part of the dev extra."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from dqnfed import RunResult
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import run_experiment
from dqnfed.flower.new_app import new_app
from tests.helpers.superlink import BIN, kill_processes_at_home

SIMULATION = ["--stream", "--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]


@pytest.fixture
def flower_home(tmp_path: Path) -> Iterator[Path]:
    """Give a home for Flower; the SuperLink that its simulation leaves behind is ended, and nothing else."""
    home = tmp_path / "flwr"
    home.mkdir()
    yield home
    kill_processes_at_home(home)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Flower simulates on Ray: pip install 'flwr[simulation]'")
def test_the_new_app_runs_in_flowers_simulation(flower_home: Path, tmp_path: Path) -> None:
    app = tmp_path / "my-federation"
    new_app(app, clients=3, rounds=2)
    environment = {
        **os.environ,
        "FLWR_HOME": str(flower_home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": os.pathsep.join([str(BIN), os.environ.get("PATH", "")]),
    }
    command = [str(BIN / "flwr"), "run", str(app), "local", *SIMULATION, "--run-config", "set='run.dtype=float64'"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert (app / "run" / "summary.json").is_file(), done.stdout[-4000:] + done.stderr[-2000:]
    found = RunResult.load(app / "run")
    experiment = read_config(str(app / "my_federation" / "experiment.toml"), ["run.dtype='float64'"])
    assert (found.theta - run_experiment(experiment, None).theta).abs().max() <= 1e-6

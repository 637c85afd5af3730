"""A run whose server had sums of scores alone: terminal, log and report say what is known, and that the rest is not."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dqnfed.cli import app
from dqnfed.experiments.progress import current_numbers
from dqnfed.flower.results import _numbers
from dqnfed.report.comparison import Experiment, Method
from dqnfed.report.headline import findings
from dqnfed.report.reader import read_runs

SUMS = ["--set", "privacy.secure=true", "--set", "eval.metrics='aggregate-only'"]


@pytest.mark.slow
def test_the_terminal_and_the_report_say_what_is_not_known(tmp_path: Path) -> None:
    out = tmp_path / "run"
    done = CliRunner().invoke(app, ["run", "digits", "-a", "fedavg", "--rounds", "1", "--out", str(out), *SUMS])
    assert done.exit_code == 0, done.output
    [line] = [line for line in done.output.splitlines() if line.startswith("fedavg on digits")]
    assert "mean" in line
    assert "std" in line
    assert "nan" not in line
    assert "worst" not in line
    assert "evaluation under pads: the server has sums of losses and scores alone" in done.output
    [found] = read_runs([out]).runs
    measured = found.measures()
    assert math.isfinite(measured["mean"])
    assert "worst10" not in measured
    told = findings(Experiment("digits", (Method("FedAvg", "fedavg", (found,)),)))
    assert told[-1] == "The server had sums of scores alone with FedAvg: nobody's own score is known."


@pytest.mark.parametrize("worst", [math.nan, 3.0])
def test_lines_leave_out_what_is_not_known(worst: float) -> None:
    record = {"accuracy": {"mean": 90.0, "std": 2.0, "worst10": worst}, "loss_after": None}
    assert ("worst" in current_numbers(record)) == ("worst" in _numbers(record)) == math.isfinite(worst)
    assert "nan" not in current_numbers(record) + _numbers(record)

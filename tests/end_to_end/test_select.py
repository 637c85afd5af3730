"""`--select` from the command line: which model is saved, used for predictions, reported and compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from dqnfed import RunResult, cli
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_experiment, run_experiment
from dqnfed.report.reader import read_run
from dqnfed.report.result_summaries import run_summary

CHANGES = ("--set", "data.validation=0.2", "--set", "data.clients=4", "--set", "train.lr=2.0")
Dqnfed = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dqnfed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Dqnfed:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dqnfed", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as ending:
            code = int(ending.code or 0)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return call


def summary_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def test_a_run_saves_reports_and_predicts_with_the_kept_model(dqnfed: Dqnfed, tmp_path: Path) -> None:
    words = ("run", "digits", "-a", "fedavg", "--rounds", "10", *CHANGES)
    code, out, _ = dqnfed(*words, "--select", "worst10", "--out", "r", "--quiet")
    assert code == 0
    summary = summary_of(tmp_path / "r")
    kept = summary["kept_round"]
    assert 0 < kept < 9, "the test needs a run whose best model is not the last"
    line = f"kept the model of round {kept} (highest validation score of the worst 10 % of clients, 3 evaluations)"
    assert line in out
    # the model of the file, by hand, on the test examples
    config = read_config("r/config.toml")
    federation, model = build_experiment(config).federation, RunResult.load("r").model()
    accuracies = []
    for k in range(4):
        a, b = int(federation.test.starts[k]), int(federation.test.starts[k + 1])
        with torch.no_grad():
            right = model(federation.test.inputs[a:b]).argmax(1) == federation.test.targets[a:b]
        accuracies.append(100 * float(right.float().mean()))
    assert summary["accuracy"]["mean"] == pytest.approx(np.mean(accuracies), abs=1e-3)
    assert summary["accuracy"]["min"] == pytest.approx(min(accuracies), abs=1e-3)
    # it is that of a run which ends there, and the last one is another
    shorter = run_experiment(read_config("r/config.toml", [f"train.rounds={kept + 1}", "eval.select=last"]), None)
    assert torch.equal(RunResult.load("r").theta, shorter.theta)
    np.save("new.npy", load_digits().data[:50].astype(np.float32) / 16)
    assert dqnfed("predict", "r", "new.npy", "--classes-only", "--out", "classes.csv")[0] == 0
    with torch.no_grad():
        expected = shorter.model()(torch.from_numpy(np.load("new.npy")).reshape(50, *shape_of(config))).argmax(1)
    assert Path("classes.csv").read_text().split() == [str(int(c)) for c in expected]
    # reports show the kept model, without a remark
    [run], problems = read_run(tmp_path / "r")
    assert problems == []
    assert run.accuracy == pytest.approx(np.array(accuracies), abs=0.01)
    assert run_summary(tmp_path / "r")["clients"] == pytest.approx(accuracies, abs=0.01)


def shape_of(config: Any) -> tuple[int, ...]:
    spec = build_experiment(config).problem.model_spec
    assert spec is not None
    return tuple(spec["input_shape"])


def test_a_comparison_keeps_the_best_model_of_every_method(dqnfed: Dqnfed, tmp_path: Path) -> None:
    words = ("compare", "digits", "--algorithms", "fedavg,ditto", "--rounds", "3", *CHANGES, "--jobs", "1")
    code, out, _ = dqnfed(*words, "--select", "loss", "--out", "both")
    assert code == 0
    for method in ("fedavg", "ditto"):
        summary = summary_of(tmp_path / "both" / method / "0")
        assert summary["select"] == "loss"
        line = f"{method}: kept the model of round {summary['kept_round']} (seed 0): lowest mean validation loss"
        assert line in out


def test_a_resumed_run_says_what_it_kept(dqnfed: Dqnfed, tmp_path: Path) -> None:
    assert dqnfed("run", "digits", "--rounds", "3", *CHANGES, "--select", "loss", "--out", "r", "--quiet")[0] == 0
    first = summary_of(tmp_path / "r")
    (tmp_path / "r" / "summary.json").unlink()  # as if it had been killed
    code, out, _ = dqnfed("resume", "r")
    assert code == 0
    assert f"kept the model of round {first['kept_round']} (lowest mean validation loss" in out
    assert summary_of(tmp_path / "r")["kept_validation"] == first["kept_validation"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("run", "digits", "--rounds", "1", "--select", "loss"),
            '`eval.select` is "loss" (lowest mean',
        ),
        (("run", "digits", "--rounds", "1", "--set", "eval.select=min"), "data.validation = 0.1"),
        (
            ("run", "digits", "--select", "best"),
            "'worst10', 'worst5' or 'min', but it is 'best'",
        ),
    ],
)
def test_mistakes_say_the_way_out(dqnfed: Dqnfed, words: tuple[str, ...], told: str) -> None:
    code, _, err = dqnfed(*words, "--out", "r")
    assert code != 0
    assert told in " ".join(err.split())


def test_help_names_the_rules(dqnfed: Dqnfed) -> None:
    for command in ("run", "compare"):
        _, out, _ = dqnfed(command, "--help")
        assert "last|loss|mean|worst10|worst5|min" in out
    assert "eval.select" in dqnfed("sweep", "--help")[1]

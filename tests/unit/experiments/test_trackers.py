"""Trackers: what they are told, in the real libraries where installed, and what is said where not."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dqnfed.experiments.trackers import TRACKERS, make_trackers, scalars

CONFIG = {"name": "digits", "algorithm": {"name": "dqn-fed", "rtol": 1e-6}, "run": {"seed": 3}, "train": {"lr": 0.1}}
RECORD = {
    "round": 4,
    "status": "next",
    "clients": [0, 2],
    "rho": 0.5,
    "accuracy": {"mean": 71.0, "worst10": 40.0},
    "train_loss": None,
    "models": {"global": {"mean": 60.0}},
    "diagnostics": {"residual": 0.25},
    "dropped": [],
}
SUMMARY = {"status": "finished", "rounds": 5, "seed": 3, "accuracy": {"mean": 72.0}}
NUMBERS = {
    "rho": 0.5,
    "accuracy/mean": 71.0,
    "accuracy/worst10": 40.0,
    "models/global/mean": 60.0,
    "diagnostics/residual": 0.25,
}


def test_the_numbers_of_a_record_are_named_by_their_place() -> None:
    assert scalars(RECORD) == NUMBERS


@pytest.mark.parametrize(
    ("name", "product"), [("tensorboard", "TensorBoard"), ("mlflow", "MLflow"), ("wandb", "Weights")]
)
def test_a_missing_library_names_the_extra(
    name: str, product: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    (tracker,) = make_trackers([name])
    with pytest.raises(ImportError, match=rf"{product}.*pip install 'dqnfed\[track\]'"):
        tracker.start(tmp_path, CONFIG)


def test_an_unknown_tracker_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="tensorboard, mlflow, wandb"):
        make_trackers(["neptune"])
    assert make_trackers([]) == []


def test_every_run_gets_its_own_tracker() -> None:
    assert all(make_trackers([name])[0] is not make_trackers([name])[0] for name in TRACKERS)


def follow(name: str, out: Path) -> None:
    (tracker,) = make_trackers([name])
    tracker.start(out, CONFIG)
    tracker.round(RECORD)
    tracker.end(SUMMARY)


def test_weights_and_biases_is_told_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class FakeRun:
        def __init__(self) -> None:
            self.summary: dict[str, float] = {}

        def log(self, values: dict[str, float], step: int) -> None:
            told.append((values, step))

        def finish(self, exit_code: int) -> None:
            told.append((self.summary, exit_code))

    fake = ModuleType("wandb")
    fake.init = lambda **options: told.append(options) or FakeRun()  # type: ignore[attr-defined,func-returns-value]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    follow("wandb", tmp_path)
    options, logged, finished = told
    assert (options["project"], options["group"], options["name"]) == ("dqnfed", "digits", "dqn-fed-3")
    assert options["config"]["algorithm.rtol"] == 1e-6
    assert logged == (NUMBERS, 5)
    assert finished[1] == 0
    assert finished[0]["final/accuracy/mean"] == 72.0


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_events_hold_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    follow("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = {tag: events.Scalars(tag)[0] for tag in events.Tags()["scalars"]}
    assert {tag: event.value for tag, event in found.items() if not tag.startswith("final/")} == NUMBERS
    assert {event.step for event in found.values()} == {5}


@pytest.mark.filterwarnings("ignore")
def test_mlflow_store_holds_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    follow("mlflow", tmp_path)
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("digits")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["train.lr"] == "0.1"
    assert {key: value for key, value in run.data.metrics.items() if not key.startswith("final/")} == NUMBERS
    assert json.loads(json.dumps(run.data.metrics))["final/accuracy/mean"] == 72.0

"""Experiment trackers as observers of a run: TensorBoard, MLflow, Weights & Biases; off unless asked for.

The run folder always has everything. A tracker copies the scalars of every round elsewhere; its library is imported
when the run starts, so that nobody needs it who does not use it.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dqnfed.experiments.config import Config

EXTRA = "track"


class Tracker(Protocol):
    """Follows one run."""

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...
    def round(self, record: Mapping[str, Any]) -> None: ...
    def end(self, summary: Mapping[str, Any]) -> None: ...


class TensorBoard:
    """Writes TensorBoard events into the folder `tensorboard` of the run (or of the working directory)."""

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None:
        require("tensorboard", "TensorBoard")
        library = require("torch.utils.tensorboard", "TensorBoard")
        self._writer = library.SummaryWriter(log_dir=str((out or Path()) / "tensorboard"))
        self._writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in flat(config)))

    def round(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, step_of(record))

    def end(self, summary: Mapping[str, Any]) -> None:
        for name, value in scalars(summary).items():
            self._writer.add_scalar(f"final/{name}", value, int(summary.get("rounds") or 0))
        self._writer.close()


class MLflow:
    """Logs to the MLflow server or store that MLFLOW_TRACKING_URI names (MLflow's default where it names none)."""

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None:
        library = require("mlflow", "MLflow")
        self._client = library.MlflowClient()
        name = experiment_name(config)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        self._run = self._client.create_run(experiment, run_name=run_name(config)).info.run_id
        for key, value in flat(config):
            self._client.log_param(self._run, key, str(value)[:500])  # MLflow refuses longer values

    def round(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record).items():
            self._client.log_metric(self._run, name, value, step=step_of(record))

    def end(self, summary: Mapping[str, Any]) -> None:
        for name, value in scalars(summary).items():
            self._client.log_metric(self._run, f"final/{name}", value)
        known = {"finished": "FINISHED", "stopped": "FINISHED", "diverged": "FAILED"}
        ended = known.get(str(summary.get("status")), "KILLED")
        self._client.set_terminated(self._run, status=ended)


class WeightsAndBiases:
    """Logs to Weights & Biases; WANDB_MODE, WANDB_PROJECT and the other variables of its library are honoured."""

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None:
        library = require("wandb", "Weights & Biases")
        self._run = library.init(
            project=None if os.environ.get("WANDB_PROJECT") else "dqnfed",
            group=experiment_name(config),
            name=run_name(config),
            config=dict(flat(config)),
            dir=str(out) if out else None,
        )

    def round(self, record: Mapping[str, Any]) -> None:
        self._run.log(scalars(record), step=step_of(record))

    def end(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update({f"final/{name}": value for name, value in scalars(summary).items()})
        self._run.finish(exit_code=0 if summary.get("status") in ("finished", "stopped") else 1)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}


def make_trackers(names: Sequence[str]) -> list[Tracker]:
    """Return new trackers by name, each for one run."""
    unknown = [name for name in names if name not in TRACKERS]
    if unknown:
        raise ValueError(f"a tracker is one of {', '.join(TRACKERS)}, but {unknown[0]!r} was asked for.")
    return [TRACKERS[name]() for name in names]


def trackers_of(config: Config) -> list[Tracker]:
    """Return new trackers for one run of the experiment: those that its settings ask for."""
    return make_trackers([name for name, wanted in config.track.model_dump().items() if wanted])


def require(module: str, product: str) -> Any:
    """Return the module, or say which extra installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"{product} is not installed ({error}); run `pip install 'dqnfed[{EXTRA}]'`, or leave it out of `track`."
        ) from error


def scalars(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return the numbers of a record under names like `accuracy/worst10`; round and seed measure nothing."""
    found: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, Mapping):
            found |= scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and key not in ("round", "seed"):
            found[prefix + key] = float(value)
    return found


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings under dotted names."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def step_of(record: Mapping[str, Any]) -> int:
    """Return the number of rounds done: the start model is step 0."""
    return int(record["round"]) + 1


def experiment_name(config: Mapping[str, Any]) -> str:
    """Return the experiment's name from the settings."""
    return str(config.get("name") or "dqnfed")


def run_name(config: Mapping[str, Any]) -> str:
    """Return a name that tells runs of one experiment apart: algorithm and seed."""
    settings = dict(flat(config))
    return f"{settings.get('algorithm.name', 'run')}-{settings.get('run.seed', 0)}"

"""What `dqnfed data` and `dqnfed partition` do, without a terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dqnfed.data.catalogue import dataset_called
from dqnfed.data.fetch import Progress, fetch, silent
from dqnfed.data.hub import fetch_from_hub
from dqnfed.data.manifest import Manifest
from dqnfed.data.raw import RawData
from dqnfed.experiments.config import Config, ConfigError, DataBlock, checked, preset_names, read_config, with_changes
from dqnfed.experiments.data_source import dealt

SOURCES = ("official", "hub")
# of experiments on the user's own table, where nothing else is said
OWN_VALIDATION = 0.2  # of each client's rows
OWN_SELECT = "loss"  # docs/how-to/validation.md has the measurement
OWN_TRAINING = {"rounds": 50, "epochs": 2, "batch_size": 32, "lr": 0.1}
OWN_METHODS = ("dqn-fed", "fedavg", "local-only", "pooled")


def fetched(name: str, data_dir: Path | None, source: str, progress: Progress = silent) -> Path:
    """Return where the dataset is after fetching it from its official source or from the Hugging Face hub."""
    if source not in SOURCES:
        raise ConfigError(f"--from is one of {', '.join(SOURCES)}, but is '{source}'.")
    if source == "hub":
        return fetch_from_hub(name, data_dir)
    return fetch(name, data_dir, progress=progress)


@dataclass(frozen=True)
class Dealt:
    """A partition with what is worth printing about it."""

    raw: RawData
    manifest: Manifest
    counts: np.ndarray | None  # [K, C] examples of each class; None for regression

    @property
    def title(self) -> str:
        settings = self.manifest.settings
        detail = {"dirichlet": f"({settings.get('beta')})", "shards": f", {settings.get('shards_per_client')} a client"}
        return f"{self.manifest.dataset}: {self.manifest.scheme}{detail.get(self.manifest.scheme, '')}"


def data_block(
    name: str,
    *,
    data_dir: Path | None,
    clients: int | None,
    shards: int | None,
    dirichlet: float | None,
    classes: int | None,
    scheme: str | None,
    test: float | None,
    validation: float | None,
    seed: int,
) -> DataBlock:
    """Return the data block of a preset, or of a dataset by name, with the command line's wishes on top.

    At most one of `shards` (per client), `dirichlet` (beta), `classes` (per client) and `scheme` may be given.
    """
    rules: dict[str, dict[str, Any]] = {
        "shards": {"partition": "shards", "shards_per_client": shards},
        "dirichlet": {"partition": "dirichlet", "beta": dirichlet},
        "classes": {"partition": "classes", "classes_per_client": classes},
        "scheme": {"partition": scheme},
    }
    given = {"shards": shards, "dirichlet": dirichlet, "classes": classes, "scheme": scheme}
    chosen = [rule for rule, value in given.items() if value is not None]
    if len(chosen) > 1:
        raise ConfigError(
            f"a dataset is dealt by one rule, but {' and '.join(f'--{rule}' for rule in chosen)} are given."
        )
    base = read_config(name).data.model_dump() if name in preset_names() else {"name": dataset_called(name).name}
    wishes = {"dir": data_dir and str(data_dir), "clients": clients, "test": test, "validation": validation}
    changed = {key: value for key, value in wishes.items() if value is not None}
    return DataBlock.model_validate({**base, **(rules[chosen[0]] if chosen else {}), **changed, "seed": seed})


def dealt_out(block: DataBlock) -> Dealt:
    """Return the partition that a data block describes."""
    raw, manifest = dealt(block, block.seed or 0)
    return Dealt(raw, manifest, manifest.label_counts(raw) if raw.n_classes else None)


def own_config(
    file: Path,
    *,
    client: str | None,
    label: str,
    group: str | None = None,
    drop: tuple[str, ...] = (),
    task: str = "auto",
    score: str | None = None,
    model: str = "mlp",
    base: Config | None = None,
    changes: tuple[str, ...] = (),
) -> Config:
    """Return the experiment on the user's own table; `base` (a preset or a file) and key=value changes may say more."""
    raw: dict[str, Any] = {
        "name": file.stem,
        "description": f"{label} by {client or 'file'} in {file.name}",
        "data": {"validation": OWN_VALIDATION},
        "model": {"name": model, **({"hidden": [32]} if model == "mlp" else {})},
        "train": OWN_TRAINING,
        "eval": {"select": OWN_SELECT},
        "compare": {"algorithms": list(OWN_METHODS)},
    }
    if base is not None:
        raw = base.as_dict()
    table = {"name": file.stem, "file": str(file), "label": label, "drop": list(drop), "task": task}
    named = {key: value for key, value in (("client", client), ("group", group)) if value is not None}
    raw["data"] = {**raw.get("data", {}), **table, **named}
    if score is not None:
        raw["eval"] = {**raw.get("eval", {}), "score": score}
    changed = with_changes(raw, changes)
    if (
        base is None
        and not changed["data"].get("validation")
        and "select" not in with_changes({}, changes).get("eval", {})
    ):
        changed["eval"] = {**changed["eval"], "select": "last"}  # there are no rows to choose the best model by
    return checked(changed, str(file))

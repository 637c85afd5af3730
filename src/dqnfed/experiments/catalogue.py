"""What `dqnfed list` shows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dqnfed.data.catalogue import DATASETS
from dqnfed.experiments.config import preset_names, read_config
from dqnfed.experiments.method_docs import described_algorithms


def algorithms() -> list[dict[str, Any]]:
    """Return every method: what it is, what a client sends and keeps, what it suits."""
    return described_algorithms()


def presets() -> list[dict[str, Any]]:
    """Return every packaged experiment."""
    rows = []
    for name in preset_names():
        config = read_config(name)
        rows.append({"preset": name, "rounds": config.train.rounds, "description": config.description})
    return rows


def datasets(data_dir: Path | None = None) -> list[dict[str, Any]]:
    """Return every dataset and whether its files are here."""
    folder = data_dir or Path(os.environ.get("DQNFED_DATA", "data"))
    return [
        {
            "dataset": dataset.name,
            "title": dataset.title,
            "here": not dataset.folder or (folder / dataset.folder).is_dir(),
            "licence": dataset.licence,
        }
        for dataset in DATASETS.values()
    ]

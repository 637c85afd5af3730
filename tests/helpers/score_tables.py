"""Experiments of a report made from plain arrays of scores, without training anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dqnfed.report.comparison import Experiment, Method, display
from dqnfed.report.measures import Floats
from dqnfed.report.reader import Evaluation, Run
from dqnfed.report.run_files import Client

NAMES = ("Avon", "Brook", "Cedar", "Dale", "Esk", "Fleet", "Gade", "Hull")


def experiment_of(
    scores: Mapping[str, Floats], *, score: str = "accuracy", folder: Path | None = None, spread: float | None = None
) -> Experiment:
    """Return the experiment of methods whose scores are given as [seeds, clients]; NaN: no score.

    With `spread` it is a regression of a target with this standard deviation, and the folder says so.
    """
    config: dict[str, Any] = {}
    if folder is not None and spread is not None:
        (folder / "features.json").write_text(json.dumps({"classes": [], "target_mean": 0.0, "target_std": spread}))
        config = {"data": {"label": "pressure"}}
    methods = []
    for algorithm, values in scores.items():
        runs = []
        for seed, row in enumerate(values):
            clients = tuple(Client(c, name_of(c), 10, 5, {}, None) for c in range(len(row)))
            evaluations = (Evaluation(0, np.asarray(row, dtype=np.float64)),) if np.isfinite(row).any() else ()
            runs.append(
                Run(
                    folder=folder or Path("none"),
                    experiment="made-up",
                    algorithm=algorithm,
                    model="",
                    seed=seed,
                    status="finished",
                    config=config,
                    env={},
                    summary={"score": score},
                    clients=clients,
                    rounds=np.array([0.0]),
                    history={},
                    last_scores={},
                    evaluations=evaluations,
                )
            )
        methods.append(Method(display(algorithm), algorithm, tuple(runs)))
    return Experiment("made-up", tuple(methods))


def name_of(client: int) -> str:
    return NAMES[client] if client < len(NAMES) else f"client {client}"

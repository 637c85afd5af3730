"""`pipeline.json`: how columns become numbers, and the model's outputs an answer, for programs without dqnfed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dqnfed.core.result import RunResult
from dqnfed.experiments.own_data import FEATURES_FILE, Columns, load_columns

FILE = "pipeline.json"
VERSION = 1
DENSE = ("linear", "mlp")  # models that a reader can compute by hand, layer after layer


def pipeline_of(result: RunResult, columns: Columns | None) -> dict[str, Any]:
    """Return what `docs/how-to/use-a-model.md` describes; `columns` is None where the model was trained on arrays."""
    spec = result.model_spec
    assert spec is not None
    n_outputs, is_regression = spec["n_outputs"], spec["n_outputs"] == 1
    answer: dict[str, Any]
    if is_regression:
        answer = {"mean": columns.target_mean, "std": columns.target_std} if columns else {"mean": 0.0, "std": 1.0}
    else:
        names = list(columns.classes) if columns else [str(c) for c in range(n_outputs)]
        answer = {"classes": names}
    content: dict[str, Any] = {
        "format": "dqnfed pipeline",
        "version": VERSION,
        "task": "regression" if is_regression else "classification",
    }
    if columns is not None:
        fitted = json.loads(columns.preprocessing.to_json())
        numeric = [{"missing" if key == "has_holes" else key: v for key, v in c.items()} for c in fitted["numeric"]]
        content["columns"] = {"numeric": numeric, "categorical": fitted["categorical"]}
    content["inputs"] = {"shape": list(spec["input_shape"]), "type": input_type(spec)}
    content["answer"] = answer
    content["model"] = spec
    if layers := dense_layers(spec, [name for name, _ in result.layout]):
        content["layers"] = layers
    return content


def run_columns(folder: Path) -> Columns | None:
    """Return what a run learnt about the columns of its table; None where it was trained on arrays."""
    return load_columns(folder) if (folder / FEATURES_FILE).is_file() else None


def input_type(spec: dict[str, Any]) -> str:
    """Return the type of the numbers that the model reads: bytes of images, numbers of characters, else floats."""
    if spec["settings"].get("mean") is not None:
        return "uint8"
    return "int64" if spec["name"] == "lstm" else str(spec["dtype"])


def dense_layers(spec: dict[str, Any], names: list[str]) -> list[dict[str, str | None]]:
    """Return the layers of a dense network by the names of their parameters; none for other models."""
    settings = spec["settings"]
    if spec["name"] not in DENSE or settings.get("mean") is not None or settings.get("norm", "none") != "none":
        return []
    stems = [name.removesuffix(".weight") for name in names if name.endswith(".weight")]
    between = settings.get("activation", "relu")
    last = "softmax" if settings.get("double_softmax") else None
    activations = [between] * (len(stems) - 1) + [last]
    return [
        {"weight": f"{stem}.weight", "bias": f"{stem}.bias", "activation": activation}
        for stem, activation in zip(stems, activations, strict=True)
    ]

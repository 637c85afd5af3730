"""Every kind of model leaves as ONNX and as a program of torch, with the answers of the module itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from dqnfed.experiments.export import Answer, write_program
from dqnfed.experiments.onnx_graph import write_onnx
from dqnfed.experiments.pipeline import input_type
from dqnfed.models import build

BYTES = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}


@pytest.mark.parametrize(
    ("name", "shape", "n_outputs", "settings", "kind"),
    [
        ("linear", (5,), 3, {}, "float32"),
        ("mlp", (3, 8, 8), 4, BYTES, "uint8"),
        ("cnn", (3, 32, 32), 10, BYTES, "uint8"),
        pytest.param("lstm", (20,), 80, {}, "int64", marks=pytest.mark.slow),
        pytest.param("resnet18", (3, 32, 32), 10, BYTES, "uint8", marks=pytest.mark.slow),
        pytest.param("resnet50", (3, 32, 32), 4, BYTES, "uint8", marks=pytest.mark.slow),
    ],
)
def test_a_model_answers_the_same_elsewhere(
    tmp_path: Path, name: str, shape: tuple[int, ...], n_outputs: int, settings: dict[str, Any], kind: str
) -> None:
    spec = {"name": name, "input_shape": list(shape), "n_outputs": n_outputs, "settings": settings, "dtype": "float32"}
    assert input_type(spec) == kind
    answer = {"classes": [f"class {c}" for c in range(n_outputs)]}
    pipeline = {
        "task": "classification",
        "inputs": {"shape": list(shape), "type": kind},
        "answer": answer,
        "model": spec,
    }
    module = build(name, input_shape=shape, n_outputs=n_outputs, settings=settings).eval()
    model = Answer(module, answer).eval()
    write_program(tmp_path / "m.pt2", model, pipeline)
    write_onnx(tmp_path / "m.onnx", model, pipeline)
    random = np.random.default_rng(0)
    inputs = random.normal(size=(5, *shape)) if kind == "float32" else random.integers(0, 80, (5, *shape))
    inputs = inputs.astype(kind)
    with torch.no_grad():
        expected = module(torch.from_numpy(inputs)).softmax(-1).numpy()
        again = torch.export.load(tmp_path / "m.pt2").module()(torch.from_numpy(inputs)).numpy()
    classes, found = onnxruntime.InferenceSession(str(tmp_path / "m.onnx")).run(None, {"inputs": inputs})
    assert np.abs(found - expected).max() <= 1e-5
    assert np.abs(again - expected).max() <= 1e-6
    assert classes.tolist() == [f"class {c}" for c in found.argmax(-1)]

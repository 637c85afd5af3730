"""A model leaves: predictions as a table, and files that answer the same without dqnfed."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file
from typer.testing import CliRunner

from dqnfed.cli import app
from dqnfed.core.run_folder import load_tensors, save_tensors
from tests.helpers.hospitals import hospital_rows, write_csv
from tests.helpers.pages import blocks_of
from tests.helpers.repository import ROOT

runner = CliRunner()
Rows = list[dict[str, str]]


def called(*words: object) -> str:
    done = runner.invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder with a classifier and a regression, trained on the same table, in all three formats."""
    home = tmp_path_factory.mktemp("models")
    table = write_csv(home / "clinics.csv", hospital_rows(missing=0.1))
    for run, label in (("classes", "outcome"), ("values", "pressure")):
        columns = ("--client", "hospital", "--label", label, "--drop", "region")
        called("run", "--data", table, *columns, "--rounds", 8, "--out", home / run, "--quiet")
        for suffix in ("onnx", "pt2", "safetensors"):
            called("export", home / run, home / f"{run}-files" / f"model.{suffix}")
    return home


def held_out(label: str) -> Rows:
    """Return rows that training has not seen: every third lacks something, some have new categories and far numbers."""
    rows = hospital_rows(missing=0.3, seed=7)
    for i, row in enumerate(rows):
        del row[label]
        row["id"] = f"patient {i}"
        if i % 5 == 0:
            row["smokes"] = "pipe"
        if i % 7 == 0:
            row["age"] = "140"
    return rows


def predicted(folder: Path, run: str, rows: Rows) -> Rows:
    called("predict", folder / run, write_csv(folder / "new.csv", rows), "--out", folder / "out.csv")
    with (folder / "out.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def prepared(rows: Rows, pipeline: dict) -> np.ndarray:  # type: ignore[type-arg]
    """Return the inputs as docs/how-to/use-a-model.md says, with no code of the package."""
    made = []
    for row in rows:
        values: list[float] = []
        for column in pipeline["columns"]["numeric"]:
            text = row[column["name"]]
            values.append((float(text) - column["mean"]) / column["std"] if text else 0.0)
            if column["missing"]:
                values.append(0.0 if text else 1.0)
        for column in pipeline["columns"]["categorical"]:
            values += [1.0 if row[column["name"]] == category else 0.0 for category in column["categories"]]
        made.append(values)
    return np.array(made, dtype=np.float32)


def by_onnx(path: Path, rows: Rows) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path))
    feed = {}
    for column in session.get_inputs():
        is_number = column.type == "tensor(double)"
        values = [float(row[column.name] or "nan") if is_number else row[column.name] for row in rows]
        feed[column.name] = np.array(values, dtype=np.float64 if is_number else object)[:, None]
    return list(session.run(None, feed))


def by_torch(path: Path, inputs: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return np.asarray(torch.export.load(path).module()(torch.from_numpy(inputs)).numpy())


def by_hand(path: Path, inputs: np.ndarray, pipeline: dict) -> np.ndarray:  # type: ignore[type-arg]
    parameters, outputs = load_file(path), inputs.astype(np.float64)
    for layer in pipeline["layers"]:
        outputs = outputs @ parameters[layer["weight"]].T.astype(np.float64) + parameters[layer["bias"]]
        if layer["activation"] == "relu":
            outputs = np.maximum(outputs, 0)
    return outputs


def test_every_format_gives_the_predictions_of_predict_to_1e_6(folder: Path) -> None:
    rows, files = held_out("outcome"), folder / "classes-files"
    pipeline = json.loads((files / "pipeline.json").read_text())
    table = predicted(folder, "classes", rows)
    expected = np.array([[float(row["probability_died"]), float(row["probability_survived"])] for row in table])
    inputs = prepared(rows, pipeline)
    classes, probabilities = by_onnx(files / "model.onnx", rows)
    assert np.abs(probabilities - expected).max() <= 1e-6
    assert classes.tolist() == [row["class"] for row in table]
    assert np.abs(by_torch(files / "model.pt2", inputs) - expected).max() <= 1e-6
    outputs = np.exp(by_hand(files / "model.safetensors", inputs, pipeline))
    assert np.abs(outputs / outputs.sum(1, keepdims=True) - expected).max() <= 1e-6


def test_values_are_in_the_targets_own_units_in_every_format(folder: Path) -> None:
    rows, files = held_out("pressure"), folder / "values-files"
    pipeline = json.loads((files / "pipeline.json").read_text())
    table = predicted(folder, "values", rows)
    assert list(table[0]) == ["id", "value", "unseen", "out_of_range"]
    expected = np.array([float(row["value"]) for row in table])
    assert 110 < expected.mean() < 150  # pressures are drawn around 130
    inputs, scale = prepared(rows, pipeline), pipeline["answer"]["std"]
    [values] = by_onnx(files / "model.onnx", rows)
    outputs = by_hand(files / "model.safetensors", inputs, pipeline)[:, 0] * scale + pipeline["answer"]["mean"]
    for found in (values, by_torch(files / "model.pt2", inputs), outputs):
        assert np.abs(found - expected).max() <= 1e-6 * scale


def test_predictions_are_a_table_that_marks_what_training_had_not_seen(folder: Path) -> None:
    rows = held_out("outcome")
    rows[1]["age"] = rows[2]["age"] = rows[3]["age"] = "55"
    rows[1]["pressure"] = "20"
    table = predicted(folder, "classes", rows)
    head = ["id", "class", "probability_died", "probability_survived", "unseen", "out_of_range"]
    assert list(table[0]) == head
    assert [row["id"] for row in table] == [row["id"] for row in rows]
    assert [row["unseen"] for row in table[:6]] == ["smokes", "", "", "", "", "smokes"]
    assert [row["out_of_range"] for row in table[:3]] == ["age", "pressure", ""]
    for row in table:
        probabilities = {name: float(row[f"probability_{name}"]) for name in ("died", "survived")}
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-8)
        assert max(probabilities, key=lambda name: probabilities[name]) == row["class"]


def test_rows_are_named_by_a_column_or_counted(folder: Path) -> None:
    rows = held_out("outcome")[:3]
    for i, row in enumerate(rows):
        row["number"] = f"{10 * i}"
    new = write_csv(folder / "named.csv", rows)
    lines = called("predict", folder / "classes", new, "--id", "number").splitlines()
    assert [line.split(",")[0] for line in lines] == ["id", "0", "10", "20"]
    new = write_csv(folder / "counted.csv", [{k: v for k, v in row.items() if k != "id"} for row in rows])
    lines = called("predict", folder / "classes", new).splitlines()
    assert [line.split(",")[0] for line in lines] == ["id", "1", "2", "3"]
    only = called("predict", folder / "classes", new, "--classes-only").splitlines()
    assert only == [line.split(",")[1] for line in lines[1:]]
    failed = runner.invoke(app, ["predict", str(folder / "classes"), str(new), "--id", "nmber"])
    assert "has no column 'nmber' for the rows' names. Did you mean 'number'?" in str(failed.exception)


@pytest.mark.slow
def test_the_examples_of_the_guide_run_without_dqnfed(tmp_path: Path) -> None:
    """Each has at most 12 lines; all give the same probabilities, with dqnfed out of reach."""
    called("run", "heart", "--rounds", 2, "--out", tmp_path / "run", "--quiet")
    for suffix in ("onnx", "pt2", "safetensors"):
        called("export", tmp_path / "run", tmp_path / f"model.{suffix}")
    blocks = blocks_of(ROOT / "docs/how-to/use-a-model.md")
    table = next(block.code for block in blocks if "new.csv <<END" in block.code)
    (tmp_path / "new.csv").write_text(table.split("<<END\n")[1].split("END")[0])
    examples = [block.code for block in blocks if block.language == "python"]
    assert len(examples) == 3
    code = "import sys; sys.modules['dqnfed'] = None\n"
    for example in examples:
        lines = [line for line in example.splitlines() if line.strip()]
        assert len(lines) <= 12
        code += example + "\nprint([float(p) for row in probabilities for p in row])\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first = called("predict", tmp_path / "run", tmp_path / "new.csv").splitlines()[1:]
    expected = [float(p) for line in first for p in line.split(",")[2:4]]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[0")]
    assert len(found) == 3
    assert np.abs(np.array(found) - expected).max() <= 1e-6
    assert [line.split(",")[4:] for line in first] == [["", ""], ["cp", "age"]]


def test_models_of_arrays_are_exported_too(tmp_path: Path) -> None:
    called("run", "digits", "--rounds", 2, "--out", tmp_path / "run", "--quiet")
    inputs = np.random.default_rng(0).random((5, 64)).astype(np.float32)
    np.save(tmp_path / "new.npy", inputs)
    lines = called("predict", tmp_path / "run", tmp_path / "new.npy").splitlines()
    assert lines[0] == "id,class," + ",".join(f"probability_{c}" for c in range(10))
    expected = np.array([[float(p) for p in line.split(",")[2:]] for line in lines[1:]])
    for suffix in ("onnx", "pt2", "safetensors"):
        called("export", tmp_path / "run", tmp_path / f"m.{suffix}")
    pipeline = json.loads((tmp_path / "pipeline.json").read_text())
    shaped = inputs.reshape(5, *pipeline["inputs"]["shape"])
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    assert np.abs(session.run(["probabilities"], {"inputs": shaped})[0] - expected).max() <= 1e-6
    assert np.abs(by_torch(tmp_path / "m.pt2", shaped) - expected).max() <= 1e-6


def test_a_missing_number_that_training_never_missed_has_no_answer(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "full.csv", hospital_rows(missing=0.0))
    columns = ("--client", "hospital", "--label", "outcome", "--drop", "region")
    called("run", "--data", table, *columns, "--rounds", 1, "--out", tmp_path / "run", "--quiet")
    called("export", tmp_path / "run", tmp_path / "model.onnx")
    rows = hospital_rows(missing=0.0, seed=1)[:2]
    rows[0]["age"] = ""
    classes, probabilities = by_onnx(tmp_path / "model.onnx", rows)
    assert classes[0] == ""
    assert np.isnan(probabilities[0]).all()
    assert classes[1] in ("died", "survived")


@pytest.mark.parametrize(
    ("name", "message"),
    [("model.txt", "must end in one of .onnx, .pt2, .safetensors"), ("model", "must end in one of")],
)
def test_another_suffix_is_refused(folder: Path, name: str, message: str) -> None:
    done = runner.invoke(app, ["export", str(folder / "classes"), str(folder / name)])
    assert message in str(done.exception)
    assert not (folder / name).exists()


def test_the_pipeline_of_another_model_is_left_alone(folder: Path) -> None:
    before = (folder / "classes-files/pipeline.json").read_text()
    done = runner.invoke(app, ["export", str(folder / "values"), str(folder / "classes-files/other.pt2")])
    assert "belongs to another model" in str(done.exception)
    assert (folder / "classes-files/pipeline.json").read_text() == before
    assert not (folder / "classes-files/other.pt2").exists()


def test_columns_with_the_names_of_outputs_are_read(tmp_path: Path) -> None:
    names = {"age": "probabilities", "smokes": "predicted_class", "ward": "dqnfed/inputs", "pressure": "linear"}
    rows = [{names.get(k, k): v for k, v in row.items()} for row in hospital_rows(missing=0.1)]
    table = write_csv(tmp_path / "odd.csv", rows)
    columns = ("--client", "hospital", "--label", "outcome", "--drop", "region")
    called("run", "--data", table, *columns, "--rounds", 1, "--out", tmp_path / "run", "--quiet")
    called("export", tmp_path / "run", tmp_path / "model.onnx")
    lines = called("predict", tmp_path / "run", table).splitlines()[1:]
    _, probabilities = by_onnx(tmp_path / "model.onnx", rows)
    assert probabilities[:, 0] == pytest.approx([float(line.split(",")[2]) for line in lines], abs=1e-6)


def test_a_model_of_nan_is_not_exported(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    for path in (folder / "classes").iterdir():
        if path.is_file() and path.name != "checksums.json":
            (run / path.name).write_bytes(path.read_bytes())
    tensors, metadata = load_tensors(run / "model.safetensors")
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    save_tensors(run / "model.safetensors", tensors, metadata)
    done = runner.invoke(app, ["export", str(run), str(tmp_path / "model.onnx")])
    assert "weights that are not finite numbers" in str(done.exception)

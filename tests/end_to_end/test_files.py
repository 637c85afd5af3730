"""The border to files at the command line: nothing is believed unread, and no wrong number comes with exit code 0."""

from __future__ import annotations

import json
import shutil
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from dqnfed import cli
from dqnfed.core.run_folder import FIXED_FILES, RunFolder, load_tensors, save_tensors
from tests.helpers.folders import contents
from tests.helpers.hospitals import hospital_rows, write_csv
from tests.helpers.quick import every

COLUMNS = ("--client", "hospital", "--label", "outcome", "--drop", "region", "-a", "fedavg")


class Ended(NamedTuple):
    """How a command ended, and what it printed, in one line."""

    code: int
    said: str


Command = Callable[..., Ended]


@pytest.fixture
def dqnfed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")

    def call(*words: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["dqnfed", *map(str, words)])
        caplog.clear()
        code = 0
        try:
            cli.main()
        except SystemExit as ending:
            code = int(ending.code or 0)
        captured = capfd.readouterr()
        said = " ".join((captured.out + captured.err + caplog.text).split())
        assert "Traceback" not in said
        return Ended(code, said)

    return call


def clinics(path: Path, row: int | None = None, column: str = "age", cell: str = "") -> Path:
    rows = hospital_rows()
    if row is not None:
        rows[row][column] = cell
    return write_csv(path, rows)


def trained(dqnfed: Command, table: Path | str, out: str, *more: str) -> None:
    ended = dqnfed("run", "--data", table, *COLUMNS, "--rounds", "4", "--quiet", "--out", out, *more)
    assert ended.code == 0, ended.said


def stopped_after(out: Path, n_rounds: int) -> None:
    """Make of a finished run one that was killed after so many rounds, with a checkpoint then."""
    folder = RunFolder(out)
    folder.write_checksums(FIXED_FILES)
    (out / "summary.json").unlink()
    assert (out / "checkpoint" / f"checkpoint-{n_rounds}.json").is_file()


def test_an_infinite_cell_is_refused_or_taken_for_missing_and_said(dqnfed: Command) -> None:
    table = clinics(Path("clinics.csv"), 17, "pressure", "inf")
    ended = dqnfed("run", "--data", table, *COLUMNS, "--rounds", "2", "--out", "r")
    assert ended.code == 1
    assert "clinics.csv, row 18, column 'pressure': inf is not a finite number" in ended.said
    assert not Path("r").exists()
    words = ("--rounds", "2", "--out", "r", "--set", "data.extremes=missing")
    ended = dqnfed("run", "--data", table, *COLUMNS, *words)
    assert ended.code == 0
    assert "1 value of column 'pressure' taken for missing" in ended.said


def test_a_replaced_table_is_refused_at_resume(dqnfed: Command, tmp_path: Path) -> None:
    trained(dqnfed, clinics(Path("clinics.csv")), "r")
    stopped_after(tmp_path / "r", 4)
    before = {path: path.read_bytes() for path in Path("r").rglob("*") if path.is_file() and path.name != ".lock"}
    clinics(Path("clinics.csv"), 17, "age", "63.5")
    ended = dqnfed("resume", "r")
    assert ended.code == 1
    assert "other data and cannot go on with these, which differ in: column 'age'." in ended.said
    assert before == {path: path.read_bytes() for path in before}
    clinics(Path("clinics.csv"))
    assert dqnfed("resume", "r").code == 0


def test_a_run_works_from_any_directory(dqnfed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(dqnfed, clinics(Path("clinics.csv")).name, "r")
    shutil.copytree("r", "straight")
    stopped_after(tmp_path / "r", 4)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ended = dqnfed("resume", "../r")
    assert ended.code == 0, ended.said
    assert contents(tmp_path / "r") == contents(tmp_path / "straight")
    assert dqnfed("run", "../r/config.toml", "--quiet", "--out", "again").code == 0
    assert contents(Path("again")) == contents(tmp_path / "straight")


def test_a_data_folder_here_is_found_from_elsewhere(
    dqnfed: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ./data, which is looked for by default; one that has moved since is found where DQNFED_DATA says."""
    monkeypatch.delenv("DQNFED_DATA", raising=False)
    monkeypatch.setenv("DQNFED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "libsvm").mkdir(parents=True)
    lines = [f"{1 if i % 3 else -1} {i % 60 + 1}:1 {(7 * i) % 60 + 61}:1" for i in range(400)]
    (tmp_path / "data" / "libsvm" / "mushrooms").write_text("\n".join(lines) + "\n")
    Path("own.toml").write_text(
        'name = "own"\n[data]\nname = "mushrooms"\npartition = "iid"\nclients = 4\n'
        '[model]\nname = "linear"\n[algorithm]\nname = "fedavg"\n[train]\nrounds = 2\n'
    )
    assert dqnfed("run", "own.toml", "--quiet", "--out", "r").code == 0
    assert tomllib.loads(Path("r/config.toml").read_text())["data"]["dir"] == str(tmp_path / "data")
    (tmp_path / "elsewhere").mkdir()
    for moved in (False, True):
        monkeypatch.chdir(tmp_path / "elsewhere")
        stopped_after(tmp_path / "r", 2)
        ended = dqnfed("resume", "../r")
        assert ended.code == 0, ended.said
        if not moved:
            (tmp_path / "data").rename(tmp_path / "moved")
            monkeypatch.setenv("DQNFED_DATA", str(tmp_path / "moved"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "summary.json", "features.json", "metrics.jsonl", "clients.json"]
)
def test_resume_names_what_is_damaged_and_mends_it(dqnfed: Command, name: str) -> None:
    """Of a finished run, with a checkpoint after every round: everything is there again, with the same bits."""
    trained(dqnfed, clinics(Path("clinics.csv")), "r", "--set", "run.checkpoint_seconds=0")
    shutil.copytree("r", "straight")
    raw = bytearray((Path("r") / name).read_bytes())
    raw[-3] ^= 4  # of the last line: the checkpoint before the last has all lines but that
    (Path("r") / name).write_bytes(raw)
    for words in (("predict", "r", "clinics.csv"), ("export", "r", "model.safetensors")):
        refused = dqnfed(*words)
        assert refused.code == 1
        assert f"damaged: {name}, checksum differs" in refused.said
    ended = dqnfed("resume", "r")
    assert ended.code == 0, ended.said
    assert f"damaged: {name}, checksum differs" in ended.said
    assert contents(Path("r")) == contents(Path("straight"))
    assert (Path("r") / name).is_file()
    assert dqnfed("predict", "r", "clinics.csv", "--out", "classes.csv").code == 0


def test_no_table_and_no_statement_is_made_of_a_damaged_run(dqnfed: Command) -> None:
    """A cut metrics.jsonl ends with the scores of another round."""
    assert dqnfed("run", "digits", "--rounds", "2", "--quiet", "--out", "run").code == 0
    metrics = Path("run/metrics.jsonl")
    metrics.write_bytes(metrics.read_bytes()[: metrics.stat().st_size // 2])
    for words in ("report", "run", "--table", "csv"), ("statement", "run"):
        ended = dqnfed(*words)
        assert ended.code == 1
        assert "damaged: metrics.jsonl, checksum differs" in ended.said
    page = dqnfed("report", "run")
    assert page.code == 0
    assert "damaged: metrics.jsonl, checksum differs" in page.said


def test_a_damaged_config_is_named_and_refused(dqnfed: Command) -> None:
    trained(dqnfed, clinics(Path("clinics.csv")), "r")
    path = Path("r/config.toml")
    path.write_text(path.read_text().replace("rounds = 4", "rounds = 5"))
    ended = dqnfed("resume", "r")
    assert ended.code == 1
    assert "damaged: config.toml, checksum differs" in ended.said


@pytest.mark.parametrize("cell", ["nan", "inf", "-inf", "1e39"])
def test_predict_refuses_what_is_not_finite(dqnfed: Command, cell: str) -> None:
    assert dqnfed("run", "digits", "--rounds", "1", "--out", "r", "--quiet", "-a", "fedavg").code == 0
    row = ["0.5"] * 64
    Path("new.csv").write_text("\n".join([",".join(row), ",".join([*row[:5], cell, *row[6:]])]) + "\n")
    ended = dqnfed("predict", "r", "new.csv")
    assert ended.code == 1
    assert "row 2, column 6 is" in ended.said
    assert "not a finite number" in ended.said
    values = np.array([[float(cell if cell != "1e39" else "nan")] + [0.5] * 63])
    for name, save in (("new.npy", np.save), ("new.npz", lambda file, x: np.savez(file, x=x))):
        save(name, values)
        ended = dqnfed("predict", "r", name)
        assert ended.code == 1
        assert "row 1, column 1 is" in ended.said


def test_predict_refuses_infinite_and_unexpectedly_empty_cells_of_a_table(dqnfed: Command) -> None:
    full = write_csv(Path("full.csv"), hospital_rows(missing=0.0))
    trained(dqnfed, full, "r")
    for cell, message in (("inf", "row 3, column 'age': inf is not a finite number"), ("", "row 3: column 'age' is")):
        rows = hospital_rows(missing=0.0)
        rows[2]["age"] = cell
        ended = dqnfed("predict", "r", write_csv(Path("new.csv"), rows))
        assert ended.code == 1
        assert message in ended.said


def test_predict_refuses_a_model_of_nan(dqnfed: Command) -> None:
    trained(dqnfed, clinics(Path("clinics.csv")), "r")
    tensors, metadata = load_tensors(Path("r/model.safetensors"))
    tensors = {name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}
    save_tensors(Path("r/model.safetensors"), tensors, metadata)
    Path("r/checksums.json").unlink()  # as in a folder of an earlier version
    ended = dqnfed("predict", "r", "clinics.csv")
    assert ended.code == 1
    assert "weights that are not finite numbers, so it predicts nothing" in ended.said


def test_a_diverged_run_says_so_and_exits_with_3(dqnfed: Command) -> None:
    words = ("digits", "--rounds", "3", "--set", "train.lr=1000", "--set", "train.epochs=3")
    ended = dqnfed("run", *words, "-a", "fedavg", "--out", "r")
    assert ended.code == 3
    assert "diverged: the mean training loss rose from" in ended.said
    summary = json.loads(Path("r/summary.json").read_text())
    assert summary["status"] == "diverged"
    assert dqnfed("resume", "r").code == 3
    ended = dqnfed("compare", *words, "--algorithms", "fedavg,qffl", "--jobs", "1", "--out", "c")
    assert ended.code == 0
    assert "FedAvg (diverged)" in ended.said
    assert "diverged: fedavg, seed 0: the mean training loss rose from" in ended.said
    assert "FedAvg (diverged)" in Path("c/report.html").read_text()


def test_a_dataset_that_is_missing_is_an_error(dqnfed: Command, tmp_path: Path) -> None:
    ended = dqnfed("convex", "a1a", "--data-dir", tmp_path, "--algorithms", "newton")
    assert ended.code == 1
    assert "dqnfed data fetch a1a" in ended.said


@pytest.mark.parametrize("name", every(2, ["../../x", "/etc/x", "..", "", "a/b", "~", "x\\y", "a\nb", "n" * 400]))
def test_names_stay_inside_runs(dqnfed: Command, tmp_path: Path, name: str) -> None:
    blocks = "[data]\nclients = 4\n[train]\nrounds = 1\n[algorithm]\nname = 'fedavg'\n"
    Path("own.toml").write_text(f"name = {json.dumps(name)}\n{blocks}")
    assert dqnfed("run", "own.toml", "--quiet").code == 0
    [out] = (tmp_path / "runs").iterdir()
    assert (out / "summary.json").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"own.toml", "runs"}


def test_env_keeps_no_password(dqnfed: Command) -> None:
    assert (
        dqnfed("run", "digits", "--rounds", "1", "--set", "description=mysql://me:secret@host/db", "--out", "r").code
        == 0
    )
    assert "secret" not in Path("r/env.json").read_text()
    assert "mysql://***@host/db" in Path("r/env.json").read_text()

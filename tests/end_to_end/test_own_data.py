"""Four hospitals in a CSV, not a word of code: trained, reported, predicted; and what cannot work says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dqnfed.cli import app
from tests.helpers.folders import contents
from tests.helpers.hospitals import SIZES, hospital_rows, write_csv

runner = CliRunner()
COLUMNS = ["--client", "hospital", "--label", "outcome"]


@pytest.fixture
def clinics(tmp_path: Path) -> Path:
    return write_csv(tmp_path / "clinics.csv", hospital_rows(missing=0.05))


def trained(clinics: Path, out: Path, *more: str) -> tuple[str, dict[str, object]]:
    command = ["run", "--data", str(clinics), *COLUMNS, "--rounds", "15", "--out", str(out), *more]
    done = runner.invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output, json.loads((out / "summary.json").read_text())


def test_a_csv_trains_and_reports_without_a_word_of_code(clinics: Path, tmp_path: Path) -> None:
    said, summary = trained(clinics, tmp_path / "run", "--model", "mlp", "--group", "region")
    assert "392 rows of 4 clients" in said
    assert "died = 0, survived = 1" in said
    assert "client 'Dale' is tested on 2 rows only" in said
    accuracy = summary["accuracy"]
    assert isinstance(accuracy, dict)
    assert accuracy["weighted_mean"] > 65  # the classes are nearly balanced
    clients = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert [c["name"] for c in clients] == list(SIZES)
    assert [c["n_train"] + c["n_test"] for c in clients] == [160, 96, 48, 9]  # a fifth is for validation
    assert [c["group"] for c in clients] == ["urban", "urban", "rural", "rural"]
    done = runner.invoke(app, ["report", str(tmp_path / "run")], catch_exceptions=False)
    assert done.exit_code == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_the_model_predicts_new_patients_by_class_name(clinics: Path, tmp_path: Path) -> None:
    trained(clinics, tmp_path / "run", "--model", "linear", "--drop", "region")
    rows = hospital_rows(missing=0.2, seed=1)
    new = write_csv(tmp_path / "new.csv", [{k: v for k, v in row.items() if k != "outcome"} for row in rows])
    done = runner.invoke(app, ["predict", str(tmp_path / "run"), str(new), "--classes-only"], catch_exceptions=False)
    said = done.output.split()
    assert set(said) == {"died", "survived"}
    right = sum(a == row["outcome"] for a, row in zip(said, rows, strict=True))
    assert right / len(rows) > 0.65


def test_a_run_on_your_own_data_resumes_and_compares_from_its_config(clinics: Path, tmp_path: Path) -> None:
    trained(clinics, tmp_path / "run", "--drop", "region")
    command = ["compare", str(tmp_path / "run" / "config.toml"), "--algorithms", "fedavg,qffl", "--rounds", "3"]
    done = runner.invoke(app, [*command, "--out", str(tmp_path / "all")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert (tmp_path / "all" / "qffl" / "0" / "summary.json").is_file()


@pytest.mark.parametrize("score", ["auc", "f1", "loss"])
def test_fairness_can_be_measured_on_other_scores(clinics: Path, tmp_path: Path, score: str) -> None:
    _, summary = trained(clinics, tmp_path / "run", "--score", score, "--drop", "region", "--set", "data.test=0.3")
    assert summary["score"] == score
    accuracy = summary["accuracy"]
    assert isinstance(accuracy, dict)
    assert (accuracy["mean"] < 0) == (score == "loss")


def test_numbers_are_regressed(clinics: Path, tmp_path: Path) -> None:
    command = ["run", "--data", str(clinics), "--client", "hospital", "--label", "age", "--drop", "region"]
    done = runner.invoke(app, [*command, "--rounds", "5", "--out", str(tmp_path / "run")], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "targets are standardised" in done.output
    assert "labels" not in json.loads((tmp_path / "run" / "clients.json").read_text())[0]


@pytest.mark.parametrize(
    ("where", "column", "value", "more", "message"),
    [
        ("Dale", "outcome", "", [], "client 'Dale' has no row with a label"),
        ("Dale", "hospital", "", [], "have no client in column 'hospital'"),
        ("Dale", "outcome", "died", ["--score", "auc"], "AUC is undefined for client 'Dale'"),
        ("Avon", "region", "space", ["--client", "hospitl"], "Did you mean 'hospital'?"),
        ("Avon", "region", "space", ["--task", "regression"], "is text"),
        ("Avon", "region", "space", ["--score", "f2"], "f2"),
        ("Avon", "region", "space", ["--model", "resnet18"], "resnet18 needs images"),
        ("Avon", "region", "space", ["--set", "data.lable=x"], "did you mean 'label'?"),
    ],
)
def test_what_cannot_work_says_why(
    tmp_path: Path, where: str, column: str, value: str, more: list[str], message: str
) -> None:
    rows = [{**row, column: value} if row["hospital"] == where else row for row in hospital_rows()]
    path = write_csv(tmp_path / "clinics.csv", rows)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        runner.invoke(app, ["run", "--data", str(path), *COLUMNS, *more], catch_exceptions=False)


def test_missing_options_are_named(clinics: Path) -> None:
    with pytest.raises(ValueError, match="needs --client and --label"):
        runner.invoke(app, ["run", "--data", str(clinics)], catch_exceptions=False)
    with pytest.raises(ValueError, match="name an experiment"):
        runner.invoke(app, ["run"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--client", "hospital", "--label", "outcome"], "--client and --label describe your own table, but no --data"),
        (["--task", "regression"], "--task describes your own table"),
        (["--model", "linear"], r"--model describes.*--set model\.name=linear"),
    ],
)
def test_options_of_a_table_that_is_not_named_are_refused(options: list[str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        runner.invoke(app, ["run", "digits", *options], catch_exceptions=False)


def split_by_hospital(rows: list[dict[str, str]], folder: Path) -> Path:
    folder.mkdir()
    for name in SIZES:
        mine = [{k: v for k, v in row.items() if k != "hospital"} for row in rows if row["hospital"] == name]
        write_csv(folder / f"{name}.csv", mine)
    return folder


def as_parquet(rows: list[dict[str, str]], path: Path) -> Path:
    """Write the table as a program would that knows which columns are numbers."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns: dict[str, list[Any]] = {key: [row[key] or None for row in rows] for key in rows[0]}
    for key in ("age", "pressure"):
        columns[key] = [None if value is None else float(value) for value in columns[key]]
    parquet.write_table(arrow.table(columns), path)
    return path


def test_a_table_a_folder_and_a_parquet_file_give_the_same_bits(tmp_path: Path) -> None:
    """The folder's files have no column for the client; one hospital has no age at all, and rows are interleaved."""
    rows = [row | ({"age": ""} if row["hospital"] == "Dale" else {}) for row in hospital_rows(missing=0.1)]
    interleaved = sorted(rows, key=lambda row: row["outcome"])
    forms = [
        ["--data", str(write_csv(tmp_path / "one.csv", interleaved)), "--client", "hospital"],
        ["--data", str(split_by_hospital(interleaved, tmp_path / "folder"))],
        ["--data", str(as_parquet(interleaved, tmp_path / "one.parquet")), "--client", "hospital"],
    ]
    found = []
    for number, form in enumerate(forms):
        out = tmp_path / str(number)
        methods = ["--algorithms", "dqn-fed", "--seeds", "3", "--rounds", "3"]
        command = ["compare", *form, "--label", "outcome", *methods, "--out", str(out), "--jobs", "1"]
        done = runner.invoke(app, command, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert "392 rows of 4 clients" in done.output
        found.append([contents(out / name / "3") for name in ("dqn-fed", "local-only", "pooled")])
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            assert [mine[key] for key in ("metrics", "clients", "who", "model")] == [
                first[key] for key in ("metrics", "clients", "who", "model")
            ]


def test_one_command_compares_methods_on_a_table_with_training_alone_and_pooling(clinics: Path, tmp_path: Path) -> None:
    command = [
        "compare",
        "--data",
        str(clinics),
        *COLUMNS,
        "--rounds",
        "2",
        "--seeds",
        "0:2",
        "--out",
        str(tmp_path / "c"),
    ]
    done = runner.invoke(app, [*command, "--jobs", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for name in ("dqn-fed", "fedavg", "local-only", "pooled"):
        summary = json.loads((tmp_path / "c" / name / "1" / "summary.json").read_text())
        assert (summary["select"], summary["status"]) == ("loss", "finished")
    assert (tmp_path / "c" / "report.html").is_file()
    config = (tmp_path / "c" / "fedavg" / "0" / "config.toml").read_text()
    assert "validation = 0.2" in config


def test_references_can_be_left_out_and_a_dry_run_writes_nothing(clinics: Path, tmp_path: Path) -> None:
    command = ["compare", "--data", str(clinics), *COLUMNS, "--rounds", "3", "--algorithms", "fedavg", "--dry-run"]
    with_them = runner.invoke(app, [*command, "--out", str(tmp_path / "c")], catch_exceptions=False).output
    without = runner.invoke(app, [*command, "--no-references"], catch_exceptions=False).output
    assert all(f"{name} on clinics: about" in with_them for name in ("fedavg", "local-only", "pooled"))
    assert "fedavg on clinics: about" in without
    assert "local-only" not in without
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: (folder / "Avon.csv").write_text("age\n"), "Avon.csv has no rows"),
        (lambda folder: (folder / "Avon.csv").write_text("age,zip\n1,2\n"), "every file needs the same columns"),
        (lambda folder: (folder / "Avon.tsv").write_text("age\n1\n"), "more than one file called 'Avon'"),
        (lambda folder: [path.unlink() for path in folder.iterdir()], "holds no table"),
    ],
)
def test_a_folder_that_cannot_be_one_table_says_why(
    change: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    folder = split_by_hospital(hospital_rows(), tmp_path / "folder")
    change(folder)
    done = runner.invoke(app, ["compare", "--data", str(folder), "--label", "outcome", "--dry-run"])
    assert done.exit_code != 0
    assert said in str(done.exception)


def test_without_validation_rows_the_last_model_is_kept(clinics: Path, tmp_path: Path) -> None:
    _, summary = trained(clinics, tmp_path / "run", "--set", "data.validation=0")
    assert summary["select"] == "last"


def test_a_file_needs_the_column_of_the_client(clinics: Path) -> None:
    done = runner.invoke(app, ["compare", "--data", str(clinics), "--label", "outcome"])
    assert "Only for a folder" in str(done.exception)


def test_the_heart_page_leads_with_four_named_bars(tmp_path: Path) -> None:
    command = ["compare", "heart", "--seeds", "0:2", "--rounds", "2", "--out", str(tmp_path / "h"), "--jobs", "1"]
    done = runner.invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    for method in ("DQN-Fed", "FedAvg", "Local only", "Pooled"):
        assert method in done.output
    assert "report.html" in done.output
    page = (tmp_path / "h" / "report.html").read_text()
    assert page.count('class="bar-row"') == 4
    before_tables = page[: page.index("<table")]
    for name in ("cleveland", "hungarian", "switzerland", "va-long-beach"):
        assert f'<span class="who">{name}</span>' in before_tables
        assert f"{name}: joining changes your accuracy by" in before_tables

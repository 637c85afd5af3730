"""Four hospitals in a CSV, not a word of code: trained, reported, predicted; and what cannot work says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dqnfed.cli import app
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
    assert [c["n_train"] + c["n_test"] for c in clients] == list(SIZES.values())
    assert [c["group"] for c in clients] == ["urban", "urban", "rural", "rural"]
    done = runner.invoke(app, ["report", str(tmp_path / "run")], catch_exceptions=False)
    assert done.exit_code == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000


def test_the_model_predicts_new_patients_by_class_name(clinics: Path, tmp_path: Path) -> None:
    trained(clinics, tmp_path / "run", "--model", "linear", "--drop", "region")
    rows = hospital_rows(missing=0.2, seed=1)
    new = write_csv(tmp_path / "new.csv", [{k: v for k, v in row.items() if k != "outcome"} for row in rows])
    done = runner.invoke(app, ["predict", str(tmp_path / "run"), str(new)], catch_exceptions=False)
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

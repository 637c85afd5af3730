"""Run folders: read whole, and as far as they go when something is missing or half-written."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dqnfed.report.reader import find_runs, read_run, read_runs
from tests.helpers.runs import write_comparison, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", rounds=6, n_clients=5, groups=("rural", "urban"))


def test_a_whole_run_is_read_without_remark(folder: Path) -> None:
    (run,), problems = read_run(folder)
    assert problems == []
    assert (run.experiment, run.algorithm, run.seed, run.status) == ("made-up", "dqn-fed", 0, "finished")
    assert (run.n_rounds, run.planned_rounds, len(run.clients)) == (6, 6, 5)
    assert run.rounds.tolist() == [-1, 0, 1, 2, 3, 4, 5]
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert run.history["mean"].tolist() == [record["accuracy"]["mean"] for record in records]
    assert run.history["bytes"][-1] == sum(record["bytes_up"] + record["bytes_down"] for record in records)
    assert np.isnan(run.history["rho"][0])
    assert [client.group for client in run.clients] == ["rural", "urban", "rural", "urban", "rural"]


def test_final_accuracies_are_those_of_the_last_round(folder: Path) -> None:
    (run,), _ = read_run(folder)
    rows = [line.split(",") for line in (folder / "clients.csv").read_text().splitlines()[1:]]
    assert run.accuracy.tolist() == [float(row[5]) for row in rows if row[0] == "5"]


@pytest.mark.parametrize(("rounds", "kept"), [(6, 2), (200, 101)])
def test_final_accuracies_are_those_of_the_kept_model(rounds: int, kept: int, tmp_path: Path) -> None:
    """Also in a long run, of which few evaluations are read."""
    folder = write_run(tmp_path / "r", rounds=rounds, n_clients=3)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    of_kept = {"select": "loss", "kept_round": kept, "accuracy": records[kept + 1]["accuracy"]}
    (folder / "summary.json").write_text(json.dumps(summary | of_kept))
    (run,), problems = read_run(folder)
    assert problems == []  # summary and table agree
    rows = [line.split(",") for line in (folder / "clients.csv").read_text().splitlines()[1:]]
    assert run.accuracy.tolist() == [float(row[5]) for row in rows if row[0] == str(kept)]
    assert run.measures()["mean"] == pytest.approx(run.accuracy.mean())
    assert run.evaluations[-1].round == rounds - 1  # curves go on to the end


def test_rounds_that_were_not_evaluated_leave_gaps(tmp_path: Path) -> None:
    (run,), problems = read_run(write_run(tmp_path / "r", rounds=10, eval_every=4, participation=0.4))
    assert problems == []
    assert run.rounds[np.isfinite(run.history["mean"])].tolist() == [-1, 3, 7, 9]
    assert [evaluation.round for evaluation in run.evaluations] == [-1, 3, 7, 9]


def test_a_second_model_is_a_second_view(tmp_path: Path) -> None:
    runs, problems = read_run(write_run(tmp_path / "r", algorithm="ditto", rounds=3, with_global_model=True))
    assert problems == []
    assert [run.model for run in runs] == ["", "global"]
    personal, shared = runs
    assert np.allclose(shared.accuracy, np.clip(personal.accuracy - 5, 0, 100), atol=0.01)
    assert shared.history["mean"][-1] == pytest.approx(shared.accuracy.mean(), abs=1e-6)


def test_long_runs_keep_few_client_evaluations(tmp_path: Path) -> None:
    (run,), _ = read_run(write_run(tmp_path / "r", rounds=200, n_clients=3))
    kept = [evaluation.round for evaluation in run.evaluations]
    assert len(kept) <= 24
    assert kept[0] == -1
    assert kept[-1] == 199


def cut_last_metrics_line(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-30])


def cut_last_client_row(folder: Path) -> None:
    path = folder / "clients.csv"
    path.write_bytes(path.read_bytes()[:-4])


def spoil_a_line(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[2] = "{not json"
    path.write_text("\n".join(lines) + "\n")


def spoil_config(folder: Path) -> None:
    (folder / "config.toml").write_text("= broken")


def say_an_old_version(folder: Path) -> None:
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps(env | {"dqnfed": "0.0.3"}))


def contradict_the_clients(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    summary["accuracy"]["mean"] += 3
    (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_last_metrics_line, "metrics.jsonl: its last line is half-written"),
        (cut_last_client_row, "clients.csv: its last line is half-written"),
        (spoil_a_line, "metrics.jsonl: line 3 is not a record of a round"),
        (spoil_config, "config.toml cannot be read"),
        (say_an_old_version, "was written by dqnfed 0.0.3"),
        (contradict_the_clients, "summary.json says mean accuracy"),
        (lambda folder: (folder / "clients.csv").unlink(), "clients.csv is missing"),
        (lambda folder: (folder / "clients.json").unlink(), "clients.json is missing"),
        (lambda folder: (folder / "config.toml").unlink(), "config.toml is missing"),
        (lambda folder: (folder / "env.json").unlink(), "env.json is missing"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
        (lambda folder: (folder / "clients.json").write_text("[{"), "clients.json cannot be read"),
        (lambda folder: (folder / "clients.csv").write_text("a,b\n1,2\n"), "the header 'a,b' lacks round or client"),
        (lambda folder: (folder / "summary.json").write_text("{"), "summary.json cannot be read"),
    ],
)
def test_damage_is_named_and_the_rest_is_read(folder: Path, damage: Callable[[Path], object], said: str) -> None:
    whole = read_run(folder)[0][0].measures()
    damage(folder)
    (run,), problems = read_run(folder)
    assert any(said in problem.message for problem in problems)
    assert run.measures()["mean"] == pytest.approx(whole["mean"], abs=12)  # a round less at most


def test_a_round_half_written_in_clients_csv_does_not_count(folder: Path) -> None:
    path = folder / "clients.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    (run,), _ = read_run(folder)
    assert run.evaluations[-1].round == 4
    assert np.isfinite(run.accuracy).all()


def test_a_last_round_with_a_silent_client_counts(folder: Path) -> None:
    rows, records = folder / "clients.csv", folder / "metrics.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:-1]))
    *before, last = (json.loads(line) for line in records.read_text().splitlines())
    silent = len(json.loads((folder / "clients.json").read_text())) - 1
    records.write_text("".join(json.dumps(record) + "\n" for record in [*before, {**last, "silent": [silent]}]))
    (run,), _ = read_run(folder)
    assert run.evaluations[-1].round == last["round"]
    assert np.isnan(run.accuracy).tolist() == [False] * silent + [True]


def test_names_come_from_the_folder_where_nothing_else_says_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "digits" / "fedavg" / "3", algorithm="fedavg", seed=3, rounds=2)
    for name in ("config.toml", "summary.json"):
        (folder / name).unlink()
    (run,), _ = read_run(folder)
    assert (run.experiment, run.algorithm, run.seed, run.status) == ("digits", "fedavg", 3, "running")


def test_a_resumed_round_counts_once(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], *lines[2:]]) + "\n")
    (run,), _ = read_run(folder)
    assert run.rounds.tolist() == [-1, 0, 1, 2, 3, 4, 5]


def test_an_older_format_with_a_plain_accuracy_is_understood(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r | {"accuracy": r["accuracy"]["mean"]}) + "\n" for r in records))
    (run,), _ = read_run(folder)
    assert run.history["mean"][-1] == pytest.approx(run.accuracy.mean())


def test_runs_are_found_below_a_folder_in_natural_order(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("fedavg",), seeds=(10, 2), rounds=1)
    found, problems = find_runs([tmp_path, tmp_path / "fedavg"])
    assert [path.name for path in found] == ["2", "10"]
    assert problems == []


def test_paths_without_runs_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    reading = read_runs([tmp_path / "empty", tmp_path / "nowhere"])
    assert reading.runs == ()
    assert ["holds no run" in str(reading.problems[0]), "no such folder" in str(reading.problems[1])] == [True, True]

"""Grouping: what is one experiment, one method, one seed; and what is said about unequal runs."""

from pathlib import Path

import pytest

from dqnfed.report.comparison import group
from dqnfed.report.reader import read_runs
from tests.helpers.runs import write_comparison, write_run


def grouped(path: Path, *, expect_running: bool = False) -> tuple[list[tuple[str, list[str]]], list[str]]:
    found = group(read_runs([path]).runs, expect_running=expect_running)
    names = [(e.name, [method.label for method in e.methods]) for e in found.experiments]
    return names, [problem.message for problem in found.problems]


def set_in_config(folder: Path, old: str, new: str) -> None:
    path = folder / "config.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_methods_stand_in_the_papers_order_with_dqn_fed_last(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("dqn-fed", "my-method", "term", "fedavg"), seeds=(0,), rounds=1)
    assert grouped(tmp_path) == ([("made-up", ["FedAvg", "TERM", "my-method", "DQN-Fed"])], [])


def test_seeds_belong_to_one_method(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("fedavg",), seeds=(2, 0, 1), rounds=1)
    (experiment,) = group(read_runs([tmp_path]).runs).experiments
    assert [run.seed for run in experiment.methods[0].runs] == [0, 1, 2]
    assert experiment.seeds == (0, 1, 2)


def test_mixed_experiments_are_told_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "a", name="digits", rounds=1)
    write_run(tmp_path / "b", name="blobs", rounds=1)
    names, problems = grouped(tmp_path)
    assert [name for name, _ in names] == ["digits", "blobs"]
    assert "belong to 2 experiments (digits, blobs)" in problems[0]


def test_the_same_name_on_other_data_is_another_experiment(tmp_path: Path) -> None:
    write_run(tmp_path / "a", n_clients=5, rounds=1)
    write_run(tmp_path / "b", n_clients=6, rounds=1)
    names, _ = grouped(tmp_path)
    assert [name for name, _ in names] == ["made-up", "made-up (2)"]


def test_other_settings_make_another_method_named_by_what_differs(tmp_path: Path) -> None:
    write_run(tmp_path / "a", algorithm="fedavg", rounds=1)
    set_in_config(write_run(tmp_path / "b", algorithm="fedavg", rounds=1), "lr = 0.1", "lr = 0.3")
    names, problems = grouped(tmp_path)
    assert names == [("made-up", ["FedAvg · lr=0.1", "FedAvg · lr=0.3"])]
    assert problems == []


def test_a_repeated_run_counts_once_and_is_named(tmp_path: Path) -> None:
    old, new = (write_run(tmp_path / name, rounds=1) for name in ("old", "new"))
    for folder, time in ((old, "2026-01-01"), (new, "2026-01-02")):
        text = (folder / "env.json").read_text()
        (folder / "env.json").write_text(text.replace("2026-11-15", time))
    found = group(read_runs([tmp_path]).runs)
    assert [run.folder for run in found.experiments[0].runs] == [new]
    assert found.problems[0].folder == old


def test_missing_seeds_and_unequal_rounds_are_named(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("fedavg",), seeds=(0, 1), rounds=2)
    write_run(tmp_path / "term", algorithm="term", rounds=3)
    _, problems = grouped(tmp_path)
    assert any("TERM has no run with seed 1" in problem for problem in problems)
    assert any("different numbers of rounds (2, 3)" in problem for problem in problems)


def test_a_run_in_progress_is_named_unless_expected(tmp_path: Path) -> None:
    write_run(tmp_path / "a", rounds=4, finished=False)
    set_in_config(tmp_path / "a", "rounds = 4", "rounds = 9")
    assert "4 of 9 rounds are done" in grouped(tmp_path)[1][0]
    assert grouped(tmp_path, expect_running=True)[1] == []


def test_two_models_of_one_method_are_two_rows(tmp_path: Path) -> None:
    write_run(tmp_path, algorithm="ditto", rounds=1, with_global_model=True)
    assert grouped(tmp_path) == ([("made-up", ["Ditto", "Ditto (global model)"])], [])


@pytest.mark.parametrize(("algorithms", "focus"), [(("fedavg", "dqn-fed"), "DQN-Fed"), (("q-ffl", "term"), "TERM")])
def test_the_page_looks_at_dqn_fed_or_the_best_first(tmp_path: Path, algorithms: tuple[str, ...], focus: str) -> None:
    write_comparison(tmp_path, algorithms=algorithms, seeds=(0,), rounds=40)
    (experiment,) = group(read_runs([tmp_path]).runs).experiments
    assert experiment.methods[experiment.focus].label == focus


def test_where_and_how_often_it_was_measured_does_not_make_another_method(tmp_path: Path) -> None:
    write_run(tmp_path / "a", seed=0, rounds=1)
    folder = write_run(tmp_path / "b", seed=1, rounds=1)
    set_in_config(folder, "every = 1", "every = 5")
    set_in_config(folder, "[run]\n", '[run]\ndevice = "cuda"\n')
    assert grouped(tmp_path) == ([("made-up", ["DQN-Fed"])], [])

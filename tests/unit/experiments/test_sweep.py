"""Sweeps: the whole grid, on validation data only, never twice, whatever happens in between."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from dqnfed import Evaluation
from dqnfed.experiments.config import Config, ConfigError, ValidationMeasure, read_config
from dqnfed.experiments.experiment import run_experiment
from dqnfed.experiments.grids import PAPER_GRIDS
from dqnfed.experiments.sweep import VALIDATION_SHARE, Plan, chosen_grids, final_config, grid_points, open_study, search
from dqnfed.sim.choice import SELECTS

pytest.importorskip("optuna")


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    config = read_config("digits", ["train.rounds=2", "data.clients=4", "data.limit=200", "model.hidden=[4]"])
    grids = {"qffl": {"q": [0.0, 1.0, 5.0]}, "fedavg": {"lr": [0.001, 1.0]}}
    return Plan(config, ("qffl", "fedavg", "server-lbfgs"), (0, 1), tmp_path / "sweep", grids)


def test_the_whole_grid_is_tried_and_the_best_is_the_best(plan: Plan) -> None:
    found = {f.algorithm: f for f in search(plan)}
    assert [len(found[name].tried) for name in plan.algorithms] == [3, 2, 0]
    for f in found.values():
        scores = [t.score for t in f.tried if t.score is not None]
        assert scores == sorted(scores, reverse=True)
        assert not scores or f.score == max(scores)
        for t in f.tried:
            assert t.score == pytest.approx(sum(t.scores.values()) / 2)
            assert set(t.scores) == {"0", "1"}
    assert found["server-lbfgs"].best == {}
    content = json.loads((plan.out / "sweep.json").read_text())
    assert content["part"] == "validation"
    assert content["algorithms"]["fedavg"]["best"] == found["fedavg"].best
    assert "| lr=0.001 |" in (plan.out / "sweep.md").read_text()


def test_selection_never_sees_test_data(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Config] = []

    def watched(config: Config, out: Path, *, resume: bool = False) -> object:
        seen.append(config)
        return run_experiment(config, out, resume=resume)

    monkeypatch.setattr("dqnfed.experiments.sweep.run_experiment", watched)
    found = search(plan)
    assert {config.eval.part for config in seen} == {"validation"}
    assert {config.data.validation for config in seen} == {VALIDATION_SHARE}
    finals = [final_config(plan, f) for f in found]
    assert {config.eval.part for config in finals} == {"test"}
    assert {config.data.validation for config in finals} == {VALIDATION_SHARE}  # the same training data
    assert (finals[0].algorithm.model_extra or {}) == found[0].best


def test_a_point_is_scored_by_the_model_that_its_run_keeps(plan: Plan) -> None:
    """`eval.select` holds for the trials and for the final runs; the validation examples are the sweep's own."""
    config = plan.config.model_copy(update={"eval": plan.config.eval.model_copy(update={"select": "min"})})
    chosen = replace(plan, config=config, algorithms=("fedavg",), seeds=(0,), select="worst5")
    [found] = search(chosen)
    for tried in found.tried:
        folder = chosen.out / "trials" / "fedavg" / f"lr={tried.settings['lr']:g}" / "0"
        summary = json.loads((folder / "summary.json").read_text())
        assert summary["select"] == "min"
        assert tried.score == summary["accuracy"]["worst5"]
    assert final_config(chosen, found).eval.select == "min"


def test_the_words_of_both_selections_are_those_of_the_engine() -> None:
    scores = get_args(ValidationMeasure)
    assert ("last", "loss", *scores) == SELECTS
    for select in SELECTS:
        assert read_config("digits", [f"eval.select={select}"]).eval.select == select
        assert Evaluation(select=select).select == select
    with pytest.raises(ConfigError, match=r"eval.select: Input should be 'last', 'loss', .* but it is 'best'"):
        read_config("digits", ["eval.select=best"])
    assert read_config("digits").eval.select == Evaluation().select == "last"


def test_bowls_hold_examples_out_for_validation_too() -> None:
    config = read_config("digits", ["data.name=bowls", "data.validation=0.2", "train.rounds=2", "eval.select=loss"])
    assert run_experiment(config, None).summary["kept_round"] in (0, 1)


def test_a_finished_sweep_runs_nothing_again(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    first = search(plan)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a finished point was run again")

    monkeypatch.setattr("dqnfed.experiments.sweep.run_experiment", never)
    assert search(plan) == first


def test_a_killed_sweep_goes_on(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the third run: the first two are kept, the half-done point is tried again, nothing is lost."""
    plan = replace(plan, algorithms=("qffl",))
    n_runs = 0

    def killed(config: Config, out: Path, *, resume: bool = False) -> object:
        nonlocal n_runs
        n_runs += 1
        if n_runs == 3:
            raise KeyboardInterrupt
        return run_experiment(config, out, resume=resume)

    with monkeypatch.context() as dying:
        dying.setattr("dqnfed.experiments.sweep.run_experiment", killed)
        with pytest.raises(KeyboardInterrupt):
            search(plan)
    (found,) = search(plan)
    assert sorted(t.settings["q"] for t in found.tried) == [0.0, 1.0, 5.0]
    assert found == search(replace(plan, out=plan.out.parent / "afresh"))[0]


def test_a_point_that_cannot_run_is_reported(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(config: Config, out: Path, *, resume: bool = False) -> object:
        if (config.algorithm.model_extra or {}).get("q") == 5.0:
            raise ValueError("q = 5 is too much")
        return run_experiment(config, out, resume=resume)

    monkeypatch.setattr("dqnfed.experiments.sweep.run_experiment", picky)
    (found,) = search(replace(plan, algorithms=("qffl",)))
    assert found.tried[-1].score is None
    assert found.tried[-1].why == "q = 5 is too much"
    assert found.best["q"] != 5.0


def test_tpe_stays_between_the_ends_of_the_grid(plan: Plan) -> None:
    plan = replace(plan, algorithms=("fedavg",), sampler="tpe", n_trials=4, seeds=(0,))
    (found,) = search(plan)
    assert len(found.tried) == 4
    assert all(0.001 <= t.settings["lr"] <= 1.0 for t in found.tried)
    assert len({t.settings["lr"] for t in found.tried}) == 4
    assert len(open_study(plan, "fedavg").trials) == 4


@pytest.mark.slow
def test_two_processes_share_the_work(plan: Plan) -> None:
    alone = search(replace(plan, out=plan.out / "alone"))
    together = search(replace(plan, out=plan.out / "together", jobs=2))
    assert together == alone  # each point once


def test_grids_come_from_the_paper_the_experiment_or_a_file(plan: Plan, tmp_path: Path) -> None:
    assert grid_points({"a": [1, 2], "b": ["x"]}) == [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]
    assert grid_points({}) == [{}]
    assert chosen_grids(plan.config, "paper") == PAPER_GRIDS
    own = plan.config.model_copy(update={"grids": {"term": {"t": [3.0]}}})
    assert chosen_grids(own, "paper")["term"] == {"t": [3.0]}
    path = tmp_path / "grid.toml"
    path.write_text("[qffl]\nq = [0.5, 2]\n")
    assert chosen_grids(plan.config, str(path)) == {"qffl": {"q": [0.5, 2]}}
    path.write_text("[qffl]\nq = 0.5\n")
    with pytest.raises(ConfigError, match="must hold lists of values"):
        chosen_grids(plan.config, str(path))
    with pytest.raises(ConfigError, match="there is no file nowhere"):
        chosen_grids(plan.config, "nowhere")
    with pytest.raises(ConfigError, match=r"algorithm\.quu"):
        search(replace(plan, grids={"qffl": {"quu": [1.0]}}))

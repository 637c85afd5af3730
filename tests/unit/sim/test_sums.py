"""Evaluation of which the server gets sums: what follows from them is that of the open run, no more."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dqnfed import Evaluation, Federation, Policy, run
from dqnfed.algorithms.ditto import Ditto
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.sim.sampling import Sampling
from tests.helpers.bowls import BOWLS, Case

SUMS = Evaluation(metrics="aggregate-only")
ROUNDED = 2.0**-8  # of a score


@pytest.fixture(scope="module")
def case() -> Case:
    return BOWLS["network"][-1]()


def held_out(case: Case) -> Federation:
    """Return the federation whose test examples are its validation examples too."""
    return replace(case.federation, validation=case.federation.test)


METHODS = [FedAvg(), *(pytest.param(m, marks=pytest.mark.slow) for m in (DQNFed(cached_clients=0), Ditto()))]


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: type(a).__name__)
def test_means_and_deviations_are_those_of_the_open_run(algorithm: AnyAlgorithm, case: Case, tmp_path: Path) -> None:
    summed, opened = (
        run(algorithm, case.problem, case.federation, rounds=2, evaluation=wanted, secure=True, out=out)
        for wanted, out in ((SUMS, tmp_path / "run"), (Evaluation(), None))
    )
    for record, usual in zip(summed.history, opened.history, strict=True):
        assert record["train_loss"]["mean"] == pytest.approx(usual["train_loss"]["mean"], rel=1e-9)
        assert record["models"].keys() == usual["models"].keys() if "models" in usual else "models" not in record
        for name in ("mean", "std", "angle", "cov", "jain"):
            assert record["accuracy"][name] == pytest.approx(usual["accuracy"][name], rel=1e-3, abs=ROUNDED)
        unknown = {"worst10", "worst5", "best10", "best5", "kl", "gini", "min", "max", "weighted_mean"}
        assert all(math.isnan(record["accuracy"][name]) for name in unknown)
        assert record["accuracy"].keys() == usual["accuracy"].keys()
        assert record["rho"] is record["loss_before"] is record["loss_after"] is None
        assert math.isnan(record["train_loss"]["max"])
    assert torch.equal(summed.theta, opened.theta) or (summed.theta - opened.theta).abs().max() < 1e-6
    assert summed.client_rows == []
    assert "are not known" in json.loads((tmp_path / "run" / "summary.json").read_text())["summed"]


@pytest.mark.parametrize("select", ["loss", "mean"])
def test_the_best_model_and_early_stopping_follow_from_sums(select: str, case: Case) -> None:
    """With too large a learning rate the validation score falls, so that the run stops and keeps an earlier model."""
    algorithm, federation = FedAvg(lr=4.0), held_out(case)
    results = [
        run(
            algorithm,
            case.problem,
            federation,
            rounds=12,
            evaluation=Evaluation(metrics=metrics, select=select, patience=3),
            secure=True,
        )
        for metrics in ("aggregate-only", "per-client")
    ]
    summed, opened = (result.summary for result in results)
    assert summed["kept_round"] == opened["kept_round"]
    assert (summed["status"], summed["rounds"]) == (opened["status"], opened["rounds"])
    assert summed["kept_validation"]["value"] == pytest.approx(opened["kept_validation"]["value"], rel=1e-4)


def test_a_run_that_ends_worse_keeps_its_best_model_by_the_mean_loss(case: Case) -> None:
    worse = FedAvg(lr=80.0)
    found = run(
        worse, case.problem, case.federation, rounds=4, evaluation=SUMS, secure=True, policy=Policy(on_worse="best")
    )
    losses = [record["train_loss"]["mean"] for record in found.history]
    assert losses[-1] > losses[0]
    assert found.summary["kept_round"] == found.history[losses.index(min(losses))]["round"]


@pytest.mark.parametrize("select", ["worst10", "worst5", "min"])
def test_choices_by_single_clients_are_refused_by_name(select: str, case: Case) -> None:
    with pytest.raises(ValueError, match=rf"`eval.select` = '{select}' .* choose one of last, loss, mean"):
        run(FedAvg(), case.problem, held_out(case), rounds=1, secure=True, evaluation=replace(SUMS, select=select))


def test_what_asks_for_single_losses_and_too_few_clients_are_refused(case: Case) -> None:
    known = FedAvg(), case.problem, case.federation
    by_losses = Sampling(rule="power-of-choice")
    with pytest.raises(ValueError, match="'power-of-choice' asks for single clients' losses"):
        run(*known, rounds=1, participation=0.5, sampling=by_losses, secure=True, evaluation=SUMS)
    with pytest.raises(ValueError, match=r"over at least 3 clients, but 2 are evaluated"):
        run(FedAvg(), case.problem, case.federation, rounds=1, secure=True, evaluation=replace(SUMS, clients=2))


def test_of_fewer_than_five_clients_no_deviation_is_asked_for(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        found = run(FedAvg(), case.problem, case.federation, rounds=1, secure=True, evaluation=replace(SUMS, clients=4))
    accuracy = found.history[-1]["accuracy"]
    assert math.isfinite(accuracy["mean"])
    assert math.isnan(accuracy["std"])
    assert math.isnan(accuracy["cov"])
    assert sum("sums of losses and scores alone" in record.getMessage() for record in caplog.records) == 1


def test_a_loss_that_is_no_number_ends_in_a_diverged_run(case: Case) -> None:
    inputs = case.federation.train.inputs.clone()
    inputs[case.federation.train.rows(torch.tensor([2]))] = torch.inf
    broken = replace(case.federation, train=case.federation.train._replace(inputs=inputs))
    found = run(FedAvg(), case.problem, broken, rounds=1, secure=True, evaluation=SUMS)
    assert found.summary["status"] == "diverged"
    assert math.isnan(found.history[-1]["train_loss"]["mean"])
    assert math.isfinite(found.history[-1]["accuracy"]["mean"])


@pytest.mark.slow
def test_a_run_that_is_resumed_has_the_same_sums(case: Case, tmp_path: Path) -> None:
    def part(rounds: int, out: Path, *, resume: bool = False) -> list[float]:
        found = run(
            FedAvg(),
            case.problem,
            case.federation,
            rounds=rounds,
            secure=True,
            evaluation=SUMS,
            policy=Policy(on_worse="best"),
            out=out,
            resume=resume,
        )
        return [record["train_loss"]["mean"] for record in found.history]

    part(2, tmp_path / "run")
    assert part(4, tmp_path / "run", resume=True) == pytest.approx(part(4, tmp_path / "whole"), rel=1e-9)

"""Early stopping watches validation scores and nothing else, and survives a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dqnfed import Evaluation, FedAvg, Federation, Problem, run
from tests.helpers.folders import newest_checkpoint


def federation(validation: float = 0.25) -> Federation:
    generator = torch.Generator().manual_seed(0)
    clients = []
    for shift in (-0.5, 0.0, 0.5):
        inputs = torch.randn(40, 4, generator=generator) + shift
        clients.append((inputs, (inputs[:, 0] > inputs[:, 1]).long()))
    return Federation.from_clients(clients, test=0.25, validation=validation)


def problem() -> Problem:
    torch.manual_seed(0)
    return Problem.from_module(nn.Linear(4, 2))


def test_a_run_without_progress_stops_after_its_patience() -> None:
    """With a step of 1e-9 no score can change, so the first evaluation stays the best."""
    result = run(FedAvg(lr=1e-9), problem(), federation(), rounds=50, evaluation=Evaluation(every=2, patience=3))
    assert result.summary["status"] == "stopped"
    assert result.summary["rounds"] == 2 * (1 + 3)
    assert "has not risen above" in result.summary["reason"]
    assert result.history[-1]["status"] == "stop"


def test_a_run_that_improves_goes_on() -> None:
    steady = run(FedAvg(lr=0.5), problem(), federation(), rounds=12, evaluation=Evaluation(patience=12))
    free = run(FedAvg(lr=0.5), problem(), federation(), rounds=12)
    assert steady.summary["rounds"] == 12
    assert steady.summary["status"] == "finished"
    assert torch.equal(steady.theta, free.theta)  # watching changes nothing


def test_test_scores_are_not_watched() -> None:
    """Other test examples, same validation examples: the run stops in the same round."""
    whole = federation()
    other = Federation(whole.train, whole.validation or whole.test, whole.validation, whole.names, None, 2)
    stops = [
        run(FedAvg(lr=0.3), problem(), data, rounds=60, evaluation=Evaluation(patience=2)).summary["rounds"]
        for data in (whole, other)
    ]
    assert stops[0] == stops[1] < 60


def test_the_best_score_is_checkpointed(tmp_path: Path) -> None:
    run(FedAvg(lr=1e-9), problem(), federation(), rounds=50, out=tmp_path, evaluation=Evaluation(patience=4))
    facts = newest_checkpoint(tmp_path)
    assert facts["best"]["round"] == 0
    assert facts["best"]["waited"] == 4


def test_patience_needs_validation_examples() -> None:
    with pytest.raises(ValueError, match=r"no validation examples; hold some out"):
        run(FedAvg(), problem(), federation(validation=0.0), rounds=2, evaluation=Evaluation(patience=1))
    with pytest.raises(ValueError, match="patience"):
        Evaluation(patience=0)

"""A run with `on_worse = "best"` does not end above its start, whatever one client says about its loss."""

from __future__ import annotations

import pytest
import torch

from dqnfed import FedAvg, Policy, run
from dqnfed.sim.guard import mean_change
from tests.helpers.bowls import network_bowl


def test_a_run_that_gets_worse_keeps_its_best_evaluated_model() -> None:
    """Steps a thousand times too long: the last model is kept without the guard, and the start or a better one with."""
    algorithm, (problem, federation, *_) = FedAvg(lr=1000.0), network_bowl()
    last = run(algorithm, problem, federation, rounds=3, policy=Policy(on_worse="last"))
    best = run(algorithm, problem, federation, rounds=3, policy=Policy(on_worse="best"))
    start = last.summary["start"]["train_loss"]["mean"]
    assert last.summary["train_loss"]["mean"] > start >= best.summary["train_loss"]["mean"]
    assert "is kept (`policy.on_worse`)" in best.summary["kept_because"]
    assert best.summary["status"] == last.summary["status"]  # what happened is said all the same


def test_a_run_that_gets_better_keeps_its_last_model() -> None:
    algorithm, (problem, federation, *_) = FedAvg(lr=0.1), network_bowl()
    last, best = (run(algorithm, problem, federation, rounds=3, policy=Policy(on_worse=w)) for w in ("last", "best"))
    torch.testing.assert_close(best.theta, last.theta, rtol=0.0, atol=0.0)
    assert "kept_because" not in best.summary


@pytest.mark.parametrize("n_clients", [3, 5, 10, 30])
@pytest.mark.parametrize("claim", [-1e9, 1e9])
def test_no_single_loss_decides(n_clients: int, claim: float) -> None:
    """All others gain (or lose) alike, and one client claims the opposite."""
    start = torch.full((n_clients,), 2.0, dtype=torch.float64)
    sign = -1.0 if claim > 0 else 1.0
    now = start + 0.5 * sign
    now[0] = start[0] + claim
    assert sign * mean_change(now, start) > 0.0

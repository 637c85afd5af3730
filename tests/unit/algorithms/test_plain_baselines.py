"""FedYogi, FedDyn and MIFA: their formulas in NumPy, their limits, and where they end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from dqnfed.algorithms.fedadam import FedAdam
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.feddyn import FedDyn
from dqnfed.algorithms.fedyogi import FedYogi
from dqnfed.algorithms.mifa import MIFA
from tests.helpers.baselines import GRADIENTS, LR, bowls, classes
from tests.helpers.linear_clients import linear_clients
from tests.helpers.play import SometimesAway, play


def test_fedyogi_follows_the_papers_formulas() -> None:
    problem, federation, centres = bowls(3, 2)
    settings: dict[str, Any] = {"server_lr": 0.05, "beta1": 0.8, "beta2": 0.9, "tau": 0.01, "weighting": "uniform"}
    played = play(FedYogi(lr=LR, **settings), problem, federation, rounds=5)
    theta, m, v = np.zeros(2), np.zeros(2), np.full(2, 0.01**2)
    for after in played.thetas[1:]:
        mean = LR * (theta - centres.numpy()).mean(0)
        m = 0.8 * m + 0.2 * mean
        v = np.where(v > mean**2, v - 0.1 * mean**2, v + 0.1 * mean**2)
        theta = theta - 0.05 * m / (np.sqrt(v) + 0.01)
        np.testing.assert_allclose(after, theta, rtol=1e-12)


def test_the_second_moment_of_yogi_falls_more_slowly_than_adams() -> None:
    large, small = torch.tensor([1.0]).double(), torch.tensor([1e-6]).double()
    assert float(FedYogi().next_second_moment(large, small)) > 0.999
    assert float(FedAdam().next_second_moment(large, small)) < 0.991


def test_mifa_is_fedavg_where_everybody_is_available() -> None:
    problem, federation = classes(5)
    work: dict[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 4, "lr_decay": 0.9}
    mine = play(MIFA(**work), problem, federation, rounds=5).thetas[-1]
    theirs = play(FedAvg(weighting="uniform", **work), problem, federation, rounds=5).thetas[-1]
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_mifa_counts_the_last_update_of_a_client_that_is_away() -> None:
    """Linear losses: every update is the client's gradient, so after all have replied every step is their mean."""
    problem, federation, _ = linear_clients()
    away = SometimesAway(away=frozenset({(0, 2), (2, 0), (2, 1), (3, 1)}))
    thetas = play(MIFA(lr=LR), problem, federation, rounds=4, clients=away).thetas
    steps = [after - before for before, after in pairwise(thetas)]
    np.testing.assert_allclose(steps[0], -LR * GRADIENTS[:2].mean(0), rtol=1e-12)
    for step in steps[1:]:
        np.testing.assert_allclose(step, -LR * GRADIENTS.mean(0), rtol=1e-12)


def test_feddyn_follows_the_papers_formulas_with_exact_local_minimisers() -> None:
    """On bowls argmin F(v) - g'v + alpha/2 |v - theta|^2 is (c + g + alpha theta) / (1 + alpha)."""
    problem, federation, centres = bowls(3, 2)
    played = play(FedDyn(lr=0.5, epochs=60, alpha=0.7), problem, federation, rounds=4)
    c, g, h, theta = centres.numpy(), np.zeros((3, 2)), np.zeros(2), np.zeros(2)
    for after in played.thetas[1:]:
        local = (c + g + 0.7 * theta) / 1.7
        g = g - 0.7 * (local - theta)
        h = h - 0.7 / 3 * (local - theta).sum(0)
        theta = local.mean(0) - h / 0.7
        np.testing.assert_allclose(after, theta, atol=1e-12)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_feddyn_ends_at_the_optimum_of_the_mean_loss(participation: float) -> None:
    problem, federation, centres = bowls(4, 3)
    theta = play(FedDyn(lr=0.5, epochs=20), problem, federation, rounds=120, participation=participation).thetas[-1]
    torch.testing.assert_close(theta, centres.mean(0), rtol=0, atol=1e-6)


def test_the_sum_of_slopes_is_what_the_server_of_feddyn_holds() -> None:
    problem, federation = classes(4)
    played = play(FedDyn(lr=0.3, epochs=2), problem, federation, rounds=5, participation=0.5)
    seen = sorted({k for record in played.records for k in record["clients"]})
    slopes = torch.stack([played.memory(k).slope for k in seen])
    torch.testing.assert_close(played.servers[-1].drift, slopes.sum(0) / 4, rtol=1e-10, atol=1e-14)

"""FedProx: the proximal term, and nothing else, separates it from FedAvg."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedprox import FedProx
from dqnfed.core.algorithm import Empty, Theta
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.baselines import bowls, classes, task_of
from tests.helpers.play import play


@pytest.mark.parametrize("server", [{}, {"server_lr": 0.6, "weighting": "uniform"}], ids=["default", "other server"])
def test_without_the_term_it_is_fedavg_to_the_bit(server: dict[str, Any]) -> None:
    problem, federation = classes(5)
    settings: dict[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 12, "momentum": 0.5, "weight_decay": 0.01}
    plain = play(FedAvg(**settings, **server), problem, federation, rounds=2, participation=0.6)
    zero = play(FedProx(**settings, **server, mu=0.0), problem, federation, rounds=2, participation=0.6)
    for mine, theirs in zip(zero.thetas, plain.thetas, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_local_work_ends_at_the_proximal_point(mu: float) -> None:
    """The minimiser of ||v - c||^2 / 2 + mu ||v - theta||^2 / 2 is (c + mu theta) / (1 + mu)."""
    problem, federation, centres = bowls(1, sizes=[4])
    theta = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    algorithm = FedProx(mu=mu, lr=0.3, epochs=100)
    task = task_of(federation.train.targets, lr=0.3, steps=100)
    update, _ = algorithm.client_step(problem, task, Theta(theta), Empty(theta.new_zeros(0)))
    # 100 steps shrink the error by |1 - 0.3 (1 + mu)|^100 < 1e-17
    torch.testing.assert_close(theta - update.delta, (centres[0] + mu * theta) / (1 + mu), rtol=1e-12, atol=1e-12)


def test_local_work_is_torchs_sgd_on_the_loss_with_the_term() -> None:
    problem, federation = classes(1, sizes=[20])
    algorithm = FedProx(mu=0.8, lr=0.3, epochs=2, batch_size=6, momentum=0.5, weight_decay=0.02)
    played = play(algorithm, problem, federation, rounds=2)
    theta, train = problem.theta0.clone().requires_grad_(), federation.train
    for round in range(2):
        anchor = theta.detach().clone()
        optimiser = torch.optim.SGD([theta], lr=0.3, momentum=0.5, weight_decay=0.02)
        for batch in TaskBuilder(federation, problem, algorithm, 0).stacked(torch.arange(1), round).batches[0]:
            rows = batch[batch >= 0]
            optimiser.zero_grad()
            loss = problem.losses(problem.predict(theta, train.inputs[rows]), train.targets[rows]).mean()
            (loss + 0.8 / 2 * (theta - anchor).square().sum()).backward()
            optimiser.step()
    torch.testing.assert_close(played.thetas[-1], theta.detach(), rtol=1e-12, atol=1e-14)


def test_one_step_is_fedavg_whatever_mu() -> None:
    """At its start a client is at the anchor, where the term has no gradient."""
    problem, federation, _ = bowls(1)
    theta = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    task = task_of(federation.train.targets, lr=0.3, steps=1)
    mine, plain = (
        algorithm.client_step(problem, task, Theta(theta), Empty(theta.new_zeros(0)))[0].delta
        for algorithm in (FedProx(mu=5.0, epochs=2), FedAvg(epochs=2))
    )
    torch.testing.assert_close(mine, plain, rtol=1e-15, atol=0)


@pytest.mark.parametrize("mu", [0.0, 5.0])
def test_mu_is_refused_where_clients_make_one_step(mu: float) -> None:
    with pytest.raises(ValueError, match=f"FedProx: `mu` is {mu}, but has no effect with one full-batch step a round"):
        FedProx(mu=mu)
    assert FedProx(mu=mu, epochs=2).mu == FedProx(mu=mu, batch_size=8).mu == mu
    assert FedProx().mu == 0.01


def test_clients_drift_less_for_larger_mu() -> None:
    problem, federation, _ = bowls(4, seed=2)
    lengths = []
    for mu in (0.0, 0.5, 5.0):
        thetas = play(FedProx(mu=mu, lr=0.1, epochs=10), problem, federation, rounds=1).thetas
        lengths.append(float((thetas[1] - thetas[0]).norm()))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < 0.5 * lengths[0]


def test_bad_mu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FedProx: `mu` must be in \[0, inf\), but is -0.1"):
        FedProx(mu=-0.1)

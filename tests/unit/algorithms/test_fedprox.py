"""FedProx: the proximal term, and nothing else, separates it from FedAvg."""

from __future__ import annotations

import pytest
import torch

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedprox import FedProx
from dqnfed.core.algorithm import Empty, Theta
from tests.helpers.baselines import bowls, classes, task_of
from tests.helpers.play import play


def test_without_the_term_it_is_fedavg_to_the_bit() -> None:
    problem, federation = classes(5)
    settings = {"lr": 0.3, "epochs": 2, "batch_size": 12, "momentum": 0.5, "weight_decay": 0.01}
    plain = play(FedAvg(**settings), problem, federation, rounds=2, participation=0.6)  # type: ignore[arg-type]
    zero = play(FedProx(**settings, mu=0.0), problem, federation, rounds=2, participation=0.6)  # type: ignore[arg-type]
    for mine, theirs in zip(zero.thetas, plain.thetas, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("mu", [0.1, 1.0, 3.0])
def test_local_work_ends_at_the_proximal_point(mu: float) -> None:
    """The minimiser of ||v - c||^2 / 2 + mu ||v - theta||^2 / 2 is (c + mu theta) / (1 + mu)."""
    problem, federation, centres = bowls(1, sizes=[4])
    theta = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    algorithm = FedProx(mu=mu, lr=0.3)
    task = task_of(federation.train.targets, lr=0.3, steps=100)
    update, _ = algorithm.client_step(problem, task, Theta(theta), Empty(theta.new_zeros(0)))
    # 100 steps shrink the error by |1 - 0.3 (1 + mu)|^100 < 1e-17
    torch.testing.assert_close(theta - update.delta, (centres[0] + mu * theta) / (1 + mu), rtol=1e-12, atol=1e-12)


def test_one_step_is_fedavg_whatever_mu() -> None:
    """At its start a client is at the anchor, where the term has no gradient."""
    problem, federation, _ = bowls(3)
    one = play(FedProx(mu=5.0), problem, federation, rounds=1).thetas[-1]
    torch.testing.assert_close(one, play(FedAvg(), problem, federation, rounds=1).thetas[-1], rtol=1e-15, atol=1e-15)


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

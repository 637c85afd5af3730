"""FedAdam against a scalar-by-scalar oracle of its Algorithm 2, and its reductions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.fedadam import FedAdam
from dqnfed.algorithms.fedavg import FedAvgUpdate
from dqnfed.core.replies import Replies
from tests.helpers.baselines import GRADIENTS, bowl_problem, bowls, cohort_of
from tests.helpers.play import play


def oracle(rounds: list[list[float]], server_lr: float, beta1: float, beta2: float, tau: float) -> list[float]:
    """Return theta after the given mean updates, one scalar at a time in Python floats."""
    n = len(rounds[0])
    theta, m, v = [0.0] * n, [0.0] * n, [tau * tau] * n
    for mean in rounds:
        for i, d in enumerate(mean):
            m[i] = beta1 * m[i] + (1 - beta1) * d
            v[i] = beta2 * v[i] + (1 - beta2) * d * d
            theta[i] -= server_lr * m[i] / (v[i] ** 0.5 + tau)
    return theta


@pytest.mark.parametrize(("weighting", "weights"), [("examples", (0.1, 0.3, 0.6)), ("uniform", (1 / 3, 1 / 3, 1 / 3))])
def test_three_rounds_match_the_oracle(weighting: str, weights: tuple[float, ...]) -> None:
    algorithm = FedAdam(server_lr=0.05, beta1=0.8, beta2=0.95, tau=1e-2, weighting=weighting)
    server = algorithm.init_server(bowl_problem(4), 3)
    shares = torch.tensor(weights, dtype=torch.float64)
    means: list[list[float]] = []
    for round in range(3):
        deltas = (0.1 + round) * GRADIENTS.roll(round, 0)
        server = algorithm.server_step(server, Replies(FedAvgUpdate(deltas)), cohort_of(round=round)).server
        means.append((shares @ deltas).tolist())
    expected = torch.tensor(oracle(means, 0.05, 0.8, 0.95, 1e-2), dtype=torch.float64)
    torch.testing.assert_close(server.theta, expected, rtol=1e-13, atol=1e-15)


def test_a_constant_update_moves_every_coordinate_alike() -> None:
    """m -> D and sqrt(v) -> |D|, so that each coordinate moves by server_lr |D| / (|D| + tau) whatever its size."""
    algorithm = FedAdam(server_lr=0.01, beta1=0.9, beta2=0.9, tau=1e-6)
    server = algorithm.init_server(bowl_problem(3), 1)
    delta = torch.tensor([[1e-2, -1.0, 50.0]], dtype=torch.float64)
    before: Tensor = server.theta
    for round in range(400):
        before = server.theta
        server = algorithm.server_step(server, Replies(FedAvgUpdate(delta)), cohort_of((5,), round=round)).server
    move = before - server.theta
    torch.testing.assert_close(move, 0.01 * delta[0].sign(), rtol=2e-4, atol=0)  # tau / |D| = 1e-4 at the smallest


def test_without_memory_and_with_large_tau_it_is_fedavg() -> None:
    """beta1 = 0 and tau -> infinity: theta - (server_lr / tau) D."""
    algorithm = FedAdam(server_lr=1e8, beta1=0.0, beta2=0.0, tau=1e8)
    server = algorithm.init_server(bowl_problem(4), 3)
    found = algorithm.server_step(server, Replies(FedAvgUpdate(0.1 * GRADIENTS)), cohort_of()).server.theta
    expected = torch.tensor([-0.145, 0.010, -0.090, -0.080], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


def test_it_finds_the_bottom_of_the_mean_bowl() -> None:
    problem, federation, centres = bowls(3, sizes=[4, 4, 4])
    algorithm = FedAdam(server_lr=0.2, beta1=0.5, beta2=0.9)
    theta = play(algorithm, problem, federation, rounds=60).thetas[-1]
    assert float((problem.theta0 - centres.mean(0)).norm()) > 1.0
    assert float((theta - centres.mean(0)).norm()) < 0.2  # one step: near the bottom Adam hops about


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta1": 1.0}, r"`beta1` must be in \[0, 1\), but is 1.0"),
        ({"beta2": -0.1}, r"`beta2` must be in \[0, 1\), but is -0.1"),
        ({"tau": 0.0}, r"`tau` must be in \(0, inf\), but is 0.0"),
        ({"server_lr": 0.0}, r"`server_lr` must be in \(0, inf\)"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"FedAdam: {message}"):
        FedAdam(**settings)  # type: ignore[arg-type]

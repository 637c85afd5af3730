"""AFL: golden lambdas, the averaged iterate, the worst client, and partial participation without bias."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from dqnfed import run
from dqnfed.algorithms.afl import AFL, AFLServer, AFLUpdate
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.core.algorithm import Cohort, Empty
from tests.helpers.baselines import LR, bowls, classes
from tests.helpers.linear_clients import linear_clients
from tests.helpers.play import play
from tests.helpers.rows import gaussian_rows


@pytest.mark.parametrize(
    ("lambda_lr", "expected"), [(0.1, (0.26666667, 0.41666667, 0.31666667)), (1.0, (0.0, 1.0, 0.0))]
)
def test_known_weights(lambda_lr: float, expected: tuple[float, ...]) -> None:
    problem, federation, _ = linear_clients()
    server = play(AFL(lambda_lr=lambda_lr, lr=LR), problem, federation, rounds=1).servers[-1]
    torch.testing.assert_close(server.weights, server.weights.new_tensor(expected), rtol=0, atol=5e-9)


def test_the_model_moves_with_the_weights_of_before() -> None:
    """The first step is the uniform mean, the second uses the lambda that the first round's losses made."""
    problem, federation, _ = linear_clients()
    played = play(AFL(lambda_lr=0.1, lr=LR), problem, federation, rounds=2)
    expected = played.thetas[0].new_tensor((-0.11666667, -0.03333333, -0.06666667, -0.05))
    torch.testing.assert_close(played.thetas[1], expected, rtol=0, atol=5e-9)
    g = federation.train.inputs[federation.train.starts[:-1]]
    second = LR * played.servers[1].weights @ g
    torch.testing.assert_close(played.thetas[1] - played.thetas[2], second, rtol=1e-12, atol=1e-15)


def test_without_a_step_for_lambda_it_is_uniform_fedavg() -> None:
    problem, federation = classes(5)
    settings: dict[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 4}
    plain = play(FedAvg(weighting="uniform", **settings), problem, federation, rounds=4, participation=0.6)
    zero = play(AFL(lambda_lr=0.0, **settings), problem, federation, rounds=4, participation=0.6)
    for mine, theirs in zip(zero.thetas, plain.thetas, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_the_average_is_the_mean_of_the_iterates() -> None:
    problem, federation = classes(4)
    played = play(AFL(lr=0.3), problem, federation, rounds=7)
    for t, server in enumerate(played.servers[1:], start=1):
        expected = torch.stack(played.thetas[1 : t + 1]).mean(0)
        torch.testing.assert_close(server.average, expected, rtol=1e-12, atol=1e-14)


def test_a_tail_average_forgets_the_start() -> None:
    problem, federation = classes(4)
    played = play(AFL(lr=0.3, average_from=3), problem, federation, rounds=6)
    for theta, server in list(zip(played.thetas, played.servers, strict=True))[:4]:
        torch.testing.assert_close(server.average, theta, rtol=1e-14, atol=1e-15)
    expected = torch.stack(played.thetas[4:]).mean(0)
    torch.testing.assert_close(played.servers[-1].average, expected, rtol=1e-12, atol=1e-14)


def test_the_averaged_model_is_judged_first_and_returned() -> None:
    problem, federation = classes(4)
    played = play(AFL(), problem, federation, rounds=3)
    models = AFL().evaluated(played.servers[-1], Empty(torch.zeros(0)))
    assert list(models) == ["averaged", "global"]
    result = run(AFL(), problem, federation, rounds=3)
    assert torch.equal(result.theta, played.servers[-1].average)
    assert set(result.summary["models"]) == {"global"}
    assert not torch.equal(result.theta, played.thetas[-1])


def test_equal_losses_leave_the_weights_alone() -> None:
    problem, federation, _ = linear_clients(losses=torch.full((3,), 2.5, dtype=torch.float64))
    server = play(AFL(lambda_lr=3.0), problem, federation, rounds=1).servers[-1]
    torch.testing.assert_close(server.weights, torch.full((3,), 1 / 3, dtype=torch.float64), rtol=1e-14, atol=0)


def test_one_client_is_gradient_descent() -> None:
    problem, federation, centres = bowls(1, 3, spread=0.0)
    thetas = play(AFL(lr=0.2), problem, federation, rounds=5).thetas
    for t, theta in enumerate(thetas):
        torch.testing.assert_close(theta, (1 - 0.8**t) * centres[0], rtol=1e-13, atol=1e-15)


def test_finds_the_centre_of_the_smallest_enclosing_ball() -> None:
    """The minimax point of bowls; FedAvg's is their mean, which is far from it."""
    problem, federation, _ = bowls(3, 2, sizes=[1, 1, 1], spread=0.0)
    centres = torch.tensor([[0.0, 0.0], [0.2, 0.1], [4.0, 0.0]], dtype=torch.float64)
    train = federation.train._replace(targets=centres)
    federation = type(federation)(train, federation.test)
    played = play(AFL(lr=0.1, lambda_lr=0.02, average_from=200), problem, federation, rounds=400)
    expected = torch.tensor([2.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(played.servers[-1].average, expected, rtol=0, atol=0.02)
    assert float(played.servers[-1].weights[1]) < 0.05


def test_a_cohort_gives_the_whole_federations_step_on_average() -> None:
    """Over all pairs of four clients, theta and the raised lambdas average to those of full participation."""
    delta, losses = gaussian_rows(4, 5, seed=1), torch.tensor([0.3, 1.0, 0.2, 0.6], dtype=torch.float64)
    weights = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    zero = torch.zeros(5, dtype=torch.float64)
    server, algorithm = AFLServer(zero, zero, torch.tensor(0), weights), AFL(lambda_lr=1e-3)

    def after(clients: tuple[int, ...]) -> AFLServer:
        who = torch.tensor(clients)
        cohort = Cohort(who, torch.ones(len(who)), 4, 0)
        return algorithm.server_step(server, AFLUpdate(delta[who], losses[who]), cohort).server

    pairs = [after(pair) for pair in combinations(range(4), 2)]
    whole = after((0, 1, 2, 3))
    torch.testing.assert_close(torch.stack([s.theta for s in pairs]).mean(0), whole.theta, rtol=1e-13, atol=1e-15)
    # no lambda touches zero here, so that the projection is a shift and averages too
    torch.testing.assert_close(torch.stack([s.weights for s in pairs]).mean(0), whole.weights, rtol=1e-13, atol=0)


def test_lambda_belongs_to_the_client_not_to_its_place() -> None:
    problem, federation = classes(6)
    played = play(AFL(lambda_lr=0.01), problem, federation, rounds=1, participation=0.5)
    chosen = played.records[0]["clients"]
    weights = played.servers[-1].weights
    absent = [c for c in range(6) if c not in chosen]
    assert float(weights[chosen].min()) > float(weights[absent].max())
    torch.testing.assert_close(weights[absent], weights[absent[0]].expand(len(absent)), rtol=1e-14, atol=0)
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-14)


def test_a_client_without_a_gradient_still_raises_its_lambda() -> None:
    gradients = torch.tensor([[0.0, 0.0], [1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    problem, federation, _ = linear_clients(gradients, torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64), [5, 5, 5])
    played = play(AFL(lambda_lr=0.05), problem, federation, rounds=1)
    assert played.records[0]["dropped"] == []
    expected = torch.tensor([1 / 3 + 0.05, 1 / 3 - 0.05, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(played.servers[-1].weights, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lambda_lr": -0.1}, r"AFL: `lambda_lr` must be in \[0, inf\), but is -0.1"),
        ({"average_from": -1}, r"`average_from` must be in \[0, inf\)"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AFL(**settings)

"""AFL: golden lambdas, the averaged iterate, the worst client, and partial participation without bias."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.afl import AFL, AFLServer, AFLUpdate
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.core.algorithm import Cohort, Empty
from dqnfed.core.replies import Replies
from dqnfed.sim.engine import run
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


def test_the_averaged_model_is_evaluated_first_and_returned() -> None:
    problem, federation = classes(4)
    played = play(AFL(), problem, federation, rounds=3)
    models = AFL().models(played.servers[-1], Empty(torch.zeros(0)))
    assert list(models) == ["averaged", "global"]
    result = run(AFL(), problem, federation, rounds=3, accelerate=False)
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
    played = play(AFL(lr=0.2, lambda_lr=0.04, average_from=100), problem, federation, rounds=200)
    expected = torch.tensor([2.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(played.servers[-1].average, expected, rtol=0, atol=0.02)
    assert float(played.servers[-1].weights[1]) < 0.05


def after(weights: list[float], losses: list[float], delta: Tensor, clients: tuple[int, ...]) -> AFLServer:
    """Return the server after one step of the given clients; `losses` are known of before, by client."""
    zero, who = torch.zeros(delta.shape[1], dtype=torch.float64), torch.tensor(clients)
    lambdas, known = (torch.tensor(values, dtype=torch.float64) for values in (weights, losses))
    server = AFLServer(zero, zero, torch.tensor(0), lambdas, known)
    cohort = Cohort(who, torch.ones(len(who)), len(weights), 0)
    replies = Replies(AFLUpdate(delta[who], 1.0 + who.double()))
    return AFL(lambda_lr=0.05).server_step(server, replies, cohort).server


def test_cohorts_give_the_whole_federations_step_on_average() -> None:
    """Over all pairs of four clients with equal lambdas."""
    delta = gaussian_rows(4, 5, seed=1)
    pairs = [after([0.25] * 4, [1.0] * 4, delta, pair).theta for pair in combinations(range(4), 2)]
    torch.testing.assert_close(torch.stack(pairs).mean(0), -delta.mean(0), rtol=1e-13, atol=1e-15)


def test_unlike_paper_a_step_is_never_longer_than_a_convex_combination() -> None:
    delta = torch.eye(4, dtype=torch.float64)
    assert after([0.1, 0.2, 0.3, 0.4], [1.0] * 4, delta, (0, 1)).theta.tolist() == pytest.approx([-0.2, -0.4, 0, 0])
    assert after([0.1, 0.2, 0.3, 0.4], [1.0] * 4, delta, (2, 3)).theta.tolist() == pytest.approx([0, 0, -3 / 7, -4 / 7])
    assert after([0.0, 0.0, 0.5, 0.5], [1.0] * 4, delta, (0, 1)).theta.tolist() == [0.0] * 4


def test_absent_clients_are_represented_by_what_is_known_of_them() -> None:
    """Clients 0 and 1 now have losses 1 and 2; client 2 had 5, client 3 was never seen and counts as their mean."""
    server = after([0.25] * 4, [9.0, 9.0, 5.0, torch.nan], gaussian_rows(4, 3), (0, 1))
    assert server.losses.tolist() == pytest.approx([1.0, 2.0, 5.0, torch.nan], nan_ok=True)
    losses = torch.tensor([1.0, 2.0, 5.0, 8 / 3], dtype=torch.float64)
    expected = 0.25 + 0.05 * (losses - losses.mean())  # no entry touches zero: the projection is a shift
    torch.testing.assert_close(server.weights, expected, rtol=1e-13, atol=0)


def test_lambda_belongs_to_the_client_not_to_its_place() -> None:
    problem, federation = classes(6)
    played = play(AFL(lambda_lr=0.01), problem, federation, rounds=6, participation=0.5)
    server = played.servers[-1]
    seen = sorted({c for record in played.records for c in record["clients"]})
    assert server.losses.isnan().logical_not().nonzero().flatten().tolist() == seen
    assert float(server.weights.sum()) == pytest.approx(1.0, abs=1e-14)
    assert float(server.weights.min()) > 0


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

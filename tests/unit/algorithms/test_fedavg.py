"""FedAvg is the weighted mean of what the clients did."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvg, FedAvgServer, FedAvgUpdate, client_weights
from dqnfed.core.algorithm import Cohort, Empty, Theta
from dqnfed.core.replies import Replies
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.baselines import EXAMPLES, GRADIENTS, LR, bowls, classes, cohort_of, task_of
from tests.helpers.play import play


def stepped(algorithm: FedAvg, deltas: Tensor, cohort: Cohort) -> Tensor:
    theta: Tensor = algorithm.server_step(
        FedAvgServer(torch.zeros_like(deltas[0])), Replies(FedAvgUpdate(deltas)), cohort
    ).server.theta
    return theta


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        ("examples", [-0.145, 0.010, -0.090, -0.080]),
        ("uniform", [-0.11666667, -0.03333333, -0.06666667, -0.05]),
    ],
)
def test_golden_step(weighting: str, expected: list[float]) -> None:
    found = stepped(FedAvg(weighting=weighting), LR * GRADIENTS, cohort_of())
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-9)  # printed digits


def test_the_server_rate_scales_the_step() -> None:
    one, third = (stepped(FedAvg(server_lr=rate), GRADIENTS, cohort_of()) for rate in (1.0, 1 / 3))
    torch.testing.assert_close(third, one / 3, rtol=1e-15, atol=0)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_weights_sum_to_one(weighting: str) -> None:
    weights = client_weights(weighting, cohort_of((1, 7, 31, 500)))
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-15)
    assert bool((weights > 0).all())


def test_one_client_gets_its_own_model() -> None:
    problem, federation, centres = bowls(1, sizes=[5])
    algorithm = FedAvg(lr=0.2, epochs=3)
    theta = play(algorithm, problem, federation, rounds=1).thetas[-1]
    torch.testing.assert_close(theta, centres[0] * (1 - 0.8**3))  # three steps of gradient descent on a unit bowl


def test_identical_clients_are_one_client() -> None:
    problem, federation, _ = bowls(1, sizes=[6])
    alone, theta = FedAvg(lr=0.3, epochs=2), problem.theta0
    task = task_of(federation.train.targets, lr=0.3, steps=2)
    update, _ = alone.client_step(problem, task, Theta(theta), Empty(theta.new_zeros(0)))
    deltas = torch.stack([update.delta] * 4)
    torch.testing.assert_close(
        stepped(alone, deltas, cohort_of((6, 6, 6, 6))), stepped(alone, deltas[:1], cohort_of((6,)))
    )


def test_one_full_batch_step_is_gradient_descent_on_the_pooled_loss() -> None:
    problem, federation = classes(4)
    theta = play(FedAvg(lr=0.7), problem, federation, rounds=1).thetas[-1]
    pooled = problem.theta0.clone().requires_grad_()
    everything = federation.train
    problem.losses(problem.predict(pooled, everything.inputs), everything.targets).mean().backward()
    assert pooled.grad is not None
    torch.testing.assert_close(theta, problem.theta0 - 0.7 * pooled.grad, rtol=1e-12, atol=1e-14)


def test_order_of_replies_is_irrelevant() -> None:
    order = torch.tensor([2, 0, 1])
    shuffled = cohort_of(tuple(EXAMPLES[k] for k in order.tolist()))
    torch.testing.assert_close(
        stepped(FedAvg(), GRADIENTS[order], shuffled), stepped(FedAvg(), GRADIENTS, cohort_of()), rtol=1e-15, atol=1e-15
    )


def test_the_last_short_batch_counts() -> None:
    """5 examples in batches of 2: three steps an epoch, the last on one example; replayed by hand."""
    problem, federation, _ = bowls(1, sizes=[5])
    algorithm = FedAvg(lr=0.1, epochs=2, batch_size=2)
    played = play(algorithm, problem, federation, rounds=1, seed=3)
    batches = TaskBuilder(federation, problem, algorithm, 3).stacked(torch.arange(1), 0).batches[0]
    theta = problem.theta0
    assert [int((b >= 0).sum()) for b in batches] == [2, 2, 1, 2, 2, 1]
    for batch in batches:
        rows = batch[batch >= 0]
        theta = theta - 0.1 * (theta - federation.train.targets[rows].mean(0))
    torch.testing.assert_close(played.thetas[-1], theta, rtol=1e-14, atol=1e-14)


def test_local_work_is_torchs_sgd_with_every_setting() -> None:
    """Momentum starts anew each round, weight decay is part of each gradient, the rate decays every second round."""
    problem, federation = classes(1, sizes=[20])
    algorithm = FedAvg(lr=0.4, epochs=2, batch_size=6, momentum=0.7, weight_decay=0.05, lr_decay=0.5, lr_decay_every=2)
    played = play(algorithm, problem, federation, rounds=5)
    theta, train = problem.theta0.clone().requires_grad_(), federation.train
    for round, rate in enumerate((0.4, 0.4, 0.2, 0.2, 0.1)):
        optimiser = torch.optim.SGD([theta], lr=rate, momentum=0.7, weight_decay=0.05)
        batches = TaskBuilder(federation, problem, algorithm, 0).stacked(torch.arange(1), round).batches[0]
        assert len(batches) > 2
        for batch in batches:
            rows = batch[batch >= 0]
            optimiser.zero_grad()
            problem.losses(problem.predict(theta, train.inputs[rows]), train.targets[rows]).mean().backward()
            optimiser.step()
    torch.testing.assert_close(played.thetas[-1], theta.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server_lr": 0.0}, r"`server_lr` must be in \(0, inf\), but is 0.0"),
        ({"weighting": "size"}, "`weighting` must be one of examples, uniform, but is 'size'"),
        ({"lr": -1.0}, r"`lr` must be in \(0, inf\)"),
        ({"momentum": 1.0}, r"`momentum` must be in \[0, 1\)"),
        ({"epochs": 0}, r"`epochs` must be in \[1, inf\)"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedAvg(**settings)  # type: ignore[arg-type]

"""TERM: golden weights, limits of the tilt, the gradient of the tilted objective, and both normalisers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.term import TERM, TERMServer, TERMUpdate, tilted_mean, tilted_problem, tilted_weights
from dqnfed.core.algorithm import Empty, Theta
from dqnfed.core.problem import Task
from dqnfed.core.replies import Replies
from tests.helpers.baselines import LOSSES, LR, bowls, classes, cohort_of, task_of
from tests.helpers.linear_clients import linear_clients
from tests.helpers.play import play

UNIFORM = torch.full((3,), 1 / 3, dtype=torch.float64)


def weights_of(algorithm: TERM, losses: Tensor, server: TERMServer | None = None) -> tuple[Tensor, TERMServer]:
    """Return the weights that the server gives to clients of equal size: with unit updates the step is the weights."""
    server = server or algorithm.init_server(linear_clients().problem, len(losses))
    server = server._replace(theta=torch.zeros(len(losses), dtype=torch.float64))
    replies = Replies(TERMUpdate(torch.eye(len(losses), dtype=torch.float64), losses))
    after = algorithm.server_step(server, replies, cohort_of([1] * len(losses))).server
    return -after.theta, after


def tilted_loss(theta: Tensor, centres: Tensor, p: Tensor, t: float) -> float:
    losses = ((theta - centres).square().sum(1) / 2).numpy()
    return float(np.log(np.sum(p.numpy() * np.exp(t * losses))) / t)


# -- weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (0.1, (0.31122540, 0.36159233, 0.32718227)),
        (1.0, (0.14024438, 0.62853172, 0.23122390)),
        (5.0, (0.00054908, 0.99276174, 0.00668918)),
    ],
)
def test_known_weights(t: float, expected: tuple[float, ...]) -> None:
    found, _ = weights_of(TERM(t=t), LOSSES)
    torch.testing.assert_close(found, found.new_tensor(expected), rtol=0, atol=5e-9)


def test_known_weights_by_examples() -> None:
    found = tilted_weights(torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64), LOSSES, 1.0)
    torch.testing.assert_close(found, found.new_tensor((0.04108903, 0.55244480, 0.40646617)), rtol=0, atol=5e-9)


def test_known_step() -> None:
    problem, federation, _ = linear_clients()
    theta = play(TERM(t=1.0, weighting="uniform", lr=LR), problem, federation, rounds=1).thetas[-1]
    expected = theta.new_tensor((-0.09169580, 0.03480430, -0.08597556, -0.12324310))
    torch.testing.assert_close(theta, expected, rtol=0, atol=5e-9)


@pytest.mark.parametrize("t", [-5.0, -0.1, 0.1, 2.0, 100.0])
def test_weights_are_a_shift_invariant_distribution(t: float) -> None:
    found, _ = weights_of(TERM(t=t), LOSSES)
    assert float(found.sum()) == pytest.approx(1.0, abs=1e-15)
    assert bool((found > 0).all())
    shifted, _ = weights_of(TERM(t=t), LOSSES + 7.0)
    torch.testing.assert_close(shifted, found, rtol=1e-12, atol=1e-300)
    order = (LOSSES if t > 0 else -LOSSES).argsort()
    assert bool((found[order].diff() > 0).all())


def test_the_opposite_tilt_inverts_the_ratios() -> None:
    up, down = tilted_weights(UNIFORM, LOSSES, 0.7), tilted_weights(UNIFORM, LOSSES, -0.7)
    torch.testing.assert_close(up / up[0], down[0] / down, rtol=1e-13, atol=0)


def test_limits_of_the_tilt() -> None:
    assert torch.equal(tilted_weights(UNIFORM, LOSSES, 0.0), UNIFORM)
    torch.testing.assert_close(tilted_weights(UNIFORM, LOSSES, 1e-9), UNIFORM, rtol=1e-8, atol=0)
    one_hot = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(tilted_weights(UNIFORM, LOSSES, 1e3), one_hot, rtol=0, atol=1e-300)
    equal = torch.full((3,), 4.2, dtype=torch.float64)
    torch.testing.assert_close(tilted_weights(UNIFORM, equal, 50.0), UNIFORM, rtol=1e-14, atol=0)


@pytest.mark.parametrize("normaliser", ["cohort", "running"])
@pytest.mark.parametrize("t", [-500.0, 500.0])
def test_no_overflow_at_exponents_of_ten_thousand(t: float, normaliser: str) -> None:
    found, _ = weights_of(TERM(t=t, normaliser=normaliser), torch.tensor([20.0, 1.0, 3.0], dtype=torch.float64))
    winner = 0 if t > 0 else 1
    assert torch.equal(found, torch.eye(3, dtype=torch.float64)[winner])


# -- the method --------------------------------------------------------------------------------------------------------


def test_no_tilt_is_fedavg_to_the_bit_and_a_tiny_one_is_close() -> None:
    problem, federation = classes(6)
    settings: dict[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 4}
    plain = play(FedAvg(**settings), problem, federation, rounds=4, participation=0.5)
    zero = play(TERM(t=0.0, **settings), problem, federation, rounds=4, participation=0.5)
    tiny = play(TERM(t=1e-9, **settings), problem, federation, rounds=4, participation=0.5)
    for mine, small, theirs in zip(zero.thetas, tiny.thetas, plain.thetas, strict=True):
        assert torch.equal(mine, theirs)
        torch.testing.assert_close(small, theirs, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("t", [-2.0, 0.5, 2.0])
def test_a_full_batch_step_follows_the_gradient_of_the_tilted_objective(t: float) -> None:
    problem, federation, centres = bowls(4, 3, spread=0.0, seed=1)
    p = federation.n_examples.double() / federation.n_examples.sum()
    start, after = play(TERM(t=t, lr=LR), problem, federation, rounds=1).thetas
    h = 1e-6
    slope = torch.stack(
        [
            start.new_tensor(tilted_loss(start + h * e, centres, p, t) - tilted_loss(start - h * e, centres, p, t))
            for e in torch.eye(3, dtype=torch.float64)
        ]
    ) / (2 * h)
    # central differences: truncation h^2 times a third derivative of order 10, rounding 1e-16 / h
    torch.testing.assert_close((start - after) / LR, slope, rtol=0, atol=2e-9)


def test_a_larger_tilt_serves_the_worst_client_better() -> None:
    problem, federation, centres = bowls(4, 3, spread=0.0, seed=5)
    worst = [
        float((play(TERM(t=t, lr=0.3), problem, federation, rounds=30).thetas[-1] - centres).square().sum(1).max())
        for t in (-1.0, 0.0, 1.0, 5.0)
    ]
    assert worst == sorted(worst, reverse=True)


def test_the_server_rate_scales_the_step() -> None:
    problem, federation, _ = linear_clients()
    one = play(TERM(t=2.0), problem, federation, rounds=1).thetas[-1]
    half = play(TERM(t=2.0, server_lr=0.5), problem, federation, rounds=1).thetas[-1]
    torch.testing.assert_close(half, one / 2, rtol=1e-15, atol=0)


# -- the running normaliser --------------------------------------------------------------------------------------------


def test_the_running_normaliser_is_a_moving_average() -> None:
    """Against the plain recursion on Z itself, which small exponents allow."""
    t, rho = 0.8, 0.3
    algorithm, server, Z = TERM(t=t, rho=rho, normaliser="running"), None, None
    for losses in (LOSSES, LOSSES.flip(0) + 0.5, 0.1 * LOSSES):
        found, server = weights_of(algorithm, losses, server)
        now = float(np.mean(np.exp(t * losses.numpy())))
        Z = now if Z is None else (1 - rho) * Z + rho * now
        torch.testing.assert_close(found, torch.exp(t * losses) / (3 * Z), rtol=1e-13, atol=0)


def test_unlike_official_code_the_first_round_is_not_twice_as_long() -> None:
    running, _ = weights_of(TERM(t=1.0, normaliser="running"), LOSSES)
    cohort, _ = weights_of(TERM(t=1.0), LOSSES)
    torch.testing.assert_close(running, cohort, rtol=1e-14, atol=0)


def test_steady_losses_and_full_renewal_give_the_cohort_weights() -> None:
    expected, _ = weights_of(TERM(t=1.0), LOSSES)
    server = None
    for _ in range(5):
        found, server = weights_of(TERM(t=1.0, rho=0.2, normaliser="running"), LOSSES, server)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    _, far = weights_of(TERM(t=1.0, normaliser="running"), 5 * LOSSES)
    renewed, _ = weights_of(TERM(t=1.0, rho=1.0, normaliser="running"), LOSSES, far)
    torch.testing.assert_close(renewed, expected, rtol=1e-14, atol=0)


# -- the inner tilt ----------------------------------------------------------------------------------------------------


def padded_task(targets: Tensor, batches: Tensor) -> Task:
    """Return the task with one padded example far away, which must not count."""
    task = task_of(torch.cat([targets, torch.full_like(targets[:1], 1e3)]))
    return task._replace(mask=torch.tensor([1.0] * len(targets) + [0.0], dtype=torch.float64), batches=batches)


@pytest.mark.parametrize("tau", [-2.0, 0.5, 3.0])
def test_the_inner_tilt_weighs_examples_by_their_losses(tau: float) -> None:
    """The gradient of log(mean exp(tau l)) / tau is the mean of the examples' gradients under the softmax of tau l."""
    targets = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    problem = tilted_problem(bowls(1, 3).problem, tau)
    theta, task = torch.full((3,), 0.2, dtype=torch.float64), padded_task(targets, torch.zeros(1, 0, dtype=torch.long))
    softmax = torch.softmax(tau * (theta - targets).square().sum(1) / 2, 0)
    torch.testing.assert_close(grad(problem.loss)(theta, task), softmax @ (theta - targets), rtol=1e-12, atol=1e-14)
    batch = torch.tensor([4, 1, -1])
    softmax = torch.softmax(tau * (theta - targets[batch[:2]]).square().sum(1) / 2, 0)
    expected = softmax @ (theta - targets[batch[:2]])
    torch.testing.assert_close(grad(problem.batch_loss)(theta, task, batch), expected, rtol=1e-12, atol=1e-14)
    nothing = grad(problem.batch_loss)(theta, task, torch.tensor([-1, -1]))
    assert torch.equal(nothing, torch.zeros_like(theta))


def test_the_tilted_mean_lies_between_mean_and_maximum_and_grows_with_the_tilt() -> None:
    values, real = torch.tensor([0.1, 2.0, 0.7], dtype=torch.float64), torch.tensor([True, True, True])
    found = [float(tilted_mean(values, real, tau)) for tau in (-1e3, -1.0, -1e-6, 1e-6, 1.0, 1e3)]
    assert found == sorted(found)
    assert 0.1 <= found[0] < 0.11
    assert found[2] == pytest.approx(float(values.mean()), abs=1e-6)
    assert 1.99 < found[-1] <= 2.0


@pytest.mark.parametrize("tau", [0.0, 1.5])
def test_clients_report_the_tilted_loss_at_the_model_that_was_sent_and_descend_on_it(tau: float) -> None:
    """One full-batch step follows the examples' gradients under the softmax of tau times their losses."""
    problem, federation, _ = bowls(1, 3, sizes=[6])
    targets, theta = federation.train.targets, torch.full((3,), 0.2, dtype=torch.float64)
    update, _ = TERM(tau=tau).client_step(problem, task_of(targets), Theta(theta), Empty(theta.new_zeros(0)))
    losses = ((theta - targets).square().sum(1) / 2).numpy()
    expected = np.log(np.mean(np.exp(tau * losses))) / tau if tau else losses.mean()
    assert float(update.loss) == pytest.approx(float(expected), rel=1e-13)
    shares = np.exp(tau * losses) / np.exp(tau * losses).sum()
    torch.testing.assert_close(update.delta, LR * torch.from_numpy(shares) @ (theta - targets), rtol=1e-12, atol=1e-15)


def test_the_inner_tilt_changes_the_training_and_a_tiny_one_hardly() -> None:
    problem, federation = classes(4)
    tilted = play(TERM(tau=1.0, batch_size=5, epochs=2), problem, federation, rounds=2, participation=0.5)
    plain = play(TERM(tau=0.0, batch_size=5, epochs=2), problem, federation, rounds=2, participation=0.5)
    assert not torch.equal(tilted.thetas[-1], plain.thetas[-1])
    barely = play(TERM(tau=1e-7, batch_size=5, epochs=2), problem, federation, rounds=2, participation=0.5)
    torch.testing.assert_close(barely.thetas[-1], plain.thetas[-1], rtol=1e-5, atol=1e-6)


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match=r'TERM: `rho` is 0.3, but has no effect with normaliser = "cohort"'):
        TERM(rho=0.3)
    with pytest.raises(ValueError, match="TERM: `normaliser` is 'running', but has no effect with t = 0"):
        TERM(t=0.0, normaliser="running")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"t": float("inf")}, r"TERM: `t` must be in \[-1e\+06, 1e\+06\], but is inf"),
        ({"tau": float("nan")}, "`tau` must be in"),
        ({"rho": 0.0}, r"`rho` must be in \(0, 1\]"),
        ({"server_lr": 0.0}, r"`server_lr` must be in \(0, inf\)"),
        ({"normaliser": "global"}, "`normaliser` must be one of cohort, running"),
        ({"weighting": "size"}, "`weighting` must be one of examples, uniform"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TERM(**settings)

"""Step lengths: what each rule promises, on quadratics whose curvature is known."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dqnfed.maths.directions import at_least_step, mean_step, rate_matching_step
from dqnfed.maths.step_length import (
    armijo_holds,
    curvature_length,
    diminishing_length,
    fixed_length,
    floored_curvature,
    growth_limit,
    is_stationary,
    line_search_start,
    loss_ratio,
    match_length,
    mean_step_norm,
    paper_length,
    paper_length_is_safe,
    trapezoid_shortfall,
    votes_for_longer,
)
from tests.helpers.problems import random_quadratics
from tests.helpers.rows import agreeing_rows, gaussian_rows

FloatArray = NDArray[np.float64]


@pytest.mark.parametrize("seed", range(10))
def test_exact_curvature_lets_no_loss_rise(seed: int) -> None:
    problem = random_quadratics(4, 15, seed)
    theta = 3.0 * gaussian_rows(1, 15, seed=seed + 500)[0]
    step = at_least_step(problem.gradients(theta), problem.newton_rates(theta)).step
    slopes = problem.gradients(theta) @ step
    alpha = curvature_length(slopes.numpy(), problem.curvatures(step).numpy(), float(step @ step))
    assert 0.0 < alpha <= 1.0
    fall = problem.losses(theta) - problem.losses(theta - alpha * step)
    assert (fall >= alpha * slopes / 2 * (1 - 1e-9)).all()


def test_the_most_curved_client_sets_the_length() -> None:
    slopes, curvature = np.array([1.0, 1.0, 4.0]), np.array([1.0, 10.0, 20.0])
    assert curvature_length(slopes, curvature, 2.0) == pytest.approx(1 / 20)
    assert curvature_length(slopes, 1e-6 * curvature, 2.0) == 1.0
    assert curvature_length(slopes, 1e-6 * curvature, 2.0, largest=3.0) == 3.0
    assert curvature_length(slopes, np.full(3, np.nan), 2.0) == 1.0
    assert curvature_length(np.array([1.0, -1e-9, 1.0]), curvature, 2.0) == 0.0
    assert curvature_length(np.zeros(3), curvature, 0.0) == 0.0


def test_no_few_clients_can_stop_the_others() -> None:
    """With `least` alpha is that share of the median limit or more, also where a client would lose."""
    slopes, curvature = np.ones(5), np.array([1.0, 2.0, 4.0, 1e6, 1e9])
    assert curvature_length(slopes, curvature, 1.0) == pytest.approx(1e-9)
    assert curvature_length(slopes, curvature, 1.0, least=0.5) == pytest.approx(0.5 * 0.25)
    assert curvature_length(np.array([1.0, 1.0, 1.0, -1.0, 1.0]), curvature, 1.0, least=0.5) == pytest.approx(0.125)
    assert curvature_length(slopes, np.ones(5), 1.0, least=0.5) == 1.0


def test_the_move_does_not_depend_on_the_units_of_rates_or_losses() -> None:
    problem = random_quadratics(3, 10, 1)
    theta = gaussian_rows(1, 10, seed=9)[0]
    G, d = problem.gradients(theta), problem.newton_rates(theta)

    def move(unit: torch.Tensor, of_rates: float) -> torch.Tensor:
        step = at_least_step(unit[:, None] * G, of_rates * unit * d).step
        curvature = (unit * problem.curvatures(step)).numpy()
        slopes = (unit[:, None] * G @ step).numpy()
        return curvature_length(slopes, curvature, float(step @ step), largest=math.inf) * step

    plain = move(torch.ones(3, dtype=torch.float64), 1.0)
    for unit, of_rates in ((torch.ones(3), 7.0), (torch.tensor([1.0, 100.0, 0.01]), 1.0)):
        torch.testing.assert_close(move(unit.double(), of_rates), plain, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("allowance", [0.0, 0.03, 0.5])
def test_an_allowance_counts_every_slope_as_a_share_of_the_mean_gain_higher(allowance: float) -> None:
    """The mean gain is (1 + 0 + 2) / 3: who loses gains nothing."""
    slopes, curvature = np.array([1.0, -0.01, 2.0]), np.array([1.0, 2.0, 1.0])
    expected = max(0.0, (allowance - 0.01) / (2.0 * 3.0))
    assert curvature_length(slopes, curvature, 3.0, allowance=allowance) == pytest.approx(expected)


def test_without_anybody_there_is_no_step() -> None:
    assert curvature_length(np.zeros(0), np.zeros(0), 1.0) == 0.0


def test_small_and_negative_curvatures_are_raised_to_a_tenth_of_the_median() -> None:
    found = floored_curvature(np.array([4.0, -2.0, 0.01, 6.0, np.nan]), np.ones(5))
    np.testing.assert_allclose(found, [4.0, 0.3, 0.3, 6.0, 3.0])
    assert np.isnan(floored_curvature(np.full(3, np.nan), np.ones(3))).all()
    np.testing.assert_array_equal(floored_curvature(np.array([5.0, 6.0]), np.ones(2)), [5.0, 6.0])


def test_usual_is_the_less_the_shorter_a_gradient_is() -> None:
    """Sizes 4, 2, 1e-3, 6 (median 3), per length 4, 2, 10, 6 (median 5): 5e-4 is usual for a length of 1e-4."""
    curvature, lengths = np.array([4.0, -2.0, 1e-3, 6.0, np.nan]), np.array([1.0, 1.0, 1e-4, 1.0, 1e-2])
    np.testing.assert_allclose(floored_curvature(curvature, lengths), [4.0, 0.3, 1e-3, 6.0, 0.05])
    flat = np.where(np.arange(5) == 2, 1e-9, curvature)
    np.testing.assert_allclose(floored_curvature(flat, lengths)[2], 0.1 * 1e-4 * 3.0)  # median per length 3
    np.testing.assert_allclose(floored_curvature(curvature, 0.0 * lengths), [4.0, 0.3, 0.3, 6.0, 3.0])  # no lengths


def test_growth_is_limited_from_the_second_round_on() -> None:
    assert growth_limit(10.0, None) == math.inf
    assert growth_limit(10.0, 1.0) * 10.0 == pytest.approx(2.0)
    assert growth_limit(10.0, 1.0, growth=4.0) * 10.0 == pytest.approx(4.0)
    assert growth_limit(10.0, 0.0) == growth_limit(0.0, 1.0) == math.inf


def test_paper_fixed_and_diminishing_lengths_are_those_of_the_paper() -> None:
    problem = random_quadratics(3, 10, 0)
    theta = gaussian_rows(1, 10)[0]
    step = rate_matching_step(problem.gradients(theta), problem.newton_rates(theta)).step
    squared = float(step @ step)
    direction = step / squared
    torch.testing.assert_close(paper_length() * step, squared * direction)
    torch.testing.assert_close(fixed_length(0.05, squared) * step, 0.05 * direction)
    torch.testing.assert_close(diminishing_length(0.6, squared, 2) * step, 0.2 * direction)
    assert diminishing_length(0.6, squared, 3, power=0.5) == pytest.approx(fixed_length(0.3, squared))
    assert fixed_length(0.1, 0.0) == 0.0


@pytest.mark.parametrize("seed", range(10))
def test_where_the_theorem_holds_the_papers_step_lets_no_loss_rise(seed: int) -> None:
    problem = random_quadratics(2, 10, seed)
    theta = gaussian_rows(1, 10, seed=seed + 40)[0]
    L = float(torch.linalg.eigvalsh(problem.hessians).max())
    rates = problem.newton_rates(theta)
    # d -> a d scales ||u||^2 by a^2: small rates always satisfy the theorem, the prescribed ones need not
    while True:
        step = rate_matching_step(problem.gradients(theta), rates).step
        if paper_length_is_safe(rates.numpy(), float(step @ step), L):
            break
        rates = rates / 2
    assert (problem.losses(theta - step) <= problem.losses(theta)).all()
    assert not paper_length_is_safe(1e6 * rates.numpy(), 1e12 * float(step @ step), L)


def test_matched_steps_have_the_length_of_the_mean_update() -> None:
    deltas = agreeing_rows(6, 40)
    step = at_least_step(deltas, deltas.square().sum(dim=1)).step
    mean = mean_step(deltas)
    alpha = match_length(float(torch.linalg.vector_norm(step)), float(torch.linalg.vector_norm(mean)))
    torch.testing.assert_close(torch.linalg.vector_norm(alpha * step), torch.linalg.vector_norm(mean))
    assert match_length(0.0, 1.0) == 0.0
    assert match_length(1.0, 2.0, ratio=1.25) == 2.5


def test_identical_updates_are_averaged_as_by_fedavg() -> None:
    deltas = gaussian_rows(1, 40).expand(5, 40)
    step = at_least_step(deltas, deltas.square().sum(dim=1)).step
    alpha = match_length(float(torch.linalg.vector_norm(step)), float(torch.linalg.vector_norm(deltas[0])))
    torch.testing.assert_close(alpha * step, mean_step(deltas), rtol=1e-12, atol=1e-12)


# -- votes and losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_the_mean_step_is_the_mean_of_the_shortest_steps_that_reach_one_rate_each(seed: int) -> None:
    G, rates = gaussian_rows(6, 20, seed=seed).numpy(), np.random.default_rng(seed).uniform(0.1, 2.0, 6)
    own = [np.linalg.pinv(g[None]) @ [rate] for g, rate in zip(G, rates, strict=True)]
    assert mean_step_norm(G @ G.T, rates) == pytest.approx(float(np.linalg.norm(np.mean(own, axis=0))))
    squares = np.square(G).sum(axis=1)  # of model changes, whose mean is FedAvg's step
    assert mean_step_norm(G @ G.T, squares) == pytest.approx(float(np.linalg.norm(G.mean(axis=0))))


def test_rows_of_no_length_have_a_step_of_no_length() -> None:
    assert mean_step_norm(np.diag([0.0, 4.0]), np.array([3.0, 8.0])) == pytest.approx(2.0 * 2.0 / 2)
    assert mean_step_norm(np.zeros((2, 2)), np.ones(2)) == 0.0


def test_losses_are_compared_by_their_means() -> None:
    now, before = np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 1.0])
    assert loss_ratio(now, before) == 2.0
    assert loss_ratio(now, before, least=4.0) == 0.5
    assert loss_ratio(np.zeros(2), np.zeros(2)) == 0.0
    assert loss_ratio(np.ones(2), np.zeros(2)) > 1e300


@pytest.mark.parametrize("K", [1, 2, 3, 4, 7, 20, 100])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e9])
def test_one_loss_raises_the_robust_ratio_by_a_fifth_at_most(K: int, value: float) -> None:
    """All losses are 1 before; K >= 3: with two clients the median is moved by one of them."""
    losses = np.where(np.arange(K) == 0, value, 1.0)
    if K >= 3:
        assert loss_ratio(losses, np.ones(K), robust=True) <= 1.2 + 1e-12
    assert loss_ratio(3.0 * np.ones(K), np.ones(K), robust=True) == pytest.approx(3.0)  # a rise of all shows


def test_votes_are_for_longer_steps_where_row_and_loss_agree() -> None:
    along, losses = np.array([1.0, 1.0, 1.0, -1.0, 0.0]), np.array([1.0, 2.0, 5.0, 0.0, 0.0])
    assert votes_for_longer(along, losses, np.array([1.0, 1.0, np.nan, 1.0, 1.0])) == pytest.approx(2 / 5)


# -- line search -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trial", "holds"), [(1.69, True), (1.71, False), (2.0, False), (2.29, False)])
def test_armijo_asks_for_a_share_of_the_first_order_decrease(trial: float, holds: bool) -> None:
    """A loss of 2 with slope 4 must fall below 2 - 0.15 * 0.5 * 4 = 1.7, and one client that stays above it decides."""
    losses, slopes, fallen = np.array([5.0, 2.0]), np.array([1.0, 4.0]), np.array([1.0, trial])
    assert armijo_holds(losses, fallen, slopes, 0.5, sufficient=0.15) is holds


def test_nan_losses_are_never_accepted() -> None:
    assert not armijo_holds(np.ones(2), np.array([0.0, np.nan]), np.ones(2), 1.0)


def test_opposed_clients_are_stationary() -> None:
    g = gaussian_rows(1, 10)
    G = torch.cat([g, -g])
    found = at_least_step(G, torch.ones(2, dtype=torch.float64))
    slopes = (G @ found.step).numpy()
    alpha = curvature_length(slopes, np.full(2, 1e-3), float(found.step @ found.step))
    assert alpha == 0.0
    assert is_stationary(alpha, float(torch.linalg.vector_norm(found.step)), 5.0)


def test_stationary_means_lost_in_the_size_of_the_model() -> None:
    assert is_stationary(0.5, 1e-8, 1000.0)
    assert not is_stationary(0.5, 1e-8, 0.0)


def test_the_search_starts_at_twice_the_curvature_rule() -> None:
    assert line_search_start(0.2) == 0.4
    assert line_search_start(0.9) == 1.0


# ------------------------------------------------------------------- does a loss move as its slopes say?


def quadratic_facts(seed: int) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return slopes at both ends of a step that stops before any minimum, and the true changes, of ten parabolas."""
    generator = np.random.default_rng(seed)
    before = -generator.uniform(0.5, 2.0, 10)
    after = before * generator.uniform(0.1, 1.0, 10)
    return before, after, (before + after) / 2  # exact for a parabola


@pytest.mark.parametrize("seed", range(3))
def test_the_truth_leaves_nothing_missing(seed: int) -> None:
    before, after, change = quadratic_facts(seed)
    np.testing.assert_allclose(trapezoid_shortfall(before, after, change, 0.0), 0.0, atol=1e-15)


@pytest.mark.parametrize(("factor", "missing"), [(-1.0, 2.0), (-10.0, 1.1), (1e6, 1.0 - 1e-6), (3.0, 2.0 / 3.0)])
def test_what_is_missing_says_by_how_much_gradients_were_changed(factor: float, missing: float) -> None:
    """Slopes f times the truth leave 1 - 1/f missing: above 1 if the sign is wrong, nearly 1 for any exaggeration."""
    before, after, change = quadratic_facts(0)
    found = trapezoid_shortfall(factor * before, factor * after, change, 0.0)
    np.testing.assert_allclose(found, missing, rtol=1e-12)


def test_a_clipped_gradient_says_too_little_and_is_not_false() -> None:
    before, after, change = quadratic_facts(0)
    assert trapezoid_shortfall(0.1 * before, 0.1 * after, change, 0.0).max() < 0.0


def test_slopes_that_cancel_say_nothing_unless_the_loss_contradicts_them() -> None:
    before, after = np.array([-1.0, -1.0, np.nan, -1e-9]), np.array([0.8, 0.8, 1.0, -1e-9])
    found = trapezoid_shortfall(before, after, np.array([-0.05, 0.6, 0.0, 1.0]), 1e-10)
    assert np.isnan(found).tolist() == [True, False, True, True]
    assert found[1] == pytest.approx((0.1 + 0.6) / 0.9)

"""One step for several clients: for everybody, or past a Pareto-stationary point for the mean."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize

from dqnfed.maths.solvers import at_least_weights, bounded_rates, common_weights, sparing_weights
from tests.unit.maths.oracles import enumerated_at_least_step

FloatArray = NDArray[np.float64]


def rows_of(K: int, n: int, seed: int, *, agreement: float = 1.0) -> FloatArray:
    draw = np.random.default_rng(seed)
    return np.asarray(draw.normal(size=(K, n)) + agreement * draw.normal(size=n))


def step_by_slsqp(G: FloatArray, d: FloatArray) -> FloatArray:
    """Return the shortest u with G u >= d by sequential quadratic programming."""
    found = minimize(
        lambda u: u @ u / 2,
        np.linalg.pinv(G) @ d,
        jac=lambda u: u,
        constraints={"type": "ineq", "fun": lambda u: G @ u - d, "jac": lambda u: G},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert found.success
    return np.asarray(found.x)


def everybody(K: int) -> NDArray[np.bool_]:
    return np.ones(K, dtype=np.bool_)


# -- for everybody -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_where_clients_agree_the_step_is_the_shortest_for_rates_less_the_slack(seed: int) -> None:
    G, d = rows_of(5, 12, seed, agreement=2.0), np.random.default_rng(seed).uniform(0.1, 2.0, 5)
    found = common_weights(G @ G.T, d, np.ones(5), everybody(5), ridge=0.0)
    assert not found.beyond
    assert found.served.all()
    wanted = d - 1e-3 * d.mean()
    np.testing.assert_allclose(found.weights @ G, step_by_slsqp(G, wanted), rtol=1e-5, atol=1e-6)
    expected = enumerated_at_least_step(G, wanted)
    assert expected is not None
    np.testing.assert_allclose(found.weights @ G, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("slack", [0.0, 1e-3, 0.2])
def test_nobody_gets_less_than_its_rate_less_the_slack(slack: float) -> None:
    G, d = rows_of(6, 20, 3), np.random.default_rng(3).uniform(0.1, 2.0, 6)
    found = common_weights(G @ G.T, d, np.ones(6), everybody(6), ridge=0.0, slack=slack)
    slopes = G @ (found.weights @ G)
    assert (slopes >= d - slack * d.mean() - 1e-9).all()
    assert slopes.min() < d.min() + d.max()  # it is not simply long


def test_a_client_with_nothing_to_gain_does_not_hold_back_the_others() -> None:
    """The third row opposes the first two and asks for next to nothing, which no step can give it."""
    G, d = np.array([[1.0, 0.02], [1.0, -0.02], [-1e-4, 0.0]]), np.array([1.0, 1.0, 1e-9])
    assert common_weights(G @ G.T, d, np.ones(3), everybody(3), slack=0.0).beyond
    found = common_weights(G @ G.T, d, np.ones(3), everybody(3))
    assert not found.beyond
    slopes = G @ (found.weights @ G)
    assert (slopes[:2] >= 0.999).all()
    assert -1e-3 * d.mean() <= slopes[2] < 0.0


def test_rows_that_are_not_kept_have_no_part() -> None:
    G, d = rows_of(5, 9, 1, agreement=2.0), np.ones(5)
    G[2] = -G[0]
    kept = np.array([True, True, False, True, True])
    found = common_weights(G @ G.T, d, np.ones(5), kept)
    others = common_weights(G[kept] @ G[kept].T, d[kept], np.ones(4), everybody(4))
    assert found.weights[2] == 0.0
    assert found.served.tolist() == kept.tolist()
    np.testing.assert_array_equal(found.weights[kept], others.weights)
    nobody = common_weights(G @ G.T, d, np.ones(5), ~everybody(5))
    assert not nobody.weights.any()
    assert not nobody.beyond


def test_a_step_that_hardly_lowers_the_mean_is_not_taken() -> None:
    """Two nearly opposite rows: the step for both is nearly perpendicular to their mean."""
    G, d = np.array([[1.0, 1e-3], [-0.9, 1e-3]]), np.ones(2)
    for least_cosine, beyond in ((0.1, True), (0.0, False)):
        found = common_weights(G @ G.T, d, np.ones(2), everybody(2), ridge=0.0, least_cosine=least_cosine)
        assert found.beyond is beyond


# -- past a Pareto-stationary point ------------------------------------------------------------------------------------


def conflict(seed: int, *, K: int = 6, n: int = 4) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return rows that no step serves, rates and losses."""
    draw = np.random.default_rng(seed)
    G = draw.normal(size=(K - 1, n)) + 0.5 * draw.normal(size=n)
    G = np.vstack([G, -draw.dirichlet(np.ones(K - 1)) @ G])
    return G, draw.uniform(0.2, 2.0, K), draw.uniform(0.5, 2.0, K)


def cosine(a: FloatArray, b: FloatArray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("seed", range(20))
def test_past_a_pareto_point_the_mean_falls_at_the_mean_rate_and_worse_off_clients_are_spared(seed: int) -> None:
    G, d, losses = conflict(seed)
    found = common_weights(G @ G.T, d, losses, everybody(6), ridge=0.0)
    u, mean = found.weights @ G, G.mean(axis=0)
    assert found.beyond
    assert mean @ u >= d.mean() * (1 - 1e-9)
    assert cosine(u, mean) >= 0.3 - 1e-9
    assert (G[found.served] @ u >= -0.05 * (mean @ u) - 1e-12).all()
    assert {*np.flatnonzero(found.served).tolist()} in (
        {*np.flatnonzero(losses >= losses.mean()).tolist()},
        {int(losses.argmax())},
        set(),
    )


@pytest.mark.parametrize("seed", range(20))
def test_whoever_can_be_spared_is(seed: int) -> None:
    """The step is the shortest with g_k'u >= 0 for those above the average, and for the worst alone where that strays
    too far from the mean."""
    G, d, losses = conflict(seed)
    weights, spared = sparing_weights(G @ G.T, d, losses, ridge=0.0)
    mean = G.mean(axis=0)
    for wanted in (losses >= losses.mean(), losses >= losses.max(), np.zeros(6, dtype=np.bool_)):
        expected = enumerated_at_least_step(
            np.vstack([G[wanted], mean]), np.append(np.zeros(np.count_nonzero(wanted)), d.mean())
        )
        if expected is not None and cosine(expected, mean) >= 0.3:
            break
    assert expected is not None
    assert spared.tolist() == wanted.tolist()
    np.testing.assert_allclose(weights @ G, expected, rtol=1e-6, atol=1e-8)


def test_these_conflicts_need_every_case() -> None:
    kinds = set()
    for seed in range(20):
        G, d, losses = conflict(seed)
        _, spared = sparing_weights(G @ G.T, d, losses, ridge=0.0)
        kinds.add("all" if spared.sum() > 1 else "the worst" if spared.any() else "nobody")
    assert {"all", "the worst"} <= kinds


def test_if_even_the_worst_cannot_be_spared_the_step_is_the_mean_gradient() -> None:
    G, d, losses = np.array([[-1.0, 0.0], [1.5, 0.0]]), np.array([1.0, 3.0]), np.array([2.0, 1.0])
    weights, spared = sparing_weights(G @ G.T, d, losses, ridge=0.0)
    assert not spared.any()
    np.testing.assert_allclose(weights @ G, [2.0 / 0.25, 0.0])  # g'u = 2 with g = (0.25, 0)


def test_where_the_mean_gradient_vanishes_there_is_no_step() -> None:
    G = np.array([[1.0, 2.0], [-3.0, 1.0], [2.0, -3.0]])
    found = common_weights(G @ G.T, np.ones(3), np.ones(3), everybody(3))
    assert found.beyond
    assert not found.weights.any()
    assert not found.served.any()


def test_a_loss_that_is_not_finite_is_the_worst_of_all() -> None:
    G = np.array([[1.0, 0.5], [-0.5, 0.5], [-0.4, -0.1]])
    _, spared = sparing_weights(G @ G.T, np.ones(3), np.array([1.0, np.inf, 2.0]))
    assert spared.tolist() == [False, True, False]


# -- the ridge ---------------------------------------------------------------------------------------------------------


def test_a_ridge_under_which_a_client_would_lose_is_made_smaller() -> None:
    """Two rows at an angle of pi - e: with a ridge above e^2 the longer rate takes everything from the other."""
    e = 1e-4
    G, d = np.array([[1.0, 0.0], [-np.cos(e), np.sin(e)]]), np.array([1.0, 1e-3])
    plain = at_least_weights(G @ G.T, d, ridge=0.0)
    found = at_least_weights(G @ G.T, d, ridge=1e-6)
    assert plain.feasible
    assert found.feasible
    assert (G @ (found.weights @ G) > 0.0).all()
    M = G @ G.T + 1e-6 * np.eye(2)
    assert (G @ (np.linalg.solve(M, d) @ G)).min() < 0.0  # the example would show nothing otherwise


def test_rows_that_are_opposite_to_rounding_stay_infeasible() -> None:
    G = np.array([[1.0, 0.0], [-1.0, 1e-9]])
    for ridge in (1e-6, 0.0):
        assert not at_least_weights(G @ G.T, np.ones(2), ridge=ridge).feasible


# -- rates -------------------------------------------------------------------------------------------------------------


def test_unknown_rates_become_the_median_over_these_clients_and_others() -> None:
    rates, squares = np.array([np.nan, 4.0, 9.0]), np.array([2.0, 2.0, 3.0])  # 2 and 3 per square
    np.testing.assert_allclose(bounded_rates(rates, squares, 100.0), [5.0, 4.0, 9.0])
    np.testing.assert_allclose(bounded_rates(rates, squares, 100.0, np.array([1.0])), [4.0, 4.0, 9.0])
    known_elsewhere = bounded_rates(np.array([np.nan]), np.array([2.0]), 100.0, np.array([0.5, 0.7, np.nan]))
    np.testing.assert_allclose(known_elsewhere, [1.2])
    np.testing.assert_allclose(bounded_rates(np.full(2, np.nan), np.array([2.0, 3.0]), 100.0), [2.0, 3.0])


@pytest.mark.parametrize("bounds", [1.0, 3.0, 1000.0])
def test_rates_per_square_stay_within_the_bounds_of_their_median(bounds: float) -> None:
    draw = np.random.default_rng(0)
    rates, squares = 10.0 ** draw.uniform(-6, 6, 11), draw.uniform(0.5, 2.0, 11)
    per_square = bounded_rates(rates, squares, bounds) / squares
    middle = np.median(rates / squares)
    assert per_square.max() <= middle * bounds * (1 + 1e-12)
    assert per_square.min() >= middle / bounds * (1 - 1e-12)
    inside = (rates / squares <= middle * bounds) & (rates / squares >= middle / bounds)
    np.testing.assert_allclose(per_square[inside], (rates / squares)[inside])


def test_a_rate_of_zero_is_known() -> None:
    """It has no part in the median, and is held like the others."""
    found = bounded_rates(np.array([0.0, 2.0, 4.0]), np.ones(3), 10.0)
    np.testing.assert_allclose(found, [0.3, 2.0, 4.0])

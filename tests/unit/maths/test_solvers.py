"""Min-norm weights and projections against enumeration, KKT conditions and another method."""

from itertools import pairwise

import numpy as np
import pytest
import scipy.optimize
from numpy.typing import NDArray

from dqnfed.maths.solvers import (
    _pivoted,
    _sliced_box_minimiser,
    bounded_rates,
    box_simplex_projection,
    cone_weights,
    factor,
    min_norm_box_weights,
    min_norm_weights,
    serving_weights,
    simplex_projection,
    unit_gramian,
)
from tests.unit.maths.oracles import enumerated_box_weights, frank_wolfe_gap, slice_kkt_residual

FloatArray = NDArray[np.float64]

GOLDEN = np.array([[1.0, 2.0, 0.0, -1.0], [0.5, -1.0, 1.0, 2.0], [2.0, 0.0, 1.0, 0.5]])


def sampled_gramian(K: int, n: int, seed: int, *, shared: float = 0.3, decades: float = 0.0) -> FloatArray:
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(K, n)) + shared * rng.normal(size=n)
    G *= 10.0 ** rng.uniform(-decades, decades, size=(K, 1))
    return np.asarray(G @ G.T)


def box_around(prior: FloatArray, radius: float) -> tuple[FloatArray, FloatArray]:
    return np.clip(prior - radius, 0.0, 1.0), np.clip(prior + radius, 0.0, 1.0)


# -- min-norm point ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 2, 3, 6])
@pytest.mark.parametrize("seed", range(10))
def test_min_norm_equals_enumeration(K: int, seed: int) -> None:
    M = sampled_gramian(K, 8, seed)
    expected = enumerated_box_weights(M, np.zeros(K), np.ones(K))
    np.testing.assert_allclose(min_norm_weights(M), expected, atol=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_two_rows_have_a_closed_form(seed: int) -> None:
    g1, g2 = np.random.default_rng(seed).normal(size=(2, 3))
    first = np.clip((g2 - g1) @ g2 / ((g1 - g2) @ (g1 - g2)), 0.0, 1.0)
    G = np.stack([g1, g2])
    np.testing.assert_allclose(min_norm_weights(G @ G.T), [first, 1 - first], atol=1e-12)


@pytest.mark.parametrize(
    ("K", "n", "decades"),
    [(20, 5, 0.0), (50, 1000, 0.0), (50, 49, 4.0), (100, 30, 2.0), (200, 400, 6.0), (500, 2000, 0.0), (500, 100, 3.0)],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_min_norm_satisfies_kkt_for_any_rank_and_scale(K: int, n: int, decades: float, seed: int) -> None:
    M = sampled_gramian(K, n, seed, decades=decades)
    weights = min_norm_weights(M)
    assert slice_kkt_residual(M, weights, np.zeros(K), np.ones(K)) <= 1e-12
    assert frank_wolfe_gap(M, weights) <= 1e-9 * M.diagonal().max()


def test_common_descent_and_length_of_the_min_norm_point() -> None:
    rng = np.random.default_rng(3)
    G = rng.normal(size=(12, 40)) + rng.normal(size=40)
    weights = min_norm_weights(G @ G.T)
    direction = weights @ G
    squared = direction @ direction
    np.testing.assert_array_less(squared * (1 - 1e-12), G @ direction)
    np.testing.assert_allclose((G @ direction)[weights > 0], squared, rtol=1e-12)
    assert np.sqrt(squared) <= np.linalg.norm(G, axis=1).min()


def test_orthogonal_rows_are_weighted_by_their_inverse_squares() -> None:
    lengths = np.array([1.0, 2.0, 0.5, 10.0])
    np.testing.assert_allclose(min_norm_weights(np.diag(lengths**2)), lengths**-2 / (lengths**-2).sum(), rtol=1e-13)


def test_duplicates_leave_the_direction_alone() -> None:
    G = np.random.default_rng(1).normal(size=(6, 30)) + 0.5
    twice = np.concatenate([G, G, G[:2]])
    np.testing.assert_allclose(min_norm_weights(twice @ twice.T) @ twice, min_norm_weights(G @ G.T) @ G, atol=1e-12)


def test_rows_whose_hull_holds_zero_cancel() -> None:
    g1, g2 = np.random.default_rng(0).normal(size=(2, 10))
    G = np.stack([g1, g2, -2.0 * g1 - 3.0 * g2, g1 + 10.0])
    weights = min_norm_weights(G @ G.T)
    np.testing.assert_allclose(weights, [2 / 6, 3 / 6, 1 / 6, 0.0], atol=1e-10)


def test_zero_rows_carry_the_weight_and_no_rows_at_all_share_it() -> None:
    np.testing.assert_array_equal(min_norm_weights(np.zeros((4, 4))), np.full(4, 0.25))
    G = np.array([[1.0, 0.0], [0.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    np.testing.assert_array_equal(min_norm_weights(G @ G.T), [0.0, 0.5, 0.0, 0.5])


def test_known_values_of_the_min_norm_point() -> None:
    weights = min_norm_weights(GOLDEN @ GOLDEN.T)
    np.testing.assert_allclose(weights, [0.50649351, 0.49350649, 0.0], atol=5e-9)
    np.testing.assert_allclose(weights @ GOLDEN, [0.75324675, 0.51948052, 0.49350649, 0.48051948], atol=5e-9)


@pytest.mark.parametrize("factor_of_all", [1e-200, 1e-8, 1e100])
def test_min_norm_weights_do_not_depend_on_the_unit(factor_of_all: float) -> None:
    M = sampled_gramian(10, 30, 0)
    np.testing.assert_allclose(min_norm_weights(factor_of_all * M), min_norm_weights(M), rtol=1e-9, atol=1e-12)


def test_a_gramian_that_is_not_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"square.*\(2, 3\)"):
        min_norm_weights(np.ones((2, 3)))
    with pytest.raises(ValueError, match="row 1 is not"):
        min_norm_weights(np.array([[1.0, 0.0], [0.0, np.nan]]))


# -- boxes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [0.0, 0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("seed", range(8))
def test_box_weights_equal_enumeration(radius: float, seed: int) -> None:
    K = 5
    M = sampled_gramian(K, 12, seed)
    lower, upper = box_around(np.random.default_rng(seed).dirichlet(np.ones(K)), radius)
    expected = enumerated_box_weights(M, lower, upper)
    np.testing.assert_allclose(min_norm_box_weights(M, lower, upper), expected, atol=1e-9)


@pytest.mark.parametrize(("K", "n"), [(30, 100), (60, 20), (200, 50), (300, 1000)])
@pytest.mark.parametrize("radius", [0.2, 1.0, 5.0])
@pytest.mark.parametrize("decades", [0.0, 2.0])
def test_box_weights_satisfy_kkt(K: int, n: int, radius: float, decades: float) -> None:
    M = sampled_gramian(K, n, 0, decades=decades)
    lower, upper = box_around(np.full(K, 1.0 / K), radius / K)
    assert slice_kkt_residual(M, min_norm_box_weights(M, lower, upper), lower, upper) <= 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_box_weights_of_nearly_equal_numbers(seed: int) -> None:
    """In one dimension the problem is a linear program in disguise, with a Gramian of rank one."""
    rng = np.random.default_rng(seed)
    G = rng.normal() + 1e-6 * rng.normal(size=(40, 1))
    lower, upper = box_around(rng.dirichlet(np.ones(40)), 0.1)
    M = G @ G.T
    weights = min_norm_box_weights(M, lower, upper)
    assert slice_kkt_residual(M, weights, lower, upper) <= 1e-12
    assert np.count_nonzero((weights > lower) & (weights < upper)) <= 2  # a basic solution but for rounding


@pytest.mark.parametrize("seed", range(10))
def test_ties_and_duplicates_do_not_cycle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    G = rng.integers(-1, 3, size=(30, 6)).astype(np.float64)
    G = G[rng.integers(0, 30, size=45)] * 10.0 ** rng.integers(-3, 4, size=(45, 1))
    M = G @ G.T
    assert slice_kkt_residual(M, min_norm_weights(M), np.zeros(45), np.ones(45)) <= 1e-12
    lower, upper = box_around(np.full(45, 1 / 45), 0.04)
    assert slice_kkt_residual(M, min_norm_box_weights(M, lower, upper), lower, upper) <= 1e-12


def test_box_weights_equal_another_method() -> None:
    K = 15
    M = sampled_gramian(K, 40, 5) / 40
    lower, upper = box_around(np.full(K, 1.0 / K), 0.05)
    other = scipy.optimize.minimize(
        lambda w: w @ M @ w / 2,
        np.full(K, 1.0 / K),
        jac=lambda w: M @ w,
        bounds=list(zip(lower, upper, strict=True)),
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1.0, "jac": lambda w: np.ones(K)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    ours = min_norm_box_weights(M, lower, upper)
    assert ours @ M @ ours <= other.x @ M @ other.x * (1 + 1e-12)
    np.testing.assert_allclose(ours, other.x, atol=1e-5)  # the root of SLSQP's tolerance in the value


def test_a_point_box_is_the_prior_and_a_wide_one_is_no_constraint() -> None:
    M = sampled_gramian(7, 20, 2)
    prior = np.random.default_rng(2).dirichlet(np.ones(7))
    np.testing.assert_array_equal(min_norm_box_weights(M, prior, prior), prior)
    np.testing.assert_array_equal(min_norm_box_weights(M, np.zeros(7), np.ones(7)), min_norm_weights(M))
    values = [
        w @ M @ w for r in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0) for w in [min_norm_box_weights(M, *box_around(prior, r))]
    ]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(values))


@pytest.mark.parametrize(
    ("radius", "expected"),
    [
        (0.05, (0.38145199, 0.33521467, 0.28333333)),
        (0.1, (0.40237223, 0.36429444, 0.23333333)),
        (0.5, (0.5, 0.5, 0.0)),
        (1.0, (0.5, 0.5, 0.0)),
    ],
)
def test_known_values_on_unit_rows(radius: float, expected: tuple[float, ...]) -> None:
    M = unit_gramian(GOLDEN @ GOLDEN.T).matrix
    np.testing.assert_allclose(min_norm_box_weights(M, *box_around(np.full(3, 1 / 3), radius)), expected, atol=5e-9)


def test_known_values_with_a_prior() -> None:
    M = unit_gramian(GOLDEN @ GOLDEN.T).matrix
    weights = min_norm_box_weights(M, *box_around(np.array([0.1, 0.3, 0.6]), 0.1))
    np.testing.assert_allclose(weights, [0.2, 0.3, 0.5], atol=1e-12)


def test_box_weights_of_rows_without_length() -> None:
    lower, upper = np.array([0.5, 0.0, 0.0]), np.array([1.0, 0.3, 1.0])
    np.testing.assert_allclose(min_norm_box_weights(np.zeros((3, 3)), lower, upper), [0.5, 0.25, 0.25])
    weights = min_norm_box_weights(np.diag([1.0, 0.0, 1.0]), lower, upper)
    np.testing.assert_allclose(weights, [0.5, 0.3, 0.2], atol=1e-12)


def test_an_empty_box_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sums are 0 and 0\.9; widen"):
        min_norm_box_weights(np.eye(3), np.zeros(3), np.full(3, 0.3))


# -- the cone problem --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [["_pivoted"], ["_pivoted", "nnls"]])
@pytest.mark.parametrize("n", [12, 40])
def test_the_cone_problem_survives_a_failed_start(n: int, failing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    M = unit_gramian(sampled_gramian(30, n, 4)).matrix
    r = np.random.default_rng(4).uniform(0.1, 1.0, size=30)
    expected, _ = cone_weights(M, r)
    for name in failing:
        monkeypatch.setattr(f"dqnfed.maths.solvers.{name}", lambda A, b: None)
    z, v = cone_weights(M, r)
    assert r @ z == pytest.approx(1.0)
    assert z @ M @ z == pytest.approx(expected @ M @ expected, abs=1e-12)
    assert v == pytest.approx(z @ M @ z, abs=1e-12)


def test_pivoting_ends_at_the_weights() -> None:
    """z >= 0, M z >= r, equal where z > 0, for rows of every kind of conflict."""
    for seed in range(30):
        M = unit_gramian(sampled_gramian(40, 30 + seed, seed)).matrix + 1e-6 * np.eye(40)
        r = np.random.default_rng(seed).uniform(-0.2, 1.0, size=40)
        found = _pivoted(M, r)
        assert found is not None
        z = found.weights
        assert (z >= 0.0).all()
        assert (M @ z - r >= -1e-9 * np.abs(M) @ z).all()
        assert np.abs(z * (M @ z - r)).max() <= 1e-9 * z.max() * (np.abs(M) @ z).max()
        np.testing.assert_allclose(z / (r @ z), cone_weights(M, r)[0], atol=1e-9)


def test_what_pivoting_calls_exact_needs_no_finish() -> None:
    """The active-set method, started there, has nothing to do: the same weights and the same multiplier."""
    n_exact = 0
    for seed in range(30):
        M = unit_gramian(sampled_gramian(40, 30 + seed, seed)).matrix + 1e-6 * np.eye(40)
        r = np.random.default_rng(seed).uniform(-0.2, 1.0, size=40)
        found = _pivoted(M, r)
        if found is None or not found.is_exact:
            continue
        n_exact += 1
        z, v = cone_weights(M, r)
        start = found.weights / (r @ found.weights)
        finished, multiplier = _sliced_box_minimiser(M, r, np.zeros(40), np.full(40, np.inf), start)
        np.testing.assert_allclose(z, finished, rtol=0.0, atol=1e-13 * np.abs(finished).max())
        assert v == pytest.approx(multiplier, rel=1e-12)
    assert n_exact >= 20


def test_pivoting_goes_on_where_every_weight_is_wrong() -> None:
    """Rates far below zero can turn all that were free negative at once; then nobody is free for a moment."""
    across = [-0.9505056888241479, -0.7883429504049986, 0.9522228912973582, 0.9102223753917839, -0.9624265452369577]
    M = np.eye(4)
    M[np.triu_indices(4, 1)] = [*across, -0.9263995618464261]
    M = np.triu(M) + np.triu(M, 1).T
    r = np.array([0.001160702900123842, -2.0040076013290142, -1.6347676585199824, 1.0])
    found = _pivoted(M, r)
    assert found is not None
    np.testing.assert_allclose(found.weights, [0.0, 0.0, 0.0, 1.0], atol=1e-15)
    z, v = cone_weights(M, r)
    assert (z >= 0.0).all()
    assert r @ z == pytest.approx(1.0)
    assert v == pytest.approx(z @ M @ z, rel=1e-9)


@pytest.mark.parametrize("seed", [2821, 3044, 3370, 3799, 12590, 12758])
def test_pivoting_ends_where_changing_all_at_once_would_cycle(seed: int) -> None:
    rng = np.random.default_rng(seed)
    G = rng.normal(size=(4, 4)).round(1)
    M = unit_gramian(G @ G.T).matrix
    r = rng.uniform(-1, 1, 4).round(2)
    found = _pivoted(M, r)
    assert found is not None
    excess = M @ found.weights - r
    assert (found.weights >= 0.0).all()
    assert (excess >= -1e-12).all()
    np.testing.assert_allclose(excess[found.weights > 0.0], 0.0, atol=1e-12)


def test_a_factor_multiplies_back_to_its_gramian() -> None:
    M = sampled_gramian(12, 5, 0)
    R = factor(M, rtol=1e-12)
    assert R.shape == (12, 5)
    np.testing.assert_allclose(R @ R.T, M, atol=1e-12)


# -- projections -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_projection_is_the_nearest_point(seed: int) -> None:
    rng = np.random.default_rng(seed)
    y = rng.normal(scale=2.0, size=8)
    x = simplex_projection(y)
    assert x.sum() == pytest.approx(1.0, abs=1e-14)
    assert (x >= 0).all()
    others = rng.dirichlet(np.full(8, 0.3), size=200)
    assert ((y - x) @ (others - x).T <= 1e-12).all()  # the variational inequality of a projection
    np.testing.assert_allclose(simplex_projection(x), x, atol=1e-15)
    np.testing.assert_allclose(simplex_projection(y + 5.0), x, atol=1e-14)
    np.testing.assert_allclose(box_simplex_projection(y, np.zeros(8), np.ones(8)), x, atol=1e-14)


def test_known_projections() -> None:
    np.testing.assert_allclose(simplex_projection(np.array([1.8, 0.6])), [1.0, 0.0], atol=1e-15)
    third = 1 / 3
    losses = np.array([0.5, 2.0, 1.0])
    np.testing.assert_allclose(
        simplex_projection(third + 0.1 * losses), [0.26666667, 0.41666667, 0.31666667], atol=5e-9
    )
    np.testing.assert_allclose(simplex_projection(third + losses), [0.0, 1.0, 0.0], atol=1e-15)


@pytest.mark.parametrize("seed", range(50))
def test_box_projection_is_the_nearest_point(seed: int) -> None:
    rng = np.random.default_rng(seed)
    K = int(rng.integers(1, 9))
    inside = rng.dirichlet(np.ones(K))
    lower = inside * rng.uniform(0, 1, size=K) * (rng.uniform(size=K) < 0.7)
    upper = inside + rng.uniform(0, 0.5, size=K) * (rng.uniform(size=K) < 0.7)
    y = rng.normal(size=K)
    x = box_simplex_projection(y, lower, upper)
    assert x.sum() == pytest.approx(1.0, abs=1e-12)
    assert ((x >= lower - 1e-15) & (x <= upper + 1e-15)).all()
    np.testing.assert_allclose(x, bisected_projection(y, lower, upper), atol=1e-12)
    assert (y - x) @ (inside - x) <= 1e-12


def bisected_projection(y: FloatArray, lower: FloatArray, upper: FloatArray) -> FloatArray:
    """Return the projection by bisection on the shift, a hundred halvings."""
    low, high = float((y - upper).min()), float((y - lower).max())
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(y - middle, lower, upper).sum() > 1.0 else (low, middle)
    return np.asarray(np.clip(y - (low + high) / 2, lower, upper))


def test_rows_that_are_left_out_stay_out_where_no_step_serves_everybody() -> None:
    """The last row opposes the first, so that the step is for the first three alone, without the one left out."""
    G = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [-1.0, 0.0, 0.0]])
    d = np.array([0.5, 7.0, 2.0, 1.0])
    weights, chosen = serving_weights(G @ G.T, d, np.array([True, False, True, True]), 3, ridge=0.0)
    assert chosen.tolist() == [True, False, True, False]
    np.testing.assert_allclose(weights @ G, [0.5, 0.0, 2.0])


def test_a_row_of_no_length_has_no_rate_and_no_part_in_the_median() -> None:
    """The known rates per square are 1, 2 and 300, of which 300 is held to three times the median."""
    rates, squares = np.array([0.0, 4.0, 2.0, 300.0, np.nan]), np.array([0.0, 4.0, 1.0, 1.0, 5.0])
    np.testing.assert_allclose(bounded_rates(rates, squares, 3.0), [0.0, 4.0, 2.0, 6.0, 10.0])

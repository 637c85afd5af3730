"""The server's step: rates met, the paper's form reproduced, and honest answers where rates cannot be met."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.maths.directions import (
    RateMatch,
    at_least_step,
    at_least_weights,
    compatible_rows,
    drop_outlier_rows,
    gram_schmidt_step,
    mean_step,
    rate_matching_step,
    rate_matching_weights,
)
from dqnfed.maths.gramian import gramian
from dqnfed.maths.solvers import min_norm_weights, unit_gramian
from tests.helpers.rows import agreeing_rows, gaussian_rows, positive_rates, rows_of_condition
from tests.unit.maths.oracles import enumerated_at_least_step

GOLDEN = torch.tensor([[1.0, 2.0, 0.0, -1.0], [0.5, -1.0, 1.0, 2.0], [2.0, 0.0, 1.0, 0.5]], dtype=torch.float64)


def kkt_residual(G: Tensor, d: Tensor, step: Tensor, weights: Tensor) -> float:
    """Return the largest violation of the conditions of min ||u||^2 subject to G u >= d, for rows of unit length."""
    lengths = torch.linalg.vector_norm(G, dim=1)
    rows, wanted, multipliers = G / lengths[:, None], d / lengths, weights * lengths
    spare = (rows @ step - wanted) / wanted.max()
    return max(
        float((-spare).max()),
        float((-multipliers).max() / multipliers.max()),
        float((multipliers / multipliers.max() * spare).abs().max()),
        float(torch.linalg.vector_norm(step - weights @ G) / torch.linalg.vector_norm(step)),
    )


# -- equality ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("K", "n"), [(1, 1), (2, 5), (10, 100), (30, 30), (50, 500)])
@pytest.mark.parametrize("condition", [1.0, 30.0, 1e3])
@pytest.mark.parametrize("seed", range(3))
def test_every_client_gets_its_rate(K: int, n: int, condition: float, seed: int) -> None:
    G, d = rows_of_condition(K, n, condition, seed), positive_rates(K, seed=seed)
    found = rate_matching_step(G, d)
    assert (G @ found.step - d).abs().max() <= 1e-10 * d.max()
    assert found.residual <= 1e-10 * d.max()
    rounding = 1e-15 * float((found.weights.abs() @ G.abs()).max())  # weights that cancel are long
    torch.testing.assert_close(found.weights @ G, found.step, rtol=1e-12, atol=rounding)


@pytest.mark.parametrize(("K", "n"), [(2, 5), (10, 100), (30, 30), (50, 500)])
@pytest.mark.parametrize("condition", [1.0, 30.0, 1e3])
@pytest.mark.parametrize("seed", range(3))
def test_the_solve_equals_the_papers_two_stages(K: int, n: int, condition: float, seed: int) -> None:
    G, d = rows_of_condition(K, n, condition, seed), positive_rates(K, seed=seed)
    found, literal = rate_matching_step(G, d), gram_schmidt_step(G, d)
    assert torch.linalg.vector_norm(found.step - literal.step) <= 1e-8 * torch.linalg.vector_norm(found.step)
    # eta = ||u||^2, direction = u / ||u||^2, lambda* convex weights
    torch.testing.assert_close(literal.eta, literal.step @ literal.step, rtol=1e-8, atol=0.0)
    torch.testing.assert_close(literal.direction, literal.step / literal.eta, rtol=1e-8, atol=0.0)
    assert literal.weights.min() > 0
    assert literal.weights.sum().item() == pytest.approx(1.0, abs=1e-12)


def test_the_step_is_the_shortest_that_meets_the_rates() -> None:
    G, d = gaussian_rows(5, 20), positive_rates(5)
    step = rate_matching_step(G, d).step
    null_space = torch.linalg.svd(G).Vh[5:]
    assert (null_space @ step).abs().max() <= 1e-13  # any other solution adds a part of the null space
    torch.testing.assert_close(step, torch.linalg.pinv(G) @ d, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("solve", [rate_matching_step, at_least_step])
def test_the_order_of_clients_is_irrelevant(solve: Callable[[Tensor, Tensor], RateMatch]) -> None:
    G, d = rows_of_condition(20, 60, 1e3), positive_rates(20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    one, other = solve(G, d), solve(G[order], d[order])
    torch.testing.assert_close(other.step, one.step, rtol=1e-8, atol=1e-8 * float(one.step.abs().max()))
    torch.testing.assert_close(other.weights, one.weights[order], rtol=1e-6, atol=1e-6 * float(one.weights.abs().max()))


def test_gram_schmidt_is_order_free_too() -> None:
    G, d = gaussian_rows(6, 30), positive_rates(6)
    torch.testing.assert_close(gram_schmidt_step(G.flip(0), d.flip(0)).step, gram_schmidt_step(G, d).step)


def test_a_vanishing_denominator_breaks_the_literal_form_only() -> None:
    g1, g2 = torch.tensor([[2.0, 0.0, 0.0], [1.0, 1.0, 0.0]], dtype=torch.float64)
    d = torch.tensor([4.0, 2.0], dtype=torch.float64)  # d_2 = (g_2.g_1) d_1 / ||g_1||^2: Gram-Schmidt divides by zero
    G = torch.stack([g1, g2])
    assert gram_schmidt_step(G, d).step.isnan().any()
    torch.testing.assert_close(rate_matching_step(G, d).step, 2.0 * torch.eye(3, dtype=torch.float64)[0])


def test_known_values() -> None:
    """AdaFed with gamma 0 and 1 is the same solve with rates 1 and f_k."""
    ones = rate_matching_step(GOLDEN, torch.ones(3, dtype=torch.float64)).step
    assert (ones @ ones).item() == pytest.approx(1.14583333, abs=5e-9)
    expected = torch.tensor([0.14545455, 0.65454545, 0.29090909, 0.58181818], dtype=torch.float64)
    torch.testing.assert_close(ones / (ones @ ones), expected, rtol=0.0, atol=5e-9)
    losses = rate_matching_step(GOLDEN, torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64))
    assert (losses.step @ losses.step).item() == pytest.approx(2.45691288, abs=5e-9)
    expected = torch.tensor([1.14488636, 1.41477273, -0.94507576], dtype=torch.float64)
    torch.testing.assert_close(losses.weights, expected, rtol=0.0, atol=5e-9)


@pytest.mark.parametrize(("K", "n"), [(1, 1), (5, 200), (30, 500)])
def test_float32_rows_meet_their_rates_to_what_the_gramian_is_worth(K: int, n: int) -> None:
    G, d = gaussian_rows(K, n, torch.float32), positive_rates(K, torch.float32)
    found = rate_matching_step(G, d)
    assert found.step.dtype == found.weights.dtype == torch.float32
    tolerance = 10 * torch.finfo(torch.float32).eps * torch.linalg.cond(G.double()) ** 2  # the Gramian squares it
    assert (G.double() @ found.step.double() - d.double()).abs().max() <= tolerance * d.max()


def test_a_ridge_shortens_the_step_and_is_reported() -> None:
    G, d = gaussian_rows(6, 20), positive_rates(6)
    exact, ridged = rate_matching_step(G, d), rate_matching_step(G, d, ridge=0.1)
    assert torch.linalg.vector_norm(ridged.step) < torch.linalg.vector_norm(exact.step)
    assert exact.residual < 1e-12 < ridged.residual
    lengths = torch.linalg.vector_norm(G, dim=1)
    missed = d - G @ ridged.step
    torch.testing.assert_close(missed, 0.1 * lengths**2 * ridged.weights)  # (M~ + ridge I) z~ = r, by definition


# -- rates that cannot be met ------------------------------------------------------------------------------------------


def test_pareto_stationary_rows_give_no_step_and_a_residual() -> None:
    g1, g2 = gaussian_rows(2, 10)
    G, d = torch.stack([g1, g2, -g1 - g2]), torch.ones(3, dtype=torch.float64)
    for found in (rate_matching_step(G, d), at_least_step(G, d)):
        assert torch.linalg.vector_norm(found.step) < 1e-12
        assert found.residual > 0.5


@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (1.0, 100.0, 0.01)])
def test_contradictions_are_settled_by_least_squares(scales: tuple[float, ...]) -> None:
    g1, g2 = gaussian_rows(2, 10)
    G = torch.stack([g1, g2, g1 + g2, g1 - 2 * g2]) * torch.tensor([*scales, 1.0], dtype=torch.float64)[:, None]
    d = torch.tensor([1.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    found = rate_matching_step(G, d)
    torch.testing.assert_close(found.step, torch.linalg.pinv(G) @ d, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.residual, (G @ found.step - d).abs().max())
    assert found.residual > 0.1


def test_duplicate_clients_change_nothing_when_they_agree() -> None:
    G, d = agreeing_rows(5, 40), positive_rates(5)
    twice, rates = torch.cat([G, G[:3], G[:1]]), torch.cat([d, d[:3], d[:1]])
    for solve in (rate_matching_step, at_least_step):
        torch.testing.assert_close(solve(twice, rates).step, solve(G, d).step, rtol=1e-9, atol=1e-10)
        assert solve(twice, rates).residual <= 1e-10


def test_duplicate_gradients_with_different_rates() -> None:
    g = gaussian_rows(1, 10)[0]
    G, d = torch.stack([g, g]), torch.tensor([1.0, 3.0], dtype=torch.float64)
    equal = rate_matching_step(G, d)  # meets in the middle, and says so
    torch.testing.assert_close(G @ equal.step, torch.full((2,), 2.0, dtype=torch.float64))
    assert equal.residual.item() == pytest.approx(1.0)
    least = at_least_step(G, d)  # gives both the larger rate
    torch.testing.assert_close(G @ least.step, torch.full((2,), 3.0, dtype=torch.float64))
    assert least.residual.item() == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_more_clients_than_parameters(dtype: torch.dtype) -> None:
    G, d = agreeing_rows(12, 4, dtype, agreement=2.0), positive_rates(12, dtype)
    equal, least = rate_matching_step(G, d), at_least_step(G, d)
    expected = torch.linalg.pinv(G.double()) @ d.double()
    torch.testing.assert_close(equal.step.double(), expected, rtol=1e-3 if dtype == torch.float32 else 1e-9, atol=1e-5)
    assert equal.residual > 0.01
    assert least.step.isfinite().all()
    assert least.residual <= 1e-4 * d.max() if dtype == torch.float32 else least.residual <= 1e-9


def test_a_zero_gradient_is_left_out_and_its_rate_reported() -> None:
    G, d = gaussian_rows(3, 10), positive_rates(3)
    with_zero = torch.cat([G, torch.zeros(1, 10, dtype=torch.float64)])
    rates = torch.cat([d, torch.tensor([0.7], dtype=torch.float64)])
    for solve in (rate_matching_step, at_least_step):
        found = solve(with_zero, rates)
        torch.testing.assert_close(found.step, solve(G, d).step)
        assert found.weights[-1] == 0.0
        assert found.residual.item() == pytest.approx(0.7)


def test_only_zero_gradients() -> None:
    for solve in (rate_matching_step, at_least_step):
        found = solve(torch.zeros(2, 5), torch.ones(2))
        assert found.step.abs().max() == 0.0
        assert found.residual == 1.0


def test_bad_rates_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one rate per gradient row.*\(2, 3\).*\(3,\)"):
        rate_matching_step(torch.ones(2, 3), torch.ones(3))
    with pytest.raises(ValueError, match="row 1 has nan; drop that client"):
        at_least_step(torch.ones(2, 3), torch.tensor([1.0, torch.nan]))


# -- at least ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("K", "n"), [(1, 3), (2, 2), (5, 20), (20, 60), (50, 500)])
@pytest.mark.parametrize("seed", range(5))
def test_at_least_satisfies_its_optimality_conditions(K: int, n: int, seed: int) -> None:
    G, d = agreeing_rows(K, n, seed=seed), positive_rates(K, seed=seed)
    found = at_least_step(G, d)
    assert kkt_residual(G, d, found.step, found.weights) <= 1e-8
    assert found.residual <= 1e-8 * d.max()


@pytest.mark.parametrize("seed", range(5))
def test_at_least_satisfies_them_on_ill_conditioned_rows_of_any_scale(seed: int) -> None:
    G = rows_of_condition(15, 40, 1e3, seed) * torch.logspace(-3, 3, 15, dtype=torch.float64)[:, None]
    d = positive_rates(15, seed=seed) * torch.linalg.vector_norm(G, dim=1)
    found = at_least_step(G, d)
    assert kkt_residual(G, d, found.step, found.weights) <= 1e-8


@pytest.mark.parametrize(("K", "n"), [(2, 3), (4, 3), (6, 10), (8, 4)])
@pytest.mark.parametrize("seed", range(6))
def test_at_least_equals_enumeration(K: int, n: int, seed: int) -> None:
    G, d = agreeing_rows(K, n, seed=seed), positive_rates(K, seed=seed)
    expected = enumerated_at_least_step(G.numpy(), d.numpy())
    found = at_least_step(G, d)
    if expected is None:
        assert found.step.abs().max() == 0.0
        assert found.residual == d.max()
    else:
        np.testing.assert_allclose(found.step.numpy(), expected, rtol=1e-8, atol=1e-8 * np.abs(expected).max())


@pytest.mark.parametrize("seed", range(5))
def test_at_least_is_never_longer_than_equality(seed: int) -> None:
    G, d = agreeing_rows(10, 50, seed=seed), positive_rates(10, seed=seed)
    least, equal = at_least_step(G, d), rate_matching_step(G, d)
    assert torch.linalg.vector_norm(least.step) <= torch.linalg.vector_norm(equal.step) * (1 + 1e-12)
    assert least.weights.min() >= 0


def test_at_least_is_equality_where_equality_needs_no_negative_weight() -> None:
    G = gaussian_rows(4, 30)
    d = G @ (torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64) @ G)
    torch.testing.assert_close(at_least_step(G, d).step, rate_matching_step(G, d).step, rtol=1e-10, atol=1e-12)


def test_orthogonal_gradients_are_served_one_by_one() -> None:
    G = (
        torch.linalg.qr(gaussian_rows(20, 5)).Q.T
        * torch.tensor([1.0, 2.0, 3.0, 0.1, 5.0], dtype=torch.float64)[:, None]
    )
    d = positive_rates(5)
    expected = (d / G.square().sum(dim=1)) @ G
    for solve in (rate_matching_step, at_least_step):
        torch.testing.assert_close(solve(G, d).step, expected, rtol=1e-12, atol=1e-13)


def test_one_client_walks_down_its_gradient() -> None:
    G, d = gaussian_rows(1, 10), torch.tensor([0.3], dtype=torch.float64)
    for solve in (rate_matching_step, at_least_step):
        torch.testing.assert_close(solve(G, d).step, G[0] * 0.3 / (G[0] @ G[0]))


@pytest.mark.parametrize("seed", range(5))
def test_rates_of_one_give_mgda_and_rates_of_length_give_its_unit_form(seed: int) -> None:
    G = agreeing_rows(8, 30, seed=seed) * torch.logspace(-1, 1, 8, dtype=torch.float64)[:, None]
    M = gramian(G).numpy()
    lengths = torch.linalg.vector_norm(G, dim=1)
    mgda = torch.from_numpy(min_norm_weights(M)) @ G
    unit_mgda = torch.from_numpy(min_norm_weights(unit_gramian(M).matrix)) @ (G / lengths[:, None])
    for rates, direction in ((torch.ones(8, dtype=torch.float64), mgda), (lengths, unit_mgda)):
        step = at_least_step(G, rates).step
        torch.testing.assert_close(step, direction / (direction @ direction), rtol=1e-9, atol=1e-9)


def test_scaling_rates_or_one_client() -> None:
    G, d = agreeing_rows(6, 30), positive_rates(6)
    scales = torch.tensor([1.0, 1e3, 1.0, 1e-3, 7.0, 1.0], dtype=torch.float64)
    for solve in (rate_matching_step, at_least_step):
        step = solve(G, d).step
        torch.testing.assert_close(solve(G, 5.0 * d).step, 5.0 * step, rtol=1e-10, atol=1e-12)
        # a client that measures its loss in another unit sends a scaled gradient and a scaled rate
        torch.testing.assert_close(solve(scales[:, None] * G, scales * d).step, step, rtol=1e-9, atol=1e-11)


def test_the_default_ridge_costs_a_thousandth_of_a_rate_at_most() -> None:
    G, d = agreeing_rows(20, 100), positive_rates(20)
    weights, feasible = at_least_weights(gramian(G).numpy(), d.numpy())
    assert feasible
    assert (weights >= 0).all()
    reached = G @ (torch.from_numpy(weights) @ G)
    assert (reached >= d * (1 - 1e-3)).all()
    tight = torch.from_numpy(weights > 0)
    torch.testing.assert_close(reached[tight], d[tight], rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("ridge", [0.0, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_opposite_gradients_are_infeasible(ridge: float, dtype: torch.dtype) -> None:
    g = gaussian_rows(1, 50, dtype)[0]
    G = torch.stack([g, -3.0 * g])
    found = at_least_step(G, torch.ones(2, dtype=dtype), ridge=ridge)
    assert found.step.abs().max() == 0.0
    assert found.residual == 1.0
    assert not at_least_weights(gramian(G).numpy(), np.ones(2), ridge=ridge, rtol=1e-6).feasible


def test_rates_that_ask_for_nothing_are_met_by_standing_still() -> None:
    found = at_least_step(gaussian_rows(3, 10), torch.tensor([0.0, -1.0, 0.0], dtype=torch.float64))
    assert found.step.abs().max() == 0.0
    assert found.residual == 0.0


def test_a_few_clients_may_ask_for_nothing() -> None:
    G = agreeing_rows(6, 20)
    d = torch.tensor([1.0, 0.0, 0.5, -0.2, 1.0, 0.0], dtype=torch.float64)
    found = at_least_step(G, d)
    assert (G @ found.step >= d - 1e-12).all()


def test_gram_forms_equal_the_steps() -> None:
    G, d = agreeing_rows(7, 40), positive_rates(7)
    M = gramian(G).numpy()
    equal = torch.from_numpy(rate_matching_weights(M, d.numpy()))
    least = torch.from_numpy(at_least_weights(M, d.numpy(), ridge=0.0).weights)
    torch.testing.assert_close(equal, rate_matching_step(G, d).weights, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(least, at_least_step(G, d).weights, rtol=1e-10, atol=1e-12)


# -- dropping rows that block everybody --------------------------------------------------------------------------------


@pytest.mark.parametrize("attackers", [(3,), (0, 9)])
@pytest.mark.parametrize("seed", range(5))
def test_clients_that_push_against_everybody_are_found(attackers: tuple[int, ...], seed: int) -> None:
    G, d = agreeing_rows(10, 200, seed=seed), positive_rates(10, seed=seed).numpy()
    honest = [k for k in range(10) if k not in attackers]
    for k in attackers:
        G[k] = -(positive_rates(len(honest), seed=seed + k) @ G[honest])
    M = gramian(G).numpy()
    assert not at_least_weights(M, d).feasible
    assert np.flatnonzero(~compatible_rows(M, d)).tolist() == list(attackers)


def test_a_conflict_of_many_is_not_solved_by_silencing_some() -> None:
    g = gaussian_rows(1, 20)[0]
    G = torch.stack([g, g, g, -g, -g, -g])
    assert compatible_rows(gramian(G).numpy(), np.ones(6)).all()


def test_agreeing_clients_are_all_kept() -> None:
    G, d = agreeing_rows(10, 50), positive_rates(10)
    assert compatible_rows(gramian(G).numpy(), d.numpy()).all()


@pytest.mark.parametrize("k", [0, 4, 9])
def test_a_row_that_asks_for_too_much_is_left_out(k: int) -> None:
    M, d = gramian(agreeing_rows(10, 50)).numpy(), np.ones(10)
    d[k] = 1e3
    alone = drop_outlier_rows(M, d, stretch=2.0)
    assert np.flatnonzero(~alone).tolist() == [k]
    without = at_least_weights(np.delete(np.delete(M, k, 0), k, 1), np.delete(d, k)).weights
    np.testing.assert_array_equal(at_least_weights(M[np.ix_(alone, alone)], d[alone]).weights, without)


def test_a_row_against_all_others_is_left_out_though_a_step_exists() -> None:
    """In many dimensions there is a step even for a sign-flipped row; it is long, and the row pays nobody back."""
    G = agreeing_rows(10, 50)
    G[3] = -G[3]
    M = gramian(G).numpy()
    assert at_least_weights(M, np.ones(10)).feasible
    assert np.flatnonzero(~drop_outlier_rows(M, np.ones(10), stretch=2.0)).tolist() == [3]


def test_rows_that_ask_for_little_are_all_kept() -> None:
    M, d = gramian(agreeing_rows(10, 50)).numpy(), positive_rates(10).numpy()
    assert drop_outlier_rows(M, d, stretch=5.0).all()
    assert drop_outlier_rows(M, 1e3 * d, max_share=0.0, stretch=1.01).all()


# -- the mean ----------------------------------------------------------------------------------------------------------


def test_mean_step_is_the_weighted_average() -> None:
    torch.testing.assert_close(mean_step(GOLDEN), GOLDEN.mean(dim=0))
    counts = torch.tensor([10, 30, 60])
    expected = torch.tensor([1.45, -0.1, 0.9, 0.8], dtype=torch.float64)
    torch.testing.assert_close(mean_step(GOLDEN, counts), expected)
    with pytest.raises(ValueError, match="positive sum"):
        mean_step(GOLDEN, torch.zeros(3))


@pytest.mark.parametrize(("stretch", "n_dropped"), [(1.6, 1), (1.8, 0), (2.9, 0)])
def test_a_stretch_is_one_of_lengths(stretch: float, n_dropped: int) -> None:
    """For the unit rows of three axes the step is d itself: sqrt(6) long with the last row, sqrt(2) without it."""
    kept = drop_outlier_rows(np.eye(3), np.array([1.0, 1.0, 2.0]), ridge=0.0, max_share=1 / 3, stretch=stretch)
    assert kept.tolist() == [True, True, n_dropped == 0]

"""BFGS in its dense, limited-memory and compact forms, one client at a time and vectorised."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.maths.directions import at_least_weights, rate_matching_weights
from dqnfed.maths.quasi_newton import (
    FloatArray,
    Pairs,
    cauchy_rate,
    compact_inverse,
    damped,
    empty_pairs,
    hessian_bfgs_update,
    inverse_bfgs_update,
    is_curved,
    lbfgs_direct_rate,
    lbfgs_inverse_product,
    lbfgs_rate,
    metric_gramian,
    one_pair_rate,
    probe_length,
    push_pair,
    remembered,
    scale,
    secant_curvature,
    server_remembered,
)
from tests.helpers.problems import random_quadratics
from tests.helpers.rows import agreeing_rows, gaussian_rows, positive_rates

N = 12


def memory_products(G: Tensor, pairs: Pairs) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return G G', G P' and P P' with P = [S; Y]."""
    G, P = G.double(), torch.cat([pairs.s, pairs.y]).double()
    return (G @ G.T).numpy(), (G @ P.T).numpy(), (P @ P.T).numpy()


def hessian(seed: int = 0, n: int = N) -> Tensor:
    return random_quadratics(1, n, seed).hessians[0]


def filled(n_pushed: int, m: int = 5, seed: int = 0, *, loss_unit: float = 1.0) -> Pairs:
    """Return a memory that saw `n_pushed` pairs of one quadratic."""
    pairs = empty_pairs(m, N, torch.float64)
    H = loss_unit * hessian(seed)
    for s in gaussian_rows(n_pushed, N, seed=seed + 50):
        pairs = push_pair(pairs, s, H @ s)
    return pairs


def dense_inverse(pairs: Pairs) -> Tensor:
    """Return the matrix that the limited memory stands for, by the dense recursion from gam I."""
    H = scale(pairs) * torch.eye(pairs.s.shape[1], dtype=torch.float64)
    for s, y in list(zip(pairs.s, pairs.y, strict=True))[len(pairs.s) - int(pairs.n_pairs) :]:
        H = inverse_bfgs_update(H, s, y)
    return H


# -- dense -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_updates_send_the_pair_to_itself_and_invert_each_other(seed: int) -> None:
    B = hessian(seed + 10)
    s = gaussian_rows(1, N, seed=seed)[0]
    y = hessian(seed) @ s
    B_new, H_new = hessian_bfgs_update(B, s, y), inverse_bfgs_update(torch.linalg.inv(B), s, y)
    torch.testing.assert_close(B_new @ s, y, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(H_new @ y, s, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(B_new @ H_new, torch.eye(N, dtype=torch.float64), rtol=0.0, atol=1e-9)
    for matrix in (B_new, H_new):
        torch.testing.assert_close(matrix, matrix.T, rtol=0.0, atol=1e-12)
        assert torch.linalg.eigvalsh(matrix).min() > 0


def test_exact_line_searches_end_on_a_quadratic_after_n_steps() -> None:
    n = 8
    A, b = hessian(3, n), gaussian_rows(1, n, seed=3)[0]
    theta, H = torch.zeros(n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)
    for _ in range(n):
        g = A @ theta - b
        step = H @ g
        s = -(g @ step) / (step @ A @ step) * step
        theta, H = theta + s, inverse_bfgs_update(H, s, A @ s)
    assert torch.linalg.vector_norm(A @ theta - b) <= 1e-10 * torch.linalg.vector_norm(b)
    torch.testing.assert_close(H, torch.linalg.inv(A), rtol=1e-6, atol=1e-8)  # and BFGS has learnt the Hessian


@pytest.mark.parametrize("update", [hessian_bfgs_update, inverse_bfgs_update])
@pytest.mark.parametrize("case", ["zero", "backward", "orthogonal", "nan"])
def test_pairs_without_curvature_change_nothing(update: Callable[[Tensor, Tensor, Tensor], Tensor], case: str) -> None:
    s = gaussian_rows(1, N)[0]
    pair = {
        "zero": (torch.zeros_like(s), torch.zeros_like(s)),
        "backward": (s, -s),
        "orthogonal": (s, torch.cat([-s[N // 2 :], s[: N // 2]])),
        "nan": (s, s * torch.nan),
    }[case]
    matrix = hessian()
    assert torch.equal(update(matrix, *pair), matrix)
    memory = filled(3)
    assert all(torch.equal(a, b) for a, b in zip(push_pair(memory, *pair), memory, strict=True))


# -- limited memory ----------------------------------------------------------------------------------------------------


def test_the_memory_keeps_the_newest_pairs_newest_last() -> None:
    rows = gaussian_rows(7, N, seed=50)
    pairs = filled(7, m=3)
    assert int(pairs.n_pairs) == 3
    assert torch.equal(pairs.s, rows[-3:])
    partly = filled(2, m=3)
    assert int(partly.n_pairs) == 2
    assert partly.s[0].abs().max() == partly.y[0].abs().max() == 0.0
    with pytest.raises(ValueError, match="m is 0"):
        empty_pairs(0, N)


@pytest.mark.parametrize("n_pushed", [0, 1, 2, 5, 9])
@pytest.mark.parametrize("m", [1, 5])
def test_every_limited_memory_form_equals_the_dense_recursion(n_pushed: int, m: int) -> None:
    pairs = filled(n_pushed, m)
    H = dense_inverse(pairs)
    G = gaussian_rows(4, N, seed=7)
    for g in G:
        torch.testing.assert_close(lbfgs_rate(pairs, g), g @ H @ g, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(lbfgs_inverse_product(pairs, g), H @ g, rtol=1e-10, atol=1e-11)
        assert lbfgs_rate(pairs, g) > 0
    torch.testing.assert_close(lbfgs_inverse_product(pairs, G), G @ H, rtol=1e-10, atol=1e-11)

    GG, GP, PP = memory_products(G, pairs)
    inverse = compact_inverse(PP, int(pairs.n_pairs))
    torch.testing.assert_close(torch.from_numpy(metric_gramian(GG, GP, inverse)), G @ H @ G.T, rtol=1e-10, atol=1e-11)
    z = gaussian_rows(1, 4, seed=8)[0]
    torch.testing.assert_close(
        lbfgs_inverse_product(pairs, torch.as_tensor(z.numpy()) @ G), z @ G @ H, rtol=1e-10, atol=1e-11
    )


@pytest.mark.parametrize("n_pushed", [0, 1, 3, 8])
@pytest.mark.parametrize("beta", [1.0, 2.5])
def test_the_direct_form_equals_the_papers_recursion(n_pushed: int, beta: float) -> None:
    pairs = filled(n_pushed)
    B = beta * torch.eye(N, dtype=torch.float64)
    for s, y in list(zip(pairs.s, pairs.y, strict=True))[5 - int(pairs.n_pairs) :]:
        B = hessian_bfgs_update(B, s, y)
    for g in gaussian_rows(4, N, seed=9):
        torch.testing.assert_close(lbfgs_direct_rate(pairs, g, beta=beta), g @ B @ g, rtol=1e-10, atol=1e-11)


def test_one_pair_has_a_closed_form() -> None:
    pairs = filled(1, m=1)
    s, y, g = pairs.s[0], pairs.y[0], gaussian_rows(1, N, seed=3)[0]
    sy, gam = s @ y, (s @ y) / (y @ y)
    inverse = gam * (g - (s @ g) / sy * y).square().sum() + (s @ g) ** 2 / sy
    direct = g @ g - (s @ g) ** 2 / (s @ s) + (y @ g) ** 2 / sy
    torch.testing.assert_close(lbfgs_rate(pairs, g), inverse)
    torch.testing.assert_close(lbfgs_direct_rate(pairs, g), direct)


def test_no_pair_means_the_identity() -> None:
    pairs, g = empty_pairs(3, N, torch.float64), gaussian_rows(1, N)[0]
    assert scale(pairs) == 1.0
    torch.testing.assert_close(lbfgs_rate(pairs, g), g @ g)
    torch.testing.assert_close(lbfgs_direct_rate(pairs, g), g @ g)
    torch.testing.assert_close(lbfgs_inverse_product(pairs, g), g)


def test_a_loss_in_another_unit_has_a_rate_in_that_unit() -> None:
    g = gaussian_rows(1, N, seed=4)[0]
    one, thousand = filled(4), filled(4, loss_unit=1e3)
    torch.testing.assert_close(lbfgs_rate(thousand, 1e3 * g), 1e3 * lbfgs_rate(one, g), rtol=1e-10, atol=0.0)
    # the literal, direct form started at I is not even homogeneous
    literal = lbfgs_direct_rate(thousand, 1e3 * g) / lbfgs_direct_rate(one, g)
    assert literal > 1e6


def test_with_as_many_pairs_as_parameters_the_rate_is_newtons() -> None:
    """On a quadratic, n conjugate pairs make H the inverse Hessian, and g'Hg its Newton decrement."""
    n = 6
    A = hessian(1, n)
    values, vectors = torch.linalg.eigh(A)
    pairs = empty_pairs(n, n, torch.float64)
    for value, vector in zip(values, vectors.T, strict=True):
        pairs = push_pair(pairs, vector, value * vector)
    g = gaussian_rows(1, n, seed=2)[0]
    torch.testing.assert_close(lbfgs_rate(pairs, g), g @ torch.linalg.solve(A, g), rtol=1e-10, atol=0.0)


# -- damping -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("threshold", [0.1, 0.2])
def test_a_damped_pair_has_exactly_the_threshold_curvature(seed: int, threshold: float) -> None:
    s, y = gaussian_rows(2, N, seed=seed)
    y = y - (s @ y) / (s @ s) * s - 0.5 * s  # s'y < 0
    gam, yes = torch.tensor(0.7, dtype=torch.float64), torch.tensor(True)
    yd = damped(s, y, gam, yes, threshold=threshold)
    torch.testing.assert_close(s @ yd, threshold * (s @ s) / gam, rtol=1e-10, atol=0.0)
    assert is_curved(s, yd)
    torch.testing.assert_close(
        torch.linalg.matrix_rank(torch.stack([y, s, yd])), torch.tensor(2)
    )  # on the line y .. s/gam


def test_a_curved_pair_and_a_first_pair_are_not_damped() -> None:
    s = gaussian_rows(1, N)[0]
    gam = torch.tensor(1.0, dtype=torch.float64)
    assert torch.equal(damped(s, 2.0 * s, gam, torch.tensor(True)), 2.0 * s)
    assert torch.equal(damped(s, -s, gam, torch.tensor(False)), -s)
    zero = torch.zeros_like(s)
    assert torch.equal(damped(zero, zero, gam, torch.tensor(True)), zero)


# -- curvature along a move --------------------------------------------------------------------------------------------


def test_the_secant_is_the_curvature_and_nan_without_a_move() -> None:
    A, s = hessian(), gaussian_rows(1, N)[0]
    torch.testing.assert_close(secant_curvature(s, A @ s), s @ A @ s / (s @ s))
    assert secant_curvature(torch.zeros_like(s), s).isnan()


def test_one_probe_gives_the_cauchy_decrement() -> None:
    A, theta = hessian(), gaussian_rows(1, N)[0]
    g = A @ theta
    e = probe_length(theta, g)
    torch.testing.assert_close(torch.linalg.vector_norm(e * g), 1e-4 * (1 + torch.linalg.vector_norm(theta)))
    rate, c = cauchy_rate(g, A @ (theta - e * g), e)
    torch.testing.assert_close(c, g @ A @ g / (g @ g), rtol=1e-9, atol=0.0)
    torch.testing.assert_close(rate, (g @ g) ** 2 / (g @ A @ g), rtol=1e-9, atol=0.0)
    newton = g @ torch.linalg.solve(A, g)
    assert rate <= newton  # Cauchy-Schwarz


def test_probes_without_an_answer_are_nan_and_a_zero_gradient_has_no_rate() -> None:
    g, zero = gaussian_rows(1, N)[0], torch.zeros(N, dtype=torch.float64)
    e = torch.tensor(1e-4, dtype=torch.float64)
    assert all(value.isnan() for value in cauchy_rate(g, g, e))
    assert all(value.isnan() for value in cauchy_rate(g, g * torch.nan, e))
    rate, c = cauchy_rate(zero, zero, probe_length(zero, zero))
    assert rate == 0.0
    assert c.isnan()


# -- many clients at once ----------------------------------------------------------------------------------------------


def round_of_one_client(pairs: Pairs, s: Tensor, y: Tensor, g: Tensor) -> tuple[Pairs, Tensor, Tensor, Tensor]:
    """Return what a client does with a new pair: damp, keep, and rate its gradient."""
    kept = push_pair(pairs, s, damped(s, y, scale(pairs), pairs.n_pairs > 0))
    return kept, lbfgs_rate(kept, g), lbfgs_direct_rate(kept, g), secant_curvature(s, y)


def test_vectorised_clients_do_what_each_does_alone() -> None:
    memories = [filled(0), filled(1), filled(3), filled(7), filled(2)]
    S, G = gaussian_rows(5, N, seed=1), gaussian_rows(5, N, seed=2)
    Y = torch.stack([hessian(k) @ s for k, s in enumerate(S)])
    S[1], Y[1] = 0.0, 0.0  # did not move
    Y[2] = -Y[2]  # curves downwards
    Y[4] = torch.nan  # broke
    stacked = Pairs(*(torch.stack(leaves) for leaves in zip(*memories, strict=True)))
    kept, *values = vmap(round_of_one_client)(stacked, S, Y, G)
    for k, memory in enumerate(memories):
        kept_alone, *alone = round_of_one_client(memory, S[k], Y[k], G[k])
        for together, single in zip((*kept, *values), (*kept_alone, *alone), strict=True):
            torch.testing.assert_close(together[k], single, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert kept.n_pairs.tolist() == [1, 1, 4, 5, 2]
    assert torch.stack(values[:2]).isfinite().all()
    assert (values[0] > 0).all()
    assert values[2].isnan().tolist() == [False, True, False, False, True]


# -- the server's metric -----------------------------------------------------------------------------------------------


def test_one_client_in_its_own_metric_takes_the_quasi_newton_step() -> None:
    pairs, g = filled(4), gaussian_rows(1, N, seed=6)
    GG, GP, PP = memory_products(g, pairs)
    inverse = compact_inverse(PP, int(pairs.n_pairs))
    M = metric_gramian(GG, GP, inverse)
    rate = lbfgs_rate(pairs, g[0]).reshape(1).numpy()
    for weights in (rate_matching_weights(M, rate), at_least_weights(M, rate, ridge=0.0).weights):
        step = lbfgs_inverse_product(pairs, torch.as_tensor(weights) @ g)
        torch.testing.assert_close(step, lbfgs_inverse_product(pairs, g[0]), rtol=1e-10, atol=1e-11)


def test_a_step_in_the_metric_meets_the_rates_at_the_least_metric_length() -> None:
    pairs, G, d = filled(4), agreeing_rows(5, N, seed=6), positive_rates(5)
    H = dense_inverse(pairs)
    W = torch.linalg.inv(H)
    GG, GP, PP = memory_products(G, pairs)
    inverse = compact_inverse(PP, int(pairs.n_pairs))
    M = metric_gramian(GG, GP, inverse)
    z = rate_matching_weights(M, d.numpy())
    equal = lbfgs_inverse_product(pairs, torch.as_tensor(z) @ G)
    torch.testing.assert_close(G @ equal, d, rtol=1e-8, atol=1e-9)
    expected = H @ G.T @ torch.linalg.solve(G @ H @ G.T, d)
    torch.testing.assert_close(equal, expected, rtol=1e-8, atol=1e-9)
    z = at_least_weights(M, d.numpy(), ridge=0.0).weights
    least = lbfgs_inverse_product(pairs, torch.as_tensor(z) @ G)
    assert (G @ least >= d - 1e-8).all()
    assert least @ W @ least <= equal @ W @ equal * (1 + 1e-10)


def test_float32_memory_is_multiplied_in_float64() -> None:
    pairs = Pairs(*(leaf.float() if leaf.is_floating_point() else leaf for leaf in filled(5)))
    G = gaussian_rows(4, N, torch.float32, seed=7)
    exact = dense_inverse(Pairs(pairs.s.double(), pairs.y.double(), pairs.n_pairs))
    GG, GP, PP = memory_products(G, pairs)
    M = torch.from_numpy(metric_gramian(GG, GP, compact_inverse(PP, int(pairs.n_pairs))))
    torch.testing.assert_close(M, G.double() @ exact @ G.double().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_the_servers_memory_is_that_of_the_clients(seed: int) -> None:
    """Curved, flat and negative pairs in turn: asking the host and asking nobody give the same memory."""
    generator = torch.Generator().manual_seed(seed)
    mine = theirs = empty_pairs(3, 6, torch.float64)
    for sign in (1.0, 1.0, -1.0, 0.0, 1.0, 1.0):
        s, noise = torch.randn(2, 6, generator=generator, dtype=torch.float64)
        y = sign * (s + 0.3 * noise)
        mine, theirs = server_remembered(mine, s, y), remembered(theirs, s, y)
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


# ------------------------------------------------------------------------------- one pair, of which a number is kept


def test_one_pair_needs_no_more_than_its_scale() -> None:
    """Over many pairs, damped ones and ones without curvature among them, the rate is that of a memory of one pair."""
    generator = torch.Generator().manual_seed(0)
    n = 30
    pairs, gam = empty_pairs(1, n, torch.float64), torch.zeros((), dtype=torch.float64)
    n_damped = 0
    for step in range(60):
        s, g = (torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(2))
        noise = torch.randn(n, generator=generator, dtype=torch.float64)
        y = (2.0 * s if step % 3 else -0.5 * s) + noise  # every third one is curved the wrong way
        n_damped += bool((pairs.n_pairs > 0) & (s @ y < 0.1 * s @ s / scale(pairs)))
        pairs = remembered(pairs, s, y)
        found = one_pair_rate(s, y, g, gam)
        gam = found.scale
        if pairs.n_pairs == 0:  # the first one is curved the wrong way, and there is none to damp it against
            assert found.rate.isnan()
            continue
        torch.testing.assert_close(found.rate, lbfgs_rate(pairs, g), rtol=1e-10, atol=0.0)
        torch.testing.assert_close(gam, scale(pairs), rtol=1e-12, atol=0.0)
    assert n_damped > 10


def test_without_a_pair_the_rate_is_unknown_and_a_skipped_one_leaves_the_scale() -> None:
    g, nothing = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    unknown = one_pair_rate(nothing, nothing, g, torch.zeros((), dtype=torch.float64))
    assert unknown.rate.isnan()
    assert unknown.scale == 0.0
    kept = one_pair_rate(nothing, nothing, g, torch.tensor(0.25, dtype=torch.float64))
    assert kept.rate == 0.25 * 4.0
    assert kept.scale == 0.25


@pytest.mark.parametrize("gam", [0.0, 0.25])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_a_pair_that_is_no_number_is_skipped(gam: float, broken: float) -> None:
    s, g = gaussian_rows(2, N)
    y = torch.full_like(s, broken)
    found = one_pair_rate(s, y, g, torch.tensor(gam, dtype=torch.float64))
    assert found.scale == gam
    wanted = gam * g @ g if gam else torch.tensor(torch.nan, dtype=torch.float64)
    torch.testing.assert_close(found.rate, wanted, equal_nan=True)


def test_one_pair_rates_vectorise() -> None:
    generator = torch.Generator().manual_seed(1)
    s, y, g = (torch.randn(5, 8, generator=generator, dtype=torch.float64) for _ in range(3))
    gam = torch.tensor([0.0, 0.5, 2.0, 0.0, 1.0], dtype=torch.float64)
    together = vmap(one_pair_rate)(s, y, g, gam)
    for k in range(5):
        alone = one_pair_rate(s[k], y[k], g[k], gam[k])
        torch.testing.assert_close(together.rate[k], alone.rate, equal_nan=True)
        torch.testing.assert_close(together.scale[k], alone.scale)


@pytest.mark.parametrize(("min_curvature", "n_pairs"), [(0.0, 1), (0.59, 1), (0.61, 0)])
def test_a_pair_is_kept_from_the_curvature_asked_for_on(min_curvature: float, n_pairs: int) -> None:
    """s'y = 0.6 ||s|| ||y||."""
    s, y = torch.tensor([2.0, 0.0], dtype=torch.float64), torch.tensor([0.3, 0.4], dtype=torch.float64)
    pushed = push_pair(empty_pairs(3, 2, torch.float64), s, y, min_curvature=min_curvature)
    assert int(pushed.n_pairs) == n_pairs
    assert bool((pushed.s[-1] == s).all()) is bool(n_pairs)


def test_a_singular_direct_form_has_no_rate_and_raises_nothing() -> None:
    same = torch.ones(2, 3, dtype=torch.float64)  # the same pair twice
    y = torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    g = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert not lbfgs_direct_rate(Pairs(same, -y, torch.tensor(2)), g).isfinite()

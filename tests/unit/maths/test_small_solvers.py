"""Cubic steps, conjugate gradients, Woodbury solves, quantisers and sketches."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from dqnfed.maths.conjugate_gradient import cg_next, cg_solution, cg_start
from dqnfed.maths.cubic import cubic_step
from dqnfed.maths.quantise import Quantised, dequantised, quantised
from dqnfed.maths.sketches import draw_keys, sketch
from dqnfed.maths.woodbury import woodbury_solution


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(d: int, seed: int, *, ridge: float = 0.1) -> Tensor:
    A = normal(2 * d, d, seed=seed)
    return A.T @ A / d + ridge * torch.eye(d, dtype=torch.float64)


@pytest.mark.parametrize("lipschitz", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("seed", range(3))
def test_cubic_step_minimises_the_cubic_model(lipschitz: float, seed: int) -> None:
    A, g = positive(6, seed), normal(6, seed=100 + seed)
    found = cubic_step(A, g, lipschitz)
    h = -found.step
    slope = g + A @ h + lipschitz / 2 * h.norm() * h  # of the model; zero at its minimiser
    assert float(slope.norm()) <= 1e-10 * float(g.norm())
    assert found.radius == pytest.approx(float(h.norm()), rel=1e-9)

    def model(x: np.ndarray) -> float:
        y = torch.from_numpy(x)
        return float(g @ y + y @ A @ y / 2 + lipschitz / 6 * y.norm() ** 3)

    oracle = minimize(model, np.zeros(6), method="BFGS", options={"gtol": 1e-10})
    assert model(h.numpy()) <= oracle.fun + 1e-9 * (1 + abs(oracle.fun))


def test_cubic_step_of_a_zero_gradient_stays() -> None:
    found = cubic_step(positive(3, 0), torch.zeros(3, dtype=torch.float64), 1.0)
    assert torch.equal(found.step, torch.zeros(3, dtype=torch.float64))


def test_cubic_step_without_a_cube_is_newtons() -> None:
    A, g = positive(5, 4), normal(5, seed=4)
    torch.testing.assert_close(cubic_step(A, g, 0.0).step, torch.linalg.solve(A, g), rtol=1e-8, atol=1e-8)


def test_conjugate_gradients_end_after_as_many_steps_as_there_are_dimensions() -> None:
    A, b = positive(8, 1), normal(8, seed=2)
    found = cg_solution(lambda v: A @ v, b, n_iterations=8)
    torch.testing.assert_close(found, torch.linalg.solve(A, b), rtol=1e-8, atol=1e-8)


def test_conjugate_gradients_with_the_matrix_as_preconditioner_need_one_step() -> None:
    A, b = positive(8, 3), normal(8, seed=3)

    def precondition(v: Tensor) -> Tensor:
        solution: Tensor = torch.linalg.solve(A, v)
        return solution

    start = cg_start(b, precondition)
    done = cg_next(start, A @ start.direction, precondition)
    assert float(done.residual.norm()) <= 1e-12 * float(b.norm())
    torch.testing.assert_close(done.product, A @ done.solution, rtol=1e-12, atol=1e-12)


def test_conjugate_gradients_stop_at_negative_curvature_and_at_zero() -> None:
    b = normal(4, seed=5)
    assert torch.equal(cg_solution(lambda v: -v, b, n_iterations=5), torch.zeros(4, dtype=torch.float64))
    zero = torch.zeros(4, dtype=torch.float64)
    assert torch.equal(cg_solution(lambda v: v, zero, n_iterations=3), zero)


def test_conjugate_gradients_from_a_start_and_to_a_tolerance() -> None:
    A, b = positive(10, 6), normal(10, seed=6)
    x = torch.linalg.solve(A, b)
    torch.testing.assert_close(cg_solution(lambda v: A @ v, b, n_iterations=3, start=x), x, rtol=1e-10, atol=1e-10)
    loose = cg_solution(lambda v: A @ v, b, n_iterations=10, rtol=0.1)
    assert 1e-6 * float(b.norm()) < float((b - A @ loose).norm()) <= 0.1 * float(b.norm())


@pytest.mark.parametrize("m", [1, 4, 20])
def test_woodbury_equals_the_dense_solve(m: int) -> None:
    Y, g = normal(m, 12, seed=m), normal(12, seed=50)
    found = woodbury_solution(Y, g, weight=0.25, damping=0.1)
    dense = found.mu * torch.eye(12, dtype=torch.float64) + 0.25 * Y.T @ Y
    torch.testing.assert_close(found.step, torch.linalg.solve(dense, g), rtol=1e-9, atol=1e-9)
    assert found.mu == pytest.approx(0.1 * 0.25 * float(Y.square().sum()) / m)


def test_woodbury_of_zero_rows_is_a_gradient_step() -> None:
    g = normal(5, seed=1)
    found = woodbury_solution(torch.zeros(3, 5, dtype=torch.float64), g, weight=1.0, damping=0.5)
    torch.testing.assert_close(found.step, g / 0.5)


@pytest.mark.parametrize("bits", [1, 3, 8, 24])
def test_quantiser_is_off_by_one_width_at_most(bits: int) -> None:
    v, u = normal(200, seed=bits), torch.rand(200, generator=torch.Generator().manual_seed(bits), dtype=torch.float64)
    q = quantised(v, u, bits=bits)
    width = 2 * float(v.abs().max()) / (2**bits - 1)
    assert int(q.levels.min()) >= 0
    assert int(q.levels.max()) <= 2**bits - 1
    assert float((dequantised(q, bits=bits) - v).abs().max()) <= width * (1 + 1e-9)


def test_quantiser_is_unbiased() -> None:
    v, n_draws = normal(20, seed=9), 20_000
    u = torch.rand(n_draws, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows = quantised(v.expand(n_draws, 20), u, bits=2)
    width = 2 * float(v.abs().max()) / 3
    mean = dequantised(rows, bits=2).mean(0)  # a rounding deviates by width / 2 at most
    assert float((mean - v).abs().max()) <= 5 * (width / 2) / n_draws**0.5


def test_quantiser_sends_zero_exactly() -> None:
    q = quantised(torch.zeros(4, dtype=torch.float64), torch.full((4,), 0.7, dtype=torch.float64), bits=3)
    assert torch.equal(dequantised(q, bits=3), torch.zeros(4, dtype=torch.float64))
    assert isinstance(q, Quantised)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_sketches_preserve_products_on_average(kind: str) -> None:
    n_draws, rows, columns = 600, 4, 6
    total = torch.zeros(columns, columns, dtype=torch.float64)
    for seed in range(n_draws):
        S = sketch(draw_keys(torch.Generator().manual_seed(seed)), rows, columns, kind=kind, dtype=torch.float64)
        total += S.T @ S / n_draws
    deviation = (2.0 / (rows * n_draws)) ** 0.5  # of a diagonal entry of the mean; off-diagonal ones have less
    assert float((total - torch.eye(columns, dtype=torch.float64)).abs().max()) <= 5 * deviation


def test_sketch_entries_do_not_depend_on_the_shape() -> None:
    keys = draw_keys(torch.Generator().manual_seed(3))
    large = sketch(keys, 5, 40, kind="rademacher", dtype=torch.float64)
    small = sketch(keys, 5, 17, kind="rademacher", dtype=torch.float64)
    assert torch.equal(large[:, :17], small)  # padding changes nothing
    other = sketch(draw_keys(torch.Generator().manual_seed(4)), 5, 17, kind="rademacher", dtype=torch.float64)
    assert 0.2 < float((other == small).double().mean()) < 0.8


def test_gaussian_sketch_has_normal_moments() -> None:
    n = 40_000
    S = sketch(draw_keys(torch.Generator().manual_seed(8)), 4, n // 4, kind="gaussian", dtype=torch.float64) * 2.0
    for power, expected, deviation in ((1, 0.0, 1.0), (2, 1.0, 2**0.5), (4, 3.0, 96**0.5)):
        assert float((S**power).mean()) == pytest.approx(expected, abs=5 * deviation / n**0.5)
    neighbours = float((S[:, 1:] * S[:, :-1]).mean())
    assert abs(neighbours) <= 5 / n**0.5

"""Packed symmetric matrices and the systems that second-order servers solve."""

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.maths.symmetric import (
    damped_factor,
    eigenpairs,
    factored_solution,
    glm_hessian,
    n_packed,
    packed,
    packed_norm,
    positive_solution,
    projected_solution,
    unpacked,
)


def symmetric(d: int, seed: int, *, shift: float = 0.0) -> Tensor:
    M = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (M + M.T) / 2 + shift * torch.eye(d, dtype=torch.float64)


@pytest.mark.parametrize("d", [1, 2, 7, 30])
def test_packing_keeps_the_matrix_and_its_norm(d: int) -> None:
    M = symmetric(d, d)
    v = packed(M)
    assert v.shape == (n_packed(d),)
    assert torch.equal(unpacked(v, d), M)
    assert float(packed_norm(v, d)) == pytest.approx(float(torch.linalg.matrix_norm(M)), rel=1e-14)


def test_packing_vectorises() -> None:
    stack = torch.stack([symmetric(5, seed) for seed in range(3)])
    assert torch.equal(vmap(lambda v: unpacked(v, 5))(vmap(packed)(stack)), stack)


def test_glm_hessian_is_the_sum_of_weighted_outer_products() -> None:
    A = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = torch.linspace(0.1, 1.0, 9, dtype=torch.float64)
    expected = sum((w[i] * torch.outer(A[i], A[i]) for i in range(9)), 0.5 * torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(glm_hessian(A, w, 0.5), expected, rtol=1e-13, atol=1e-13)


def test_solutions_of_a_positive_system_agree_with_lu() -> None:
    H, b = symmetric(8, 1, shift=6.0), torch.arange(8, dtype=torch.float64)
    expected = torch.linalg.solve(H, b)
    torch.testing.assert_close(positive_solution(H, b), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(projected_solution(H, b, 1e-6), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(factored_solution(damped_factor(H), b), expected, rtol=1e-9, atol=1e-9)  # 1e-12 jitter


def test_projection_raises_small_and_negative_eigenvalues_to_mu() -> None:
    H = torch.diag(torch.tensor([-3.0, 1e-9, 2.0], dtype=torch.float64))
    b = torch.ones(3, dtype=torch.float64)
    expected = torch.tensor([1 / 0.1, 1 / 0.1, 0.5], dtype=torch.float64)
    torch.testing.assert_close(projected_solution(H, b, 0.1), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_an_indefinite_system_is_solved_finitely_and_downhill(seed: int) -> None:
    H, b = symmetric(6, seed), torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    step = positive_solution(H, b)
    assert bool(torch.isfinite(step).all())
    assert float(b @ step) > 0


def test_a_matrix_that_is_not_positive_gives_nan_for_its_client_alone() -> None:
    stack = torch.stack([symmetric(4, 0, shift=5.0), -torch.eye(4, dtype=torch.float64)])
    factors = vmap(damped_factor)(stack)
    assert bool(torch.isfinite(factors[0]).all())
    assert bool(factors[1].isnan().all())


def test_one_broken_matrix_does_not_cost_the_batch_its_eigenpairs() -> None:
    broken = torch.full((3, 3), torch.nan, dtype=torch.float64)
    values, vectors = vmap(eigenpairs)(torch.stack([symmetric(3, 2), broken]))
    rebuilt = vectors[0] @ torch.diag(values[0]) @ vectors[0].T
    torch.testing.assert_close(rebuilt, symmetric(3, 2), rtol=1e-12, atol=1e-12)
    assert bool(values[1].isnan().all())

"""The faster products are the plain ones, and copy nothing as large as the rows."""

from __future__ import annotations

import pytest
import torch

from dqnfed.accel.onednn import LEAST_WORK, linear
from dqnfed.accel.products import (
    BLOCK,
    device_gramian,
    device_products,
    fast_cross_products,
    fast_gramian,
)
from dqnfed.maths.gramian import gramian
from tests.helpers.rows import gaussian_rows


@pytest.mark.parametrize("n", [5, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_across_two_sets_of_rows(n: int, dtype: torch.dtype) -> None:
    G, H = gaussian_rows(5, n).to(dtype), gaussian_rows(3, n, seed=1).to(dtype)
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    for found in (torch.from_numpy(fast_cross_products(G, [H])[0]), device_products(G, H)):
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, G.double() @ H.double().T, rtol=rtol, atol=rtol * n**0.5)


@pytest.mark.parametrize("block", [1, 7, 100, 4096])
def test_the_block_size_does_not_matter(block: int) -> None:
    G, extra = gaussian_rows(5, 100), gaussian_rows(3, 100, seed=1)
    expected = torch.cat([G @ G.T, G @ extra.T], dim=1)
    torch.testing.assert_close(fast_gramian(G, extra, block=block), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(fast_gramian(G, (extra[:1], extra[1:]), block=block), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(device_products(G, extra, block=block), G @ extra.T, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_float64_whatever_the_rows_are(dtype: torch.dtype) -> None:
    G = gaussian_rows(6, 200_000, dtype)
    exact = G.double() @ G.double().T
    # one block of b products in float32 (or better) has a relative error below b eps, in practice sqrt(b) eps
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for M in (fast_gramian(G), device_gramian(G)):
        assert M.dtype == torch.float64
        assert (M - exact).abs().max() <= BLOCK**0.5 * eps * exact.diagonal().max()
        assert torch.equal(M, M.T)


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    """On a processor a panel of columns is computed by one core, whichever; the panels are summed in order."""
    G, extra, before = gaussian_rows(5, 90_001, torch.float32), gaussian_rows(70, 90_001), torch.get_num_threads()
    found = []
    try:
        for n_threads in (1, 2, 3):
            torch.set_num_threads(n_threads)
            found.append(fast_gramian(G, extra.float()))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_long_sum_keeps_what_float32_would_lose() -> None:
    n = 2**24 + 1000  # float32 stops counting ones at 2^24
    ones = torch.ones(1, dtype=torch.float32).expand(1, n)
    assert fast_gramian(ones).item() == n
    assert device_gramian(ones).item() == n


@pytest.mark.parametrize("n", [1, BLOCK, 3 * BLOCK + 17])
def test_the_fast_products_are_the_plain_ones(n: int) -> None:
    G = gaussian_rows(5, n, torch.float32)
    found, lengths = fast_gramian(G), G.double().norm(dim=1)
    assert ((found - gramian(G)).abs() <= 1e-6 * torch.outer(lengths, lengths)).all()


def test_rows_without_columns_have_products_of_zero() -> None:
    empty = torch.empty(3, 0)
    assert torch.equal(fast_gramian(empty), torch.zeros(3, 3, dtype=torch.float64))
    assert torch.equal(device_gramian(empty), torch.zeros(3, 3, dtype=torch.float64))


def test_no_second_copy_of_the_rows_is_made() -> None:
    G, others = gaussian_rows(8, 500_000, torch.float32), gaussian_rows(2, 500_000, torch.float32, seed=1)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        fast_gramian(G, others)
    largest = max(event.self_cpu_memory_usage for event in profile.function_events)
    assert 0 < largest <= G.nbytes / 8


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"one row per client.*\(3,\)"):
        fast_gramian(torch.ones(3))
    with pytest.raises(ValueError, match=r"as long as the rows of G, 4.*\(1, 5\)"):
        fast_gramian(torch.ones(2, 4), torch.ones(1, 5))


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("n_rows", [2, 64])
def test_a_linear_layer_by_onednn_is_the_product(n_rows: int, is_transposed: bool) -> None:
    rows, weight, bias = (gaussian_rows(*shape, torch.float32) for shape in ((n_rows, 400), (200, 400), (1, 200)))
    assert (rows.numel() * len(weight) >= LEAST_WORK) == (n_rows == 64)
    given = weight.t().contiguous().t() if is_transposed else weight
    expected = rows.double() @ weight.double().T
    bound = 400 * torch.finfo(torch.float32).eps * (rows.double().abs() @ weight.double().abs().T + bias.abs())
    assert ((linear(rows, given) - expected).abs() <= bound).all()
    assert ((linear(rows, given, bias[0]) - expected - bias).abs() <= bound).all()

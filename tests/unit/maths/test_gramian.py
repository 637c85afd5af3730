"""Products of the client matrix: right, in float64, in one pass and without a copy."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dqnfed.maths.directions import at_least_step, rate_matching_step
from dqnfed.maths.gramian import (
    BLOCK,
    combine,
    cross_products,
    gramian,
)
from tests.helpers.rows import agreeing_rows, gaussian_rows, positive_rates


class LargestAllocation(TorchDispatchMode):
    """Records the most elements that any operation wrote to memory of its own."""

    def __init__(self, *owned: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owned = {tensor.untyped_storage().data_ptr() for tensor in owned}
        self.n_elements = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in self.owned:
                self.n_elements = max(self.n_elements, leaf.numel())
        return result


@pytest.mark.parametrize("n", [5, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_across_two_sets_of_rows(n: int, dtype: torch.dtype) -> None:
    G, H = gaussian_rows(5, n).to(dtype), gaussian_rows(3, n, seed=1).to(dtype)
    found = cross_products(G, H)
    assert found.dtype == torch.float64
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(found, G.double() @ H.double().T, rtol=rtol, atol=rtol * n**0.5)


@pytest.mark.parametrize("block", [1, 7, 100, 4096])
def test_the_block_size_does_not_matter(block: int) -> None:
    G, extra = gaussian_rows(5, 100), gaussian_rows(3, 100, seed=1)
    expected = torch.cat([G @ G.T, G @ extra.T], dim=1)
    torch.testing.assert_close(gramian(G, extra, block=block), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gramian(G, (extra[:1], extra[1:]), block=block), expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_are_float64_whatever_the_rows_are(dtype: torch.dtype) -> None:
    G = gaussian_rows(6, 200_000, dtype)
    M, exact = gramian(G), G.double() @ G.double().T
    assert M.dtype == torch.float64
    # one block of b products in float32 (or better) has a relative error below b eps, in practice sqrt(b) eps
    eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    assert (M - exact).abs().max() <= BLOCK**0.5 * eps * exact.diagonal().max()
    assert torch.equal(M, M.T)


@pytest.mark.parametrize(("K", "n"), [(3, 10), (20, 2410)])
def test_few_products_of_float32_rows_are_exact(K: int, n: int) -> None:
    """The step of an ill-conditioned Gramian is then the same as from products in whole numbers (`privacy.secure`)."""
    G, weights = agreeing_rows(K, n, torch.float32, 0), torch.randn(K, dtype=torch.float64)
    exact = G.double() @ G.double().T
    assert (gramian(G) - exact).abs().max() <= 1e-14 * exact.abs().max()
    assert torch.equal(combine(weights, G), (weights @ G.double()).float())


def test_a_long_sum_keeps_what_float32_would_lose() -> None:
    n = 2**24 + 1000  # float32 stops counting ones at 2^24
    ones = torch.ones(1, dtype=torch.float32).expand(1, n)
    assert gramian(ones).item() == n


def test_combination_is_the_weighted_sum_of_rows() -> None:
    G, weights = gaussian_rows(4, 50, torch.float32), positive_rates(4)
    assert combine(weights, G).dtype == torch.float32
    torch.testing.assert_close(combine(weights, G), (weights[:, None] * G).sum(dim=0).float())
    assert torch.equal(combine(weights, G), combine(weights, G))


@pytest.mark.parametrize("step", [rate_matching_step, at_least_step])
def test_the_server_step_makes_no_second_copy_of_the_rows(step: Callable[[Tensor, Tensor], object]) -> None:
    K, n = 8, 1_000_000
    G, d = agreeing_rows(K, n, torch.float32), positive_rates(K)
    with LargestAllocation(G):
        step(G[:, :100], d)  # first calls import modules
    tracemalloc.start()  # sees numpy's memory, as the mode sees torch's
    with LargestAllocation(G) as largest:
        step(G, d)
    _, numpy_peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert largest.n_elements <= n  # the step itself
    assert numpy_peak <= n
    with LargestAllocation(G) as largest:
        G.clone()
    assert largest.n_elements == K * n  # what a copy would have shown


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"one row per client.*\(3,\)"):
        gramian(torch.ones(3))
    with pytest.raises(ValueError, match=r"as long as the rows of G, 4.*\(1, 5\)"):
        gramian(torch.ones(2, 4), torch.ones(1, 5))
    with pytest.raises(ValueError, match="one weight per row"):
        combine(torch.ones(3), torch.ones(2, 4))

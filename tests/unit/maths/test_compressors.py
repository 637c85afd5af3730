"""FedNL's compressors: contraction, unbiasedness, and what they really cost."""

import pytest
import torch
from torch import Tensor

from dqnfed.core.tensors import stack
from dqnfed.maths.compressors import Compressor, compressed, compressor, expanded, mean_expanded, moved_by
from dqnfed.maths.symmetric import n_packed, packed, packed_norm, unpacked

D = 9


def triangle(seed: int, d: int = D) -> Tensor:
    M = torch.randn(d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return packed((M + M.T) / 2)


def uniform(seed: int, d: int = D) -> Tensor:
    return torch.rand(n_packed(d), generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)


def through(how: Compressor, v: Tensor, seed: int = 0) -> Tensor:
    return expanded(how, compressed(how, v, uniform(seed, how.d)))


@pytest.mark.parametrize("kind_and_size", [("rank", 1), ("rank", 4), ("top", 1), ("top", 12), ("top", n_packed(D))])
@pytest.mark.parametrize("seed", range(10))
def test_contractive_compressors_contract(kind_and_size: tuple[str, int], seed: int) -> None:
    how, v = compressor(*kind_and_size, D), triangle(seed)
    squared = packed_norm(v, D) ** 2
    assert packed_norm(through(how, v) - v, D) ** 2 <= (1 - how.delta) * squared * (1 + 1e-12)
    assert packed_norm(through(how, v), D) ** 2 <= squared * (1 + 1e-12)


@pytest.mark.parametrize(
    "how", [compressor("top", n_packed(D), D), compressor("rank", D, D), compressor("identity", 1, D)]
)
def test_a_compressor_that_keeps_everything_is_the_identity(how: Compressor) -> None:
    torch.testing.assert_close(through(how, triangle(3)), triangle(3), rtol=1e-12, atol=1e-12)


def test_top_keeps_the_largest_entries_of_the_upper_triangle() -> None:
    v = triangle(5)
    kept = through(compressor("top", 7, D), v)
    smallest_kept = v.abs()[kept != 0].min()
    assert int((kept != 0).sum()) == 7
    assert bool((v.abs()[kept == 0] <= smallest_kept).all())


def test_rank_is_the_best_approximation_of_its_rank() -> None:
    v = triangle(6)
    values = torch.linalg.eigvalsh(unpacked(v, D)).abs().sort(descending=True).values
    error = packed_norm(through(compressor("rank", 3, D), v) - v, D)
    assert float(error) == pytest.approx(float(values[3:].norm()), rel=1e-12)  # Eckart & Young 1936


def test_random_is_unbiased_with_the_stated_variance() -> None:
    how, v, n_draws = compressor("random", 9, D), triangle(7), 4000
    drawn = torch.stack([through(how, v, seed) for seed in range(n_draws)])
    spread = (how.variance * v.square()).sqrt() / n_draws**0.5  # of each entry's mean
    assert bool(((drawn.mean(0) - v).abs() <= 5 * spread + 1e-12).all())
    second_moment = float(drawn.square().sum(1).mean() / v.square().sum())
    assert second_moment == pytest.approx(how.variance + 1, rel=5 / n_draws**0.5)


def test_random_that_keeps_everything_learns_at_full_rate() -> None:
    assert compressor("random", n_packed(D), D).default_alpha == 1.0
    assert compressor("random", 9, D).default_alpha == pytest.approx(9 / n_packed(D))
    assert compressor("top", 9, D).default_alpha == compressor("rank", 1, D).default_alpha == 1.0


@pytest.mark.parametrize("kind", ["rank", "top", "random", "identity"])
def test_mean_of_codes_is_the_mean_of_their_matrices(kind: str) -> None:
    how = compressor(kind, 3, D)
    codes = [compressed(how, triangle(seed), uniform(seed)) for seed in range(5)]
    expected = torch.stack([expanded(how, code) for code in codes]).sum(0) / 8
    torch.testing.assert_close(mean_expanded(how, stack(codes), 8), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["rank", "top", "random", "identity"])
def test_moving_by_a_code_adds_its_matrix(kind: str) -> None:
    how, v = compressor(kind, 4, D), triangle(1)
    code = compressed(how, triangle(2), uniform(2))
    torch.testing.assert_close(moved_by(how, v, code, 0.3), v + 0.3 * expanded(how, code), rtol=1e-12, atol=1e-12)


def test_bits_count_values_and_indices() -> None:
    assert compressor("top", 984, 123).bits(32) == 984 * (32 + 13)  # 7626 entries need 13 bits
    assert compressor("random", 984, 123).bits(32) == 984 * (32 + 13)
    assert compressor("rank", 2, 123).bits(32) == 2 * 124 * 32
    assert compressor("identity", 1, 123).bits(32) == 7626 * 32


@pytest.mark.parametrize(("kind", "size"), [("rank", 10), ("top", 46), ("random", 0), ("best", 1)])
def test_sizes_that_do_not_fit_are_refused(kind: str, size: int) -> None:
    with pytest.raises(ValueError, match=kind):
        compressor(kind, size, D)

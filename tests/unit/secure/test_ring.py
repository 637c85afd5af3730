"""Numbers in the ring modulo 2^64: what fits comes back, what does not is refused, and sums never wrap unseen."""

from __future__ import annotations

import numpy as np
import pytest

from dqnfed.secure.ring import (
    FRACTION_BITS,
    RingOverflow,
    check_sum,
    decoded,
    encoded,
    product,
    signed,
    weighted_sum,
    whole_weights,
)

MODULUS = 2**64


@pytest.mark.parametrize("bits", [1, 15, 30, 40])
def test_values_come_back_to_half_a_unit_of_the_last_place(bits: int) -> None:
    values = np.random.default_rng(bits).uniform(-1.0, 1.0, 1000)
    assert np.abs(decoded(encoded(values, bits=bits), bits=bits) - values).max() <= 0.5 / 2**bits


@pytest.mark.parametrize("bad", [1.001, -1.001, np.nan, np.inf])
def test_a_value_outside_the_stated_bound_is_refused(bad: float) -> None:
    with pytest.raises(RingOverflow, match="at most 1 in size"):
        encoded(np.array([0.5, bad]))


def test_a_bound_that_no_word_holds_is_refused() -> None:
    with pytest.raises(RingOverflow, match="needs more than 62 bits"):
        encoded(np.zeros(1), bits=40, bound=2.0**22)
    encoded(np.array([2.0**21]), bits=40, bound=2.0**21)


def test_products_are_those_of_whole_numbers_modulo_2_to_the_64() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 2**64, (2, 50), dtype=np.uint64)
    assert product(a, b) == sum(int(x) * int(y) for x, y in zip(a, b, strict=True)) % MODULUS
    assert [signed(word) for word in (0, 1, 2**63 - 1, 2**63, 2**64 - 1)] == [0, 1, 2**63 - 1, -(2**63), -1]


@pytest.mark.parametrize("K", [1, 3, 20, 500, 5000])
@pytest.mark.parametrize("seed", range(3))
def test_a_weighted_sum_of_unit_vectors_never_wraps(K: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(K) * 10.0 ** rng.uniform(-6, 6, K)
    whole, scale = whole_weights(weights)
    check_sum(whole)
    worst = [encoded(np.array([1.0 if w > 0 else -1.0])) for w in whole]  # every term has the same sign
    found = float(decoded(weighted_sum(whole, worst))[0]) * scale
    assert found == pytest.approx(np.abs(weights).sum(), rel=K * 2.0**-18)


def test_whole_weights_are_as_exact_as_the_ring_allows() -> None:
    weights = np.random.default_rng(1).standard_normal(10)
    whole, scale = whole_weights(weights)
    assert np.abs(whole * scale - weights).max() <= 2.0**-24 * np.abs(weights).max()
    assert sum(abs(int(w)) for w in whole) << FRACTION_BITS >= 2**59, "bits are left unused"


def test_weights_that_could_wrap_or_are_no_numbers_are_refused() -> None:
    with pytest.raises(RingOverflow, match="may exceed"):
        check_sum(np.array([2**33, -(2**33)]))
    with pytest.raises(RingOverflow, match="must be finite"):
        whole_weights(np.array([1.0, np.nan]))
    whole, scale = whole_weights(np.zeros(3))
    assert not whole.any()
    assert scale == 0.0

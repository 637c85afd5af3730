"""No sum that is released is nearly one client's row, and neither is what follows from several of them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from dqnfed.secure.release import Revealing, check_release, effective_number, least_effective_number


def test_the_effective_number_counts_equal_weights() -> None:
    for K in (1, 2, 7):
        assert effective_number(np.full(K, -0.3)) == pytest.approx(K)
    assert effective_number(np.zeros(3)) == 0.0
    assert effective_number(np.array([1.0, 1e-9])) == pytest.approx(1.0)


@pytest.mark.parametrize(("q", "K"), [(2, 3), (2, 6), (3, 5), (3, 7)])
@pytest.mark.parametrize("seed", range(3))
def test_no_mixture_of_sums_has_a_smaller_effective_number(q: int, K: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sums = rng.standard_normal((q, K))
    least = least_effective_number(sums)
    mixtures = rng.standard_normal((4000, q))
    tried = min(effective_number(c @ sums) for c in mixtures)
    assert least <= tried * (1 + 1e-9)
    start = mixtures[np.argmin([effective_number(c @ sums) for c in mixtures])]
    searched = minimize(lambda c: effective_number(c @ sums), start, method="Nelder-Mead").fun
    assert least == pytest.approx(min(searched, least), rel=1e-9)
    assert searched <= least * 1.05 or K > 6, "the least number is reached"


def test_one_clients_row_is_not_released() -> None:
    with pytest.raises(Revealing, match=r"nearly the row of one client, the reply at place 2"):
        check_release(np.array([0.01, 0.0, 1.0, 0.01]), [])
    check_release(np.array([1.0, 0.0, 1.0, 0.01]), [])


def test_two_sums_that_differ_by_one_client_are_not_released() -> None:
    everybody = np.ones(6)
    without = everybody.copy()
    without[3] = 0.0
    check_release(without, [])
    with pytest.raises(Revealing, match="together give one client's row"):
        check_release(without, [everybody])


def test_as_many_sums_as_clients_leave_nothing_unknown() -> None:
    rng = np.random.default_rng(0)
    sums = [1.0 + 0.3 * rng.standard_normal(4) for _ in range(3)]
    check_release(sums[1], sums[:1])
    with pytest.raises(Revealing, match="at most 2 may be released"):
        check_release(sums[2], sums[:2])
    check_release(2.0 * sums[0], sums[:2])  # what is known already

"""No sum that is released is nearly one client's row, and neither is what follows from several of them."""

from __future__ import annotations

import numpy as np
import pytest

from dqnfed.secure.release import Revealing, check_release, effective_number, least_part_of_others


def test_the_effective_number_counts_equal_weights() -> None:
    for K in (1, 2, 7):
        assert effective_number(np.full(K, -0.3)) == pytest.approx(K)
    assert effective_number(np.zeros(3)) == 0.0
    assert effective_number(np.array([1.0, 1e-9])) == pytest.approx(1.0)


@pytest.mark.parametrize(("q", "K"), [(1, 4), (2, 3), (2, 6), (3, 7), (5, 300)])
@pytest.mark.parametrize("seed", range(3))
def test_no_mixture_of_sums_is_nearer_to_one_clients_row(q: int, K: int, seed: int) -> None:
    """Against least squares: the mixture whose weight for client k is 1 and whose other weights are shortest."""
    sums = np.random.default_rng(seed).standard_normal((q, K))
    lengths = []
    for k in range(K):
        rest = np.delete(sums, k, axis=1)
        # minimise |c' rest| with c' sums[:, k] = 1
        shortest = np.linalg.solve(rest @ rest.T + 1e-12 * np.eye(q), sums[:, k])
        mixture = shortest / (shortest @ sums[:, k])
        assert mixture @ sums[:, k] == pytest.approx(1.0)
        lengths.append(np.linalg.norm(mixture @ rest))
    least, place = least_part_of_others(sums)
    assert least == pytest.approx(min(lengths), rel=1e-5)
    assert place == int(np.argmin(lengths))


def test_many_small_weights_do_not_hide_a_large_one() -> None:
    """Of 1,000 clients one has the weight 1 and all others 1/5,000: an effective number of 1.4, and 0.6 % of others."""
    weights = np.full(1000, 1 / 5000)
    weights[17] = 1.0
    assert effective_number(weights) > 1.2
    with pytest.raises(Revealing, match=r"place 17: .* the others' part is 0\.006"):
        check_release(weights, [])


def test_three_sums_of_many_clients_that_give_a_row_together() -> None:
    """No two of them do: what tells is a mixture of three."""
    rng, K = np.random.default_rng(0), 300
    first, second = 1.0 + 0.3 * rng.standard_normal((2, K))
    third = 0.4 * first + 0.6 * second
    third[5] += 0.5
    check_release(third, [first])
    check_release(third, [second])
    with pytest.raises(Revealing, match="together give one client's row, the reply at place 5"):
        check_release(third, [first, second])


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

"""Sums of what clients measured: exact mean and deviation, words that say nothing else, too few clients refused."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dqnfed.core.algorithm import Theta
from dqnfed.secure.pads import Message, PadKey, evaluation_of, fresh_nonce, message_of
from dqnfed.secure.release import Revealing
from dqnfed.secure.ring import RingOverflow, Words
from dqnfed.secure.sums import LARGEST, Moments, Number, moments, padded_numbers, rounded_score, unpadding_numbers

KEY = PadKey(bytes(range(32)))


def message(n_clients: int) -> Message:
    return evaluation_of("run", 3, ["scores"], {}, range(n_clients), fresh_nonce())


def exchanged(values: list[list[float]], squared: list[bool]) -> tuple[list[Words], Words, list[Moments]]:
    """Return the clients' words, the sum of their pads, and what the server makes of them; [client][number]."""
    asked = message(len(values))
    words = [padded_numbers(KEY, asked, k, list(map(Number, row, squared))) for k, row in enumerate(values)]
    pads = unpadding_numbers(KEY, asked, 1, range(len(values)), squared)
    return words, pads, moments(words, pads, squared, [len(values)] * len(squared))


@pytest.mark.parametrize("n_clients", [5, 20])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_mean_and_deviation_are_exact(n_clients: int, scale: float) -> None:
    drawn = scale * np.random.default_rng(0).standard_normal((n_clients, 3)) + 5.0
    *_, (first, second, third) = exchanged(drawn.tolist(), [True, False, True])
    rounding = 2.0**-48  # of a number; a mean and a deviation err by no more
    for column, found in ((0, first), (1, second), (2, third)):
        assert found.n == n_clients
        assert found.mean == pytest.approx(drawn[:, column].mean(), rel=1e-14, abs=rounding)
    for column, found in ((0, first), (2, third)):
        assert found.std == pytest.approx(drawn[:, column].std(), rel=1e-12, abs=2 * rounding)
    assert math.isnan(second.std)


def test_equal_numbers_have_no_deviation_and_one_that_differs_a_little_has() -> None:
    same, close = [[1e6 + 0.1]] * 6, [[1e6 + 0.1]] * 5 + [[1e6 + 0.1 + 2.0**-20]]
    assert exchanged(same, [True])[2][0].std == 0.0
    assert exchanged(close, [True])[2][0].std == pytest.approx(2.0**-20 * math.sqrt(5) / 6, rel=1e-9)


def test_the_servers_view_follows_from_the_sums() -> None:
    """Other numbers with the same sums, whoever has which: the same results, from words that pass for random."""
    values, results = [[60.0], [70.0], [80.0], [95.0], [99.0]], set()
    words: list[Words] = []
    for order in list(permutations(values))[::5]:
        each, pads, found = exchanged(list(order), [True])
        results.add(found[0])
        words += [*each, pads]
    assert len(results) == 1
    assert stats.chisquare(np.bincount(np.concatenate(words).view(np.uint8).ravel(), minlength=256)).pvalue > 1e-4


def test_sums_of_too_few_clients_are_not_given() -> None:
    number, squared = [Number(1.0)], [Number(1.0, True)]
    with pytest.raises(Revealing, match="over 3 clients or more"):
        padded_numbers(KEY, message(2), 0, number)
    with pytest.raises(Revealing, match="over 5 clients or more"):
        padded_numbers(KEY, message(4), 0, squared)
    asked = message(6)
    for clients in ([0, 1, 1, 2], [0, 1, 2, 9], [1, 2, 3]):
        with pytest.raises(Revealing, match="itself among them"):
            unpadding_numbers(KEY, asked, 0, clients, [False])
    with pytest.raises(Revealing, match="over 5 clients or more"):
        unpadding_numbers(KEY, asked, 0, [0, 1, 2, 3], [True])


def test_every_evaluation_has_pads_of_its_own() -> None:
    nonce, models = fresh_nonce(), {"theta": torch.ones(3)}
    known: list[Any] = ["run", 2, ["loss"], models, (0, 1, 2), nonce]
    others: list[Any] = ["other", 3, ["scores"], {"theta": torch.zeros(3)}, (0, 1, 3), fresh_nonce()]
    first = evaluation_of(*known)
    lists = [[*known[:k], other, *known[k + 1 :]] for k, other in enumerate(others)]
    changed = [evaluation_of(*given) for given in lists]
    trained = message_of("run", 2, 0, Theta(models["theta"]), (0, 1, 2), nonce)
    assert len({message.digest for message in (first, *changed, trained)}) == 8
    assert evaluation_of(*known) == first


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.0 * LARGEST])
def test_numbers_without_room_are_refused(value: float) -> None:
    with pytest.raises(RingOverflow, match="cannot be summed under pads"):
        padded_numbers(KEY, message(3), 0, [Number(value)])


def test_scores_are_rounded_so_that_their_sum_is_no_knapsack() -> None:
    """With sizes 59, 61, 67 and 71 the exact sum of four accuracies tells all of them; the rounded one many at once."""
    sizes = (59, 61, 67, 71)
    shares = [100.0 * np.arange(n - 15, n) / n for n in sizes]
    rounded = [np.array([rounded_score(share) for share in each]) for each in shares]
    exact, coarse = (
        np.unique((a[:, None, None, None] + b[:, None, None] + c[:, None] + d).round(10)).size
        for a, b, c, d in (shares, rounded)
    )
    assert exact > 0.99 * 15**4
    assert coarse < 0.3 * 15**4
    assert all(np.abs(np.subtract(one, other)).max() <= 2.0**-8 for one, other in zip(shares, rounded, strict=True))
    assert rounded_score(math.inf) == math.inf

"""The report's fairness measures: equal to the library's for equal weights, to repeated clients for whole weights."""

import numpy as np
import pytest
from numpy.typing import NDArray

from dqnfed.maths.fairness import fairness_summary
from dqnfed.report.measures import MEASURES, measures

SHARED = [m.key for m in MEASURES if m.key != "improved"]


def accuracies(K: int, seed: int) -> NDArray[np.float64]:
    return np.random.default_rng(seed).uniform(0, 100, K)


@pytest.mark.parametrize("K", [1, 2, 7, 19, 20, 31, 100, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_equal_weights_give_the_librarys_values(K: int, seed: int) -> None:
    a = accuracies(K, seed)
    oracle = fairness_summary(a)
    for found in (measures(a), measures(a, np.full(K, 7.0))):
        assert {key: found[key] for key in SHARED} == pytest.approx({key: oracle[key] for key in SHARED}, abs=1e-9)


@pytest.mark.parametrize("a", [[0.0, 0.0, 0.0], [0.0, 50.0, 0.0], [3.0, 3.0, 3.0]])
def test_degenerate_vectors_agree_with_the_library(a: list[float]) -> None:
    oracle, found = fairness_summary(a), measures(np.array(a))
    assert {key: found[key] for key in SHARED} == pytest.approx({key: oracle[key] for key in SHARED}, abs=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_whole_weights_count_a_client_as_often(seed: int) -> None:
    a = accuracies(20, seed)
    weights = np.random.default_rng(seed + 100).permutation([2] * 10 + [6] * 10)  # 80 in all: tails of 4 and 8 clients
    found, oracle = measures(a, weights.astype(np.float64)), fairness_summary(np.repeat(a, weights))
    assert {key: found[key] for key in SHARED} == pytest.approx({key: oracle[key] for key in SHARED}, abs=1e-9)


def test_clients_without_an_accuracy_are_left_out() -> None:
    a = np.array([10.0, np.nan, 30.0])
    assert measures(a) == measures(np.array([10.0, 30.0]))
    assert measures(a, np.array([1.0, 5.0, 3.0])) == measures(np.array([10.0, 30.0]), np.array([1.0, 3.0]))


def test_nothing_measured_gives_nothing() -> None:
    assert measures(np.array([])) == {}
    assert measures(np.array([np.nan])) == {}
    assert measures(np.array([1.0, 2.0]), np.zeros(2)) == {}

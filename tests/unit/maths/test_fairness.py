"""Fairness measures against their definitions, known values and each other."""

import math

import numpy as np
import pytest
import torch

from dqnfed.maths import fairness
from dqnfed.maths.fairness import fairness_summary, improved_share

SUMMARY_KEYS = (
    *("mean", "std", "worst10", "best10", "worst5", "best5", "angle", "kl", "jain", "gini", "cov"),
    *("min", "max", "weighted_mean"),
)


def accuracies(K: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.random.default_rng(seed).uniform(20.0, 100.0, size=K)


def test_known_values() -> None:
    found = fairness_summary([50.0, 60.0, 70.0, 80.0, 90.0])
    assert found["mean"] == 70.0
    assert found["std"] == pytest.approx(14.14213562, abs=5e-9)
    assert found["angle"] == pytest.approx(11.42175366, abs=5e-9)
    assert found["kl"] == pytest.approx(0.02065188, abs=5e-9)
    assert found["cov"] == pytest.approx(14.14213562 / 70.0, abs=1e-9)
    three = fairness_summary([64.26, 87.03, 89.97])
    assert three["mean"] == pytest.approx(80.42, abs=1e-2)
    assert three["std"] == pytest.approx(11.4897, abs=1e-4)


@pytest.mark.parametrize("K", [1, 2, 10, 31, 100])
def test_measures_follow_their_definitions(K: int) -> None:
    a = accuracies(K)
    assert fairness.std(a) == pytest.approx(math.sqrt(sum((x - a.mean()) ** 2 for x in a) / K))
    cosine = a.sum() / (math.sqrt(K) * math.sqrt(sum(x * x for x in a)))
    assert fairness.angle(a) == pytest.approx(math.degrees(math.acos(min(cosine, 1.0))), abs=1e-5)
    assert fairness.kl(a) == pytest.approx(sum(x / a.sum() * math.log(K * x / a.sum()) for x in a), abs=1e-12)
    assert fairness.jain(a) == pytest.approx(a.sum() ** 2 / (K * (a**2).sum()))
    gaps = sum(abs(x - y) for x in a for y in a)
    assert fairness.gini(a) == pytest.approx(gaps / (2 * K * K * a.mean()), abs=1e-12)


def test_jain_angle_and_variation_are_one_measure() -> None:
    a = accuracies(40)
    cov = fairness.coefficient_of_variation(a)
    assert fairness.jain(a) == pytest.approx(1 / (1 + cov**2))
    assert math.tan(math.radians(fairness.angle(a))) == pytest.approx(cov)


def test_kl_is_half_the_squared_variation_for_small_spreads() -> None:
    a = 50.0 + 0.1 * np.random.default_rng(0).normal(size=1000)
    assert fairness.kl(a) == pytest.approx(fairness.coefficient_of_variation(a) ** 2 / 2, rel=1e-2)


@pytest.mark.parametrize(
    ("K", "share", "n_tail"), [(10, 0.1, 1), (31, 0.1, 3), (100, 0.05, 5), (5, 0.1, 1), (100, 0.29, 29)]
)
def test_tails_hold_the_floor_of_their_share_and_one_at_least(K: int, share: float, n_tail: int) -> None:
    a = np.random.default_rng(K).permutation(K).astype(np.float64)
    assert fairness.worst(a, share) == np.arange(n_tail).mean()
    assert fairness.best(a, share) == np.arange(K - n_tail, K).mean()
    assert fairness.worst(a, share, higher_is_better=False) == fairness.best(a, share)


def test_equal_values_are_perfectly_fair() -> None:
    found = fairness_summary(np.full(7, 0.3))
    assert (found["std"], found["angle"], found["gini"], found["cov"]) == pytest.approx((0.0, 0.0, 0.0, 0.0), abs=1e-12)
    assert (found["kl"], found["jain"]) == pytest.approx((0.0, 1.0), abs=1e-12)
    assert found["kl"] >= 0.0


def test_one_client_with_everything_is_as_unfair_as_it_gets() -> None:
    found = fairness_summary([0.0, 0.0, 5.0, 0.0])
    assert found["kl"] == pytest.approx(math.log(4))
    assert found["jain"] == pytest.approx(1 / 4)
    assert found["gini"] == pytest.approx(3 / 4)
    assert found["cov"] == pytest.approx(math.sqrt(3))


def test_a_model_that_serves_nobody_is_not_called_fair() -> None:
    found = fairness_summary(torch.zeros(4))
    assert found["angle"] == 90.0
    assert (found["kl"], found["jain"], found["gini"], found["cov"]) == (math.log(4), 0.25, 0.75, math.sqrt(3))
    assert all(math.isfinite(value) for value in found.values())


def test_negative_values_have_no_shares() -> None:
    found = fairness_summary([-1.0, 2.0, 3.0])
    assert all(math.isnan(found[name]) for name in ("kl", "jain", "gini"))
    assert found["mean"] == pytest.approx(4 / 3)


def test_summary_takes_tensors_and_arrays_alike() -> None:
    a = accuracies(30)
    weights = np.arange(30) + 1
    found = fairness_summary(a, weights)
    assert tuple(found) == SUMMARY_KEYS
    assert all(type(value) is float for value in found.values())
    assert found == fairness_summary(torch.from_numpy(a), torch.from_numpy(weights))
    assert found["weighted_mean"] == pytest.approx(np.average(a, weights=weights))
    assert fairness_summary(a)["weighted_mean"] == found["mean"]
    assert (found["min"], found["max"]) == (a.min(), a.max())


@pytest.mark.parametrize("unit", [1e-300, 1e-3, 1e300])
def test_relative_measures_have_no_unit(unit: float) -> None:
    a = accuracies(12) / 100.0
    for measure in (fairness.kl, fairness.jain, fairness.gini):
        assert measure(unit * a) == pytest.approx(measure(a), rel=1e-9)


def test_values_that_are_missing_are_refused() -> None:
    with pytest.raises(ValueError, match="client 1 of 3 has nan; leave clients"):
        fairness_summary([1.0, math.nan, 2.0])
    with pytest.raises(ValueError, match="client 0 of 1 has inf"):
        fairness.mean(torch.tensor([torch.inf]))
    with pytest.raises(ValueError, match=r"K >= 1.*\(0,\)"):
        fairness.mean([])
    with pytest.raises(ValueError, match=r"lies in \(0, 1\], but is 10"):
        fairness.worst([1.0], 10)
    with pytest.raises(ValueError, match="pass the example counts"):
        fairness_summary([1.0, 2.0], [0.0, 0.0])


def test_rho_counts_clients_that_did_not_lose() -> None:
    assert improved_share([1.0, 1.0, 1.0, 1.0], [0.9, 1.0, 1.1, math.nan]) == 0.5
    assert improved_share(torch.tensor([math.inf, 1.0]), torch.tensor([5.0, math.inf])) == 0.5
    with pytest.raises(ValueError, match="2 and 1"):
        improved_share([1.0, 2.0], [1.0])


@pytest.mark.parametrize(("K", "n_tenth", "n_twentieth"), [(5, 1, 1), (15, 1, 1), (29, 2, 1), (40, 4, 2)])
def test_tails_of_the_summary_are_rounded_down_to_one_client_at_least(K: int, n_tenth: int, n_twentieth: int) -> None:
    values = np.arange(K, dtype=np.float64) ** 2
    found = fairness_summary(np.roll(values, 3))
    assert found["worst10"] == pytest.approx(values[:n_tenth].mean())
    assert found["worst5"] == pytest.approx(values[:n_twentieth].mean())
    assert found["best10"] == pytest.approx(values[K - n_tenth :].mean())
    assert found["best5"] == pytest.approx(values[K - n_twentieth :].mean())

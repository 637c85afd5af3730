"""The paired test over seeds, against scipy's and against Holm's own example of step-down."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from dqnfed.report.comparison import group
from dqnfed.report.reader import read_runs
from dqnfed.report.significance import adjusted, against_reference, holm, paired_difference
from tests.helpers.runs import write_comparison


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_equals_students_paired_test(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = rng.normal(size=n), rng.normal(size=n)
    found = paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    oracle = stats.ttest_rel(a, b)
    interval = oracle.confidence_interval(0.95)
    assert found is not None
    assert (found.p, found.low, found.high) == pytest.approx((oracle.pvalue, interval.low, interval.high))
    assert found.difference == pytest.approx(float(np.mean(a - b)))


def test_only_shared_seeds_count() -> None:
    found = paired_difference({0: 1.0, 1: 2.0, 2: 3.5, 9: 100.0}, {0: 0.0, 1: 1.5, 2: 2.0, 3: -50.0})
    assert found is not None
    assert found.n_seeds == 3
    assert paired_difference({0: 1.0, 1: math.nan}, {0: 1.0, 1: 2.0}) is None


@pytest.mark.parametrize("n", [2, 5, 6, 10])
def test_equal_differences_have_the_p_value_of_the_sign_test(n: int) -> None:
    theirs = {seed: float(seed) for seed in range(n)}
    same, more = paired_difference(theirs, theirs), paired_difference({s: v + 2 for s, v in theirs.items()}, theirs)
    assert same is not None
    assert more is not None
    assert (same.p, same.low, same.high) == (1.0, 0.0, 0.0)
    assert more.p == pytest.approx(stats.binomtest(n, n).pvalue)
    assert math.isnan(more.low) == math.isnan(more.high) == (more.p >= 0.05)  # six seeds or more have an interval
    (alone,), (first, _) = adjusted([more]), adjusted([more, more])
    assert alone == pytest.approx(more, nan_ok=True)
    assert math.isnan(first.low) == (2 * more.p >= 0.05)  # which Holm's rule may take away


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_a_clear_difference_is_found_and_none_is_not(tmp_path: Path) -> None:
    write_comparison(tmp_path, algorithms=("fedavg", "dqn-fed"), seeds=range(5), rounds=40)
    (experiment,) = group(read_runs([tmp_path]).runs).experiments
    worst, reference = against_reference(experiment, "worst10", experiment.focus)
    assert reference is None
    assert worst is not None
    assert worst.difference < 0
    assert worst.p < 0.05

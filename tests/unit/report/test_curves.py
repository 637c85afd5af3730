"""Thinned curves: exact at both ends, means and extremes kept in between."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dqnfed.report.curves import N_POINTS, seed_curve, window_edges
from dqnfed.report.reader import read_run
from tests.helpers.runs import write_run


@pytest.mark.parametrize("n", [1, 2, 5, 239, 240, 241, 1000, 10_001])
@pytest.mark.parametrize("n_points", [60, 240])
def test_windows_cover_every_round_once(n: int, n_points: int) -> None:
    edges = window_edges(n, n_points)
    assert edges[0] == 0
    assert edges[-1] == n
    assert all(b > a for a, b in pairwise(edges))
    assert len(edges) - 1 <= n_points
    if n > 1:
        assert edges[1] == 1
        assert edges[-2] == n - 1


def test_short_runs_are_shown_as_they_are(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(seed), seed=seed, rounds=20))[0][0] for seed in range(3)]
    curve = seed_curve(runs, "mean")
    assert curve is not None
    values = np.stack([run.history["mean"] for run in runs])
    assert curve.rounds.tolist() == list(range(21))
    assert curve.mean == pytest.approx(values.mean(axis=0))
    assert curve.low.tolist() == values.min(axis=0).tolist()
    assert curve.high.tolist() == values.max(axis=0).tolist()
    assert curve.bytes == pytest.approx(np.mean([run.history["bytes"] for run in runs], axis=0))
    assert curve.window == 1


def test_long_runs_keep_ends_mean_and_extremes(tmp_path: Path) -> None:
    (run,), _ = read_run(write_run(tmp_path, rounds=1500, n_clients=3))
    spiky = run.history["mean"].copy()
    spiky[700] = 99.9
    run.history["mean"][:] = spiky
    curve = seed_curve([run], "mean")
    assert curve is not None
    assert len(curve.mean) <= N_POINTS
    assert (curve.mean[0], curve.mean[-1]) == (spiky[0], spiky[-1])
    assert curve.high.max() == 99.9
    assert curve.low.min() == spiky.min()
    assert curve.window > 1


def test_seeds_that_stopped_early_count_as_far_as_they_went(tmp_path: Path) -> None:
    runs = [read_run(write_run(tmp_path / str(n), rounds=n, seed=n))[0][0] for n in (3, 6)]
    curve = seed_curve(runs, "mean")
    assert curve is not None
    assert curve.rounds[-1] == 6
    assert curve.mean[-1] == runs[1].history["mean"][-1]


def test_what_no_seed_measured_has_no_curve(tmp_path: Path) -> None:
    (run,), _ = read_run(write_run(tmp_path, rounds=1))
    run.history["mean"][:] = np.nan
    assert seed_curve([run], "mean") is None


@pytest.mark.parametrize("n", [5, 61, 2000])
def test_noisy_measures_have_windows_of_one_size(n: int) -> None:
    sizes = [b - a for a, b in pairwise(window_edges(n, 60, exact_ends=False))]
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1

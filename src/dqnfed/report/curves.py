"""Curves over rounds, averaged over seeds and thinned to what a screen can show."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from dqnfed.report.measures import Floats
from dqnfed.report.reader import Run

N_POINTS = 240  # a chart is about 700 pixels wide
N_POINTS_NOISY = 60  # rho_t jumps from round to round: wider windows show its level


class Curve(NamedTuple):
    """One measure of one method: the mean over seeds, and the range over seeds (and over the rounds in a window)."""

    rounds: Floats
    bytes: Floats
    seconds: Floats
    mean: Floats
    low: Floats
    high: Floats
    window: int  # rounds averaged into a point


def seed_curve(runs: Sequence[Run], key: str, *, n_points: int = N_POINTS, exact_ends: bool = True) -> Curve | None:
    """Return the curve of one measure over the rounds that at least one seed measured; None where none did.

    Rounds are counted as done: the start model stands at 0. A point of a long run covers a window of rounds, whose
    extremes `low` and `high` keep. With `exact_ends` the first and the last point are single rounds, so that start and
    end are exact; a noisy measure is better off without.
    """
    rounds = sorted({int(t) for run in runs for t in _measured(run, key)})
    if not rounds:
        return None
    at = {t: i for i, t in enumerate(rounds)}
    values = np.full((3, len(runs), len(rounds)), np.nan)
    for s, run in enumerate(runs):
        here = np.isfinite(run.history[key])
        columns = [at[int(t)] for t in run.rounds[here]]
        for layer, name in enumerate((key, "bytes", "seconds")):
            values[layer, s, columns] = run.history[name][here]
    edges = window_edges(len(rounds), n_points, exact_ends=exact_ends)
    done = np.array(rounds, dtype=np.float64) + 1
    pieces = [values[:, :, a:b] for a, b in pairwise(edges)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a window that one seed did not measure
        return Curve(
            rounds=np.array([done[a:b].mean() for a, b in pairwise(edges)]),
            bytes=np.array([np.nanmean(piece[1]) for piece in pieces]),
            seconds=np.array([np.nanmean(piece[2]) for piece in pieces]),
            mean=np.array([np.nanmean(piece[0]) for piece in pieces]),
            low=np.array([np.nanmin(piece[0]) for piece in pieces]),
            high=np.array([np.nanmax(piece[0]) for piece in pieces]),
            window=max(b - a for a, b in pairwise(edges)),
        )


def window_edges(n: int, n_points: int, *, exact_ends: bool = True) -> list[int]:
    """Return the borders of at most `n_points` windows over n rounds; exact ends are windows of one round each."""
    if n <= n_points:
        return list(range(n + 1))
    if not exact_ends:
        return np.linspace(0, n, n_points + 1).round().astype(int).tolist()  # type: ignore[no-any-return]
    inner = np.linspace(1, n - 1, n_points - 1).round().astype(int)
    return [0, *np.unique(inner).tolist(), n]


def _measured(run: Run, key: str) -> Floats:
    values = run.history.get(key)
    return np.empty(0) if values is None else run.rounds[np.isfinite(values)]

"""The data behind the charts and the client table of a report, small enough to be embedded in the page."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from dqnfed.report.comparison import Experiment, Method
from dqnfed.report.curves import N_POINTS, N_POINTS_NOISY, Curve, seed_curve
from dqnfed.report.measures import Floats
from dqnfed.report.reader import Run
from dqnfed.report.units import score_word

CURVES = ("mean", "worst10", "std", "train_loss", "train_loss_max", "rho")
N_HISTORY_VALUES = 400_000  # client accuracies over rounds embedded at most, so that a page stays below 3 MB

Json = dict[str, "Json"] | list["Json"] | str | float | int | None


def payload(experiments: Sequence[Experiment]) -> Json:
    """Return what the page's scripts draw, as plain JSON."""
    share = N_HISTORY_VALUES // max(1, len(experiments))
    return [_experiment(experiment, share) for experiment in experiments]


def packed(data: Json) -> str:
    """Return the data as base64 of zlib-compressed JSON: about a tenth of its size as text."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def _experiment(experiment: Experiment, n_history_values: int) -> Json:
    seeds = experiment.seeds
    by_seed = [[_of_seed(method, seed) for method in experiment.methods] for seed in seeds]
    labels = sorted({label for run in experiment.runs for c in run.clients for label in c.labels}, key=_natural)
    groups = sorted({c.group for run in experiment.runs for c in run.clients if c.group is not None})
    n_values = sum(len(run.clients) * len(run.evaluations) for run in experiment.runs)
    digits = 4 if experiment.score == "loss" else 2
    every = max(1, math.ceil(n_values / max(1, n_history_values)))
    return {
        "name": experiment.name,
        "methods": [{"label": m.label, "algorithm": m.algorithm} for m in experiment.methods],
        "focus": experiment.focus,
        "score": score_word(experiment),
        "digits": 3 if experiment.score == "loss" else 1,
        "seeds": list(seeds),
        "labels": list(labels),
        "groups": list(groups),
        "curves": {key: [_curve(method, key) for method in experiment.methods] for key in CURVES},
        "clients": [_clients(next(run for run in runs if run is not None), labels, groups) for runs in by_seed],
        "final": [[_rounded(run.accuracy, digits) if run else None for run in runs] for runs in by_seed],
        "history": [[_client_history(run, every, digits - 1) if run else None for run in runs] for runs in by_seed],
        "points": [[_point(run, digits) for run in method.runs] for method in experiment.methods],
    }


def _curve(method: Method, key: str) -> Json:
    noisy = key == "rho"
    n_points = N_POINTS_NOISY if noisy else N_POINTS
    curve = seed_curve(method.runs, key, n_points=n_points, exact_ends=not noisy)
    if curve is None:
        return None
    if noisy:
        curve = curve._replace(mean=100 * curve.mean, low=100 * curve.low, high=100 * curve.high)
    return _curve_json(curve, many_seeds=len(method.runs) > 1)


def _curve_json(curve: Curve, *, many_seeds: bool) -> Json:
    found: dict[str, Json] = {
        "x": _rounded(curve.rounds, 1),
        "bytes": _rounded(curve.bytes, 0),
        "seconds": _rounded(curve.seconds, 2),
        "y": _rounded(curve.mean, 4),
        "window": curve.window,
    }
    if many_seeds or curve.window > 1:
        found |= {"low": _rounded(curve.low, 3), "high": _rounded(curve.high, 3)}
    return found


def _clients(run: Run, labels: Sequence[str], groups: Sequence[str]) -> Json:
    position = {label: i for i, label in enumerate(labels)}
    return {
        "client": [c.client for c in run.clients],
        "name": [c.name for c in run.clients],
        "train": [c.n_train for c in run.clients],
        "test": [c.n_test for c in run.clients],
        "group": [groups.index(c.group) if c.group is not None else -1 for c in run.clients],
        "mix": [[x for label, n in c.labels.items() for x in (position[label], n)] for c in run.clients],
    }


def _client_history(run: Run, every: int, digits: int) -> Json:
    kept = [*run.evaluations[:-1:every], *run.evaluations[-1:]]
    return {"x": [e.round + 1 for e in kept], "y": [_rounded(e.accuracy, digits) for e in kept]}


def _point(run: Run, digits: int) -> Json:
    found = run.measures()
    values = np.array([found.get("mean", math.nan), found.get("worst10", math.nan)])
    return _rounded(values, digits)


def _of_seed(method: Method, seed: int) -> Run | None:
    return next((run for run in method.runs if run.seed == seed), None)


def _rounded(values: Floats, decimals: int) -> list[Json]:
    return list(_numbers(values, decimals))


def _numbers(values: Floats, decimals: int) -> Iterable[float | int | None]:
    for value in np.round(values, decimals).tolist():
        if not math.isfinite(value):
            yield None
        else:
            yield int(value) if value == int(value) else value


def _natural(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (1 << 60, text)

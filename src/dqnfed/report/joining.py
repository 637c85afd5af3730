"""What each client gains by joining: the federated model against training alone and against all rows in one place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from dqnfed.report.comparison import Experiment, Method
from dqnfed.report.significance import ACCEPTED, Paired, paired_difference
from dqnfed.report.units import Unit, unit_of

ALONE, POOLED = "local-only", "pooled"
Values = Mapping[int, float]  # by seed


class Estimate(NamedTuple):
    """A client's score over seeds."""

    mean: float  # NaN: it has none
    low: float  # 95 % interval of the mean; NaN with fewer than two seeds
    high: float
    n_seeds: int


class ClientGain(NamedTuple):
    """One client: what it has with the federated model, alone, and with all rows pooled."""

    name: str
    joined: Estimate
    alone: Estimate
    pooled: Estimate
    difference: float  # joined minus alone over the seeds that have both, in the unit's own direction; NaN: none has
    paired: Paired | None  # of the same, with its interval; None with fewer than two such seeds

    def verdict(self, unit: Unit) -> str:
        """Return what the seeds say: gain, loss or open; alike, one seed or unknown where there is no interval."""
        if math.isnan(self.difference):
            return "unknown"
        if self.paired is None:
            return "one seed"
        if self.paired.low <= 0 <= self.paired.high:
            return "open"
        if self.paired.error == 0 and self.paired.p >= ACCEPTED:  # fewer than six seeds
            return "alike"
        return "gain" if unit.is_gain(self.difference) else "loss"


class Joining(NamedTuple):
    """All clients of an experiment."""

    method: str  # the federated one
    unit: Unit
    clients: tuple[ClientGain, ...]  # in client order
    has_alone: bool
    has_pooled: bool


def joining(experiment: Experiment) -> Joining:
    """Return every client's scores with the method in focus, alone and pooled, paired by seed."""
    unit = unit_of(experiment)
    focus = experiment.methods[experiment.focus]
    alone, pooled = (reference(experiment, name) for name in (ALONE, POOLED))
    mine, theirs, all_rows = (by_client(method, unit) for method in (focus, alone, pooled))
    names = {c.client: c.name for run in reversed(experiment.runs) for c in run.clients}
    clients = tuple(
        client_gain(names[c], mine.get(c, {}), theirs.get(c, {}), all_rows.get(c, {})) for c in sorted(names)
    )
    return Joining(focus.label, unit, clients, alone is not None, pooled is not None)


def client_gain(name: str, joined: Values, alone: Values, pooled: Values) -> ClientGain:
    """Return one client's scores over seeds, and the paired difference between joining and training alone."""
    shared = [s for s in joined if math.isfinite(joined[s]) and math.isfinite(alone.get(s, math.nan))]
    difference = float(np.mean([joined[s] - alone[s] for s in shared])) if shared else math.nan
    paired = paired_difference(joined, alone)
    return ClientGain(name, estimate(joined), estimate(alone), estimate(pooled), difference, paired)


def estimate(values: Values) -> Estimate:
    """Return the mean over seeds with Student's 95 % interval."""
    found = np.array([value for value in values.values() if math.isfinite(value)])
    if not found.size:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = float(found.mean())
    if found.size == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    reach = float(special.stdtrit(found.size - 1, 0.975)) * float(found.std(ddof=1)) / math.sqrt(found.size)
    return Estimate(mean, mean - reach, mean + reach, int(found.size))


def reference(experiment: Experiment, algorithm: str) -> Method | None:
    """Return the method of this name, if it was run."""
    return next((method for method in experiment.methods if method.algorithm == algorithm), None)


def by_client(method: Method | None, unit: Unit) -> dict[int, dict[int, float]]:
    """Return the told scores of a method by client and seed."""
    found: dict[int, dict[int, float]] = {}
    for run in () if method is None else method.runs:
        values = unit.values(run.accuracy)
        for client, value in zip(run.clients, values.tolist(), strict=False):
            found.setdefault(client.client, {})[run.seed] = value
    return found


def means_by_seed(method: Method, unit: Unit, pick: str) -> dict[int, float]:
    """Return the mean over clients, or the worst client's score, of every seed."""
    found = {}
    for run in method.runs:
        values = unit.values(run.accuracy)
        values = values[np.isfinite(values)]
        if values.size:
            worst = values.min() if unit.higher_is_better else values.max()
            found[run.seed] = float(values.mean() if pick == "mean" else worst)
    return found


def least_gain(gains: Sequence[ClientGain], unit: Unit) -> list[ClientGain]:
    """Return the clients that gain least, several where they gain the same."""
    known = [gain for gain in gains if math.isfinite(gain.difference)]
    if not known:
        return []
    lowest = min(unit.oriented(gain.difference) for gain in known)
    return [gain for gain in known if unit.oriented(gain.difference) <= lowest + 1e-12 * max(1.0, abs(lowest))]

"""Paired comparison of two methods over the seeds they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

from dqnfed.report.comparison import Experiment, Method

ACCEPTED = 0.05  # a p-value below this is taken for a difference
NO_DIFFERENCE = 1e-12  # rounding of scores that are the same


class Paired(NamedTuple):
    """Difference `method - reference` over shared seeds."""

    difference: float
    low: float  # 95 % confidence interval of the difference; NaN: equal differences of too few seeds, see below
    high: float
    p: float  # two-sided; interval and p are adjusted for the number of methods by `against_reference`
    n_seeds: int
    error: float = 0.0  # standard error of the difference


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Paired | None:
    """Return Student's paired test over the seeds measured by both; None for fewer than two such seeds.

    Seeds pair up because the seed fixes the partition and the start model. Where all n differences are equal, Student's
    test has no spread to test with. For no difference p is 1; otherwise p is that of the sign test, 2 / 2^n, since
    scores of few test rows are often alike by chance, and there is an interval only where p is below 0.05.
    """
    shared = sorted(
        seed for seed in values if math.isfinite(values[seed]) and math.isfinite(reference.get(seed, math.nan))
    )
    if len(shared) < 2:
        return None
    differences = np.array([values[seed] - reference[seed] for seed in shared])
    mean, n = float(differences.mean()), len(shared)
    error = float(differences.std(ddof=1)) / math.sqrt(n)
    if error <= 1e-12 * max(1.0, abs(mean)):
        return _alike(Paired(mean, mean, mean, 1.0 if abs(mean) <= NO_DIFFERENCE else 2.0 ** (1 - n), n))
    reach = float(special.stdtrit(n - 1, 0.975)) * error
    return Paired(mean, mean - reach, mean + reach, float(2 * special.stdtr(n - 1, -abs(mean / error))), n, error)


def _alike(paired: Paired) -> Paired:
    """Return a comparison whose differences are all equal, with an interval where its p-value allows one."""
    if abs(paired.difference) <= NO_DIFFERENCE or paired.p < ACCEPTED:
        return paired
    return paired._replace(low=math.nan, high=math.nan)


def holm(ps: Sequence[float]) -> list[float]:
    """Return the p-values adjusted by Holm's step-down rule: at level a, the chance of any false find is at most a."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    adjusted, running = [0.0] * len(ps), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = running
    return adjusted


def adjusted(found: Sequence[Paired]) -> list[Paired]:
    """Return the comparisons with p-values adjusted by Holm's rule, and intervals by the factor that each p-value has.

    An interval at level 1 - 0.05 / factor leaves 0 out exactly where the adjusted p-value is below 0.05.
    """
    order = sorted(range(len(found)), key=lambda i: found[i].p)
    ps, widened, factor = holm([paired.p for paired in found]), list(found), 1.0
    running = 0.0
    for rank, i in enumerate(order):
        paired = found[i]
        running = max(running, (len(found) - rank) * paired.p)
        if paired.error == 0.0:
            widened[i] = _alike(paired._replace(p=ps[i]))
            continue
        factor = running / paired.p if paired.p > 0 else float(len(found) - rank)
        reach = float(special.stdtrit(paired.n_seeds - 1, 1 - 0.025 / factor)) * paired.error
        middle = paired.difference
        widened[i] = paired._replace(p=ps[i], low=middle - reach, high=middle + reach)
    return widened


def against_reference(experiment: Experiment, measure: str, reference: int) -> list[Paired | None]:
    """Return every method's paired difference from the reference method, adjusted for their number by Holm's rule."""
    base = _by_seed(experiment.methods[reference], measure)
    found = [
        None if i == reference else paired_difference(_by_seed(method, measure), base)
        for i, method in enumerate(experiment.methods)
    ]
    tested = iter(adjusted([paired for paired in found if paired is not None]))
    return [None if paired is None else next(tested) for paired in found]


def _by_seed(method: Method, measure: str) -> dict[int, float]:
    return {run.seed: run.measures().get(measure, math.nan) for run in method.runs}

"""Groups of rows inside clients: their scores, rates and sizes over all seeds, for one client or for all together."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dqnfed.report.comparison import Experiment, Method
from dqnfed.report.joining import Estimate, estimate
from dqnfed.report.reader import Run
from dqnfed.report.significance import ACCEPTED, Paired, paired_difference
from dqnfed.report.units import SPACE, Unit, unit_of

BREAKDOWN_FILE = "breakdown.json"
Z = 1.959964
RECOGNISED = "recognised"
MANY_CLASSES = 2  # with more, rates of single classes would fill the page
Entry = Mapping[str, Any]


class Rate(NamedTuple):
    """Something told of a group beside its score."""

    title: str
    value: Estimate
    unit: Unit


class Group(NamedTuple):
    """One group of rows."""

    name: str
    n: float  # test rows, mean over the seeds that have any
    score: Estimate
    by_seed: Mapping[int, float]  # its score
    rates: tuple[Rate, ...]


class Column(NamedTuple):
    """A column and its groups, of one client or of all rows together."""

    name: str
    is_cut: bool  # into bands of numbers
    groups: tuple[Group, ...]


def breakdown(experiment: Experiment, method: Method, client: int | None = None) -> tuple[Column, ...]:
    """Return every column's groups with this method; of all test rows together where no client is named."""
    contents = {run.seed: content for run in method.runs if (content := read_breakdown(run))}
    if not contents:
        return ()
    first = next(iter(contents.values()))
    unit = unit_of(experiment)
    found = []
    for column in first["columns"]:
        names = dict.fromkeys(name for content in contents.values() for name in groups_of(content, column["name"]))
        groups = [group_of(name, column["name"], contents, client, unit) for name in names]
        found.append(Column(column["name"], bool(column["bands"]), tuple(g for g in groups if g is not None)))
    return tuple(found)


def read_breakdown(run: Run) -> Mapping[str, Any]:
    """Return what a run says about groups of rows; nothing where it says nothing."""
    try:
        content = json.loads((run.folder / BREAKDOWN_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(content, dict) and {"columns", "rows", "classes", "score"} <= set(content)
    return content if is_whole else {}


def groups_of(content: Mapping[str, Any], column: str) -> list[str]:
    return [name for entry in content["columns"] if entry["name"] == column for name in entry["groups"]]


def group_of(
    name: str, column: str, contents: Mapping[int, Mapping[str, Any]], client: int | None, unit: Unit
) -> Group | None:
    """Return one group over all seeds, or None where no seed tested a row of it."""
    entries = {
        seed: entry
        for seed, content in contents.items()
        for entry in content["rows"]
        if (entry["client"], entry["column"], entry["group"]) == (client, column, name)
    }
    if not entries:
        return None
    content = next(iter(contents.values()))
    classes, is_accuracy = content["classes"], content["score"] == "accuracy"
    scores = {seed: told(unit, entry["score"]) for seed, entry in entries.items()}
    n = float(np.mean([entry["n"] for entry in entries.values()]))
    independent = n_independent(entries.values())
    score = estimate(scores)
    if is_accuracy:
        score = widened(score, of_share(score.mean / 100, independent))
    rates = rates_of(entries, classes, content["score"], unit, independent / n)
    return Group(name, n, score, scores, tuple(rates))


def n_independent(entries: Collection[Entry]) -> float:
    """Return how many rows the scores of all seeds rest on: at most as many as there are, however often tested."""
    tested = sum(entry["n"] for entry in entries)
    return float(min(tested, max(entry.get("held", tested) for entry in entries)))


def widened(over_seeds: Estimate, of_rows: Estimate) -> Estimate:
    """Return the estimate with the wider one of two intervals: what seeds change, and what so few rows can tell."""
    if not math.isfinite(of_rows.low):
        return over_seeds
    if not math.isfinite(over_seeds.low):
        return over_seeds._replace(low=of_rows.low, high=of_rows.high)
    return over_seeds._replace(low=min(over_seeds.low, of_rows.low), high=max(over_seeds.high, of_rows.high))


def told(unit: Unit, score: float | None) -> float:
    return math.nan if score is None else float(unit.values(np.array([score]))[0])


def rates_of(entries: Mapping[int, Entry], classes: Sequence[str], score: str, unit: Unit, times: float) -> list[Rate]:
    """Return what is told beside the score: for two classes how many of each are recognised and how often the second is
    predicted; AUC; for a regression by how much predictions are too high.

    `times` is how many test sets' worth of independent rows there are.
    """
    if not classes:
        bias = {seed: math.nan if e["bias"] is None else e["bias"] for seed, e in entries.items()}
        return [Rate("mean error", estimate(bias), unit)]
    percent = Unit("rate", suffix=f"{SPACE}%", points=f"{SPACE}points")
    found = []
    if len(classes) <= MANY_CLASSES:
        for c, name in enumerate(classes):
            counts = [(e["right"][c], e["of_class"][c]) for e in entries.values()]
            found.append(Rate(f"{RECOGNISED} {name}", rate(counts, times), percent))
        counts = [(e["said"][-1], e["n"]) for e in entries.values()]
        found.append(Rate(f"predicted {classes[-1]}", rate(counts, times), percent))
    if score != "auc":
        area = estimate({seed: math.nan if e["auc"] is None else e["auc"] for seed, e in entries.items()})
        if len(classes) == MANY_CLASSES:
            first, second = np.mean([e["of_class"] for e in entries.values()], axis=0) * times
            area = widened(area, of_area(area.mean, first, second))
        found.append(Rate("AUC", area, Unit("AUC", points=f"{SPACE}points")))
    return found


def rate(counts: Sequence[tuple[int, int]], times: float) -> Estimate:
    """Return a share in percent over seeds: k of n rows in each."""
    known = {seed: 100.0 * k / n for seed, (k, n) in enumerate(counts) if n}
    if not known:
        return Estimate(math.nan, math.nan, math.nan, 0)
    found = estimate(known)
    return widened(found, of_share(found.mean / 100, times * sum(n for _, n in counts) / len(counts)))


def of_share(p: float, n: float) -> Estimate:
    """Return a share of n rows in percent with Wilson's 95 % interval."""
    if n <= 0 or not math.isfinite(p):
        return Estimate(math.nan, math.nan, math.nan, 0)
    z2 = Z * Z
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    reach = Z / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Estimate(100 * p, 100 * max(0.0, middle - reach), 100 * min(1.0, middle + reach), 1)


def of_area(area: float, n_first: float, n_second: float) -> Estimate:
    """Return an area under the ROC curve, in percent, with the 95 % interval of Hanley & McNeil (Radiology 1982).

    An area of 100 % has no spread there: it gets the interval of the share that the smaller class's rows are of.
    """
    if not math.isfinite(area) or not n_first or not n_second:
        return Estimate(math.nan, math.nan, math.nan, 0)
    a = area / 100
    one, two = a / (2 - a), 2 * a * a / (1 + a)
    variance = (a * (1 - a) + (n_second - 1) * (one - a * a) + (n_first - 1) * (two - a * a)) / (n_first * n_second)
    reach = 100 * Z * math.sqrt(max(0.0, variance))
    if reach < 1e-9:
        return of_share(a, min(n_first, n_second))
    return Estimate(area, max(0.0, area - reach), min(100.0, area + reach), 1)


class Gap(NamedTuple):
    """The largest difference between two groups of a column."""

    best: Group
    worst: Group
    difference: float  # as told: of an error, how much larger it is
    paired: Paired | None  # with its interval over seeds; None with fewer than two


def gap_of(column: Column, unit: Unit) -> Gap | None:
    """Return the best and the worst group, but for rows without a value; None where there are not two groups."""
    known = [g for g in column.groups if math.isfinite(g.score.mean) and g.name != "missing"]
    if len(known) < 2:
        return None
    ranked = sorted(known, key=lambda g: unit.oriented(g.score.mean))
    worst, best = ranked[0], ranked[-1]
    return Gap(best, worst, best.score.mean - worst.score.mean, paired_difference(best.by_seed, worst.by_seed))


def gap_sentence(column: Column, unit: Unit) -> str:
    """Return how far the groups of a column are apart, with the doubt that the seeds leave."""
    gap = gap_of(column, unit)
    if gap is None:
        return f"By {column.name}: there are no two groups with a score."
    if gap.difference == 0:
        return f"By {column.name}: all groups have the same {unit.name}, {unit.text(gap.best.score.mean)}."
    best, worst = (f"{column.name} {g.name} ({unit.text(g.score.mean)})" for g in (gap.best, gap.worst))
    apart = unit.signed(abs(gap.difference)).lstrip("+") + unit.points
    lead = f"By {column.name}: the {unit.name} is best for {best} and worst for {worst}, {apart} apart"
    if gap.paired is None:
        return f"{lead}; with one seed this may be chance."
    if gap.paired.p >= ACCEPTED:
        return f"{lead}, which the {gap.paired.n_seeds} seeds do not settle."
    ends = sorted((abs(gap.paired.low), abs(gap.paired.high)))
    low, high = (unit.signed(value).lstrip("+") for value in ends)
    return f"{lead} (95{SPACE}% interval {low} to {high}, {gap.paired.n_seeds} seeds)."

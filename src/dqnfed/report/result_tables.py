"""What the tables of all pages of results share: their columns, their order, and the paper's values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from dqnfed.experiments.paper import PrintedTable, printed_table
from dqnfed.report.impossible import impossible_values
from dqnfed.report.result_summaries import Json

MARK = "†"
LEADERBOARD = "leaderboard"  # a page with another summary: see `report.leaderboard`
ALWAYS_SHOWN = ("mean", "std", "worst10")
SHOWN = (*ALWAYS_SHOWN, "worst5", "best5")  # where the paper prints no table
# evaluated by the measures of the tables that they stand in for
STANDS_FOR = {"mnist-by-writer": "femnist-original", "mnist-by-writer-skewed": "femnist-skewed"}


class Measure(NamedTuple):
    title: str
    decimals: int = 2


MEASURES = {
    "mean": Measure("mean"),
    "std": Measure("std"),
    "worst5": Measure("worst 5 %"),
    "worst10": Measure("worst 10 %"),
    "best5": Measure("best 5 %"),
    "best10": Measure("best 10 %"),
    "angle": Measure("angle, °"),
    "kl": Measure("KL", 4),
}


def printed_for(table: str, experiment: str) -> PrintedTable | None:
    """Return the paper's table beside which an experiment of a page stands; None on pages about something else."""
    return printed_table(experiment) if experiment.startswith(table) else None


def columns_of(table: str, experiment: str, runs: Sequence[Json]) -> list[str]:
    """Return what a table shows of the clients' accuracies: what the paper prints for this setting, and the tail."""
    printed = printed_for(table, experiment) or printed_table(STANDS_FOR.get(experiment, ""))
    wanted = SHOWN if printed is None else (*ALWAYS_SHOWN, *printed.columns)
    known = [key for key in MEASURES if key in wanted and any(run["accuracy"].get(key) is not None for run in runs)]
    classes = [key for key in wanted if key.startswith("class:")]
    return [*known, *(key for key in classes if any(value_of(run, key) is not None for run in runs))]


def by_experiment(runs: Sequence[Json]) -> dict[str, list[Json]]:
    """Return the runs of each experiment, in the order in which they stand."""
    found: dict[str, list[Json]] = {}
    for run in runs:
        found.setdefault(run.get("experiment", ""), []).append(run)
    return found


def by_method(runs: Sequence[Json]) -> dict[str, list[Json]]:
    """Return the runs of each method, the best mean accuracy first."""
    found: dict[str, list[Json]] = {}
    for run in runs:
        found.setdefault(run["algorithm"], []).append(run)
    return dict(sorted(found.items(), key=lambda item: -last_mean(item[1])))


def last_mean(runs: Sequence[Json]) -> float:
    """Return the mean accuracy over seeds; a method that diverged with one of them comes last."""
    means = [run["accuracy"]["mean"] for run in runs]
    return -math.inf if None in means else fmean(means)


def printed_lines(printed: PrintedTable) -> list[str]:
    lines = [
        f"The paper prints for this setting ({printed.title}):",
        "",
        "| method | " + " | ".join(title_of(column) for column in printed.columns) + " |",
        "|---" * (len(printed.columns) + 1) + "|",
    ]
    reasons: list[str] = []
    for name, row in printed.rows.items():
        impossible = impossible_values(printed, name)
        cells = [
            "" if value is None else f"{value:g}{MARK if column in impossible else ''}"
            for column, value in zip(printed.columns, row, strict=True)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        reasons += [f"{name}, {column}: {why}" for column, why in impossible.items()]
    if reasons:
        lines += ["", f"{MARK} cannot be true: " + "; ".join(reasons) + "."]
    return lines


def title_of(column: str) -> str:
    return MEASURES[column].title if column in MEASURES else column.removeprefix("class:")


def decimals_of(column: str) -> int:
    return MEASURES[column].decimals if column in MEASURES else 2


def value_of(run: Json, column: str) -> float | None:
    """Return a measure of a run, or the accuracy of the client that holds a class; None if it is not known."""
    if not column.startswith("class:"):
        found: float | None = run["accuracy"].get(column)
        return found
    names = run.get("client_names", [])
    wanted = column.removeprefix("class:").lower()
    return next((a for name, a in zip(names, run.get("clients", []), strict=True) if name.lower() == wanted), None)


def spread(values: Sequence[float | None], decimals: int) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{mean_of(known):.{decimals}f}" + (f" ± {stdev(known):.{decimals}f}" if len(known) > 1 else "")


def range_(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def mean_of(values: Iterable[float]) -> float:
    return fmean(list(values))

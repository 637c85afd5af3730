"""The fairness table over methods and seeds: its numbers, and its form in the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from dqnfed.report.comparison import Experiment, Method, group
from dqnfed.report.measures import MEASURE, MEASURES, Measure
from dqnfed.report.reader import Run, read_runs
from dqnfed.report.run_files import number

SECONDS = Measure("seconds", "Seconds", "Seconds", 0, False, "wall-clock time of the run")
MISSING = "\N{EN DASH}"
TERMINAL_COLUMNS = ("mean", "std", "worst10", "best10", "improved")  # what 80 characters hold


class Cell(NamedTuple):
    """A measure of one method over its seeds."""

    mean: float  # NaN when no seed has it
    std: float  # sample standard deviation over seeds; NaN for a single seed
    n_seeds: int
    place: int  # 1 best, 2 second best, 0 otherwise

    def text(self, measure: Measure, *, tight: bool = False) -> str:
        """Return the cell as printed: mean ± std over seeds; `tight` leaves out the spaces."""
        if math.isnan(self.mean):
            return MISSING
        sign = "±" if tight else " ± "
        spread = "" if math.isnan(self.std) else f"{sign}{self.std:.{measure.decimals}f}"
        return f"{self.mean:.{measure.decimals}f}{spread}"


class Row(NamedTuple):
    """One method."""

    method: Method
    cells: tuple[Cell, ...]


class FairnessTable(NamedTuple):
    """Methods against measures for one experiment."""

    experiment: str
    weighted: bool
    columns: tuple[Measure, ...]
    rows: tuple[Row, ...]


def tabulate(experiment: Experiment, *, weighted: bool = False, columns: Sequence[str] | None = None) -> FairnessTable:
    """Return mean and spread over seeds of every measure of every method, places given as in the paper's tables."""
    chosen = [column(key) for key in columns or [measure.key for measure in MEASURES]]
    if experiment.score != "accuracy":  # a score in its own unit may be small
        chosen = [measure._replace(decimals=4) if measure.decimals == 2 else measure for measure in chosen]
    values = [[values_of(run, weighted=weighted) for run in method.runs] for method in experiment.methods]
    by_measure = [[over_seeds([found.get(m.key, math.nan) for found in runs]) for runs in values] for m in chosen]
    placed = [places(cells, measure) for cells, measure in zip(by_measure, chosen, strict=True)]
    rows = tuple(Row(method, tuple(cells[i] for cells in placed)) for i, method in enumerate(experiment.methods))
    return FairnessTable(experiment.name, weighted, tuple(chosen), rows)


def column(key: str) -> Measure:
    """Return the measure of a column: a fairness measure, `seconds`, or `class:NAME` for the client holding a class."""
    if key.startswith("class:"):
        name = key.removeprefix("class:")
        return Measure(key, name, name, 2, True, f"accuracy of the client {name}, in percent")
    return SECONDS if key == "seconds" else MEASURE[key]


def values_of(run: Run, *, weighted: bool = False) -> dict[str, float]:
    """Return everything a table may ask of a run, by column key."""
    totals = run.summary.get("totals")
    recorded = run.history["seconds"]
    seconds = (
        number(totals.get("seconds"))
        if isinstance(totals, dict)
        else float(recorded[-1])
        if recorded.size
        else math.nan
    )
    classes = {f"class:{c.name}": float(a) for c, a in zip(run.clients, run.accuracy, strict=False)}
    return {**classes, **run.measures(weighted=weighted), "seconds": seconds}


def places(cells: Sequence[Cell], measure: Measure) -> list[Cell]:
    """Return the cells with their places by printed value: several may share the best, and then there is no second.

    A single method has no place.
    """
    printed = [round(cell.mean, measure.decimals) if math.isfinite(cell.mean) else None for cell in cells]
    ranked = sorted({value for value in printed if value is not None}, reverse=measure.higher_is_better)
    if len([value for value in printed if value is not None]) < 2:
        return list(cells)
    n_best = printed.count(ranked[0])
    place = {value: i for i, value in enumerate(ranked[: 2 if n_best == 1 else 1], start=1)}
    return [
        cell._replace(place=0 if value is None else place.get(value, 0))
        for cell, value in zip(cells, printed, strict=True)
    ]


def fairness_table(paths: Iterable[Path]) -> Table:
    """Return the fairness table of all runs at or below the paths, for the terminal."""
    return terminal_table(group(read_runs(paths).runs).experiments)


def terminal_table(experiments: Sequence[Experiment]) -> Table:
    """Return the fairness table of the experiments, for the terminal: the measures that fit 80 characters."""
    several_seeds = any(len(experiment.seeds) > 1 for experiment in experiments)
    names = ", ".join(experiment.name for experiment in experiments) or "no runs"
    told = {"loss": "score (minus the loss)"}
    scores = ", ".join(dict.fromkeys(told.get(e.score, e.score) for e in experiments))
    table = Table(
        title=f"Test {scores or 'accuracy'} over clients: {names}",
        caption="bold: best, underlined: second best" + ("; mean ± std over seeds" if several_seeds else ""),
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("Method", overflow="fold")
    for key in TERMINAL_COLUMNS:
        measure = MEASURE[key]
        arrow = "↑" if measure.higher_is_better else "↓"
        table.add_column(f"{measure.title} {arrow}".replace(" ", "\n", 1), justify="right", no_wrap=True)
    for experiment in experiments:
        for row in tabulate(experiment, columns=TERMINAL_COLUMNS).rows:
            cells = [
                Text(cell.text(MEASURE[key], tight=True), style=("", "bold", "underline")[cell.place])
                for key, cell in zip(TERMINAL_COLUMNS, row.cells, strict=True)
            ]
            label = row.method.label if len(experiments) == 1 else f"{experiment.name}: {row.method.label}"
            table.add_row(label, *cells)
        table.add_section()
    return table


def over_seeds(values: Sequence[float]) -> Cell:
    """Return mean and sample standard deviation over the seeds that have a value, without a place."""
    found = np.array([value for value in values if math.isfinite(value)])
    if found.size == 0:
        return Cell(math.nan, math.nan, 0, 0)
    spread = float(found.std(ddof=1)) if found.size > 1 else math.nan
    return Cell(float(found.mean()), spread, int(found.size), 0)

"""Progress in the terminal: how far, how long still, and the fairness of the model right now."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dqnfed.maths.fairness import known_measures


def run_bars(console: Console | None, *, enabled: bool = True) -> Progress:
    """Return bars that count rounds, with the numbers of the model beside them."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
        transient=True,
        disable=not enabled,
    )


class ProgressBar:
    """An observer that draws one bar a run."""

    def __init__(self, console: Console, label: str) -> None:
        self._progress, self._label = run_bars(console), label

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None:
        self._progress.start()
        self._task = self._progress.add_task(self._label, total=config["train"]["rounds"], numbers="")

    def round(self, record: Mapping[str, Any]) -> None:
        numbers = current_numbers(record)
        done = record["round"] + 1
        if numbers:
            self._progress.update(self._task, completed=done, numbers=numbers)
        else:
            self._progress.update(self._task, completed=done)

    def end(self, summary: Mapping[str, Any]) -> None:
        self._progress.stop()


def current_numbers(record: Mapping[str, Any]) -> str:
    """Return the record's fairness in a few words; empty if it was not measured."""
    accuracy = record.get("accuracy")
    if not accuracy:
        return ""
    rho = record.get("rho")
    improved = "" if rho is None else f", improved {100 * rho:.0f} %"
    named = {"mean": "mean", "std": "std", "worst10": "worst 10 %"}
    shown = [f"{named[key]} {accuracy[key]:.1f}" for key in known_measures(accuracy, list(named))]
    return f"{', '.join(shown)}{improved}"


class RunBoard:
    """Bars for runs side by side: one for each that is under way, and above them one that counts the finished."""

    def __init__(self, console: Console | None = None, *, enabled: bool = False) -> None:
        self._progress = run_bars(console, enabled=enabled)
        self._all = self._progress.add_task("all runs", total=None, numbers="")
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> RunBoard:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def expect(self, n_runs: int) -> None:
        self._progress.update(self._all, total=n_runs)

    def advance(self, label: str, done: int, rounds: int, numbers: str) -> None:
        if label not in self._tasks:
            self._tasks[label] = self._progress.add_task(label, total=rounds, numbers=numbers)
        self._progress.update(self._tasks[label], completed=done, numbers=numbers)

    def end(self, label: str) -> None:
        if label in self._tasks:
            self._progress.remove_task(self._tasks.pop(label))
        self._progress.advance(self._all)


class DownloadBars:
    """Bars for downloads, one a file; `update` is what `dqnfed.data.fetch` calls."""

    def __init__(self, console: Console, *, enabled: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            DownloadColumn(),
            TransferSpeedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=not enabled,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> DownloadBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, name: str, done: int, total: int | None) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total)
        self._progress.update(self._tasks[name], completed=done, total=total)

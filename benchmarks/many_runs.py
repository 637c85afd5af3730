"""Many runs in few processes that keep the datasets, one line of JSON a run; what is in the file is not run again."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

Task = dict[str, Any]
Kind = tuple[str, str]  # a problem and a method
Outcome = Callable[[Task], Task | None]  # its line; None: broken off, to be run again


def read_lines(path: Path) -> list[Task]:
    """Return the lines of a file; there is none yet: no line. One that a kill cut short is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def kept_datasets() -> None:
    """Make this process read every dataset once, and deal it once for a seed."""
    from dqnfed.experiments import data_source as module
    from dqnfed.experiments import experiment

    module.load = cache(module.load)
    made, kept = module.data_source, {}

    def data_source(data: Any, seed: int, score: str | None = None) -> Any:
        key = (data.model_dump_json(), seed, score)
        if key not in kept:
            kept.clear()  # one federation at a time: tasks come sorted by problem and seed
            kept[key] = made(data, seed, score)
        return kept[key]

    experiment.data_source = data_source


def kind_of(task: Task) -> Kind:
    """Return which tasks take as long as this one."""
    return task["problem"], task["method"]


class Clock:
    """When the runs must be over, and how long those of a kind (a problem and a method) have taken, before and now."""

    def __init__(self, seconds: float, known: Mapping[Kind, float]) -> None:
        self.end = time.monotonic() + seconds
        self.lasted: dict[Kind, float] = dict(known)

    def leaves_time_for(self, kind: Kind) -> bool:
        """Return whether a run like those before would end in time."""
        return time.monotonic() + self.lasted.get(kind, 0.0) <= self.end

    def add(self, kind: Kind, seconds: float) -> None:
        """Take a run's time into account."""
        self.lasted[kind] = max(self.lasted.get(kind, 0.0), seconds)


def run_all(
    todo: Iterable[Task],
    outcome: Outcome,
    path: Path,
    *,
    jobs: int,
    seconds: float,
    known: Mapping[Kind, float] = MappingProxyType({}),
    kind_of: Callable[[Task], Kind] = kind_of,
) -> None:
    """Run the tasks in their order and append their lines as they end; none is begun that would not end in time."""
    waiting, clock = list(todo), Clock(seconds, known)
    path.parent.mkdir(parents=True, exist_ok=True)
    n_all, n_done, running = len(waiting), 0, dict[Future[Task], tuple[Kind, float]]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=kept_datasets) as pool, path.open("a") as file:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop(0)
                kind = kind_of(task)
                if clock.leaves_time_for(kind):
                    running[pool.submit(outcome, task)] = kind, time.monotonic()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                kind, began = running.pop(future)
                clock.add(kind, time.monotonic() - began)
                if (line := future.result()) is None:
                    continue
                file.write(json.dumps(line) + "\n")
                file.flush()
                n_done += 1
                sys.stderr.write(f"{n_done} of {n_all}\n")

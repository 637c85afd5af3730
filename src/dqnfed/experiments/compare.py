"""Several methods, several seeds, one folder; what is already finished is not run again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dqnfed.algorithms import REFERENCES
from dqnfed.experiments.config import Config, ConfigError
from dqnfed.experiments.experiment import build_algorithm, method_named, problem_kind, suitable_algorithms
from dqnfed.experiments.planned import Planned, is_finished, placed, run_planned
from dqnfed.experiments.progress import RunBoard
from dqnfed.experiments.side_by_side import automatic_jobs, finished_side_by_side, say_impossible

ObserverFactory = Callable[[str], Sequence[Any]]


def chosen_algorithms(config: Config, named: Sequence[str], *, everything: bool, references: bool = False) -> list[str]:
    """Return the methods to compare, refusing unknown names before anything runs; with the references if wanted."""
    added = list(REFERENCES) if references else []
    if everything:
        return [*suitable_algorithms(problem_kind(config)), *added]
    names = list(dict.fromkeys([*(named or config.compare.algorithms), *added]))
    for name in names:
        method_named(name)
    return names


def planned_runs(config: Config, algorithms: Sequence[str], seeds: Sequence[int], out: Path) -> list[Planned]:
    """Return every method with every seed, into OUT/<method>/<seed>, refusing bad hyper-parameters before any run."""
    for name in algorithms:
        build_algorithm(config.with_algorithm(name))
    return placed(
        [(config.with_algorithm(name).with_seed(seed), out / name / str(seed)) for seed in seeds for name in algorithms]
    )


def run_all(
    planned: Sequence[Planned],
    *,
    jobs: int | None = 1,  # runs at a time; None: as many as the machine bears
    observers: ObserverFactory = lambda label: (),  # of one run after the other
    board: RunBoard | None = None,  # of runs side by side
) -> list[Path]:
    """Play the runs, and return the folders of those that are finished.

    A folder that is finished is kept, one that was interrupted is resumed; a method that cannot run is reported and
    the others go on. Ctrl-C ends the comparison after the round, with everything saved.
    """
    kept = {run.folder for run in planned if is_finished(run.folder, run.config)}
    missing = [run for run in planned if run.folder not in kept]
    jobs = automatic_jobs(missing) if jobs is None else min(jobs, len(missing))
    if jobs > 1:
        done = finished_side_by_side(missing, jobs, board or RunBoard())
    else:
        done = finished_in_turn(missing, observers)
    kept.update(run.folder for run in done)
    return [run.folder for run in planned if run.folder in kept]


def finished_in_turn(runs: Sequence[Planned], observers: ObserverFactory) -> list[Planned]:
    """Return the runs that came to their end, run one after the other in this process."""
    done: list[Planned] = []
    for run in runs:
        ending = run_planned(run, observers(run.label))
        if ending.status == "interrupted":
            raise KeyboardInterrupt
        if ending.status == "impossible":
            say_impossible(run, ending.why)
        else:
            done.append(run)
    return done


def seeds_from(text: str) -> list[int]:
    """Return the seeds that a text names: "3", "0,2,5" or "0:5" (0 to 4)."""
    try:
        if ":" in text:
            first, last = (int(part) for part in text.split(":"))
            seeds = list(range(first, last))
        else:
            seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0:
        raise ConfigError(f"seeds read 3, or 0,2,5, or 0:5 (which is 0 to 4), but are '{text}'.")
    return seeds

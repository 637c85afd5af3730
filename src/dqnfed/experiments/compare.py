"""Several methods, several seeds, one folder; what is already finished is not run again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dqnfed.core.run_folder import RunFolder
from dqnfed.experiments.config import Config, ConfigError
from dqnfed.experiments.experiment import (
    build_algorithm,
    method_named,
    problem_kind,
    run_experiment,
    suitable_algorithms,
)

logger = logging.getLogger("dqnfed")
ObserverFactory = Callable[[str], Sequence[Any]]


def chosen_algorithms(config: Config, named: Sequence[str], *, everything: bool) -> list[str]:
    """Return the methods to compare, refusing unknown names before anything runs."""
    if everything:
        return suitable_algorithms(problem_kind(config))
    names = list(dict.fromkeys(named or config.compare.algorithms))
    for name in names:
        method_named(name)
    return names


def compare(
    config: Config,
    algorithms: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    *,
    observers: ObserverFactory = lambda label: (),
) -> list[Path]:
    """Run every method with every seed into OUT/<method>/<seed> and return the finished folders.

    A folder that is finished is kept, one that was interrupted is resumed; a method that cannot run is reported and
    the others go on. Ctrl-C ends the comparison after the round, with everything saved.
    """
    planned = [(name, seed) for seed in seeds for name in algorithms]
    for name in algorithms:
        build_algorithm(config.with_algorithm(name))  # bad hyper-parameters are refused before the first run
    done: list[Path] = []
    for i, (name, seed) in enumerate(planned):
        folder = out / name / str(seed)
        chosen = config.with_algorithm(name).with_seed(seed)
        if is_finished(folder, chosen):
            done.append(folder)
            continue
        label = f"[{i + 1}/{len(planned)}] {name}, seed {seed}"
        try:
            result = run_experiment(chosen, folder, observers=observers(label), resume=was_started(folder, chosen))
        except (ValueError, RuntimeError) as error:
            logger.error("%s with seed %d could not run: %s", name, seed, error)
            continue
        if result.summary["status"] == "interrupted":
            raise KeyboardInterrupt
        done.append(folder)
    return done


def is_finished(folder: Path, config: Config) -> bool:
    """Return whether the folder holds this very experiment, finished."""
    summary = RunFolder(folder).summary()
    return summary is not None and summary["status"] != "interrupted" and was_started(folder, config)


def was_started(folder: Path, config: Config) -> bool:
    """Return whether the folder holds this very experiment, as far as it came; another one is refused."""
    if not (folder / "config.toml").is_file():
        return False
    if RunFolder(folder).config() != config.as_dict():
        raise ConfigError(
            f"{folder} holds a run with other settings; choose another --out, or delete that folder to run it anew."
        )
    return True


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

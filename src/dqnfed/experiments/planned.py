"""One run of a comparison: where it goes, whether it is done, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from dqnfed.core.checksums import damaged_files
from dqnfed.core.run_folder import RunFolder
from dqnfed.experiments.config import Config, ConfigError
from dqnfed.experiments.experiment import build_algorithm, resumed_config, run_experiment, with_absolute_paths


class Planned(NamedTuple):
    """One method with one seed, and its folder."""

    place: str  # in the plan, as in "3/8"
    config: Config
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.config.algorithm.name}, seed {self.config.run.seed}"

    @property
    def label(self) -> str:
        return f"[{self.place}] {self.name}"


class Ending(NamedTuple):
    """What became of a run."""

    status: Literal["finished", "interrupted", "impossible"]
    why: str = ""  # it is impossible


def placed(runs: Sequence[tuple[Config, Path]]) -> list[Planned]:
    """Return the runs with their places in the plan."""
    return [Planned(f"{i + 1}/{len(runs)}", config, folder) for i, (config, folder) in enumerate(runs)]


def run_planned(run: Planned, observers: Sequence[Any]) -> Ending:
    """Return what became of the run; one that was started goes on where it was stopped."""
    config, folder = run.config, run.folder
    try:
        result = run_experiment(config, folder, observers=observers, resume=was_started(folder, config))
    except (ValueError, RuntimeError) as error:
        return Ending("impossible", str(error))
    return Ending("interrupted" if result.summary["status"] == "interrupted" else "finished")


def is_finished(folder: Path, config: Config) -> bool:
    """Return whether the folder holds this very experiment, finished and not damaged."""
    return RunFolder(folder).is_over() and was_started(folder, config) and not damaged_files(folder)


def was_started(folder: Path, config: Config) -> bool:
    """Return whether the folder holds this very experiment, as far as it came; another one is refused."""
    if not (folder / "config.toml").is_file():
        return False
    if not is_same_run(resumed_config(folder), config):
        raise ConfigError(
            f"{folder} holds a run with other settings; choose another --out, or delete that folder to run it anew."
        )
    return True


def is_same_run(one: Config, other: Config) -> bool:
    """Return whether two configs are of one run: the same but for the method's settings, and the same method.

    Where the data lie does not count: that they are the same is checked when the run goes on.
    """
    plain = [with_absolute_paths(config).without_method() for config in (one, other)]
    for content in plain:
        content["data"].pop("dir", None)
    return plain[0] == plain[1] and build_algorithm(one) == build_algorithm(other)

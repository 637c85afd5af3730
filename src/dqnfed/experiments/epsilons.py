"""The same comparison under several privacy budgets: who pays for the noise?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, isnan
from pathlib import Path

from dqnfed.experiments.compare import planned_runs
from dqnfed.experiments.config import Config, ConfigError, read_config
from dqnfed.experiments.planned import Planned, placed


def epsilons_from(text: str) -> list[float]:
    """Return the budgets that a text names: "1,3,8,inf"."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0.0 or any(map(isnan, found)) or len(set(found)) < len(found):
        raise ConfigError(f"budgets read 1,3,8,inf: different numbers above 0, but are '{text}'.")
    return found


def with_noise(source: str, changes: Sequence[str], epsilon: float | None = None) -> Config:
    """Return the experiment with what its block `epsilon` sets for such comparisons, then the user's changes.

    What the block sets for one budget stands between the two where that is given.
    """
    block = read_config(source).epsilon
    at = {_budget(text): found for text, found in block.at.items()}
    own = [*block.set, *(() if epsilon is None else at.get(epsilon, ()))]
    config = read_config(source, [*own, *changes])
    if config.privacy.clip is None:
        raise ConfigError(
            f"`--epsilon` needs the largest norm of what is noised, which {source} does not set; add "
            "`--set privacy.clip=1.0`, and `--set privacy.unit=record` to hide examples instead of clients."
        )
    if config.privacy.epsilon is not None or config.privacy.noise_multiplier:
        raise ConfigError("`--epsilon` gives the budgets; leave out `privacy.epsilon` and `privacy.noise_multiplier`.")
    return config


def _budget(text: str) -> float:
    found = epsilons_from(text)
    if len(found) > 1:
        raise ConfigError(f"`epsilon.at` has settings for one budget each, such as 3 or inf, but one is '{text}'.")
    return found[0]


def with_epsilon(config: Config, epsilon: float) -> Config:
    """Return the experiment with a budget; without noise, but clipped, where it is infinite."""
    privacy = config.privacy.model_copy(update={"epsilon": None if epsilon == inf else epsilon})
    return config.model_copy(update={"name": f"{config.name}, epsilon {epsilon:g}", "privacy": privacy})


def planned_with_epsilons(
    configs: Mapping[float, Config], algorithms: Sequence[str], seeds: Sequence[int], out: Path
) -> list[Planned]:
    """Return every method with every seed and budget, into OUT/epsilon-<budget>/<method>/<seed>."""
    runs = [
        run
        for epsilon, config in configs.items()
        for run in planned_runs(with_epsilon(config, epsilon), algorithms, seeds, out / f"epsilon-{epsilon:g}")
    ]
    return placed([(run.config, run.folder) for run in runs])

"""From a config to who takes part in a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dqnfed.experiments.config import Config, ConfigError
from dqnfed.sim.availability import read_trace
from dqnfed.sim.sampling import Sampling
from dqnfed.sim.stragglers import Stragglers


def sampling_of(config: Config) -> Sampling:
    """Return how the clients of a round are drawn, or refuse what the config says about it."""
    train = config.train
    try:
        trace = None if train.trace is None else read_trace(Path(train.trace).expanduser())
    except ValueError as error:
        raise ConfigError(f"who is online (`train.trace`): {error}") from error
    try:
        return Sampling(rule=train.sampling, candidates=train.candidates, trace=trace)
    except ValueError as error:
        raise ConfigError(f"who takes part (`train.sampling`): {error}") from error


def stragglers_of(config: Config) -> Stragglers | None:
    """Return which clients are late, or refuse settings that a deadline alone gives a meaning."""
    train = config.train
    given = {"spread": train.speed_spread, "jitter": train.speed_jitter, "late": train.late}
    said: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if train.deadline is None:
        if said:
            raise ConfigError(
                "train.speed_spread, train.speed_jitter and train.late have no effect without train.deadline; set it, "
                "or leave them out."
            )
        return None
    return Stragglers(deadline=train.deadline, **said)


def refuse_simulated(config: Config) -> None:
    """Raise where a deployment's config describes who is late or away: its clients are so by themselves."""
    if config.train.trace is not None or stragglers_of(config) is not None:
        raise ConfigError(
            "train.trace and train.deadline simulate who is away or late; real clients are so by themselves, and "
            "`policy.timeout` is their deadline. Leave them out."
        )


def expected_size(config: Config, n_clients: int) -> int:
    """Return how many clients a method is to expect in a round."""
    try:
        return sampling_of(config).expected_size(n_clients, config.train.participation)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"who is online (`train.trace`): {error}") from error

"""From a config to who takes part in a round."""

from __future__ import annotations

from pathlib import Path

from dqnfed.experiments.config import Config, ConfigError
from dqnfed.sim.availability import read_trace
from dqnfed.sim.sampling import Sampling


def sampling_of(config: Config) -> Sampling:
    """Return how the clients of a round are drawn, or refuse what the config says about it."""
    train = config.train
    try:
        trace = None if train.trace is None else read_trace(Path(train.trace).expanduser())
        return Sampling(rule=train.sampling, candidates=train.candidates, trace=trace)
    except ValueError as error:
        raise ConfigError(f"who takes part (`train.sampling`): {error}") from error


def expected_size(config: Config, n_clients: int) -> int:
    """Return how many clients a method is to expect in a round."""
    return sampling_of(config).expected_size(n_clients, config.train.participation)

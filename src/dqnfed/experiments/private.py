"""The noise that a config asks for: its multiplier as given, or the least that keeps the run within its budget."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dqnfed.experiments.config import Config, ConfigError
from dqnfed.experiments.participants import sampling_of
from dqnfed.secure.accounting import check_accountant, noise_for, sampling_share
from dqnfed.secure.noise import Privacy
from dqnfed.sim.engine import run
from dqnfed.sim.state import Evaluation

if TYPE_CHECKING:
    from dqnfed.experiments.experiment import Experiment

logger = logging.getLogger("dqnfed")
TRIED = 3  # rounds in which releases are counted before the noise is chosen


def privacy_of(config: Config, experiment: Experiment | None = None) -> Privacy | None:
    """Return the noise and its budget; None where replies are not clipped."""
    given = config.privacy
    check_level(config)
    if given.clip is None:
        if given.noise_multiplier or given.epsilon is not None:
            raise ConfigError("`privacy.noise_multiplier` and `privacy.epsilon` need `privacy.clip`, the largest norm.")
        return None
    settings = given.model_dump(exclude={"secure", "roster", "level", "noise_multiplier", "epsilon"})
    try:
        found = Privacy(**settings, noise_multiplier=given.noise_multiplier)
    except ValueError as refusal:
        raise ConfigError(str(refusal)) from refusal
    if given.epsilon is None:
        return found
    multiplier = given.noise_multiplier
    if not multiplier:
        check_accountant()
        train, n_clients = config.train, 0 if experiment is None else experiment.federation.n_clients
        share = sampling_share(found, train.sampling, train.participation, n_clients) if n_clients else 1.0
        multiplier = noise_for(given.epsilon, _n_releases(config, found, experiment), given.delta, share)
    return replace(found, epsilon=given.epsilon, noise_multiplier=multiplier)


def check_level(config: Config) -> None:
    """Refuse the protection that is described and not provided."""
    if config.privacy.level == 2:
        raise ConfigError(
            "`privacy.level` = 2 (the server together with clients) is not provided: it needs pads for every pair of "
            "clients in place of a common key. With level 1 a server that works with one client sees every reply."
        )


def _n_releases(config: Config, privacy: Privacy, experiment: Experiment | None) -> int:
    """Return how many releases a run makes."""
    rounds = config.train.rounds
    if privacy.unit == "client":
        return rounds + (privacy.noise == "local")  # where messages count: DQN-Fed's first round has two
    if experiment is None:
        raise ConfigError(
            "with `privacy.unit` = 'record' the noise follows from `privacy.epsilon` in the simulator alone, which "
            "counts how often a method asks for an example; give `privacy.noise_multiplier` too, as the "
            "simulator prints it."
        )
    return _counted(experiment, privacy, rounds)


def _counted(experiment: Experiment, privacy: Privacy, rounds: int) -> int:
    """Return the releases of a run whose later rounds have as many as the last of a few, tried without noise."""
    config, tried = experiment.config, min(rounds, TRIED)
    is_disabled = logger.disabled
    logger.disabled = True
    try:
        found = run(
            experiment.algorithm,
            experiment.problem,
            experiment.federation,
            rounds=tried,
            participation=config.train.participation,
            sampling=sampling_of(config),
            seed=config.run.seed,
            evaluation=Evaluation(every=tried, participants=False),
            privacy=replace(privacy, noise_multiplier=0.0),
        )
    finally:
        logger.disabled = is_disabled
    counts = [int(record["releases"]) for record in found.history[1:]]
    return sum(counts) + (rounds - len(counts)) * counts[-1]

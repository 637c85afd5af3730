"""The noise that a config asks for: its multiplier as given, or the least that keeps the run within its budget."""

from __future__ import annotations

from dqnfed.experiments.config import Config, ConfigError
from dqnfed.secure.accounting import check_accountant, noise_for
from dqnfed.secure.noise import Privacy

NOT_PROVIDED = {
    "unit": ("record", "clips every example's gradient, and no method here computes these; use unit = 'client'"),
    "noise": (
        "distributed",
        "needs discrete noise inside the pads' ring; use 'local', or 'central' with a trusted server",
    ),
}


def privacy_of(config: Config) -> Privacy | None:
    """Return the noise and its budget; None where replies are not clipped."""
    given = config.privacy
    for name, (refused, why) in NOT_PROVIDED.items():
        if getattr(given, name) == refused:
            raise ConfigError(f"`privacy.{name}` = '{refused}' is not provided: it {why}.")
    if given.clip is None:
        if given.noise_multiplier or given.epsilon is not None:
            raise ConfigError("`privacy.noise_multiplier` and `privacy.epsilon` need `privacy.clip`, the largest norm.")
        return None
    multiplier = given.noise_multiplier
    if given.epsilon is not None and not multiplier:
        check_accountant()
        # of local noise every message counts, and DQN-Fed's first round has two
        n_releases = config.train.rounds + (given.noise == "local")
        multiplier = noise_for(given.epsilon, n_releases, given.delta)
    return Privacy(
        clip=given.clip, noise_multiplier=multiplier, noise=given.noise, epsilon=given.epsilon, delta=given.delta
    )

"""How much privacy a run has spent: Rényi accounting by Google's dp-accounting."""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.util import find_spec
from math import inf
from pathlib import Path

from dqnfed.core.checksums import checked_facts, damage_line, with_checksum
from dqnfed.core.run_folder import json_text, write_atomically
from dqnfed.secure.noise import Privacy

SMALLEST, LARGEST = 1e-3, 1e6  # noise multipliers that are tried


class BudgetSpent(Exception):
    """The next release would exceed the budget."""


def check_accountant() -> None:
    """Raise where the accountant's library is missing."""
    if find_spec("dp_accounting") is None:
        raise ValueError("counting epsilon needs an extra: pip install 'dqnfed[private]'.")


@lru_cache(maxsize=4096)
def epsilon_spent(noise_multiplier: float, n_releases: int, delta: float, share: float = 1.0) -> float:
    """Return epsilon at delta after so many releases with Gaussian noise, from a Poisson sample of this share each.

    Two runs are neighbours if one client's replies are zeros in one of them. With share 1 no sampling is assumed.
    """
    if n_releases == 0:
        return 0.0
    if noise_multiplier == 0.0:
        return inf
    import dp_accounting as dp
    from dp_accounting import rdp

    logging.getLogger("absl").setLevel(logging.ERROR)  # orders that do not converge are left out, which is safe
    event: dp.DpEvent = dp.GaussianDpEvent(noise_multiplier)
    if share < 1.0:
        event = dp.PoissonSampledDpEvent(share, event)
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(event, n_releases)
    return float(accountant.get_epsilon(delta))


def noise_for(epsilon: float, n_releases: int, delta: float, share: float = 1.0) -> float:
    """Return the least noise multiplier, to a thousandth, with which so many releases spend at most epsilon."""
    low, high = SMALLEST, SMALLEST
    while epsilon_spent(high, n_releases, delta, share) > epsilon:
        low, high = high, 2.0 * high
        if high > LARGEST:
            raise ValueError(f"no noise gives epsilon {epsilon:g} at delta {delta:g} after {n_releases} releases.")
    while high - low > 1e-3 * low:
        middle = (low + high) / 2.0
        low, high = (low, middle) if epsilon_spent(middle, n_releases, delta, share) <= epsilon else (middle, high)
    return high


class SpentFile:
    """What a run has spent, on disk before it is released: a run that is killed has not spent less than it says."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.most_at_once = 1  # releases that were counted together; what is asked for may bring as many

    def read(self) -> int:
        """Return what was written down; 0 where there is no file."""
        if not self._path.is_file():
            return 0
        facts = checked_facts(self._path)
        if facts is None:
            raise ValueError(
                f"{self._path.parent} cannot go on: {damage_line(self._path.name)}, and without it what was released "
                "before would not be counted. Put it back from a copy, or start a new run."
            )
        self.most_at_once = int(facts["most_at_once"])
        return int(facts["releases"])

    def write(self, n_releases: int) -> None:
        """Write down what is spent from now on."""
        facts = {"releases": n_releases, "most_at_once": self.most_at_once}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._path, with_checksum(facts, json_text))


class Ledger:
    """The releases of a run so far, and whether more are within the budget."""

    def __init__(
        self, privacy: Privacy, n_releases: int = 0, share: float = 1.0, spent_file: SpentFile | None = None
    ) -> None:
        self.privacy, self.n_releases = privacy, n_releases
        self.share = share  # with which each client takes part, by itself and in secret; 1: no amplification
        self._spent_file = spent_file

    @property
    def epsilon(self) -> float:
        """What was spent."""
        return self.after(0)

    def after(self, n_more: int) -> float:
        """Return what is spent after so many more releases."""
        privacy = self.privacy
        return epsilon_spent(privacy.noise_multiplier, self.n_releases + n_more, privacy.delta, self.share)

    def spend(self, n: int = 1) -> None:
        """Count more releases, or raise where they would exceed the budget."""
        privacy, after = self.privacy, self.after(n)
        if privacy.epsilon is not None and after > privacy.epsilon:
            more = "one more" if n == 1 else f"{n} more"
            raise BudgetSpent(
                f"the privacy budget is spent: epsilon is {self.epsilon:.3f} at delta {privacy.delta:g} after "
                f"{self.n_releases} releases, and {more} would make it {after:.3f}, above {privacy.epsilon:g}"
            )
        self.n_releases += n
        if self._spent_file is not None:
            self._spent_file.most_at_once = max(n, self._spent_file.most_at_once)
            self._spent_file.write(self.n_releases)

    def announce(self) -> None:
        """Write down what the next message may bring, where only its replies say how much that is."""
        if self._spent_file is not None:
            self._spent_file.write(self.n_releases + self._spent_file.most_at_once)


def sampling_share(privacy: Privacy, rule: str, participation: float, n_clients: int) -> float:
    """Return the probability that amplifies: of Poisson sampling, with noise for those who see the models alone.

    With cohorts of a fixed size (`uniform`) nothing is counted: the known bounds are for replacing a client by
    another, which is another promise with twice the sensitivity. Against a server that gets noisy replies one by one
    (`local`) nothing is amplified, since it knows who took part, and neither against other clients (`distributed`).
    """
    if rule != "poisson" or privacy.noise != "central":
        return 1.0
    nobody = (1.0 - participation) ** (n_clients - 1)  # a round without clients releases nothing, which tells that
    return participation if nobody <= 1e-3 * privacy.delta else 1.0

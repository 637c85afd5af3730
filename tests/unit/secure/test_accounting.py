"""What noise costs: against formulas of the literature, a second accountant, and a published table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from dqnfed.secure.accounting import BudgetSpent, Ledger, epsilon_spent, noise_for
from dqnfed.secure.noise import Privacy

pytest.importorskip("dp_accounting")
SETTINGS = [(z, n) for z in (0.8, 1.5, 2.0, 3.0, 5.0) for n in (1, 10, 100, 1000)]


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Return the exact delta of Gaussian noise for a change of mu deviations (Balle & Wang 2018, Theorem 8)."""
    first = stats.norm.cdf(mu / 2 - epsilon / mu)
    return float(first - math.exp(epsilon + stats.norm.logcdf(-mu / 2 - epsilon / mu)))


def renyi_epsilon(z: float, n: int, delta: float) -> float:
    """Return the best epsilon of Rényi accounting: alpha n / (2 z^2), converted as Canonne, Kamath & Steinke (2020)."""

    def at(alpha: float) -> float:
        conversion = math.log1p(-1 / alpha) - math.log(delta * alpha) / (alpha - 1)
        return alpha * n / (2 * z * z) + conversion

    found = optimize.minimize_scalar(lambda t: at(1 + math.exp(t)), bounds=(-6, 9), method="bounded")
    return float(found.fun)


@pytest.mark.parametrize(("z", "n"), SETTINGS)
def test_epsilon_is_that_of_the_renyi_formula(z: float, n: int) -> None:
    assert epsilon_spent(z, n, 1e-5) == pytest.approx(renyi_epsilon(z, n, 1e-5), rel=0.01)


@pytest.mark.parametrize(("z", "n"), SETTINGS)
def test_epsilon_is_never_below_what_was_spent(z: float, n: int) -> None:
    assert gaussian_delta(epsilon_spent(z, n, 1e-5), math.sqrt(n) / z) <= 1e-5 * (1 + 1e-9)


def sampled_renyi(q: float, z: float, alpha: int) -> float:
    """Return the Rényi divergence of one Poisson-sampled release (Mironov, Talwar & Zhang 2019, Sec. 3.3)."""
    k = np.arange(alpha + 1)
    choices = special.gammaln(alpha + 1) - special.gammaln(k + 1) - special.gammaln(alpha - k + 1)
    terms = choices + (alpha - k) * math.log1p(-q) + k * math.log(q) + k * (k - 1) / (2 * z * z)
    return float(special.logsumexp(terms)) / (alpha - 1)


@pytest.mark.parametrize(("z", "epochs", "printed"), [(1.3, 15, 1.19), (1.1, 60, 3.01), (0.7, 45, 7.10)])
def test_a_published_table_of_poisson_sampling(z: float, epochs: int, printed: float) -> None:
    """TensorFlow Privacy's MNIST tutorial: batches of 256 of 60,000, delta 1e-5, the conversion of Mironov (2017)."""
    q, n = 256 / 60_000, int(epochs * 60_000 / 256)
    orders = range(2, 64)
    loose = min(n * sampled_renyi(q, z, a) - math.log(1e-5) / (a - 1) for a in orders)
    assert loose == pytest.approx(printed, rel=0.02)
    tight = min(
        n * sampled_renyi(q, z, a) + math.log1p(-1 / a) - math.log(1e-5 * a) / (a - 1) for a in orders
    )  # the conversion that is used today
    assert epsilon_spent(z, n, 1e-5, share=q) == pytest.approx(tight, rel=0.01)


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 8.0])
def test_the_least_noise_keeps_the_budget_and_less_does_not(epsilon: float) -> None:
    z = noise_for(epsilon, 50, 1e-5)
    assert epsilon_spent(z, 50, 1e-5) <= epsilon < epsilon_spent(z * 0.99, 50, 1e-5)


def test_a_ledger_refuses_the_release_that_exceeds_the_budget() -> None:
    privacy = Privacy(clip=1.0, noise_multiplier=4.0, epsilon=3.0)
    ledger, spent = Ledger(privacy), []
    while epsilon_spent(4.0, ledger.n_releases + 1, 1e-5) <= 3.0:
        ledger.spend()
        spent.append(ledger.epsilon)
    with pytest.raises(BudgetSpent, match="one more would make it"):
        ledger.spend()
    assert np.all(np.diff(spent) > 0)
    assert ledger.n_releases == len(spent) > 3
    assert spent[-1] <= 3.0


def test_without_noise_nothing_is_promised() -> None:
    assert epsilon_spent(0.0, 1, 1e-5) == math.inf
    assert epsilon_spent(0.0, 0, 1e-5) == 0.0
    with pytest.raises(ValueError, match="budget for noise"):
        Privacy(clip=1.0, epsilon=3.0)

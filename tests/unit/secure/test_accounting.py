"""What noise costs: against formulas of the literature, a second accountant, and a published table."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import optimize, special, stats

from dqnfed.secure.accounting import BudgetSpent, Ledger, epsilon_spent, noise_for, sampling_share
from dqnfed.secure.noise import NOISES, Privacy

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


MCMAHAN = {  # users, users a round, noise: epsilon after 1, 10, ..., 10^6 rounds, delta = users^-1.1
    (1e5, 1e2, 1.0): (0.97, 0.98, 1.00, 1.07, 1.18, 2.21, 7.50),
    (1e6, 1e1, 1.0): (0.68, 0.69, 0.69, 0.69, 0.69, 0.72, 0.73),
    (1e6, 1e3, 1.0): (1.17, 1.17, 1.20, 1.28, 1.39, 2.44, 8.13),
    (1e6, 1e4, 1.0): (1.73, 1.92, 2.08, 3.06, 8.49, 32.38, 187.01),
    (1e6, 1e3, 3.0): (0.47, 0.47, 0.48, 0.48, 0.49, 0.67, 1.95),
    (1e9, 1e3, 1.0): (0.84, 0.84, 0.84, 0.85, 0.88, 0.88, 0.88),
}


@pytest.mark.parametrize(("users", "asked", "z"), MCMAHAN)
def test_the_published_table_of_dp_fedavg(users: float, asked: float, z: float) -> None:
    """McMahan, Ramage, Talwar & Zhang (ICLR 2018), Table 1: moments up to 32, the conversion of Abadi et al. (2016).

    Today's conversion of the same moments is what the accountant counts; it is never above the printed value.
    """
    q, delta, orders = asked / users, users**-1.1, range(2, 34)
    rows = np.array([sampled_renyi(q, z, alpha) for alpha in orders])
    for power, printed in enumerate(MCMAHAN[users, asked, z]):
        n = 10**power
        loose = min(n * row - math.log(delta) / (a - 1) for row, a in zip(rows, orders, strict=True))
        assert round(loose, 2) == pytest.approx(printed, abs=0.005)
        assert epsilon_spent(z, n, delta, share=q) <= printed + 0.005


SAMPLED = [
    (q, z, n) for q in (0.004, 0.01, 0.05, 0.2, 1.0) for z, n in ((0.8, 30), (1.1, 200), (2.0, 100), (5.0, 3000))
]


@pytest.mark.parametrize(("q", "z", "n"), SAMPLED)
def test_two_accountants_agree(q: float, z: float, n: int) -> None:
    """Twenty settings: Google's accountant, and Microsoft's, which integrates numerically.

    Where much is spent Google's leaves out fractional orders and counts more: 60 in place of 54.
    """
    variables = pytest.importorskip("prv_accountant.privacy_random_variables")
    others = pytest.importorskip("prv_accountant.other_accountants")
    orders = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64)) + [128, 256, 512]
    whole = variables.GaussianMechanism(z)
    one = variables.PoissonSubsampledGaussianMechanism(noise_multiplier=z, sampling_probability=q) if q < 1.0 else whole
    _, other, _ = others.RDP([one], orders=orders).compute_epsilon(1e-5, [n])
    assert epsilon_spent(z, n, 1e-5, share=q) == pytest.approx(other, rel=0.01)


def test_poisson_sampling_amplifies_for_a_trusted_server_alone() -> None:
    shares = {noise: sampling_share(Privacy(clip=1.0, noise=noise), "poisson", 0.1, 500) for noise in NOISES}
    assert shares == {"local": 1.0, "central": 0.1, "distributed": 1.0}
    central = Privacy(clip=1.0, noise="central")
    assert sampling_share(central, "uniform", 0.1, 500) == 1.0
    assert sampling_share(central, "poisson", 0.1, 20) == 1.0, "of 20 clients often nobody is drawn, which tells"


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

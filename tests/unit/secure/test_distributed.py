"""Noise in shares: discrete, in the ring, as much as is counted, and within a stated bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from dqnfed import Evaluation, Policy, run
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.qffl import QFFL
from dqnfed.flower.in_process import run_in_process
from dqnfed.secure.distributed import FAR, check_noise, discrete_gaussian, noised_unit, room_bits, share_multiplier
from dqnfed.secure.noise import Privacy
from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.release import Revealing
from dqnfed.secure.ring import FRACTION_BITS, RingOverflow, whole_weights
from dqnfed.secure.rows import padded_row, unpadded_sum, unpadding
from tests.helpers.bowls import BOWLS, Case
from tests.helpers.turns import relative_distance

pytest.importorskip("dp_accounting")
QUIET, UNCLIPPED = Evaluation(every=50, participants=False), Policy(max_update_norm=math.inf)
EQUAL = FedAvg(weighting="uniform")


@pytest.fixture(scope="module")
def case() -> Case:
    return BOWLS["network"][-1]()


@pytest.mark.parametrize("deviation", [1.5, 20.0, 1e7])
def test_the_noise_is_a_discrete_gaussian(deviation: float) -> None:
    """N = 40000: whole numbers with the probabilities of exp(-x^2 / 2 s^2), by a chi-square test."""
    drawn = discrete_gaussian(40_000, deviation)
    assert np.array_equal(drawn, np.rint(drawn))
    edges = np.unique(np.floor(deviation * np.array([-2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2])))
    counts = np.bincount(np.searchsorted(edges, drawn, side="left"), minlength=len(edges) + 1)
    if deviation < 100:
        support = np.arange(-math.ceil(12 * deviation), math.ceil(12 * deviation) + 1)
        chances = np.exp(-np.square(support) / (2 * deviation**2))
        chances = np.bincount(np.searchsorted(edges, support, side="left"), chances / chances.sum(), len(edges) + 1)
    else:
        chances = np.diff(np.concatenate([[0.0], stats.norm.cdf(edges / deviation), [1.0]]))
    assert stats.chisquare(counts, 40_000 * chances).pvalue > 1e-4


def test_a_clipped_row_is_no_longer_in_whole_numbers() -> None:
    rng = np.random.default_rng(0)
    for n in (3, 1000, 50_000):
        row = 7.0 * rng.standard_normal(n)
        unit, norm = noised_unit(row, Privacy(clip=0.3, noise="distributed"), 10)
        assert np.linalg.norm(unit * norm) <= 0.3 * (1 + 1e-12)
        np.testing.assert_allclose(unit * norm, 0.3 * row / np.linalg.norm(row), atol=0.3 * 2.0**-FRACTION_BITS * 1.01)


@pytest.mark.parametrize(("z", "n_asked"), [(0.5, 3), (5.0, 3), (50.0, 10), (1000.0, 4)])
def test_sums_stay_within_the_modulus(z: float, n_asked: int) -> None:
    """The stated bound: rows and noise of `FAR` deviations in every number, all of one sign, in the largest sum."""
    privacy = Privacy(clip=1.0, noise_multiplier=z, noise="distributed")
    multiplier = share_multiplier(privacy, n_asked)
    largest = (1.0 + FAR * multiplier) / 2.0 ** room_bits(multiplier)  # of a noisy unit row
    assert largest <= 1.0
    key, message, n = PadKey.fresh(), Message(bytes(32), tuple(range(n_asked))), 5
    row = np.full(n, largest)
    rows = [padded_row(key, message, "delta", row, k, with_products=False, norm=1.0) for k in range(n_asked)]
    whole, scale = whole_weights(np.ones(n_asked))
    pads = unpadding(key, message, "delta", whole, range(n_asked), n)
    np.testing.assert_allclose(unpadded_sum(rows, whole, pads) * scale, n_asked * row, rtol=1e-6)


def test_noise_that_leaves_the_ring_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    privacy = Privacy(clip=1.0, noise_multiplier=2.0, noise="distributed")
    far = 2.0**FRACTION_BITS * 1.01
    monkeypatch.setattr("dqnfed.secure.distributed.discrete_gaussian", lambda n, deviation: np.full(n, far))
    with pytest.raises(RingOverflow, match="no room"):
        noised_unit(np.ones(4), privacy, 3)


def test_without_noise_it_is_the_clipped_mean(case: Case) -> None:
    settings = {"rounds": 2, "evaluation": QUIET, "policy": UNCLIPPED}
    shares, central = Privacy(clip=0.01, noise="distributed"), Privacy(clip=0.01, noise="central")
    found = run(EQUAL, case.problem, case.federation, privacy=shares, secure=True, **settings)  # type: ignore[arg-type]
    plain = run(EQUAL, case.problem, case.federation, privacy=central, **settings)  # type: ignore[arg-type]
    assert relative_distance(found.theta, plain.theta) <= 1e-6


@pytest.mark.parametrize("deployed", [False, True])
def test_the_sum_has_the_noise_that_is_counted_without_any_one_client(deployed: bool, case: Case) -> None:
    """Of K shares K - 1 are counted, so that the mean's noise is z clip / K times the root of K / (K - 1)."""
    z, clip, K = 40.0, 0.01, case.federation.n_clients
    start = in_process(case, Privacy(clip=clip, noise="distributed"), deployed=False)
    n_runs = 4 if deployed else 20
    drawn = [
        in_process(case, Privacy(clip=clip, noise_multiplier=z, noise="distributed"), deployed=deployed)
        for _ in range(n_runs)
    ]
    noise = torch.stack([theta - start for theta in drawn]).flatten()
    wanted = z * clip / K * math.sqrt(K / (K - 1))
    assert float(noise.std()) == pytest.approx(wanted, rel=4 / math.sqrt(2 * len(noise)))


@pytest.mark.parametrize("K", [3, 20])
def test_the_noise_of_all_but_one_has_the_deviation_that_is_counted(K: int) -> None:
    """N = 40,000 numbers of K - 1 clients' shares of one `clip`: their spread is right to 4 / sqrt(2 N)."""
    z, clip, n = 3.0, 0.5, 40_000
    privacy = Privacy(clip=clip, noise_multiplier=z, noise="distributed")
    shares = [noised_unit(np.zeros(n), privacy, K) for _ in range(K - 1)]
    total = np.sum([unit * norm for unit, norm in shares], axis=0)
    assert float(total.std()) == pytest.approx(z * clip, rel=4 / math.sqrt(2 * n))


def in_process(case: Case, privacy: Privacy, *, deployed: bool) -> torch.Tensor:
    how = run_in_process if deployed else run
    given = (EQUAL, case.problem, case.federation)
    found = how(*given, rounds=1, evaluation=QUIET, policy=UNCLIPPED, privacy=privacy, secure=True)
    assert found.summary["privacy"]["releases"] == 1
    return found.theta


def test_a_sum_with_less_noise_is_not_made(case: Case) -> None:
    check_noise(np.full(6, 0.3), 6)
    for weights, n_asked in ((np.full(5, 0.3), 6), (np.array([1.0, 1.0, 0.5]), 3)):
        with pytest.raises(Revealing, match="of the variance"):
            check_noise(weights, n_asked)
    privacy = Privacy(clip=0.01, noise_multiplier=5.0, noise="distributed")
    settings = {"rounds": 3, "evaluation": QUIET, "policy": UNCLIPPED, "privacy": privacy, "secure": True}
    found = run(FedAvg(), case.problem, case.federation, **settings)  # type: ignore[arg-type]
    assert found.summary["status"] == "stopped", "weights by numbers of examples"
    assert torch.equal(found.theta, case.problem.theta0)


def test_what_it_does_not_cover_is_refused(case: Case) -> None:
    privacy = Privacy(clip=0.01, noise_multiplier=5.0, noise="distributed")
    settings = {"rounds": 1, "evaluation": QUIET, "policy": UNCLIPPED, "privacy": privacy}
    given = (case.problem, case.federation)
    with pytest.raises(ValueError, match=r"needs `privacy\.secure`"):
        run(EQUAL, *given, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="numbers of their own"):
        run(QFFL(), *given, secure=True, **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'distributed'"):
        run(DQNFed(), *given, secure=True, **settings)  # type: ignore[arg-type]

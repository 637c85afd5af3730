"""Runs with noise: what it hides, what it costs, and that the budget ends them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from dqnfed import Evaluation, Policy, RunResult, run
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.mgda import MGDA
from dqnfed.algorithms.qffl import QFFL
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.experiments.config import ConfigError, read_config
from dqnfed.experiments.experiment import run_experiment
from dqnfed.experiments.private import privacy_of
from dqnfed.flower.in_process import run_in_process
from dqnfed.secure.accounting import epsilon_spent
from dqnfed.secure.noise import NoisySums, Privacy, clipped_rows, noised_rows, standard_normal
from tests.helpers.bowls import BOWLS, Case
from tests.helpers.turns import relative_distance

pytest.importorskip("dp_accounting")
QUIET = Evaluation(every=50, participants=False)
UNCLIPPED = Policy(max_update_norm=math.inf)


@pytest.fixture(scope="module")
def case() -> Case:
    return BOWLS["network"][-1]()


def noisy(algorithm: AnyAlgorithm, case: Case, privacy: Privacy, rounds: int = 4, **options: object) -> RunResult:
    policy = UNCLIPPED if privacy.noise == "central" else Policy()
    return run(
        algorithm,
        case.problem,
        case.federation,
        rounds=rounds,
        evaluation=QUIET,
        policy=policy,
        privacy=privacy,
        **options,  # type: ignore[arg-type]
    )


def test_the_noise_is_normal() -> None:
    """N = 20000 draws: Kolmogorov's test, and two draws share nothing."""
    first, second = standard_normal(20_000), standard_normal(20_000)
    assert stats.kstest(first, "norm").pvalue > 1e-4
    assert abs(float(np.corrcoef(first, second)[0, 1])) < 5 / math.sqrt(20_000)


def test_every_reply_is_clipped_by_itself(case: Case) -> None:
    update = FedAvg.info.replies[0]
    G = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]], dtype=torch.float64)
    fields = {name: torch.zeros(3, dtype=torch.float64) for name in update._fields}
    for clipped in (
        noised_rows(update(**{**fields, "delta": G}), Privacy(clip=1.0)),
        clipped_rows(update(**{**fields, "delta": G}), 1.0),
    ):
        torch.testing.assert_close(clipped.delta.norm(dim=1), torch.tensor([1.0, 0.5, 0.0], dtype=torch.float64))


@pytest.mark.parametrize("algorithm", [FedAvg(), MGDA(), QFFL(), DQNFed()], ids=lambda a: type(a).__name__)
def test_local_noise_is_counted_by_messages(algorithm: AnyAlgorithm, case: Case) -> None:
    found = noisy(algorithm, case, Privacy(clip=1.0, noise_multiplier=3.0))
    releases = np.cumsum([record["releases"] for record in found.history[1:]])
    expected = [epsilon_spent(3.0, int(n), 1e-5) for n in releases]
    assert [record["epsilon"] for record in found.history[1:]] == pytest.approx(expected)
    assert found.summary["privacy"]["epsilon"] == pytest.approx(expected[-1])
    assert releases[-1] == (5 if isinstance(algorithm, DQNFed) else 4), "DQN-Fed's first round has two messages"


@pytest.mark.parametrize("noise", ["local", "central"])
def test_a_run_that_would_exceed_its_budget_stops_and_says_so(noise: str, case: Case) -> None:
    budget = epsilon_spent(2.0, 3, 1e-5) * 1.001
    privacy = Privacy(clip=0.001, noise_multiplier=2.0, noise=noise, epsilon=budget)
    found = noisy(FedAvg(), case, privacy, rounds=20)
    assert found.summary["status"] == "stopped"
    assert "the privacy budget is spent" in found.summary["reason"]
    assert [record["status"] for record in found.history[1:]] == ["next"] * 3 + ["stop"]
    assert found.summary["privacy"]["epsilon"] <= budget


def test_a_resumed_run_goes_on_counting(case: Case, tmp_path: Path) -> None:
    privacy = Privacy(clip=1.0, noise_multiplier=2.0)
    noisy(FedAvg(), case, privacy, rounds=2, out=tmp_path / "run")
    found = noisy(FedAvg(), case, privacy, rounds=4, out=tmp_path / "run", resume=True)
    assert found.summary["privacy"]["epsilon"] == pytest.approx(epsilon_spent(2.0, 4, 1e-5))
    with pytest.raises(ValueError, match="was started with privacy"):
        noisy(FedAvg(), case, Privacy(clip=1.0, noise_multiplier=9.0), rounds=5, out=tmp_path / "run", resume=True)


class KilledError(Exception):
    """The process is gone."""


class Kills:
    """Ends the process when a round is over, before its checkpoint."""

    def start(self, *_: object) -> None: ...
    def end(self, *_: object) -> None: ...
    def fail(self, *_: object) -> None: ...

    def round(self, record: dict[str, object], *_: object) -> None:
        if record["round"] == 3:
            raise KilledError


@pytest.mark.parametrize("noise", ["local", "central"])
def test_rounds_that_were_lost_with_a_killed_process_are_counted(noise: str, case: Case, tmp_path: Path) -> None:
    """Two rounds with a checkpoint, two that are lost and run again with other noise, one more: seven releases."""
    privacy, folder = Privacy(clip=1.0, noise_multiplier=2.0, noise=noise), tmp_path / "run"
    noisy(FedAvg(), case, privacy, rounds=2, out=folder)
    with pytest.raises(KilledError):
        noisy(FedAvg(), case, privacy, 5, out=folder, resume=True, checkpoint_seconds=1e9, observers=[Kills()])
    found = noisy(FedAvg(), case, privacy, rounds=5, out=folder, resume=True)
    assert found.summary["privacy"]["releases"] == 7
    assert found.history[-1]["epsilon"] == pytest.approx(epsilon_spent(2.0, 7, 1e-5))


def test_a_killed_run_without_a_checkpoint_has_spent_too(case: Case, tmp_path: Path) -> None:
    """The epsilon of an example is of two releases a round for q-FFL, four rounds of which were made."""
    budget = epsilon_spent(2.0, 11, 1e-5) * 1.001
    privacy = Privacy(clip=1.0, noise_multiplier=2.0, unit="record", epsilon=budget)
    with pytest.raises(KilledError):
        noisy(QFFL(), case, privacy, 9, out=tmp_path / "run", checkpoint_seconds=1e9, observers=[Kills()])
    found = noisy(QFFL(), case, privacy, 9, out=tmp_path / "run", resume=True)
    assert [record["status"] for record in found.history[1:]] == ["next", "stop"], "8 and 2, and 2 more are above 11"


def test_a_damaged_count_of_releases_ends_the_run(case: Case, tmp_path: Path) -> None:
    privacy, file = Privacy(clip=1.0, noise_multiplier=2.0), tmp_path / "run" / "privacy.json"
    noisy(FedAvg(), case, privacy, rounds=2, out=tmp_path / "run")
    file.write_text(file.read_text().replace('"releases": 2', '"releases": 1'))
    with pytest.raises(ValueError, match=r"damaged: privacy\.json"):
        noisy(FedAvg(), case, privacy, rounds=4, out=tmp_path / "run", resume=True)


def test_central_noise_has_the_spread_of_one_clients_largest_part(case: Case) -> None:
    """FedAvg's step with equal weights is the mean of clipped updates plus noise of spread z clip / K."""
    z, clip, method = 500.0, 1e-3, FedAvg(weighting="uniform")
    plain = noisy(method, case, Privacy(clip=clip, noise="central"), rounds=1)
    draws = [noisy(method, case, Privacy(clip=clip, noise_multiplier=z, noise="central"), rounds=1) for _ in range(20)]
    noise = torch.stack([each.theta - plain.theta for each in draws]).flatten()
    n = len(noise)
    assert float(noise.std()) == pytest.approx(z * clip / case.federation.n_clients, rel=4 / math.sqrt(2 * n))


def test_central_noise_of_unequal_weights_hides_the_largest() -> None:
    """N = 40,000 numbers."""
    update = FedAvg.info.replies[0](torch.zeros(3, 40_000, dtype=torch.float64))
    sums = NoisySums(update, Privacy(clip=0.5, noise_multiplier=2.0, noise="central"), lambda: None)
    noise = sums.combine("delta", torch.tensor([0.1, -0.7, 0.2]))
    assert float(noise.std()) == pytest.approx(2.0 * 0.5 * 0.7, rel=4 / math.sqrt(80_000))


@pytest.mark.parametrize("algorithm", [MGDA(), DQNFed(), QFFL()], ids=lambda a: type(a).__name__)
def test_central_noise_is_refused_where_it_does_not_cover_what_the_server_asks(
    algorithm: AnyAlgorithm, case: Case
) -> None:
    with pytest.raises(ValueError, match="'central'"):
        noisy(algorithm, case, Privacy(clip=1.0, noise_multiplier=1.0, noise="central"))


def test_what_cannot_work_with_central_noise_is_refused(case: Case) -> None:
    privacy = Privacy(clip=1.0, noise_multiplier=1.0, noise="central")
    with pytest.raises(ValueError, match=r"policy\.max_update_norm"):
        run(FedAvg(), case.problem, case.federation, rounds=1, privacy=privacy)
    with pytest.raises(ValueError, match=r"with `privacy\.secure` it is not"):
        noisy(FedAvg(), case, privacy, secure=True)


def test_local_noise_goes_under_pads_too(case: Case) -> None:
    quiet = Privacy(clip=1e6, noise_multiplier=1e-15)
    plain = run(MGDA(), case.problem, case.federation, rounds=2, evaluation=QUIET)
    found = noisy(MGDA(), case, quiet, rounds=2, secure=True)
    assert relative_distance(found.theta, plain.theta) <= 1e-6


@pytest.mark.parametrize("noise", ["local", "central"])
def test_deployed_noise_is_counted_against_the_same_budget(noise: str, case: Case) -> None:
    budget = epsilon_spent(2.0, 2, 1e-5) * 1.001
    found = run_in_process(
        FedAvg(),
        case.problem,
        case.federation,
        rounds=5,
        evaluation=QUIET,
        policy=UNCLIPPED,
        privacy=Privacy(clip=0.001, noise_multiplier=2.0, noise=noise, epsilon=budget),
    )
    assert [record["status"] for record in found.history[1:]] == ["next", "next", "stop"]
    assert "the privacy budget is spent" in found.summary["reason"]


def test_a_budget_alone_sets_the_noise() -> None:
    config = read_config("bowls", ["privacy.clip=1.0", "privacy.epsilon=8.0", "train.rounds=10"])
    privacy = privacy_of(config)
    assert privacy is not None
    assert epsilon_spent(privacy.noise_multiplier, 11, 1e-5) <= 8.0
    found = run_experiment(config, None)
    assert found.summary["rounds"] == 10
    assert 0.0 < found.summary["privacy"]["epsilon"] <= 8.0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["privacy.unit='record'", "privacy.clip=1.0", "privacy.noise='central'"], "use 'local'"),
        (["privacy.epsilon=1.0"], "need `privacy.clip`"),
        (["privacy.epsilon=1.0", "privacy.level=2"], "the server together with clients"),
    ],
)
def test_what_is_not_provided_is_refused_by_name(changes: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        run_experiment(read_config("bowls", changes), None)


def test_poisson_cohorts_are_secret_and_amplify(case: Case) -> None:
    """With the same seed two runs ask other clients, and epsilon is that of Poisson sampling."""
    privacy = Privacy(clip=0.01, noise_multiplier=1.0, noise="central", delta=0.5)  # so that six clients are enough
    method, share, rounds = FedAvg(weighting="uniform"), 0.9, 6
    runs = [noisy(method, case, privacy, rounds, participation=share, sampling="poisson") for _ in range(3)]
    assert len({str([record["clients"] for record in found.history]) for found in runs}) > 1
    released = sum(record["releases"] for record in runs[0].history[1:])
    assert runs[0].summary["privacy"]["sampling_share"] == share
    assert runs[0].summary["privacy"]["epsilon"] == pytest.approx(epsilon_spent(1.0, released, 0.5, share))
    with pytest.raises(ValueError, match="needs equal weights"):
        noisy(FedAvg(), case, privacy, rounds, participation=share, sampling="poisson")


def test_a_sum_over_a_poisson_cohort_is_over_the_expected_number() -> None:
    """What it gives does not tell how many took part: three clients of five expected."""
    update = FedAvg.info.replies[0](torch.ones(3, 2, dtype=torch.float64))
    sums = NoisySums(update, Privacy(clip=10.0, noise="central"), lambda: None, n_expected=5.0)
    torch.testing.assert_close(sums.combine("delta", torch.full((3,), 1 / 3)), torch.full((2,), 3 / 5).double())

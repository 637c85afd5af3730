"""Secure runs in the simulator: drop-outs, cohorts, resuming, refusals, and what the server sees."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from dqnfed import Evaluation, Federation, Policy, run
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.mgda import MGDA
from dqnfed.core.algorithm import AnyAlgorithm, Theta
from dqnfed.core.replies import Replies
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_problem, run_experiment
from dqnfed.secure.pads import PadKey, fresh_nonce, message_of
from dqnfed.secure.replies import SecureReplies
from dqnfed.sim.clients import Traffic
from dqnfed.sim.secure import secured
from tests.helpers.bowls import BOWLS, Case
from tests.helpers.rows import gaussian_rows
from tests.helpers.secure import Wire, secure_run
from tests.helpers.turns import relative_distance

QUIET = Evaluation(every=3, participants=False)
SECURE = "privacy.secure=true"


@pytest.fixture(scope="module")
def case() -> Case:
    return BOWLS["network"][-1]()


def broken(case: Case) -> Federation:
    """Return the federation with one client whose inputs are infinite, and so are its gradients."""
    inputs = case.federation.train.inputs.clone()
    inputs[case.federation.train.rows(torch.tensor([2]))] = torch.inf
    return replace(case.federation, train=case.federation.train._replace(inputs=inputs))


@pytest.mark.parametrize("algorithm", [FedAvg(), MGDA(), DQNFed(cached_clients=0)], ids=lambda a: type(a).__name__)
def test_a_client_that_drops_out_of_a_round_needs_no_recovery(algorithm: AnyAlgorithm, case: Case) -> None:
    federation, results = broken(case), []
    for secure in (False, True):
        results.append(run(algorithm, case.problem, federation, rounds=3, evaluation=QUIET, secure=secure))
    plain, private = results
    assert private.summary["n_dropped"] == plain.summary["n_dropped"] >= 3
    assert relative_distance(private.theta, plain.theta) <= 1e-6


def test_clipped_replies_are_clipped_under_pads_too(case: Case) -> None:
    policy = Policy(max_update_norm=1.0)
    results = [
        run(MGDA(), case.problem, case.federation, rounds=3, policy=policy, evaluation=QUIET, secure=secure)
        for secure in (False, True)
    ]
    assert results[1].summary["n_clipped"] == results[0].summary["n_clipped"] > 0
    assert relative_distance(results[1].theta, results[0].theta) <= 1e-6


def test_a_resumed_run_uses_no_pad_twice(case: Case, tmp_path: Path) -> None:
    whole, first, second = Wire(), Wire(), Wire()
    key = PadKey.fresh()
    expected = secure_run(DQNFed(), case, whole, rounds=6, key=key)
    secure_run(DQNFed(), case, first, rounds=3, key=key, out=tmp_path / "run", checkpoint_seconds=0.0)
    found = secure_run(DQNFed(), case, second, rounds=6, key=key, out=tmp_path / "run", resume=True)
    assert relative_distance(found.theta, expected.theta) <= 1e-6
    used = [message.digest for message in [*first.messages, *second.messages, *whole.messages]]
    assert len(set(used)) == len(used) > 12


def test_a_secure_run_does_not_go_on_in_the_open(case: Case, tmp_path: Path) -> None:
    run(FedAvg(), case.problem, case.federation, rounds=1, secure=True, out=tmp_path / "run")
    with pytest.raises(ValueError, match=r"privacy\.secure"):
        run(FedAvg(), case.problem, case.federation, rounds=2, out=tmp_path / "run", resume=True)


def test_fewer_than_three_clients_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="needs at least 3 clients a round, but there are 2"):
        run(FedAvg(), case.problem, case.federation, rounds=1, participation=0.3, secure=True)


def test_more_pairs_than_the_ring_has_room_for_are_refused_before_the_first_round(case: Case) -> None:
    with pytest.raises(ValueError, match=r"metric_memory = 65: .* set it to 64 at most"):
        run(DQNFed(metric_memory=65), case.problem, case.federation, rounds=1, secure=True)


def test_checks_that_compare_replies_are_refused(case: Case) -> None:
    with pytest.raises(ValueError, match=r"policy\.drop_share"):
        run(FedAvg(), case.problem, case.federation, rounds=1, policy=Policy(drop_share=0.2), secure=True)


def test_the_cache_of_absent_rows_is_switched_off_with_one_line(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        found = run(DQNFed(), case.problem, case.federation, rounds=1, participation=0.7, secure=True)
    assert sum("cached_clients = 0" in record.getMessage() for record in caplog.records) == 1
    assert "0 cached clients" in found.summary["mode"]
    with pytest.raises(ValueError, match="DQNFed cannot be run"):
        run(DQNFed(cached_clients=3), case.problem, case.federation, rounds=1, participation=0.7, secure=True)


def test_a_step_that_is_one_clients_row_is_not_made(case: Case) -> None:
    """Of three clients one has nearly all examples, by which FedAvg weighs."""
    inputs, targets = case.federation.train.inputs, case.federation.train.targets
    places = [slice(0, 60), slice(0, 2), slice(4, 6)]
    clients = [
        (inputs[place].repeat(n, 1), targets[place].repeat(n)) for place, n in zip(places, (10, 2, 2), strict=True)
    ]
    weighted = FedAvg(weighting="examples")
    found = run(weighted, case.problem, Federation.from_clients(clients), rounds=5, evaluation=QUIET, secure=True)
    assert found.summary["status"] == "stopped"
    assert "nearly the row of one client" in found.summary["reason"]
    assert torch.equal(found.theta, case.problem.theta0)


SEEDS = [pytest.param(seed, marks=[] if seed == 2 else pytest.mark.slow) for seed in range(5)]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_first_step_of_digits_is_the_plain_one_in_float32(seed: int) -> None:
    """Seed 2 has the worst condition of five: with products in float32 the two steps differed by 5e-5."""
    given = [f"run.seed={seed}", "train.rounds=1", "eval.participants=false", "algorithm.name='dqn-fed'"]
    start = build_problem(read_config("digits", given)).problem.theta0
    plain, secure = (run_experiment(read_config("digits", [*given, *more]), None) for more in ([], [SECURE]))
    assert [r["status"] for r in secure.history] == [r["status"] for r in plain.history]
    assert relative_distance(secure.theta - start, plain.theta - start) <= 1e-6


def view_of(G: torch.Tensor, key: PadKey) -> tuple[SecureReplies[tuple[torch.Tensor, ...]], Traffic]:
    prepared = MGDA()
    K = len(G)
    message = message_of("run", 0, 0, Theta(G[0]), list(range(K)), fresh_nonce())
    update = prepared.info.replies[0]
    fields = {name: torch.ones(K, dtype=torch.float64) for name in update._fields}
    traffic = Traffic()
    return secured(key, message, range(K), update(**{**fields, "delta": G}), prepared, traffic), traffic


def test_what_the_server_holds_is_random_words_norms_and_scalars() -> None:
    K, n = 6, 4000
    G = gaussian_rows(K, n, seed=3)
    replies, traffic = view_of(G, PadKey.fresh())
    np.testing.assert_allclose(replies.gram("delta"), Replies((G,)).updates[0] @ G.T, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="a row of 'delta' was asked for"):
        replies.rows("delta")
    shown = replies.updates
    assert all(t.numel() == K for t in shown), "one number a client and field"
    words = [row.words for row in replies._source._padded["delta"]]  # type: ignore[attr-defined]
    for row in words:
        assert stats.chisquare(np.bincount(row.view(np.uint8), minlength=256)).pvalue > 1e-4
    assert traffic.up == K * (8 * n + 8 * K + 8) + 8 * K * (len(shown) - 1)

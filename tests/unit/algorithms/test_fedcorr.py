"""FedCorr: the stages and their invariants, what it finds, what it leaves alone, and what it refuses."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dqnfed import Evaluation, FedAvg, Policy, RunResult, looped, run
from dqnfed.algorithms import REGISTRY, method_called
from dqnfed.algorithms.fedcorr import FedCorr, fedcorr_with
from dqnfed.algorithms.fedcorr_labels import (
    Groups,
    corrected_labels,
    doubtful_labels,
    mixed_sgd,
    two_groups,
    two_groups_of_clients,
    unit,
)
from dqnfed.algorithms.fedcorr_messages import OWN_MESSAGES, OWN_REPLIES
from dqnfed.algorithms.label_correction import LabelCorrection, started_at
from dqnfed.core.algorithm import LOCAL_WORK, AnyAlgorithm, hyperparameters
from dqnfed.core.local_work import draw_batches
from dqnfed.core.problem import Problem
from dqnfed.core.run_folder import load_tensors
from dqnfed.core.seeds import seed_for
from dqnfed.core.tensors import named_tensors
from dqnfed.flower import run_in_process
from tests.contract.test_every_algorithm import Interrupter, without_times
from tests.helpers.bowls import federation_of, labelled_clients, linear_model, network_bowl, regression_clients, task_of
from tests.helpers.folders import newest_tensors
from tests.helpers.noisy_blobs import WORK, NoisyBlobs, noisy_blobs
from tests.helpers.play import Played, play
from tests.helpers.turns import relative_distance

NETWORK_METHODS = sorted(
    name for name, kind in REGISTRY.items() if "network" in kind.info.problem_kinds and name != "fedcorr"
)
AFTER_SWEEP = 1 + 10 + 1  # rounds: setup, one training turn of each of ten clients, relabelling
STAGES = ("setup", "training-turn", "relabelling", "fine-tuning", "correction", "finishing")


def method(inner: str = "fedavg", **settings: Any) -> LabelCorrection:
    return fedcorr_with(inner, REGISTRY[inner])(**{**WORK, "sweeps": 1, "fine_tuning": 2, **settings})


def played(algorithm: AnyAlgorithm, blobs: NoisyBlobs, rounds: int, **settings: Any) -> Played:
    return play(algorithm, blobs.problem, blobs.federation, rounds=rounds, **settings)


def labels_now(found: Played, blobs: NoisyBlobs) -> torch.Tensor:
    sizes = blobs.federation.n_examples.tolist()
    return torch.cat([found.memory(c).labels[:n] for c, n in enumerate(sizes)])


# The stages.


@pytest.mark.parametrize("visits", [1, 3])
def test_every_sweep_trains_every_client_once_in_a_new_order(visits: int) -> None:
    blobs = noisy_blobs()
    n_turns = -(-10 // visits)
    found = played(method(sweeps=2, visits=visits, epochs=1), blobs, rounds=1 + 2 * (n_turns + 1))
    clients = [record["clients"] for record in found.records]
    everyone = list(range(10))
    assert clients[0] == everyone
    sweeps = [clients[1 : 1 + n_turns], clients[2 + n_turns : 2 + 2 * n_turns]]
    for sweep in sweeps:
        assert all(len(trained) <= visits for trained in sweep)
        assert sorted(c for trained in sweep for c in trained) == everyone
    assert sweeps[0] != sweeps[1]
    assert clients[1 + n_turns] == clients[-1] == everyone  # the relabelling


def test_the_stages_follow_each_other() -> None:
    algorithm, blobs = method(fine_tuning=3), noisy_blobs()
    before = algorithm.rounds_before_finishing(10)
    assert before == AFTER_SWEEP + 3 + 1
    found = played(algorithm, blobs, rounds=before + 2, participation=0.5)
    stages = [algorithm.stage(server).value for server in found.servers]
    wanted = ["setup", *["training-turn"] * 10, "relabelling", *["fine-tuning"] * 3, "correction", *["finishing"] * 3]
    assert stages == wanted
    estimate = found.servers[AFTER_SWEEP].noise_estimate
    clean = (estimate.level <= 0.1).nonzero().flatten().tolist()
    noisy = estimate.is_noisy.nonzero().flatten().tolist()
    for record in found.records[AFTER_SWEEP : AFTER_SWEEP + 3]:
        assert set(record["clients"]) <= set(clean)
        assert len(record["clients"]) == min(5, len(clean))
    assert found.records[before - 1]["clients"] == noisy
    unchanged = [found.thetas[i].equal(found.thetas[i + 1]) for i in range(before + 2)]
    assert [i for i, same in enumerate(unchanged) if same] == [0, AFTER_SWEEP - 1, before - 1]  # messages about labels


def test_a_training_turn_starts_from_the_model_of_the_one_before() -> None:
    """With one client at a time the model that is sent is the last client's, to rounding."""
    blobs = noisy_blobs()
    found = played(method(), blobs, rounds=3)
    theta0, after_one, after_two = found.thetas[1], found.thetas[2], found.thetas[3]
    assert not torch.equal(theta0, after_one)
    assert not torch.equal(after_one, after_two)
    first, second = (found.records[r]["clients"] for r in (1, 2))
    assert first != second


def test_without_mixing_and_pull_a_training_turn_is_fedavgs_local_work() -> None:
    case = network_bowl()
    inputs, targets = case.federation.train.inputs[:8], case.federation.train.targets[:8]
    batches = draw_batches(8, epochs=3, batch_size=3, generator=seed_for(0))
    task = task_of((inputs, targets), case.problem, batches=batches)
    theta = case.problem.theta0 + 0.1
    settings: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01}
    expected = FedAvg(**settings).local_sgd(case.problem, task, theta)
    found = mixed_sgd(case.problem, task, targets, theta, pull=0.0, mixup=0.0, seed=0, **settings)
    assert relative_distance(found, expected) < 1e-13


@pytest.mark.parametrize("inner", ["fedavg", "dqn-fed", "qffl", "ditto", "scaffold", "fednl-diag", "afl"])
def test_without_sweeps_it_is_the_finishing_method_to_the_bit(inner: str) -> None:
    case = network_bowl()
    settings: dict[str, Any] = {"lr": 0.05, "epochs": 2, "batch_size": 4}
    alone = run(REGISTRY[inner](**settings), case.problem, case.federation, rounds=4, participation=0.7)
    combined = fedcorr_with(inner, REGISTRY[inner])(sweeps=0, **settings)
    found = run(combined, case.problem, case.federation, rounds=4, participation=0.7)
    assert torch.equal(found.theta, alone.theta)
    assert without_times(found.history) == without_times(alone.history)


@pytest.mark.parametrize("name", NETWORK_METHODS)
def test_finishing_methods_start_from_the_model_of_the_sweeps(name: str) -> None:
    """A fresh server moved to a model is the server of a problem that starts there, in every field."""
    case = network_bowl()
    algorithm = REGISTRY[name]().prepare(case.problem, 6, 6)
    theta = torch.linspace(-1.0, 1.0, case.problem.n_parameters, dtype=torch.float64)
    there = Problem(**{**case.problem.__dict__, "theta0": theta})
    moved = named_tensors(started_at(REGISTRY[name], algorithm.init_server(case.problem, 6), theta))
    expected = named_tensors(algorithm.init_server(there, 6))
    assert moved.keys() == expected.keys()
    assert [key for key in moved if not torch.equal(moved[key].nan_to_num(), expected[key].nan_to_num())] == []


@pytest.mark.parametrize("name", NETWORK_METHODS)
def test_every_network_method_can_finish(name: str) -> None:
    blobs = noisy_blobs(4, 12, share=0.5, seed=1)
    settings = {"lr": 0.05, "epochs": 1, "batch_size": None, "momentum": 0.0}
    algorithm = method(name, **settings, neighbours=5, fine_tuning=1)
    rounds = algorithm.rounds_before_finishing(4) + 2
    result = run(algorithm, blobs.problem, blobs.federation, rounds=rounds, evaluation=Evaluation(every=rounds))
    assert result.summary["rounds"] >= rounds - 2  # a method may find nothing left to do for all clients
    assert bool(torch.isfinite(result.theta).all()) or REGISTRY[name].info.diverges


# What it finds, and what it leaves alone.


@pytest.mark.parametrize("seed", [0, 2])
def test_noisy_clients_are_found_and_their_labels_corrected(seed: int) -> None:
    blobs = noisy_blobs(12, 60, seed=seed)
    algorithm = method(sweeps=2, fine_tuning=2, epochs=5)
    found = played(algorithm, blobs, rounds=algorithm.rounds_before_finishing(12))
    assert torch.equal(found.state.server.noise_estimate.is_noisy, blobs.truth.levels > 0)
    now, given, right = labels_now(found, blobs), blobs.federation.train.targets, blobs.truth.targets
    assert (now != right).sum() < 0.2 * (given != right).sum()
    changed = now != given
    assert (now[changed] == right[changed]).double().mean() > 0.9
    assert torch.equal(blobs.federation.train.targets, given)  # the federation itself is as it was


@pytest.mark.parametrize("seed", [0, 2])
def test_no_noise_in_no_labels_changed(seed: int) -> None:
    """The stated rate is one label in a hundred: a client may be taken for noisy, and the model be wrong."""
    blobs = noisy_blobs(12, 60, share=0.0, seed=seed)
    algorithm = method(sweeps=2, epochs=5)
    found = played(algorithm, blobs, rounds=algorithm.rounds_before_finishing(12))
    changed = labels_now(found, blobs) != blobs.federation.train.targets
    assert changed.double().mean() < 0.01
    if not found.state.server.noise_estimate.is_noisy.any():
        assert not changed.any()


@pytest.mark.slow
def test_unlike_paper_clients_are_split_only_where_two_groups_explain_the_scores_better() -> None:
    """Of 20 sets of clean scores few are split, at most one in 20; a mixture without the criterion splits them all."""
    rng = np.random.default_rng(0)
    clean = [torch.from_numpy(rng.normal(5.0, 0.3, 50)) for _ in range(20)]
    careful, papers = FedCorr(), FedCorr(split="always")
    n_split = sum(bool(torch.isfinite(careful.threshold(scores))) for scores in clean)
    assert n_split <= 1
    assert sum(bool(torch.isfinite(papers.threshold(scores))) for scores in clean[:3]) == 3
    noisy = torch.cat([clean[0], torch.from_numpy(rng.normal(8.0, 0.6, 20))])
    assert torch.isfinite(careful.threshold(noisy))


@pytest.mark.slow
def test_clean_federations_are_rarely_split() -> None:
    rng = np.random.default_rng(0)
    clean = [torch.from_numpy(rng.normal(5.0, 0.3, 50)) for _ in range(60)]
    assert sum(bool(torch.isfinite(FedCorr().threshold(scores))) for scores in clean) <= 3


@pytest.mark.parametrize("score", [0.0, -7.0])
def test_a_client_without_a_score_does_not_change_who_is_noisy(score: float) -> None:
    """Too few examples have none (0), and no dimension is below zero: neither is the group of the clean ones."""
    rng = np.random.default_rng(0)
    scores = torch.from_numpy(np.concatenate([rng.normal(3.0, 0.1, 29), rng.normal(5.0, 0.3, 20), [score]]))
    is_high = scores > FedCorr().threshold(scores)
    assert is_high.tolist() == [False] * 29 + [True] * 20 + [False]


def test_unlike_official_code_a_client_below_the_clean_ones_is_clean() -> None:
    """A value far below the narrow Gaussian is likelier in the wide one of the noisy clients."""
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(5.0, 0.05, 40), rng.normal(8.0, 2.0, 30), [2.0]])
    groups = two_groups(scores)
    assert groups.prefers_two
    assert not groups.is_high[-1]
    assert scores[groups.is_high].min() > scores[~groups.is_high].max()


def test_unlike_paper_one_client_with_an_outlying_score_is_no_group_of_its_own() -> None:
    """Of 20 draws at most two are split wrongly; among the scores themselves the outlier is likeliest in many."""

    def is_split_well(seed: int) -> bool:
        rng = np.random.default_rng(seed)
        scores = np.concatenate([rng.normal(3.05, 0.1, 29), rng.normal(4.3, 0.35, 20), [12.0]])
        is_high = scores > float(FedCorr().threshold(torch.from_numpy(scores)))
        return bool(is_high[29:].mean() > 0.85 and is_high[:29].mean() < 0.1)

    assert sum(map(is_split_well, range(20))) >= 18


def test_unlike_paper_close_scores_are_no_group_because_they_are_close() -> None:
    """Two high scores nearer and nearer to each other split the clients as before; without a bound they gain by it."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        others = np.concatenate([rng.normal(6.2, 0.45, 27), rng.normal(7.6, 0.6, 21)])
        apart, close = (two_groups_of_clients(np.log1p(np.append(others, [11.2 - d, 11.2 + d]))) for d in (0.1, 1e-6))
        assert np.array_equal(apart.is_high, close.is_high)
        assert close.gain == pytest.approx(apart.gain, abs=0.5)


@pytest.mark.parametrize("n_clean", [4, 49])
def test_one_noisy_client_far_above_all_others_is_found(n_clean: int) -> None:
    """Alone it has no width of its own; it gets the clean clients', at the bound."""
    for seed in range(10):
        scores = np.append(np.random.default_rng(seed).normal(5.0, 0.2, n_clean), 12.0)
        groups = two_groups_of_clients(np.log1p(scores))
        assert groups.prefers_two
        assert groups.is_high.nonzero()[0].tolist() == [n_clean]


def test_the_groups_do_not_depend_on_unit_and_origin() -> None:
    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(5.0, 0.3, 30), rng.normal(8.0, 0.9, 20)])
    first, second = two_groups_of_clients(scores), two_groups_of_clients(1000.0 * scores - 7.0)
    assert np.array_equal(first.is_high, second.is_high)
    assert first.gain == pytest.approx(second.gain, rel=1e-6)


def test_unlike_paper_a_client_that_was_found_stays_noisy() -> None:
    """Its later scores are of labels that it has corrected; `split = "always"` decides anew, as the paper does."""
    score, threshold = torch.tensor([1.0, 3.0, 1.0]), torch.tensor(2.0)
    before = torch.tensor([False, False, True])
    assert method().is_noisy(score, threshold, before).tolist() == [False, True, True]
    assert method(split="always").is_noisy(score, threshold, before).tolist() == [False, True, False]


def test_clients_and_server_agree_on_who_is_noisy() -> None:
    """Each decides by itself, and what one sweep has found the next one keeps."""
    blobs = noisy_blobs(12, 60)
    algorithm = method(sweeps=3, epochs=3)
    found = played(algorithm, blobs, rounds=1 + 3 * 13)
    after_each = [found.servers[13 * (sweep + 1)].noise_estimate.is_noisy for sweep in range(3)]
    assert after_each[0].any()
    assert all(bool((later | ~earlier).all()) for earlier, later in pairwise(after_each))
    kept = [bool(found.memory(client).is_noisy) for client in range(12)]
    assert kept == found.state.server.noise_estimate.is_noisy.tolist()


@pytest.mark.parametrize("split", [two_groups, two_groups_of_clients])
@pytest.mark.parametrize("values", [np.full(30, 2.5), np.array([1.0]), np.array([])])
def test_values_that_are_all_the_same_make_one_group(split: Callable[..., Groups], values: np.ndarray) -> None:
    groups = split(values)
    assert not groups.is_high.any()
    assert not groups.prefers_two


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_no_more_labels_than_the_share_may_be_relabelled(share: float) -> None:
    rng = np.random.default_rng(0)
    losses = np.concatenate([rng.exponential(0.1, 77), 3.0 + rng.random(46)])
    level, rows = doubtful_labels(losses, share)
    assert len(rows) == int(len(losses) * level * share)
    assert level == pytest.approx(46 / 123, abs=0.05)
    if len(rows):
        assert losses[rows].min() >= np.delete(losses, rows).max()


def test_labels_change_only_above_the_confidence() -> None:
    labels = torch.tensor([0, 0, 0, 0, 9])  # the last one is padding
    outputs = torch.tensor([[0.0, 3.0], [0.0, 0.1], [3.0, 0.0], [0.0, 3.0]])
    assert corrected_labels(labels, outputs, 0.9).tolist() == [1, 0, 0, 1, 9]
    assert corrected_labels(labels, outputs, 0.9, torch.tensor([0, 1])).tolist() == [1, 0, 0, 0, 9]
    assert corrected_labels(labels, outputs, 1.0).tolist() == labels.tolist()
    assert labels.tolist() == [0, 0, 0, 0, 9]


def test_the_pull_is_finite_at_the_start_and_holds_back_afterwards() -> None:
    assert unit(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    assert unit(torch.tensor([3.0, 4.0])).tolist() == pytest.approx([0.6, 0.8])
    case = network_bowl()
    task = task_of((case.federation.train.inputs[:8], case.federation.train.targets[:8]), case.problem)
    task = task._replace(batches=torch.zeros(20, 0, dtype=torch.long))
    theta = case.problem.theta0
    settings: dict[str, Any] = {"mixup": 0.0, "momentum": 0.0, "weight_decay": 0.0, "seed": 0}
    free, held = (
        mixed_sgd(case.problem, task, task.targets, theta, pull=pull, **settings) - theta for pull in (0.0, 0.1)
    )
    assert bool(torch.isfinite(held).all())
    assert held.norm() < free.norm()


def test_mixing_is_a_function_of_the_seed() -> None:
    case = network_bowl()
    task = task_of((case.federation.train.inputs[:8], case.federation.train.targets[:8]), case.problem)
    settings: dict[str, Any] = {"pull": 0.0, "mixup": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    first, again, other = (
        mixed_sgd(case.problem, task, task.targets, case.problem.theta0, seed=seed, **settings) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_mixing_copies_of_one_example_is_plain_sgd() -> None:
    """The mixed inputs are the example itself, and the shares of both losses sum to one."""
    case = network_bowl()
    one = case.federation.train.inputs[:1].expand(8, *case.federation.train.inputs.shape[1:])
    task = task_of((one, case.federation.train.targets[:1].expand(8)), case.problem)
    task = task._replace(batches=torch.zeros(3, 0, dtype=torch.long))
    settings: dict[str, Any] = {"pull": 0.0, "momentum": 0.5, "weight_decay": 0.0, "seed": 1}
    mixed, plain = (
        mixed_sgd(case.problem, task, task.targets, case.problem.theta0, mixup=mixup, **settings)
        for mixup in (1.0, 0.0)
    )
    torch.testing.assert_close(mixed, plain)
    assert not torch.equal(plain, case.problem.theta0)


def test_a_client_that_diverges_changes_nothing_and_has_no_score() -> None:
    blobs = noisy_blobs(4, 12)
    inputs = blobs.federation.train.inputs.clone()
    inputs[blobs.federation.train.starts[2]] = torch.nan
    train = blobs.federation.train._replace(inputs=inputs)
    federation = type(blobs.federation)(train, blobs.federation.test, n_classes=10)
    algorithm = method(fine_tuning=0, neighbours=5)
    found = play(algorithm, blobs.problem, federation, rounds=6)
    turn = next(i for i, r in enumerate(found.records) if r["clients"] == [2])
    assert torch.equal(found.thetas[turn], found.thetas[turn + 1])
    assert float(found.state.server.noise_estimate.score[2]) == 0.0
    assert bool(torch.isfinite(found.thetas[-1]).all())


def test_a_policy_that_wants_several_replies_does_not_stop_the_training_turns() -> None:
    blobs = noisy_blobs(4, 12)
    found = play(method(neighbours=5), blobs.problem, blobs.federation, rounds=6, policy=Policy(min_replies=3))
    assert int(found.state.server.progress.n_sweeps) == 1


# Everywhere the same.


def whole_run(runner: Callable[..., RunResult], inner: str, **settings: Any) -> RunResult:
    blobs = noisy_blobs(5, 14, share=0.5, seed=1)
    algorithm = method(inner, neighbours=5)
    rounds = algorithm.rounds_before_finishing(5) + 2
    return runner(
        algorithm,
        blobs.problem,
        blobs.federation,
        rounds=rounds,
        participation=0.6,
        evaluation=Evaluation(every=4),
        **settings,
    )


@pytest.mark.parametrize("inner", ["fedavg", "dqn-fed", "ditto"])
def test_all_stages_are_the_same_looped_and_on_flower(inner: str) -> None:
    expected = whole_run(run, inner)
    for found in (whole_run(run, inner, cohort=looped()), whole_run(run_in_process, inner)):
        assert relative_distance(found.theta, expected.theta) < 1e-10
        assert found.summary["accuracy"] == pytest.approx(expected.summary["accuracy"])


@pytest.mark.parametrize("inner", ["fedavg", "dqn-fed"])
@pytest.mark.parametrize("after", [0, 3, 6, 7, 9, 10], ids=STAGES)
def test_interrupted_in_any_stage_and_resumed_to_the_same_bits(inner: str, after: int, tmp_path: Path) -> None:
    straight = whole_run(run, inner, out=tmp_path / "whole")
    whole_run(run, inner, out=tmp_path / "parts", observers=(Interrupter(after_round=after),))
    resumed = whole_run(run, inner, out=tmp_path / "parts", resume=True)
    assert torch.equal(resumed.theta, straight.theta)
    assert without_times(resumed.history) == without_times(straight.history)
    last = [load_tensors(newest_tensors(tmp_path / part))[0] for part in ("parts", "whole")]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][key].nan_to_num(), last[1][key].nan_to_num()) for key in last[0])


def test_the_same_method_comes_out_of_a_pickle() -> None:
    algorithm = method("dqn-fed", cap=False)
    assert pickle.loads(pickle.dumps(algorithm)) == algorithm
    assert type(algorithm) is method_called("fedcorr+dqn-fed")
    assert method_called("fedcorr+fedavg") is method_called("fedcorr") is FedCorr


def test_settings_reach_the_finishing_method() -> None:
    algorithm = method("qffl", q=3.0, lr=0.02)
    assert type(algorithm.inner) is REGISTRY["qffl"]
    assert (algorithm.inner.q, algorithm.inner.lr) == (3.0, 0.02)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="QFFL: `q` must be in"):
        method("qffl", q=-1.0)


@pytest.mark.parametrize("name", NETWORK_METHODS)
def test_the_facts_of_the_two_together(name: str) -> None:
    """Its own messages are looped, the finishing method's as that says; what it asks of replies is the latter's."""
    kind, inner = fedcorr_with(name, REGISTRY[name]), REGISTRY[name].info
    assert kind.info.messages == (*OWN_MESSAGES, *inner.messages)
    assert kind.info.replies == (*OWN_REPLIES, *inner.replies)
    assert kind.info.looped_messages == (*OWN_MESSAGES, *inner.looped_messages)
    assert (kind.info.needs, kind.info.personal) == (inner.needs, inner.personal)
    assert kind.info.problem_kinds == {"network"}
    assert kind().needs == REGISTRY[name]().needs
    no_momentum = {"nesterov"} if kind().momentum == 0.0 else set()
    without_effect = {"lr_decay_every", "schedule_rounds"} | no_momentum  # no decay, no cosine
    assert kind(epochs=2).unused() == without_effect  # the sweeps use all others
    assert hyperparameters(kind)[-len(hyperparameters(REGISTRY[name])) :] == hyperparameters(REGISTRY[name])


@pytest.mark.parametrize("inner", ["fedavg", "qffl", "mgda", "scaffold"])
def test_without_sweeps_the_shared_settings_without_effect_are_the_finishing_methods(inner: str) -> None:
    alone = REGISTRY[inner]()
    assert fedcorr_with(inner, REGISTRY[inner])(sweeps=0).unused() == alone.unused()
    assert alone.unused() <= set(LOCAL_WORK)


@dataclass(frozen=True, kw_only=True)
class Caching(FedAvg):
    """A method that may cache the gradients of some clients; None leaves the number to it."""

    cached_clients: int | None = None


def test_gradients_of_labels_that_are_corrected_later_are_not_cached() -> None:
    """Unless their number is given, or no labels are corrected."""
    kind, problem = fedcorr_with("caching", Caching), network_bowl().problem

    def cached(**settings: Any) -> Any:
        return kind(**settings).prepare(problem, 6, 6).inner.cached_clients  # type: ignore[attr-defined]

    assert cached() == 0
    assert cached(cached_clients=3) == 3
    assert cached(sweeps=0) is None


# What it refuses.


@pytest.mark.parametrize(
    "changed",
    [
        {"visits": 2},
        {"pull": 1.0},
        {"mixup": 0.0},
        {"neighbours": 7},
        {"confidence": 0.9},
        {"relabel_share": 1.0},
        {"split": "always"},
        {"fine_tuning": 3},
        {"clean_level": 0.3},
    ],
)
def test_without_sweeps_settings_of_the_correction_are_refused(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(ValueError, match=rf"FedCorr: `{name}` is .* has no effect with sweeps=0, where no labels"):
        FedCorr(sweeps=0, **changed)
    assert getattr(FedCorr(sweeps=2, epochs=2, **changed), name) == changed[name]


def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ValueError, match=r"`pull` is 1\.0, but has no effect with sweeps=1, since it is multiplied by"):
        FedCorr(sweeps=1, pull=1.0)
    with pytest.raises(ValueError, match=r"`clean_level` is 0\.3, but has no effect with fine_tuning=0"):
        FedCorr(fine_tuning=0, clean_level=0.3)


def test_in_the_first_sweep_no_client_is_pulled() -> None:
    """Noise levels are 0 until the first relabelling, so that `pull` needs a second sweep."""
    blobs = noisy_blobs(5, 20, seed=1)
    weak, strong = (
        played(method(sweeps=2, pull=pull, epochs=1, neighbours=5), blobs, rounds=1 + 2 * 6).thetas
        for pull in (0.0, 50.0)
    )
    n_first = 1 + 1 + 5 + 1  # the start, setup, turns, relabelling
    assert all(torch.equal(a, b) for a, b in zip(weak[:n_first], strong[:n_first], strict=True))
    assert not torch.equal(weak[-1], strong[-1])


@dataclass(frozen=True, kw_only=True)
class Clashing(FedAvg):
    """A method whose hyper-parameter has the name of one of FedCorr's."""

    mixup: float = 0.3


def test_methods_that_it_cannot_be_combined_with_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'fedcorr\+fednl': fednl is for convex problems .* such as dqn-fed or qffl"):
        fedcorr_with("fednl", REGISTRY["fednl"])
    with pytest.raises(ValueError, match="would correct labels twice"):
        fedcorr_with("fedcorr", FedCorr)
    with pytest.raises(ValueError, match="the same names for different things: mixup; rename"):
        fedcorr_with("clashing", Clashing)
    assert method_called("fedcorr+nothing") is None
    assert method_called("dqn-fed+fedavg") is None


def test_problems_without_classes_are_refused() -> None:
    regression = Problem.from_module(linear_model(4, 1), loss="squared-error")
    with pytest.raises(ValueError, match="'squared_errors', which has no class probabilities"):
        FedCorr().prepare(regression, 5, 5)
    margins = Problem.from_module(linear_model(4, 1), loss="logistic")
    with pytest.raises(ValueError, match="'logistic_losses', which has no class probabilities"):
        FedCorr().prepare(margins, 5, 5)
    with pytest.raises(ValueError, match="comparing clients, but there is only one"):
        FedCorr().prepare(network_bowl().problem, 1, 1)
    own_loss = Problem.from_module(
        linear_model(4, 1), losses=lambda outputs, targets: (outputs - targets).square()[:, 0]
    )
    with pytest.raises(ValueError, match="regression has no labels to correct"):
        run(FedCorr(), own_loss, federation_of(regression_clients(3, 4)), rounds=1)


def test_characters_cannot_be_mixed() -> None:
    clients = [(torch.randint(5, (12, 4)), y[:1].expand(12)) for _, y in labelled_clients(3, 4)]
    module = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(16, 3)).double()
    with pytest.raises(ValueError, match=r"inputs of type torch\.int64, such as characters; set mixup = 0"):
        run(FedCorr(), Problem.from_module(module), federation_of(clients), rounds=2)
    result = run(FedCorr(mixup=0.0), Problem.from_module(module), federation_of(clients), rounds=3)
    assert bool(torch.isfinite(result.theta).all())


def test_bytes_are_mixed_as_the_images_that_the_model_sees() -> None:
    from dqnfed.algorithms.fedcorr_labels import as_floats
    from dqnfed.models.layers import Normalise

    images = torch.randint(256, (2, 1, 3, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    layer = Normalise([0.3], [0.2])
    torch.testing.assert_close(layer(as_floats(images, torch.float32)), layer(images))

"""One client in ten sends false values: its rate, the size of its gradient, or its direction."""

from __future__ import annotations

import math

import pytest
import torch

from dqnfed import DQNFed, Evaluation, FedAvg, Policy, RunResult, run
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import Problem
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_problem
from tests.helpers.bowls import Case, federation_of, labelled_clients, linear_model
from tests.helpers.flower import Fault, deployed, scaled
from tests.helpers.hostile_runs import app_policy
from tests.helpers.quick import every

ROUNDS, HOSTILE = 20, 3
FROM_THE_GRADIENT = ("gradient", "curvature", "probed_slope", "probed_curvature")
FAULTS: dict[str, Fault] = {
    "rate x 1e6": scaled(1e6, "rate"),
    "gradient x 1e6": scaled(1e6, "gradient", "delta"),
    "sign flipped, x 10": scaled(-10.0, "gradient", "delta"),
    "everything that follows from the gradient flipped, x 10": scaled(-10.0, *FROM_THE_GRADIENT),
}
POLICY = app_policy()
SELDOM = Evaluation(every=ROUNDS, participants=False)


def softmax_clients() -> Case:
    problem = Problem.from_module(linear_model(6, 3), loss="cross-entropy", ridge=1e-2)
    return Case(problem, federation_of(labelled_clients(10, 6)))


def digits_clients(seed: int = 0) -> Case:
    """Return a network on ten clients that hold two or three of the ten digits each."""
    built = build_problem(read_config("digits", ["data.clients=10", f"run.seed={seed}"]))
    return Case(built.problem, built.federation)


def without_the_hostile_client(case: Case) -> Case:
    others = torch.tensor([c for c in range(10) if c != HOSTILE])

    def cut(part: Examples) -> Examples:
        rows, sizes = part.rows(others), part.sizes[others]
        return Examples(part.inputs[rows], part.targets[rows], torch.cat([torch.zeros(1).long(), sizes.cumsum(0)]))

    federation = case.federation
    return Case(case.problem, Federation(cut(federation.train), cut(federation.test), n_classes=federation.n_classes))


def with_the_hostile_client(
    algorithm: AnyAlgorithm, case: Case, policy: Policy, fault: Fault, *, rounds: int = ROUNDS
) -> RunResult:
    return deployed(
        algorithm,
        case,
        lambda moment: fault if moment.is_training and moment.client == HOSTILE else None,
        rounds=rounds,
        policy=policy,
        evaluation=SELDOM,
    )


def others_loss(result: RunResult, round: int = ROUNDS - 1) -> float:
    losses = [float(row[4]) for row in result.client_rows if row[0] == round and row[1] != HOSTILE]
    assert len(losses) == 9
    return sum(losses) / 9


def loss_without(algorithm: AnyAlgorithm, case: Case, policy: Policy) -> float:
    small = without_the_hostile_client(case)
    result = run(algorithm, small.problem, small.federation, rounds=ROUNDS, policy=policy, evaluation=SELDOM)
    return float(result.summary["train_loss"]["mean"])


def assert_harmless(case: Case, fault: str) -> None:
    """The others lose at most a fiftieth of what they gain without the hostile client; roundings alone cost half."""
    result = with_the_hostile_client(DQNFed(), case, POLICY, FAULTS[fault])
    found, start, alone = others_loss(result), others_loss(result, -1), loss_without(DQNFed(), case, POLICY)
    assert start - found >= 0.98 * (start - alone)
    assert found <= 0.5 * start


@pytest.mark.parametrize("fault", every(2, FAULTS))
def test_a_hostile_client_does_not_steer_the_model(fault: str) -> None:
    assert_harmless(softmax_clients(), fault)


@pytest.mark.parametrize("fault", ["gradient x 1e6", "sign flipped, x 10"])
def test_a_hostile_client_does_not_steer_a_network(fault: str) -> None:
    assert_harmless(digits_clients(), fault)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_hostile_client_does_not_steer_any_of_five_networks(fault: str, seed: int) -> None:
    assert_harmless(digits_clients(seed), fault)


def test_with_a_clipped_norm_fedavg_survives_them_too() -> None:
    """The gradients' mean has no rates and drops nobody; clipping alone bounds what one of ten can do to it."""
    case, policy = softmax_clients(), Policy(max_update_norm=2.0)
    for fault in ("gradient x 1e6", "sign flipped, x 10"):
        result = with_the_hostile_client(FedAvg(lr=1.0), case, policy, FAULTS[fault])
        assert others_loss(result) <= 0.5 * others_loss(result, -1)


def test_without_policies_a_huge_gradient_wrecks_fedavg() -> None:
    case, trusting = softmax_clients(), Policy(max_update_norm=math.inf)
    result = with_the_hostile_client(FedAvg(lr=1.0), case, trusting, FAULTS["gradient x 1e6"])
    assert not others_loss(result) <= 100 * others_loss(result, -1)


def reasons(fault: str) -> list[list[str]]:
    """Return why the hostile client was left out, round by round."""
    result = with_the_hostile_client(DQNFed(), softmax_clients(), POLICY, FAULTS[fault], rounds=4)
    return [[f["why"] for f in record["dropped"] if f["client"] == HOSTILE] for record in result.history[1:]]


def test_whom_the_policies_touched_is_written_down() -> None:
    (first,), *others = reasons("sign flipped, x 10")
    assert first == "loss does not change as its gradient says"  # in the first round it is found by a look ahead
    assert others == 3 * [["loss does not change as its updates say"]]
    rated = with_the_hostile_client(DQNFed(), softmax_clients(), POLICY, FAULTS["rate x 1e6"], rounds=4)
    for record in rated.history[1:]:
        assert (HOSTILE, "rate") in [(note["client"], note["field"]) for note in record["held"]]
    result = with_the_hostile_client(DQNFed(), softmax_clients(), POLICY, FAULTS["gradient x 1e6"], rounds=4)
    for record in result.history[1:]:
        assert [note["client"] for note in record["clipped"]] == [HOSTILE]
        assert HOSTILE in [fault["client"] for fault in record["dropped"]]

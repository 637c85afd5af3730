"""Secure aggregation is exact: every method that needs sums or products alone makes the same steps under pads."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from dqnfed import Evaluation, RunResult, run
from dqnfed.algorithms import REGISTRY
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.sim.setup import cohort_size
from tests.contract.cases import METHODS, suited_case
from tests.helpers.turns import relative_distance

TOLERANCE = 1e-6  # of models in float64: rows are rounded to 30 binary places, weights to 24 or more


def without_cache(algorithm: AnyAlgorithm) -> AnyAlgorithm:
    has = {f.name for f in fields(algorithm)}
    return replace(algorithm, cached_clients=0) if "cached_clients" in has else algorithm  # type: ignore[call-arg]


def is_private(name: str, share: float) -> bool:
    case, algorithm = suited_case(name), without_cache(REGISTRY[name]())
    n_clients = case.federation.n_clients
    prepared = algorithm.prepare(case.problem, n_clients, cohort_size(share, n_clients))
    return prepared.needs != "rows" and not prepared.info.asks_alone


def three_rounds(algorithm: AnyAlgorithm, name: str, share: float, *, secure: bool) -> RunResult:
    case = suited_case(name)
    evaluation = Evaluation(every=3, participants=False)
    return run(
        algorithm,
        case.problem,
        case.federation,
        rounds=3,
        participation=share,
        evaluation=evaluation,
        secure=secure,
    )


@pytest.mark.parametrize("share", [1.0, 2 / 3])
@pytest.mark.parametrize("name", METHODS)
def test_secure_steps_are_the_plain_ones(name: str, share: float) -> None:
    algorithm = REGISTRY[name]()
    if not is_private(name, share):
        with pytest.raises(ValueError, match=rf"{type(algorithm).__name__} cannot be run with `privacy.secure`"):
            three_rounds(algorithm, name, share, secure=True)
        return
    plain = three_rounds(without_cache(algorithm), name, share, secure=False)
    secure = three_rounds(algorithm, name, share, secure=True)
    assert [record["status"] for record in secure.history] == [record["status"] for record in plain.history]
    assert relative_distance(secure.theta, plain.theta) <= TOLERANCE


PARTS = {
    "local training": DQNFed(local="sgd", epochs=2, lr=0.1),
    "local training, mini-batches": DQNFed(local="sgd", epochs=1, batch_size=4, lr=0.1),
    "identity metric": DQNFed(metric="identity"),
    "identity rates": DQNFed(rates="identity"),
    "fixed step": DQNFed(step="fixed", step_size=0.3),
    "votes": DQNFed(step="votes"),
    "line search": DQNFed(step="line-search"),
    "exact rates": DQNFed(constraint="exactly"),
    "stop at a Pareto point": DQNFed(beyond="stop"),
}


WITH_PART = [name for name in PARTS if name != "line search"]  # which needs everybody


@pytest.mark.slow
@pytest.mark.parametrize(("part", "share"), [*((name, 1.0) for name in PARTS), *((n, 2 / 3) for n in WITH_PART)])
def test_dqn_fed_is_private_with_each_of_its_parts(part: str, share: float) -> None:
    algorithm = PARTS[part]
    plain = three_rounds(without_cache(algorithm), "dqn-fed", share, secure=False)
    secure = three_rounds(algorithm, "dqn-fed", share, secure=True)
    assert [record["status"] for record in secure.history] == [record["status"] for record in plain.history]
    assert relative_distance(secure.theta, plain.theta) <= TOLERANCE
    assert not (secure.theta == suited_case("dqn-fed").problem.theta0).all(), "it has moved"

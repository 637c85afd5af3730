"""CUDA graphs change the speed and nothing else; without a GPU the runner is plain vmap."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.sim.cohort import vectorised
from dqnfed.sim.engine import run
from dqnfed.sim.graphs import GraphedFunction, graphed
from tests.helpers.quadratic_clients import consistent_quadratics

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
METHODS = [FedAvg(lr=0.1), FedAvg(lr=0.1, epochs=2), DQNFed(), DQNFed(step="line-search")]


@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: f"{type(a).__name__}-{a.epochs}")
def test_without_a_gpu_it_is_plain_vmap(algorithm: AnyAlgorithm) -> None:
    case = consistent_quadratics(4, 6)
    plain = run(algorithm, case.problem, case.federation, rounds=5, cohort=vectorised())
    other = run(algorithm, case.problem, case.federation, rounds=5, cohort=graphed())
    assert torch.equal(plain.theta, other.theta)


def test_a_function_on_the_host_is_called_as_it_is() -> None:
    calls = []

    def doubled(x: Tensor) -> list[Tensor]:
        calls.append(x.shape)
        return [2 * x]

    function = GraphedFunction(doubled)
    assert torch.equal(function(torch.ones(3))[0], torch.full((3,), 2.0))
    assert len(calls) == 1


@needs_gpu
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda a: f"{type(a).__name__}-{a.epochs}")
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_on_a_gpu_the_bits_are_those_of_vmap(algorithm: AnyAlgorithm, participation: float) -> None:
    case = consistent_quadratics(4, 6)
    problem, federation = case.problem.to("cuda"), case.federation.to("cuda")
    runs = [
        run(algorithm, problem, federation, rounds=8, participation=participation, cohort=cohort)
        for cohort in (vectorised(), graphed())
    ]
    assert torch.equal(runs[0].theta, runs[1].theta)


@needs_gpu
def test_answers_outlive_the_next_replay() -> None:
    function = GraphedFunction(lambda x: [x + 1])
    first = function(torch.zeros(4, device="cuda"))[0]
    function(torch.ones(4, device="cuda"))
    assert torch.equal(first.cpu(), torch.ones(4))

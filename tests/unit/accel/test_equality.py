"""Every faster form gives the results of the plain form but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from dqnfed.accel import Accelerated
from dqnfed.accel.kernels import FastKernels, forward_together
from dqnfed.algorithms import REGISTRY
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.kernels import PLAIN, Kernels
from dqnfed.core.problem import Problem
from dqnfed.core.runners import CohortRunner, looped, vectorised
from dqnfed.sim.accelerate import graphed, threads
from dqnfed.sim.clients import evaluate, evaluate_personal
from dqnfed.sim.engine import run
from dqnfed.sim.state import Evaluation
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.bowls import Case, labelled_clients, network_bowl, normal, softmax_bowl

RUNNERS: dict[str, Callable[[], CohortRunner]] = {
    "looped": looped,
    "vectorised": vectorised,
    "threads": lambda: threads(2),
    "emulated graphs": lambda: graphed(emulate=True),
}


def convolved_bowl() -> Case:
    """Return a small convolutional network on images of 5 x 5 pixels, clients of different sizes."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 3)).double()
    clients = [(x.view(-1, 1, 5, 5), y) for x, y in labelled_clients(6, 25)]
    return Case(Problem.from_module(module, ridge=0.01), Federation.from_clients(clients))


BOWLS: dict[str, Callable[[], Case]] = {"dense": network_bowl, "convolved": convolved_bowl}
# Conjugate gradients on a Hessian that is not positive make roundings larger, between plain forms too.
TOLERANCES = {"fednew-cg": 1e-6}
LOCAL: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch_size": 3, "momentum": 0.5, "weight_decay": 0.1}


def with_local_work(name: str) -> AnyAlgorithm:
    """Return the method with mini-batches, momentum and weight decay, as far as these have an effect on it."""
    method = REGISTRY[name]
    return method(**{key: value for key, value in LOCAL.items() if key in method.info.local_work})


def trained(algorithm: AnyAlgorithm, case: Case, **settings: Any) -> tuple[Tensor, list[str]]:
    settings = {"accelerate": True, **settings}
    result = run(algorithm, case.problem, case.federation, rounds=5, participation=0.5, **settings)
    return result.theta, [record["status"] for record in result.history]


def assert_same(found: tuple[Tensor, list[str]], expected: tuple[Tensor, list[str]], tolerance: float = 1e-10) -> None:
    assert found[1] == expected[1]
    assert float((found[0] - expected[0]).norm()) <= tolerance * float(expected[0].norm())


@pytest.mark.parametrize(
    ("name", "bowl"),
    [
        ("fedavg", "dense"),
        ("scaffold", "dense"),
        ("fedavg", "convolved"),
        *(pytest.param(name, "convolved", marks=pytest.mark.slow) for name in ("scaffold", "fedprox", "mgda")),
    ],
)
def test_every_runner_gives_what_the_plain_form_gives(name: str, bowl: str) -> None:
    case, algorithm = BOWLS[bowl](), with_local_work(name)
    expected = trained(algorithm, case, accelerate=False)
    for runner in RUNNERS.values():
        assert_same(trained(algorithm, case, cohort=runner()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, kind in REGISTRY.items() if "network" in kind.info.problem_kinds])
def test_every_method_has_the_same_results_in_its_plain_form(name: str) -> None:
    case, algorithm = network_bowl(), with_local_work(name)
    expected = trained(algorithm, case, accelerate=False)
    for runner in ("vectorised", "threads", "emulated graphs"):
        assert_same(trained(algorithm, case, cohort=RUNNERS[runner]()), expected, TOLERANCES.get(name, 1e-10))


@pytest.mark.parametrize("runner", ["vectorised", "emulated graphs", pytest.param("threads", marks=pytest.mark.slow)])
def test_dqn_fed_is_the_same_after_sixty_rounds_with_its_cache_overflowing(runner: str) -> None:
    """Three of twelve clients a round, room for five: roundings do not grow, and the cache drops the same clients."""
    clients = labelled_clients(12, 4)
    case = Case(network_bowl().problem, Federation.from_clients(clients))
    found, expected = (
        run(
            DQNFed(cached_clients=5),
            case.problem,
            case.federation,
            rounds=60,
            participation=0.25,
            evaluation=Evaluation(every=60, participants=False),
            accelerate=accelerate,
            cohort=cohort,
        )
        for accelerate, cohort in ((True, RUNNERS[runner]()), (False, None))
    )
    assert [r["status"] for r in found.history] == [r["status"] for r in expected.history]
    assert float((found.theta - expected.theta).norm()) <= 1e-9 * float(expected.theta.norm())


@pytest.mark.parametrize("bowl", [softmax_bowl, network_bowl, convolved_bowl])
@pytest.mark.parametrize("everyone", [True, False])
def test_evaluation_is_the_same_eager_captured_and_replayed(bowl: Callable[[], Case], everyone: bool) -> None:
    problem, federation, _ = bowl()
    clients = torch.arange(6) if everyone else torch.tensor([1, 4])
    kernels = FastKernels(emulate_graphs=True)
    for k in range(4):
        theta = normal(problem.n_parameters, seed=k)
        expected = evaluate(with_kernels(problem, PLAIN), theta, federation.train, clients)
        found = evaluate(with_kernels(problem, kernels), theta, federation.train, clients)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-13, atol=0)
        assert torch.equal(found.scores, expected.scores)


def with_kernels(problem: Problem, kernels: Kernels) -> Problem:
    return replace(problem, kernels=kernels)


@pytest.mark.parametrize("bowl", [softmax_bowl, network_bowl])
def test_clients_evaluated_together_are_those_evaluated_one_by_one(bowl: Callable[[], Case]) -> None:
    """Each at a model of its own; clients have different numbers of examples, and one has NaN among them."""
    problem, federation, _ = bowl()
    clients, train = torch.tensor([4, 1, 5]), federation.train
    inputs = train.inputs.clone()
    inputs[int(train.starts[1])] = torch.nan
    rows = Examples(inputs, train.targets, train.starts).rows(clients)
    thetas, sizes = normal(3, problem.n_parameters, seed=4), train.sizes[clients]
    given = (problem, thetas, inputs[rows], train.targets[rows], sizes)
    for mine, other in zip(forward_together(*given), PLAIN.forward_each(*given), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14, equal_nan=True)
    plain = evaluate_personal(with_kernels(problem, PLAIN), thetas, train, clients)
    fast = evaluate_personal(with_kernels(problem, FastKernels()), thetas, train, clients)
    torch.testing.assert_close(fast.loss, plain.loss, rtol=1e-13, atol=0)
    assert torch.equal(fast.scores, plain.scores)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bowl", [softmax_bowl, network_bowl, convolved_bowl])
def test_on_a_gpu_personal_models_are_evaluated_the_same(bowl: Callable[[], Case]) -> None:
    problem, federation, _ = bowl()
    clients, thetas = torch.tensor([4, 1, 5]), normal(3, problem.n_parameters, seed=4)
    expected = evaluate_personal(problem, thetas, federation.train, clients)
    there = Accelerated().problem(problem.to("cuda"))
    found = evaluate_personal(there, thetas.to("cuda"), federation.to("cuda").train, clients)
    torch.testing.assert_close(found.loss.cpu(), expected.loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.scores.cpu(), expected.scores, rtol=1e-9, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bowl", BOWLS)
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "mgda"])
def test_on_a_gpu_the_plain_form_is_the_fast_one(name: str, bowl: str) -> None:
    problem, federation, _ = BOWLS[bowl]()
    case, algorithm = Case(problem.to("cuda"), federation.to("cuda")), with_local_work(name)
    expected = trained(algorithm, case, accelerate=False)
    for runner in (looped(), vectorised(), graphed()):
        assert_same(trained(algorithm, case, cohort=runner), expected)


def test_what_was_compiled_for_a_problem_stays_and_the_rest_is_new() -> None:
    problem = network_bowl().problem
    first = Accelerated().problem(problem)
    second = Accelerated().problem(first)
    assert isinstance(first.kernels, FastKernels)
    assert isinstance(second.kernels, FastKernels)
    assert second.kernels is not first.kernels
    assert problem.kernels is PLAIN


def test_a_changed_module_is_looked_at_anew() -> None:
    """Kernels keep what they derive from a module for that module alone."""
    kernels = FastKernels()
    dense, convolved = network_bowl().problem, convolved_bowl().problem
    chains = [kernels.model(problem) for problem in (dense, convolved, dense)]
    assert [model is not None and model.chain is not None for model in chains] == [True, False, True]


def test_gradients_of_one_client_and_of_many_are_the_same() -> None:
    """In one process, with kernels that have computed both kinds before."""
    problem, federation, _ = network_bowl()
    problem = Accelerated().problem(problem)
    theta = normal(problem.n_parameters, seed=2)
    task = TaskBuilder(federation, problem, REGISTRY["fedavg"](), 0).stacked(torch.arange(6), 0)
    for _ in range(2):
        together = vmap(lambda one: problem.kernels.gradients(problem, (theta,), one)[0][0])(task)
        for k in range(6):
            alone = problem.kernels.gradients(problem, (theta,), type(task)(*(t[k] for t in task)))[0][0]
            torch.testing.assert_close(together[k], alone, rtol=1e-12, atol=1e-14)

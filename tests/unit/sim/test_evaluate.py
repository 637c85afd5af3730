"""One long batch over all clients gives what a loop over clients gives."""

from __future__ import annotations

import pytest
import torch

from dqnfed.core import kernels
from dqnfed.core.problem import Problem
from dqnfed.sim.clients import evaluate, evaluate_personal
from tests.helpers.bowls import Case, federation_of, network_bowl, normal, quadratic_bowl, softmax_bowl, task_of


def by_hand(problem: Problem, theta: torch.Tensor, case: Case, client: int) -> tuple[float, float]:
    """Return one client's loss and score from its own examples alone."""
    rows = slice(int(case.federation.train.starts[client]), int(case.federation.train.starts[client + 1]))
    task = task_of((case.federation.train.inputs[rows], case.federation.train.targets[rows]), problem)
    outputs = problem.predict(theta, task.inputs)
    return float(problem.loss(theta, task)), float(problem.score(outputs, task.targets, task.mask))


@pytest.mark.parametrize("case", [quadratic_bowl(), softmax_bowl(), network_bowl()])
@pytest.mark.parametrize("clients", [[0, 1, 2, 3, 4, 5], [1, 4], [3], [5, 4, 3, 2, 1, 0], [2, 0]])
@pytest.mark.parametrize("at_once", [8192, 7])
def test_flat_batches_equal_a_loop_over_clients(
    case: Case, clients: list[int], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "EXAMPLES_AT_ONCE", at_once)
    theta = normal(case.problem.n_parameters, seed=3)
    found = evaluate(case.problem, theta, case.federation.train, torch.tensor(clients))
    assert found.score is not None
    expected = [by_hand(case.problem, theta, case, c) for c in clients]
    assert found.loss.tolist() == pytest.approx([loss for loss, _ in expected], rel=1e-12)
    assert found.score.tolist() == pytest.approx([score for _, score in expected], rel=1e-12)
    without = evaluate(case.problem, theta, case.federation.train, torch.tensor(clients), with_score=False)
    assert without.score is None
    assert torch.equal(without.loss, found.loss)


@pytest.mark.parametrize("case", [softmax_bowl(), network_bowl()])
def test_personal_models_are_evaluated_on_their_own_client(case: Case) -> None:
    clients = torch.tensor([4, 1])
    thetas = normal(2, case.problem.n_parameters, seed=4)
    found = evaluate_personal(case.problem, thetas, case.federation.train, clients)
    assert found.score is not None
    for k, c in enumerate(clients.tolist()):
        loss, score = by_hand(case.problem, thetas[k], case, c)
        assert float(found.loss[k]) == pytest.approx(loss, rel=1e-12)
        assert float(found.score[k]) == pytest.approx(score, rel=1e-12)


def test_one_clients_bad_numbers_stay_its_own() -> None:
    case = network_bowl()
    inputs = case.federation.train.inputs.clone()
    inputs[int(case.federation.train.starts[2])] = torch.nan
    examples = case.federation.train._replace(inputs=inputs)
    found = evaluate(case.problem, normal(case.problem.n_parameters, seed=3), examples, torch.arange(6))
    assert found.loss.isnan().tolist() == [False, False, True, False, False, False]


def test_clients_of_one_size_have_means_of_their_own() -> None:
    clients = [(normal(5, 4, seed=c), torch.arange(5) % 3) for c in range(3)]
    case = Case(softmax_bowl().problem, federation_of(clients))
    theta = normal(case.problem.n_parameters, seed=3)
    found = evaluate(case.problem, theta, case.federation.train, torch.arange(3))
    expected = [by_hand(case.problem, theta, case, c) for c in range(3)]
    assert found.loss.tolist() == pytest.approx([loss for loss, _ in expected], rel=1e-12)
    assert found.scores.tolist() == pytest.approx([score for _, score in expected], rel=1e-12)

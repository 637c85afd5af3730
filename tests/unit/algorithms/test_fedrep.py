"""FedRep: the head is trained on a fixed body, the body on that head, and no head leaves its client."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedrep import FedRep
from dqnfed.core.problem import Problem
from dqnfed.core.tensors import named_parameters
from tests.helpers.bowls import federation_of, labelled_clients, linear_model, network_bowl, normal, small_network
from tests.helpers.play import play


def random_problem() -> tuple[Problem, int]:
    """Return a small network with random weights, and the size of its head."""
    module = small_network(4, 3, 3)
    with torch.no_grad():
        for k, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=k))
    problem = Problem.from_module(module)
    return problem, sum(shape.numel() for _, shape in problem.layout[-2:])


def descended(problem: Problem, theta: torch.Tensor, inputs: Any, targets: Any, lr: float, names: list[str]) -> Any:
    """Return theta after one step of torch.optim.SGD on the parameters of these names."""
    module = problem.module_at(theta).train()
    chosen = [parameter for name, parameter in module.named_parameters() if name in names]
    optimiser = torch.optim.SGD(chosen, lr=lr)
    torch.nn.functional.cross_entropy(module(inputs), targets).backward()
    optimiser.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def test_a_round_is_head_steps_and_then_a_step_of_the_body() -> None:
    problem, n_head = random_problem()
    client = labelled_clients(1, 4)[0]
    played = play(FedRep(lr=0.3, head_passes=3), problem, federation_of([client]), rounds=1)
    names = [name for name, _ in problem.layout]
    theta = problem.theta0
    for _ in range(3):
        theta = descended(problem, theta, *client, 0.3, names[-2:])
    theta = descended(problem, theta, *client, 0.3, names[:-2])
    torch.testing.assert_close(played.memory(0).head, theta[-n_head:], rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(played.thetas[-1][:-n_head], theta[:-n_head], rtol=1e-12, atol=1e-13)
    assert torch.equal(played.thetas[-1][-n_head:], problem.theta0[-n_head:])


def test_the_body_is_the_weighted_mean_and_no_head_is_sent() -> None:
    problem, n_head = random_problem()
    clients = labelled_clients(3, 4)
    alone = [play(FedRep(lr=0.3), problem, federation_of([c]), rounds=1).thetas[-1] for c in clients]
    played = play(FedRep(lr=0.3), problem, federation_of(clients), rounds=1)
    sizes = torch.tensor([float(len(y)) for _, y in clients]).double()
    mean = (sizes / sizes.sum()) @ torch.stack(alone)
    torch.testing.assert_close(played.thetas[-1], mean, rtol=1e-12, atol=1e-13)
    n_body = problem.n_parameters - n_head
    record = played.records[0]
    assert record["bytes_up"] == record["bytes_down"] == 3 * 8 * n_body


def test_with_equal_clients_every_one_has_the_same_head() -> None:
    problem, _ = random_problem()
    played = play(FedRep(lr=0.3), problem, federation_of([labelled_clients(1, 4)[0]] * 3), rounds=3)
    assert torch.equal(played.memory(0).head, played.memory(2).head)


def test_clients_with_permuted_labels_are_served_where_one_model_cannot() -> None:
    """Two clients with the same inputs and swapped labels: FedAvg can do no better than chance on one of them."""
    inputs, targets = labelled_clients(1, 4, n_classes=2)[0]
    problem = Problem.from_module(small_network(4, 6, 2))
    federation = federation_of([(inputs, targets), (inputs, 1 - targets)])

    def loss(method: Any) -> float:
        from dqnfed import run

        return float(run(method, problem, federation, rounds=60).summary["train_loss"]["mean"])

    assert loss(FedRep(lr=0.5)) < 0.5 * loss(FedAvg(lr=0.5))


def test_models_without_a_body_are_refused() -> None:
    problem = Problem.from_module(linear_model(4, 3))
    with pytest.raises(ValueError, match="no body to share"):
        FedRep().prepare(problem, 3, 3)
    case = network_bowl()
    assert list(named_parameters(case.problem.theta0, case.problem.layout))

"""DQN-Fed at its defaults on small problems that are hard: no crash, no false stop, no end above the start."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dqnfed import DQNFed, FedAvg, Problem, run
from dqnfed.core.result import RunResult
from tests.helpers.bowls import Case, Client, federation_of, normal

ROUNDS = 30
N_INPUTS, N_CLASSES = 4, 3
WORK: dict[str, dict[str, Any]] = {
    "gradients": {},
    "local, small rate": {"epochs": 2, "batch_size": 8, "lr": 0.03},
    "local, large rate": {"epochs": 3, "lr": 1.0},
}


class Data(NamedTuple):
    """A federation and how its model starts."""

    clients: list[Client]
    n_hidden: int = 0  # tanh units; 0: a linear model
    scale: float = 1.0  # of the start


def blobs(n_clients: int, *, spread: float = 1.5, seed: int = 0) -> list[Client]:
    """Return clients with examples of all classes around common centres."""
    centres = spread * normal(N_CLASSES, N_INPUTS, seed=seed, purpose="centres")
    clients = []
    for k in range(n_clients):
        labels = torch.arange(18) % N_CLASSES
        clients.append((centres[labels] + normal(18, N_INPUTS, seed=seed, purpose=f"client {k}"), labels))
    return clients


def one_class(clients: list[Client]) -> list[Client]:
    """Return clients with examples of one class each."""
    chosen = [(x[y == k % N_CLASSES], y[y == k % N_CLASSES]) for k, (x, y) in enumerate(clients)]
    return [(x.repeat(3, 1), y.repeat(3)) for x, y in chosen]


def conflicting(clients: list[Client]) -> list[Client]:
    """Return clients of which every other one has other labels for the same examples."""
    return [(clients[k // 2][0], (clients[k // 2][1] + k % 2) % N_CLASSES) for k in range(len(clients))]


def single_examples(clients: list[Client]) -> list[Client]:
    """Return clients each of which has one example, many times."""
    return [(x[k : k + 1].repeat(12, 1), y[k : k + 1].repeat(12)) for k, (x, y) in enumerate(clients)]


def times(factor: float, clients: list[Client]) -> list[Client]:
    return [(factor * x, y) for x, y in clients]


HARD: dict[str, Callable[[], Data]] = {
    "saturated start": lambda: Data(blobs(6, seed=1), scale=30.0),
    "saturated units": lambda: Data(blobs(6, seed=2), n_hidden=6, scale=15.0),
    "features times 100": lambda: Data(times(100.0, blobs(6, seed=3))),
    "features times 100, a network": lambda: Data(times(100.0, blobs(6, seed=4)), n_hidden=6),
    "features of one client times 100": lambda: Data([*times(100.0, blobs(1, seed=5)), *blobs(5, seed=5)]),
    "one class each": lambda: Data(one_class(blobs(6, seed=6))),
    "one class each, a network": lambda: Data(one_class(blobs(6, seed=7)), n_hidden=6),
    "duplicated clients": lambda: Data(blobs(1, seed=8) * 6),
    "single examples": lambda: Data(single_examples(blobs(6, seed=9)), n_hidden=6),
    "conflicting labels": lambda: Data(conflicting(blobs(6, seed=10))),
    "conflicting labels, a network": lambda: Data(conflicting(blobs(6, seed=11)), n_hidden=6),
}


ALL = list(product(HARD, (1, 2, 6), WORK))  # problem, clients a round, local work
SAMPLE = [ALL[9 * i + (4 * i + j) % 9] for i in range(len(HARD)) for j in (0, 5)]  # two of every problem, all kinds
ABOVE = {
    ("features of one client times 100", 1, "local, large rate")
}  # its loss outweighs all others; it is asked late


def problem_of(data: Data) -> Problem:
    """Return the model at a start whose weights are drawn with the given scale."""
    width = data.n_hidden or N_INPUTS
    head = nn.Linear(width, N_CLASSES, dtype=torch.float64)
    layers = [nn.Linear(N_INPUTS, width, dtype=torch.float64), nn.Tanh(), head] if data.n_hidden else [head]
    module = nn.Sequential(*layers)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            drawn = normal(*parameter.shape, seed=3, purpose=f"parameter {i}")
            parameter.copy_(data.scale * drawn / width**0.5)
    return Problem.from_module(module)


def train_losses(result: RunResult) -> list[float]:
    return [record["train_loss"]["mean"] for record in result.history]


def client_gradients(case: Case, theta: Tensor) -> Tensor:
    """Return every client's gradient at theta, by automatic differentiation of its mean loss."""
    train, found = case.federation.train, []
    for first, last in zip(train.starts[:-1].tolist(), train.starts[1:].tolist(), strict=True):
        at = theta.clone().requires_grad_()
        losses = case.problem.losses(case.problem.predict(at, train.inputs[first:last]), train.targets[first:last])
        found.append(torch.autograd.grad(losses.mean(), at)[0])
    return torch.stack(found)


def check_stop_is_true(case: Case, result: RunResult) -> None:
    """A run that ended early did so where the mean gradient vanishes, compared with the clients' own."""
    if result.summary["status"] != "stopped":
        assert result.summary["rounds"] == ROUNDS
        return
    gradients = client_gradients(case, result.theta)
    assert "mean gradient vanishes" in result.summary["reason"]
    assert float(gradients.mean(0).norm()) <= 1e-5 * float(gradients.norm(dim=1).mean())


def check_hard_problem(name: str, size: int, work: str) -> None:
    data = HARD[name]()
    case = Case(problem_of(data), federation_of(data.clients), size / 6)
    method, share = DQNFed(**WORK[work]), case.participation
    result = run(method, case.problem, case.federation, rounds=ROUNDS, participation=share)
    losses = train_losses(result)
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] <= losses[0] * (1.05 if (name, size, work) in ABOVE else 1 + 1e-9)
    check_stop_is_true(case, result)


@pytest.mark.parametrize(("name", "size", "work"), SAMPLE)
def test_hard_problems_end_finite_and_not_above_their_start(name: str, size: int, work: str) -> None:
    """Cohorts of one, two and everybody."""
    check_hard_problem(name, size, work)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "work"), [combined for combined in ALL if combined not in SAMPLE])
def test_all_hard_problems_end_finite_and_not_above_their_start(name: str, size: int, work: str) -> None:
    check_hard_problem(name, size, work)


@pytest.mark.parametrize("margin", [5.0, 10.0, 20.0, 30.0])
@pytest.mark.parametrize("work", ["gradients", "local, large rate"])
def test_a_client_that_the_start_model_fits_costs_the_others_nothing(margin: float, work: str) -> None:
    """Five clients with common centres and one whose examples the start model classifies by the margin.

    The mean ends within 5 % of the loss of FedAvg with the same local work or, with gradients, a learning rate of 1.
    """
    data = Data(blobs(5, spread=0.7, seed=12))
    problem, inputs = problem_of(data), normal(18, N_INPUTS, seed=13)
    model = nn.Linear(N_INPUTS, N_CLASSES, dtype=torch.float64)
    nn.utils.vector_to_parameters(problem.theta0, model.parameters())
    with torch.no_grad():
        model.bias.zero_()  # a multiple of an example then has a multiple of its outputs
        best = model(inputs).topk(2, dim=1)
    factors = margin / (best.values[:, 0] - best.values[:, 1])
    fitted = factors[:, None] * inputs, best.indices[:, 0]
    federation = federation_of([*data.clients, fitted])
    settings = WORK[work] or {"lr": 1.0}
    theirs = run(FedAvg(**settings), problem, federation, rounds=ROUNDS)
    ours = run(DQNFed(**WORK[work]), problem, federation, rounds=ROUNDS)
    assert ours.summary["rounds"] == ROUNDS
    assert train_losses(ours)[-1] <= 1.05 * train_losses(theirs)[-1]

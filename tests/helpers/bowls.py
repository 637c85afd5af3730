"""Small problems with known answers, in float64: bowls that every method should slide down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import Problem, Task
from dqnfed.core.seeds import seed_for

Client = tuple[Tensor, Tensor]  # inputs, targets


class Case(NamedTuple):
    """A problem, who holds its data, and how many of them take part in a round."""

    problem: Problem
    federation: Federation
    participation: float = 1.0


def federation_of(clients: Sequence[Client]) -> Federation:
    """Return the federation in which every client trains and is tested on the same given examples."""
    starts = torch.tensor([0, *(len(x) for x, _ in clients)]).cumsum(0)
    examples = Examples(torch.cat([x for x, _ in clients]), torch.cat([y for _, y in clients]), starts)
    is_regression = examples.targets.is_floating_point()
    return Federation(examples, examples, n_classes=None if is_regression else int(examples.targets.max()) + 1)


def normal(*shape: int, seed: int, purpose: str = "normal") -> Tensor:
    """Return standard normal numbers, float64."""
    return torch.randn(*shape, generator=seed_for(seed, purpose=purpose), dtype=torch.float64)


def linear_model(n_inputs: int, n_outputs: int, *, zero: bool = True) -> nn.Module:
    """Return a linear map without bias, so that a client with inputs of zero has a gradient of zero."""
    module = nn.Linear(n_inputs, n_outputs, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.copy_(torch.zeros(n_outputs, n_inputs) if zero else 0.5 * normal(n_outputs, n_inputs, seed=1))
    return module


def small_network(n_inputs: int, n_hidden: int, n_outputs: int) -> nn.Module:
    """Return a network whose first outputs are all zero: every client starts with the same loss.

    Only the head has a bias, so a client with inputs of zero and equally many labels of each class starts without a
    gradient.
    """
    hidden = nn.Linear(n_inputs, n_hidden, bias=False, dtype=torch.float64)
    head = nn.Linear(n_hidden, n_outputs, dtype=torch.float64)
    with torch.no_grad():
        hidden.weight.copy_(normal(n_hidden, n_inputs, seed=2))
        head.weight.zero_()
        head.bias.zero_()
    return nn.Sequential(hidden, nn.Tanh(), head)


def regression_clients(n_clients: int, n_inputs: int, *, spread: float = 0.3, seed: int = 0) -> list[Client]:
    """Return least-squares clients of different sizes whose optima lie `spread` around a point at distance 3 from 0.

    Zero is therefore no compromise between them: from there every client can win at once.
    """
    centre = torch.full((n_inputs,), 3.0 / n_inputs**0.5, dtype=torch.float64)
    clients = []
    for c in range(n_clients):
        inputs = normal(2 * n_inputs + c, n_inputs, seed=seed, purpose=f"inputs {c}")
        optimum = centre + spread * normal(n_inputs, seed=seed, purpose=f"optimum {c}") / n_inputs**0.5
        clients.append((inputs, (inputs @ optimum)[:, None]))
    return clients


def labelled_clients(n_clients: int, n_inputs: int, *, n_classes: int = 3, seed: int = 0) -> list[Client]:
    """Return classification clients of different sizes; each has its own blurred view of one common rule."""
    rule = 2.0 * normal(n_inputs, n_classes, seed=seed, purpose="rule")
    clients = []
    for c in range(n_clients):
        inputs = normal(8 + c, n_inputs, seed=seed, purpose=f"inputs {c}")
        own = rule + 0.3 * normal(n_inputs, n_classes, seed=seed, purpose=f"rule {c}")
        clients.append((inputs, (inputs @ own).argmax(1)))
    return clients


def quadratic_bowl(n_clients: int = 6, n_inputs: int = 12, *, seed: int = 0) -> Case:
    """Return strongly convex least squares, one quadratic a client."""
    problem = Problem.from_module(linear_model(n_inputs, 1), loss="squared-error")
    return Case(problem, federation_of(regression_clients(n_clients, n_inputs, seed=seed)))


def softmax_bowl(n_clients: int = 6, n_inputs: int = 4, *, seed: int = 0) -> Case:
    """Return softmax regression with a ridge: smooth, strongly convex, not quadratic."""
    problem = Problem.from_module(linear_model(n_inputs, 3), loss="cross-entropy", ridge=1e-2)
    return Case(problem, federation_of(labelled_clients(n_clients, n_inputs, seed=seed)))


def network_bowl(n_clients: int = 6, n_inputs: int = 4, *, seed: int = 0) -> Case:
    """Return a network of one small hidden layer on the same clients: not convex, but easy."""
    problem = Problem.from_module(small_network(n_inputs, 3, 3), loss="cross-entropy")
    return Case(problem, federation_of(labelled_clients(n_clients, n_inputs, seed=seed)))


def normed_network(n_inputs: int, n_hidden: int, n_outputs: int) -> nn.Module:
    """Return `small_network` with BatchNorm before its activation."""
    hidden, activation, head = small_network(n_inputs, n_hidden, n_outputs).children()
    return nn.Sequential(hidden, nn.BatchNorm1d(n_hidden, dtype=torch.float64), activation, head)


def normed_bowl(n_clients: int = 6, n_inputs: int = 4, *, seed: int = 0) -> Case:
    """Return `network_bowl` with BatchNorm."""
    problem = Problem.from_module(normed_network(n_inputs, 3, 3), loss="cross-entropy")
    return Case(problem, federation_of(labelled_clients(n_clients, n_inputs, seed=seed)))


BOWLS: dict[str, tuple[Callable[[], Case], ...]] = {  # by the kind of problem that a method says it suits
    "convex": (quadratic_bowl, softmax_bowl),
    "network": (network_bowl,),
    "batch-norm": (normed_bowl,),
}


def task_of(client: Client, problem: Problem, *, batches: Tensor | None = None, lr: float = 0.1) -> Task:
    """Return one client's unpadded task: one full-batch step, or the given batches."""
    inputs, targets = client
    return Task(
        inputs,
        targets,
        problem.theta0.new_ones(len(inputs)),
        torch.zeros(1, 0, dtype=torch.long) if batches is None else batches,
        problem.theta0.new_zeros(0),
        problem.theta0.new_tensor(lr),
    )

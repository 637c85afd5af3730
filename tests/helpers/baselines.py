"""The three gradients that the golden numbers are for, and clients whose losses are known in closed form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dqnfed.core.algorithm import Cohort
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import Problem, Task, negative_loss, squared_errors

# theta = 0 in R^4, losses F, n examples, one full-batch step of length 0.1
GRADIENTS = torch.tensor([[1.0, 2, 0, -1], [0.5, -1, 1, 2], [2, 0, 1, 0.5]], dtype=torch.float64)
LOSSES = torch.tensor([0.5, 2.0, 1.0], dtype=torch.float64)
EXAMPLES = (10, 30, 60)
LR = 0.1


class Bowls(NamedTuple):
    problem: Problem
    federation: Federation
    centres: Tensor  # [K, n] the clients' minimisers: the means of their examples


def bowl_problem(n: int, *, start: float = 0.0) -> Problem:
    """Return the float64 problem whose example loss is half the squared distance of theta to the target [n]."""
    return Problem(
        theta0=torch.full((n,), start, dtype=torch.float64),
        layout=(("theta", torch.Size([n])),),
        predict=lambda theta, inputs: theta.expand(len(inputs), n),
        losses=squared_errors,
        score=negative_loss,
        score_name="negative squared error",
    )


def bowls(
    n_clients: int = 4,
    n: int = 3,
    *,
    sizes: Sequence[int] = (),
    seed: int = 0,
    spread: float = 1.0,
    start: float = 0.0,
) -> Bowls:
    """Return clients with Gaussian targets around Gaussian centres; every test example is the client's centre."""
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes or [3 + 2 * k for k in range(n_clients)]
    targets = []
    for size in sizes:
        centre = torch.randn(n, generator=generator, dtype=torch.float64)
        targets.append(centre + spread * torch.randn(size, n, generator=generator, dtype=torch.float64))
    centres = torch.stack([t.mean(0) for t in targets])
    starts = torch.tensor([0, *sizes]).cumsum(0)
    train = Examples(torch.zeros(int(starts[-1]), 1, dtype=torch.float64), torch.cat(targets), starts)
    test = Examples(torch.zeros(len(sizes), 1, dtype=torch.float64), centres, torch.arange(len(sizes) + 1))
    return Bowls(bowl_problem(n, start=start), Federation(train, test), centres)


def task_of(targets: Tensor, *, lr: float = LR, steps: int = 1) -> Task:
    """Return the task of `steps` full-batch steps on the bowl problem with the given targets [N, n]."""
    return Task(
        inputs=targets.new_zeros(len(targets), 1),
        targets=targets,
        mask=targets.new_ones(len(targets)),
        batches=torch.zeros(steps, 0, dtype=torch.long),
        noise=targets.new_zeros(0),
        lr=targets.new_tensor(lr),
    )


def cohort_of(n_examples: Sequence[int] = EXAMPLES, *, n_clients: int | None = None, round: int = 0) -> Cohort:
    """Return the cohort of clients 0, 1, ... with the given numbers of examples."""
    K = len(n_examples)
    return Cohort(torch.arange(K), torch.tensor(n_examples), n_clients or K, round)


def classes(
    n_clients: int = 4, *, n_classes: int = 3, n_features: int = 5, seed: int = 0, sizes: Sequence[int] = ()
) -> tuple[Problem, Federation]:
    """Return a float64 softmax regression and clients with Gaussian classes, each with a label mix of its own."""
    generator = torch.Generator().manual_seed(seed)
    means = 1.5 * torch.randn(n_classes, n_features, generator=generator, dtype=torch.float64)
    clients = []
    for k, size in enumerate(sizes or [12 + 4 * k for k in range(n_clients)]):
        favourite = torch.full((size,), k % n_classes)
        anything = torch.randint(n_classes, (size,), generator=generator)
        labels = torch.where(torch.rand(size, generator=generator) < 0.6, favourite, anything)
        noise = torch.randn(size, n_features, generator=generator, dtype=torch.float64)
        clients.append((means[labels] + noise, labels))
    model = nn.Linear(n_features, n_classes, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return Problem.from_module(model), Federation.from_clients(clients, n_classes=n_classes, seed=seed)

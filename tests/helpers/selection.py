"""The rule of `eval.select` once more, in exact numbers, and what a model does for each client, by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import Problem


def chosen_round(values: Sequence[float], *, lowest: bool) -> int | None:
    """Return the place whose mean with the two finite values before it is the best; of equal ones the first."""
    finite = [(place, Fraction(value)) for place, value in enumerate(values) if math.isfinite(value)]
    means: dict[int, Fraction] = {}
    for k, (place, _) in enumerate(finite):
        window = [value for _, value in finite[max(0, k - 2) : k + 1]]
        means[place] = sum(window, Fraction(0)) / len(window)
    if not means:
        return None
    best = min(means.values()) if lowest else max(means.values())
    return min(place for place, mean in means.items() if mean == best)


def worst_mean(scores: Sequence[float], n_worst: int) -> float:
    return sum(sorted(scores)[:n_worst]) / n_worst


def linear_clients(n_clients: int = 4, n: int = 32, *, validation: float = 0.25) -> Federation:
    """Return clients with some wrong labels: more training does not always help them."""
    generator = torch.Generator().manual_seed(3)
    clients = []
    for k in range(n_clients):
        inputs = torch.randn(n, 6, generator=generator, dtype=torch.float64) + 0.6 * (k - 1.5)
        targets = (inputs[:, 0] + 0.5 * inputs[:, 1] > 0.3 * k).long()
        flipped = torch.rand(n, generator=generator) < 0.2
        clients.append((inputs, torch.where(flipped, 1 - targets, targets)))
    return Federation.from_clients(clients, test=0.25, validation=validation, n_classes=2)


def linear_problem() -> Problem:
    torch.manual_seed(1)
    return Problem.from_module(nn.Linear(6, 2).double())


def by_hand(theta: Tensor, examples: Examples, client: int) -> tuple[float, float]:
    """Return one client's mean cross-entropy and accuracy in percent, with the 6 x 2 linear model of theta."""
    start, end = int(examples.starts[client]), int(examples.starts[client + 1])
    inputs, targets = examples.inputs[start:end], examples.targets[start:end]
    outputs = inputs @ theta[:12].reshape(2, 6).T + theta[12:]
    right = (outputs.argmax(1) == targets).double().mean()
    return float(F.cross_entropy(outputs, targets)), 100.0 * float(right)

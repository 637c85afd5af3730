"""A convex federation whose Pareto set is known: bowls of one shape around different centres."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor, nn

from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.seeds import numpy_seed_for
from dqnfed.maths.solvers import min_norm_weights


class Centre(nn.Module):
    """One point: the model that predicts the same vector for every example."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.point = nn.Parameter(torch.zeros(n))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.point.expand(len(inputs), -1)


def bowl_shape(n: int, condition: float) -> Tensor:
    """Return the diagonal of the Hessian that all clients share, from 1 down to 1 / condition."""
    return torch.logspace(0.0, -float(np.log10(condition)), n, dtype=torch.float64)


def bowls(
    *,
    n_clients: int = 8,
    n: int = 10,
    n_examples: int = 20,
    condition: float = 100.0,
    seed: int = 0,
    validation: float = 0.0,
) -> tuple[Problem, Federation]:
    """Return f_k(theta) = 1/2 mean_i (theta - x_ki)' A (theta - x_ki), one diagonal A for all.

    Client k's loss is a bowl around its mean m_k (plus a constant), so the Pareto set is the convex hull of the
    m_k: a stationary weighted sum has theta = sum_k lambda_k m_k. The score is 100 exp(-loss), a closeness in percent.
    """
    shape = bowl_shape(n, condition)
    random = numpy_seed_for(seed, purpose="bowls")
    centres = random.normal(size=(n_clients, n)) + 2.0
    points = [
        torch.as_tensor(centre + 0.1 * random.normal(size=(n_examples, n)), dtype=torch.float64) for centre in centres
    ]

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * ((outputs - targets.to(outputs.dtype)).square() * shape.to(outputs.device, outputs.dtype)).sum(1)

    def closeness(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        return 100.0 * torch.exp(-(losses(outputs, targets) * mask).sum() / mask.sum().clamp(min=1))

    problem = Problem.from_module(Centre(n), losses=losses, score=closeness, score_name="closeness")
    return problem, Federation.from_clients([(x, x) for x in points], validation=validation, seed=seed)


def distance_to_pareto_set(theta: Tensor, federation: Federation) -> float:
    """Return how far theta is from the convex hull of the bowls' centres."""
    starts = federation.train.starts.tolist()
    centres = torch.stack([federation.train.targets[a:b].double().mean(0) for a, b in itertools.pairwise(starts)])
    offsets = (centres - theta.double()).numpy()
    weights = min_norm_weights(offsets @ offsets.T)
    return float(np.linalg.norm(weights @ offsets))

"""Least squares with clients of different sizes, once for the engine and once in NumPy: for oracles of whole runs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from dqnfed.core.curvature import least_squares_problem
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from tests.helpers.bowls import federation_of
from tests.helpers.numpy_clients import Floats, LeastSquares

RIDGE = 0.1


class Regressions(NamedTuple):
    problem: Problem
    federation: Federation
    clients: list[LeastSquares]  # the same in NumPy
    sizes: Floats  # [N] examples


def regressions(n_clients: int = 5, n: int = 4, *, seed: int = 0) -> Regressions:
    """Return clients with 4, 7, 10, ... examples and optima of their own; training starts at ones."""
    numbers = np.random.default_rng(seed)
    sizes = 4 + 3 * np.arange(n_clients)
    rows = [numbers.normal(size=(size, n)) for size in sizes]
    targets = [A @ numbers.normal(size=n) + numbers.normal(size=len(A)) for A in rows]
    federation = federation_of([(torch.from_numpy(A), torch.from_numpy(b)) for A, b in zip(rows, targets, strict=True)])
    problem = least_squares_problem(n, ridge=RIDGE, theta0=torch.ones(n, dtype=torch.float64))
    clients = [LeastSquares(A, b, RIDGE) for A, b in zip(rows, targets, strict=True)]
    return Regressions(problem, federation, clients, sizes.astype(np.float64))


def local_update(client: LeastSquares, theta: Floats, *, lr: float, steps: int) -> Floats:
    """Return theta minus where the client's full-batch gradient descent from it ends."""
    local = theta
    for _ in range(steps):
        local = local - lr * client.gradient(local)
    return np.asarray(theta - local)


def shares_of(weighting: str, sizes: Floats) -> Floats:
    """Return the clients' weights, summing to 1."""
    raw = sizes if weighting == "examples" else np.ones(len(sizes))
    return np.asarray(raw / raw.sum())

"""FedNL-CR's Lipschitz constant, from clients of different sizes."""

from __future__ import annotations

import numpy as np
import torch

from dqnfed.algorithms.fednl_cr import FedNLCR
from dqnfed.core.curvature import logistic_problem
from tests.helpers.bowls import federation_of, normal
from tests.helpers.play import play


def test_the_lipschitz_constant_is_the_mean_of_the_clients_own() -> None:
    """The mean of ||a||^3 / (6 sqrt 3) over each client's rows; clients padded to the largest have no further rows."""
    inputs = [normal(size, 3, seed=size) for size in (2, 7, 4)]
    federation = federation_of([(x, torch.ones(len(x), dtype=torch.float64)) for x in inputs])
    played = play(FedNLCR(), logistic_problem(3), federation, rounds=1)
    own = [np.mean(np.linalg.norm(x.numpy(), axis=1) ** 3) / (6.0 * np.sqrt(3.0)) for x in inputs]
    np.testing.assert_allclose(float(played.servers[-1].lipschitz), np.mean(own))

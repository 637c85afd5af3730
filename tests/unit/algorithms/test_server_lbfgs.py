"""Server L-BFGS: the step against the dense BFGS formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from dqnfed.algorithms.server_lbfgs import LBFGSUpdate, ServerLBFGS
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import Replies
from tests.helpers.quadratic_clients import consistent_quadratics


def test_a_flat_direction_gets_the_quasi_newton_step_and_no_more() -> None:
    """Along u the mean loss is less curved than W says, but alpha stays 1: theta - H g, H by inverse BFGS."""
    s, y, g = np.array([1.0, 0.0]), np.array([1.0, 3.0]), np.array([0.3, 1.0])
    rho, gam = 1.0 / (s @ y), (s @ y) / (y @ y)
    V = np.eye(2) - rho * np.outer(y, s)
    u = (gam * V.T @ V + rho * np.outer(s, s)) @ g
    curvature = (s @ y) / (s @ s)
    assert (g @ u) / (curvature * (u @ u)) > 1.2  # where the parabola along u would be lowest

    problem = consistent_quadratics(4, 2).problem
    method = ServerLBFGS().prepare(problem, 4, 2)
    fresh: Any = method.init_server(problem, 4)
    server = fresh._replace(
        theta_before=fresh.theta - torch.from_numpy(s),
        n_steps=torch.tensor(1),
        step_norm=torch.tensor(1.0, dtype=torch.float64),
    )
    replies = Replies(LBFGSUpdate(torch.from_numpy(np.stack([g, g])), torch.from_numpy(np.stack([y, y]))))
    cohort = Cohort(torch.tensor([0, 2]), torch.tensor([10, 10]), 4, 1)
    moved: Any = method.server_step(server, replies, cohort).server
    torch.testing.assert_close(server.theta - moved.theta, torch.from_numpy(u))

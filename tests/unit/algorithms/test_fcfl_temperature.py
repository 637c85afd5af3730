"""FCFL's temperature: it falls where the smoothed maximum is nearly stationary, whatever the learning rate is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dqnfed.algorithms.fcfl import FCFL, FCFLUpdate
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import Replies
from tests.helpers.quadratic_clients import consistent_quadratics


@pytest.mark.parametrize("lr", [0.01, 1.0])
@pytest.mark.parametrize(("gradient_norm", "temperature"), [(10.0, 0.5), (5.5, 0.5), (4.5, 0.005), (0.1, 0.005)])
def test_a_tenth_of_the_gradients_norm_is_compared(lr: float, gradient_norm: float, temperature: float) -> None:
    problem = consistent_quadratics(2, 2).problem
    method = FCFL(lr=lr, temperature=0.5).prepare(problem, 2, 2)
    gradient = gradient_norm * torch.tensor([0.6, -0.8], dtype=torch.float64)
    replies: Replies[Any] = Replies(
        FCFLUpdate((lr * gradient).expand(2, -1), torch.tensor([1.0, 2.0], dtype=torch.float64))
    )
    cohort = Cohort(torch.arange(2), torch.tensor([10, 10]), 2, 0)
    found: Any = method.server_step(method.init_server(problem, 2), replies, cohort).server
    assert float(found.loss_temperature) == pytest.approx(temperature)

"""The scale of AdaFed's rates, and when they are held against the losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.adafed import AdaFed
from dqnfed.algorithms.parts.messages import DescentUpdate
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import Replies
from tests.helpers.quadratic_clients import consistent_quadratics

LOSSES = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)


def replies(losses: Tensor, gamma: float) -> Replies[DescentUpdate]:
    rows = torch.eye(len(losses), dtype=torch.float64)
    return Replies(DescentUpdate(rows, losses**gamma, losses, curvature=torch.ones_like(losses)))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_the_mean_rate_is_the_mean_loss(gamma: float) -> None:
    method = AdaFed(gamma=gamma).prepare(consistent_quadratics(4, 4).problem, 4, 4)
    rates = method.wanted_rates(replies(LOSSES, gamma), np.ones(4), np.zeros(0), LOSSES.numpy())
    assert rates.mean() == pytest.approx(float(LOSSES.mean()))
    np.testing.assert_allclose(rates / rates[0], (LOSSES / LOSSES[0]).numpy() ** gamma)


@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_a_power_of_the_loss_is_no_decrease_that_the_loss_could_contradict(gamma: float) -> None:
    """Small losses have roots, and large ones squares, above twice themselves; their clients are honest."""
    losses = torch.tensor([0.01, 0.02, 5.0, 6.0], dtype=torch.float64)
    problem = consistent_quadratics(4, 4).problem
    method = AdaFed(gamma=gamma, drop_share=0.5).prepare(problem, 4, 4)
    server: Any = method.init_server(problem, 4)
    cohort = Cohort(torch.arange(4), torch.full((4,), 10), 4, 0)
    checked = method.parts.trust.check_replies(server.trust, replies(losses, gamma), cohort, torch.zeros(4).double())
    assert method.parts.trust.left_out(checked) == ()

"""Rates by loss: what is above the floor of the losses, to a power."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.parts.rates import Here, Rates
from dqnfed.core.tensors import row
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.quadratic_clients import consistent_quadratics


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("loss", "above"), [(3.0, 2.25), (0.75, 0.0), (0.5, 0.0)])
def test_a_rate_by_loss_counts_from_the_floor(loss: float, above: float, power: float) -> None:
    problem, federation, _ = consistent_quadratics(2, 3)
    problem = replace(problem, loss_floor=0.75)
    task = row(TaskBuilder(federation, problem, FedAvg(), 0).stacked(torch.arange(2), 0), 0)
    here = Here(problem.theta0, problem.theta0, torch.tensor(loss, dtype=torch.float64))
    assert float(Rates("loss", power=power).first(problem, task, here)) == pytest.approx(above**power)

"""The last linear layer: found, read, and bent exactly."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.func import hessian

from dqnfed.core.heads import head_features, head_hessians, last_layer
from dqnfed.core.problem import Problem, Task
from tests.helpers.bowls import normal


def case(*, bias: bool) -> tuple[Problem, Task]:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3, bias=bias)).double()
    mask = torch.ones(9, dtype=torch.float64)
    mask[-2:] = 0.0
    task = Task(
        normal(9, 4, seed=0), torch.arange(9) % 3, mask, torch.zeros(1, 0).long(), torch.zeros(0), torch.tensor(1.0)
    )
    return Problem.from_module(module), task


@pytest.mark.parametrize("bias", [True, False])
def test_features_are_what_the_head_sees(bias: bool) -> None:
    problem, task = case(bias=bias)
    head = last_layer(problem)
    assert (head.n_classes, head.n_features, head.has_bias) == (3, 7, bias)
    features = head_features(problem, task, problem.theta0, head)
    weights = problem.theta0[head.places()]  # [classes, columns]
    torch.testing.assert_close(features @ weights.T, problem.predict(problem.theta0, task.inputs))
    without_module = dataclasses.replace(problem, module=None)
    torch.testing.assert_close(head_features(without_module, task, problem.theta0, head), features)


@pytest.mark.parametrize("bias", [True, False])
def test_head_hessian_is_the_block_of_the_hessian(bias: bool) -> None:
    problem, task = case(bias=bias)
    head = last_layer(problem)
    features = head_features(problem, task, problem.theta0, head)
    outputs = problem.predict(problem.theta0, task.inputs)
    places = head.places()
    whole = hessian(problem.loss)(problem.theta0, task)
    flat = places.reshape(-1)
    full = head_hessians(features, outputs, task.mask, is_full=True)
    torch.testing.assert_close(full[0], whole[flat][:, flat], rtol=1e-10, atol=1e-12)
    blocks = head_hessians(features, outputs, task.mask, is_full=False)
    for c in range(3):
        torch.testing.assert_close(blocks[c], whole[places[c]][:, places[c]], rtol=1e-10, atol=1e-12)


def test_a_model_without_a_linear_end_is_refused() -> None:
    problem = Problem.from_module(nn.Sequential(nn.Linear(4, 3), nn.GroupNorm(1, 3)))
    with pytest.raises(ValueError, match=r"ends with 1\.weight \(3,\), 1\.bias \(3,\).*fednl-diag"):
        last_layer(problem)

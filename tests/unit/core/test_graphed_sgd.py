"""A step of SGD on tensors that stay where they are is a step of SGD; a GPU replays the same."""

from __future__ import annotations

import pytest
import torch
from torch.func import vmap

from dqnfed.core.graphed_sgd import graphed_sgd
from dqnfed.core.local_work import local_sgd
from dqnfed.core.problem import ModuleModel, Task
from dqnfed.core.tensors import map_tensors
from tests.unit.core.test_gradients import case

SETTINGS = [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)]


@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
@pytest.mark.parametrize("model", ["dense", "convolved"])
def test_it_is_sgd(model: str, momentum: float, weight_decay: float) -> None:
    """A short batch and a batch without examples are among the task's; it is called twice on the same tensors."""
    problem, task, theta = case(model, "cross-entropy", ridge=0.2)
    assert isinstance(problem.predict, ModuleModel)
    decay = weight_decay + problem.ridge
    graphed_sgd(problem, problem.predict, task, 2 * theta, momentum=momentum, decay=decay)
    found = graphed_sgd(problem, problem.predict, task, theta, momentum=momentum, decay=decay)
    one = Task(*(t[None] for t in task))
    expected = vmap(lambda its: local_sgd(problem, its, theta, momentum=momentum, weight_decay=weight_decay))(one)
    torch.testing.assert_close(found, expected[0], rtol=1e-12, atol=1e-14)
    assert len(problem.predict.steps) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
def test_a_gpu_replays_the_same(momentum: float, weight_decay: float) -> None:
    problem, task, theta = case("convolved", "cross-entropy", ridge=0.2)
    expected = local_sgd(problem, task, theta, momentum=momentum, weight_decay=weight_decay)
    there, task, theta = problem.to("cuda"), map_tensors(lambda t: t.to("cuda"), task), theta.to("cuda")
    for _ in range(2):
        found = local_sgd(there, task, theta, momentum=momentum, weight_decay=weight_decay)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-11)
    assert isinstance(there.predict, ModuleModel)
    assert len(there.predict.steps) == 1

"""A ReLU behind the pooling gives the bits of one before it; images on a CPU are computed a part at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from dqnfed.accel import gradients, memory
from dqnfed.accel.kernels import FastKernels
from dqnfed.accel.pooling import pooled_first
from dqnfed.core.kernels import PLAIN
from dqnfed.core.problem import Problem, Task
from dqnfed.models import build
from dqnfed.sim.accelerate import acceleration
from tests.helpers.bowls import normal


def network(*, pool: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), pool or nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))


def value_and_slopes(module: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    outputs = module(images)
    return [outputs, *torch.autograd.grad(outputs.square().sum(), list(module.parameters()))]


@pytest.mark.parametrize("pool", [nn.MaxPool2d(2), nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)])
def test_values_and_gradients_have_the_same_bits(pool: nn.Module) -> None:
    module = nn.Sequential(network(pool=pool)[:4], nn.LazyLinear(3)).double()
    images = normal(5, 1, 8, 8, seed=1).double()
    images[0], images[1, :, :4] = 0.0, 2.0  # equal numbers in a window, some of them above zero
    module(images)
    changed = pooled_first(module)
    assert [type(part) for part in changed.get_submodule("0").children()][1:3] == [nn.MaxPool2d, nn.ReLU]
    assert [type(part) for part in module.get_submodule("0").children()][1:3] == [nn.ReLU, nn.MaxPool2d]
    assert [name for name, _ in changed.named_parameters()] == [name for name, _ in module.named_parameters()]
    for got, wanted in zip(value_and_slopes(changed, images), value_and_slopes(module, images), strict=True):
        assert torch.equal(got, wanted)


def watched() -> nn.Sequential:
    module = network()
    module[1].register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "module",
    [
        watched(),
        network(pool=nn.AvgPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2)),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
    ],
)
def test_other_layers_stay_where_they_are(module: nn.Sequential) -> None:
    assert pooled_first(module) is module


def test_a_layer_that_is_in_a_sequence_twice_keeps_its_places() -> None:
    relu, pool = nn.ReLU(), nn.MaxPool2d(2)
    module = nn.Sequential(nn.Conv2d(1, 4, 3), relu, pool, nn.Conv2d(4, 4, 3), relu, pool)
    images = normal(2, 1, 14, 14, seed=2).float()
    changed = pooled_first(module)
    assert [type(changed.get_submodule(str(k))) for k in range(6)] == [nn.Conv2d, nn.MaxPool2d, nn.ReLU] * 2
    assert torch.equal(changed(images), module(images))


@pytest.fixture
def convolutional(monkeypatch: pytest.MonkeyPatch) -> tuple[Problem, Task]:
    monkeypatch.setattr(gradients, "IMAGES_AT_ONCE", 4)
    module = build("cnn", input_shape=(1, 12, 12), n_outputs=3, settings={"channels": (3, 4), "hidden": 6}, seed=1)
    problem = Problem.from_module(module.double(), ridge=0.01)
    mask = torch.ones(11, dtype=torch.float64)
    mask[-1] = 0.0
    images, labels = normal(11, 1, 12, 12, seed=3), torch.arange(11) % 3
    batches = torch.zeros(1, 0, dtype=torch.long)
    return problem, Task(images, labels, mask, batches, torch.zeros((), dtype=torch.long), torch.tensor(0.1))


def fast(problem: Problem) -> Problem:
    return replace(problem, kernels=FastKernels())


def test_gradients_and_losses_of_parts_are_those_of_all(convolutional: tuple[Problem, Task]) -> None:
    problem, task = convolutional
    thetas = (problem.theta0, problem.theta0 + 0.1)
    found, wanted = (p.kernels.gradients(p, thetas, task) for p in (fast(problem), replace(problem, kernels=PLAIN)))
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
    quick = fast(problem)
    torch.testing.assert_close(quick.kernels.loss(quick, problem.theta0, task), wanted[0][1], rtol=1e-12, atol=0)


def test_an_evaluation_of_parts_is_that_of_all(convolutional: tuple[Problem, Task]) -> None:
    problem, task = convolutional
    sizes, thetas = torch.tensor([6, 5]), torch.stack([problem.theta0, problem.theta0 + 0.1])
    given: tuple[Any, ...] = (task.inputs.double(), task.targets)
    for name, model, more in (("forward", problem.theta0, ()), ("forward_each", thetas, (sizes,))):
        settings = {"fixed": False} if name == "forward" else {}
        found, wanted = (
            getattr(p.kernels, name)(p, model, *given, *more, **settings)
            for p in (fast(problem), replace(problem, kernels=PLAIN))
        )
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


def test_freed_blocks_are_kept_by_a_process_that_computes_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []

    def mallopt(parameter: int, value: int) -> int:
        told.append((parameter, value))
        return 1

    monkeypatch.setattr(memory, "_of_c_library", lambda name: mallopt)
    memory.keep_freed_blocks.cache_clear()
    acceleration()
    acceleration()
    assert told == [(memory.M_MMAP_THRESHOLD, memory.LARGEST), (memory.M_TRIM_THRESHOLD, 2**31 - 1)]
    memory.keep_freed_blocks.cache_clear()

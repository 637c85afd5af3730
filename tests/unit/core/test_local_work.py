"""The shared local work is plain SGD, step for step, however the clients are padded."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from dqnfed import FedAvg
from dqnfed.accel.kernels import FastKernels
from dqnfed.core.kernels import PLAIN, Kernels, Pull
from dqnfed.core.local_work import draw_batches
from dqnfed.core.optimizers import Optimizer
from dqnfed.core.problem import Problem, Task
from dqnfed.core.seeds import seed_for
from dqnfed.core.tensors import module_theta, row
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.bowls import (
    federation_of,
    labelled_clients,
    linear_model,
    network_bowl,
    normal,
    small_network,
    task_of,
)

EVERY_KERNEL = pytest.mark.parametrize("kernels", [PLAIN, FastKernels()], ids=["plain", "fast"])


def local_sgd(problem: Problem, task: Task, theta: Tensor, kernels: Kernels, **settings: Any) -> Tensor:
    """Return what these kernels make of the task."""
    given = {"momentum": 0.0, "weight_decay": 0.0, "pull": None, "correction": None, **settings}
    return kernels.sgd(replace(problem, kernels=kernels), task, theta, **given)


def optimised(problem: Problem, theta: Tensor, task: Task, *, momentum: float, weight_decay: float) -> Tensor:
    """Return what torch.optim.SGD makes of the module on the task's own batches."""
    module = copy.deepcopy(problem.module_at(theta))
    optimiser = torch.optim.SGD(module.parameters(), lr=float(task.lr), momentum=momentum, weight_decay=weight_decay)
    for batch in task.batches:
        rows = batch[batch >= 0] if batch.shape[-1] else task.mask.nonzero().flatten()
        if len(rows) == 0:
            continue
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(task.inputs[rows]), task.targets[rows]).backward()
        optimiser.step()
    return module_theta(module)


@EVERY_KERNEL
@pytest.mark.parametrize("batch_size", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_equals_torch_optim_sgd(batch_size: int | None, momentum: float, weight_decay: float, kernels: Kernels) -> None:
    problem = Problem.from_module(small_network(4, 3, 3))
    theta = normal(problem.n_parameters, seed=7)
    client = labelled_clients(1, 4)[0]
    batches = draw_batches(len(client[0]), epochs=3, batch_size=batch_size, generator=seed_for(0))
    task = task_of(client, problem, batches=batches, lr=0.2)
    found = local_sgd(problem, task, theta, kernels, momentum=momentum, weight_decay=weight_decay)
    expected = optimised(problem, theta, task, momentum=momentum, weight_decay=weight_decay)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


OTHERS: dict[str, tuple[dict[str, Any], Optimizer, float | None]] = {  # of torch: options; ours; clipping
    "nesterov": ({"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, Optimizer(nesterov=True), None),
    "clipped": ({"momentum": 0.5, "weight_decay": 0.1}, Optimizer(clip_norm=0.3), 0.3),
    "adam": ({"weight_decay": 0.1}, Optimizer("adam"), None),
    "adamw": ({"weight_decay": 0.1}, Optimizer("adamw"), None),
    "adamw, clipped": ({"weight_decay": 0.1}, Optimizer("adamw", clip_norm=0.3), 0.3),
}


@EVERY_KERNEL
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimisers_are_those_of_torch(name: str, batch_size: int | None, kernels: Kernels) -> None:
    options, optimizer, clip = OTHERS[name]
    problem = Problem.from_module(small_network(4, 3, 3))
    theta, client = normal(problem.n_parameters, seed=7), labelled_clients(1, 4)[0]
    batches = draw_batches(len(client[0]), epochs=3, batch_size=batch_size, generator=seed_for(0))
    task = task_of(client, problem, batches=batches, lr=0.05)
    settings = {"momentum": options.get("momentum", 0.0), "weight_decay": 0.1, "optimizer": optimizer}
    found = local_sgd(problem, task, theta, kernels, **settings)
    module = copy.deepcopy(problem.module_at(theta))
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}.get(name[:5].rstrip(","), torch.optim.SGD)
    optimiser: Any = kind(module.parameters(), lr=0.05, **options)
    for batch in task.batches:
        rows = batch[batch >= 0] if batch.shape[-1] else task.mask.nonzero().flatten()
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(task.inputs[rows]), task.targets[rows]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimiser.step()
    torch.testing.assert_close(found, module_theta(module), rtol=1e-5, atol=1e-7)  # torch's clipping adds 1e-6


def test_a_limit_above_all_numbers_clips_nothing() -> None:
    slope = normal(5, seed=1).float()
    assert torch.equal(Optimizer(clip_norm=1e300).clipped(slope), slope)


@EVERY_KERNEL
@pytest.mark.parametrize("name", OTHERS)
def test_a_padded_cohort_of_another_optimiser_equals_its_clients_alone(name: str, kernels: Kernels) -> None:
    problem, _, _ = network_bowl()
    clients = [(x[:n], y[:n]) for (x, y), n in zip(labelled_clients(3, 4), (2, 8, 10), strict=True)]
    theta = normal(problem.n_parameters, seed=7)
    options: dict[str, Any] = {"momentum": 0.5, "weight_decay": 0.01, "optimizer": OTHERS[name][1]}
    tasks = TaskBuilder(federation_of(clients), problem, FedAvg(lr=0.3, epochs=2, batch_size=4), 0)
    together = tasks.stacked(torch.arange(3), 0)
    found = vmap(lambda task: local_sgd(problem, task, theta, kernels, **options))(together)
    for k in range(3):
        [alone] = tasks.per_client(torch.tensor([k]), 0)
        expected = local_sgd(problem, alone, theta, PLAIN, **options)
        torch.testing.assert_close(found[k], expected, rtol=1e-12, atol=1e-13)


def test_schedules_of_the_learning_rate() -> None:
    def rates(**settings: Any) -> list[float]:
        return [FedAvg(lr=1.0, **settings).lr_at(round) for round in range(6)]

    assert rates() == rates(schedule="constant", lr_decay=0.5) == [1.0] * 6
    assert rates(lr_decay=0.5, lr_decay_every=2) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]
    assert rates(warmup=3) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = [0.5 * (1 + math.cos(math.pi * round / 4)) for round in (0, 1, 2, 3, 3, 3)]
    assert rates(schedule="cosine", schedule_rounds=4) == pytest.approx(cosine)
    assert rates(schedule="cosine", schedule_rounds=4, warmup=1) == pytest.approx([0.5, *cosine[1:]])
    with pytest.raises(ValueError, match="needs `schedule_rounds`"):
        FedAvg(schedule="cosine")


@EVERY_KERNEL
@pytest.mark.parametrize("batch_size", [None, 4])
def test_a_padded_cohort_equals_its_clients_alone(batch_size: int | None, kernels: Kernels) -> None:
    """The largest client has five times the smallest one's examples and batches; padding has no effect."""
    problem, _, _ = network_bowl()
    clients = [(x[:n], y[:n]) for (x, y), n in zip(labelled_clients(3, 4), (2, 8, 10), strict=True)]
    theta = normal(problem.n_parameters, seed=7)

    algorithm = FedAvg(lr=0.3, epochs=2, batch_size=batch_size)
    tasks = TaskBuilder(federation_of(clients), problem, algorithm, 0).stacked(torch.arange(3), 0)
    found = vmap(lambda task: local_sgd(problem, task, theta, kernels, momentum=0.5, weight_decay=0.01))(tasks)
    for k, (inputs, targets) in enumerate(clients):
        batches = row(tasks, k).batches
        alone = task_of((inputs, targets), problem, batches=batches, lr=0.3)
        expected = optimised(problem, theta, alone, momentum=0.5, weight_decay=0.01)
        torch.testing.assert_close(found[k], expected, rtol=1e-12, atol=1e-13)


@EVERY_KERNEL
def test_a_client_without_batches_stands_still(kernels: Kernels) -> None:
    problem, _, _ = network_bowl()
    task = task_of(labelled_clients(1, 4)[0], problem, batches=torch.full((4, 3), -1))
    theta = normal(problem.n_parameters, seed=7)
    found = local_sgd(problem, task, theta, kernels, momentum=0.9, weight_decay=0.1, correction=torch.ones_like(theta))
    assert torch.equal(found, theta)


@EVERY_KERNEL
def test_a_pull_is_part_of_every_step(kernels: Kernels) -> None:
    """With a slope of theta - anchor, and with its implicit form, on a loss that is flat."""
    problem = Problem.from_module(linear_model(4, 3))
    inputs, targets = labelled_clients(1, 4)[0]
    task = task_of((torch.zeros_like(inputs), targets), problem, batches=torch.zeros(3, 0, dtype=torch.long), lr=0.5)
    theta, anchor = normal(problem.n_parameters, seed=7), normal(problem.n_parameters, seed=8)
    explicit = local_sgd(problem, task, theta, kernels, pull=Pull(anchor, 1.0))
    torch.testing.assert_close(explicit, anchor + 0.5**3 * (theta - anchor), rtol=1e-13, atol=1e-14)
    implicit = local_sgd(problem, task, theta, kernels, pull=Pull(anchor, 1.0, implicit=True))
    torch.testing.assert_close(implicit, anchor + (theta - anchor) / 1.5**3, rtol=1e-13, atol=1e-14)


def test_a_method_passes_all_its_settings_on() -> None:
    """Momentum, weight decay, pull and correction reach the kernels; batches and the learning rate are the task's."""
    problem, _, _ = network_bowl()
    client = labelled_clients(1, 4)[0]
    batches = draw_batches(len(client[0]), epochs=2, batch_size=3, generator=seed_for(0))
    task, theta = task_of(client, problem, batches=batches, lr=0.2), normal(problem.n_parameters, seed=7)
    forces = {"pull": Pull(normal(len(theta), seed=8), 0.5), "correction": normal(len(theta), seed=9)}
    more: dict[str, Any] = {"nesterov": True, "clip_norm": 0.5}
    method = FedAvg(lr=123.0, momentum=0.9, weight_decay=0.1, **more)
    found = method.local_sgd(problem, task, theta, **forces)  # type: ignore[arg-type]
    settings = {"momentum": 0.9, "weight_decay": 0.1, **forces, "optimizer": Optimizer(**more)}
    assert torch.equal(found, local_sgd(problem, task, theta, PLAIN, **settings))
    others: list[tuple[str, Any]] = [("momentum", 0.0), ("weight_decay", 0.0), ("pull", None), ("correction", None)]
    others += [("optimizer", Optimizer(clip_norm=0.5)), ("optimizer", Optimizer(nesterov=True))]
    others += [("optimizer", Optimizer("adam", clip_norm=0.5))]
    for name, other in others:
        assert not torch.equal(found, local_sgd(problem, task, theta, PLAIN, **{**settings, name: other})), name


@pytest.mark.parametrize(("n", "batch_size"), [(1, 1), (7, 3), (6, 3), (5, 8)])
def test_every_epoch_has_every_example_once(n: int, batch_size: int) -> None:
    batches = draw_batches(n, epochs=4, batch_size=batch_size, generator=seed_for(0))
    per_epoch = -(-n // batch_size)
    assert batches.shape == (4 * per_epoch, batch_size)
    epochs = batches.view(4, -1)
    for epoch in epochs:
        assert sorted(epoch[epoch >= 0].tolist()) == list(range(n))
    if n > 5:
        assert len({tuple(epoch.tolist()) for epoch in epochs}) > 1
    assert all((batch >= 0).any() for batch in batches)


def test_full_batches_are_empty_rows_one_a_pass() -> None:
    assert draw_batches(9, epochs=4, batch_size=None, generator=seed_for(0)).shape == (4, 0)

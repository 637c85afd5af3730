"""A step of SGD on static tensors is a step of SGD; a GPU replays the same."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from dqnfed.accel.fast_model import FastModel
from dqnfed.accel.graphed_sgd import MAX_STEPS, graphed_sgd
from dqnfed.accel.kernels import FastKernels, compiled
from dqnfed.core.kernels import Pull
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import map_tensors
from tests.helpers.bowls import normal
from tests.unit.accel.test_gradients import case, local_sgd, model_of

SETTINGS = [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)]
FORCES = ["none", "explicit", "implicit", "correction", "both"]


def forces(kind: str, n: int) -> tuple[Pull | None, Tensor | None]:
    pull = None if kind in ("none", "correction") else Pull(normal(n, seed=21), 0.7, implicit=kind == "implicit")
    return pull, normal(n, seed=22) if kind in ("correction", "both") else None


def kept_model(problem: Problem) -> FastModel:
    """Return what the problem's own kernels keep about its module."""
    assert isinstance(problem.kernels, FastKernels)
    model = problem.kernels.model(problem)
    assert model is not None
    return model


def written_out(
    problem: Problem, task: Task, theta: Tensor, momentum: float, decay: float, pull: Pull | None, extra: Tensor | None
) -> Tensor:
    """Return theta after the task's steps, each as its formula stands in the papers."""
    velocity, lr = torch.zeros_like(theta), float(task.lr)
    for batch in task.batches:
        if not bool((batch >= 0).any()):
            continue
        slope = grad(problem.batch_loss)(theta, task, batch) + decay * theta
        if pull is not None and not pull.implicit:
            slope = slope + pull.strength * (theta - pull.anchor)
        if extra is not None:
            slope = slope + extra
        velocity = momentum * velocity + slope
        theta = theta - lr * velocity
        if pull is not None and pull.implicit:
            theta = theta + (pull.anchor - theta) * lr * pull.strength / (1.0 + lr * pull.strength)
    return theta


@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
@pytest.mark.parametrize("kind", FORCES)
@pytest.mark.parametrize("model", ["dense", "convolved", "imaged"])
def test_it_is_sgd(model: str, kind: str, momentum: float, weight_decay: float) -> None:
    """A short batch and a batch without examples are among the task's; it is called twice on the same tensors."""
    problem, task, theta = case(model, "cross-entropy", ridge=0.2)
    kept = model_of(problem)
    decay = weight_decay + problem.ridge
    pull, extra = forces(kind, len(theta))
    for start in (2 * theta, theta):
        found = graphed_sgd(problem, kept, task, start, momentum=momentum, decay=decay, pull=pull, correction=extra)
    expected = written_out(problem, task, theta, momentum, weight_decay, pull, extra)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert len(kept.steps) == 1
    one = Task(*(t[None] for t in task))
    together = vmap(
        lambda its: local_sgd(
            problem, its, theta, momentum=momentum, weight_decay=weight_decay, pull=pull, correction=extra
        )
    )(one)
    torch.testing.assert_close(together[0], expected, rtol=1e-12, atol=1e-14)
    alone = local_sgd(problem, task, theta, momentum=momentum, weight_decay=weight_decay, pull=pull, correction=extra)
    torch.testing.assert_close(alone, expected, rtol=1e-12, atol=1e-14)


def test_a_step_uses_the_anchor_of_its_client() -> None:
    """Two clients share one step; neither is pulled to the other's anchor."""
    problem, task, theta = case("imaged", "cross-entropy", ridge=0.0)
    model = model_of(problem)
    for seed in (1, 2):
        pull = Pull(normal(len(theta), seed=seed), 0.5)
        found = graphed_sgd(problem, model, task, theta, momentum=0.0, decay=0.0, pull=pull)
        expected = written_out(problem, task, theta, 0.0, 0.0, pull, None)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert len(model.steps) == 1


def weighted(weight: float, losses: Callable[[Tensor, Tensor], Tensor], outputs: Tensor, targets: Tensor) -> Tensor:
    return weight * losses(outputs, targets)


def test_losses_that_keep_changing_are_not_captured() -> None:
    """A method that weights its loss anew in every round would else leave a graph a round in memory."""
    problem, task, theta = case("imaged", "cross-entropy", ridge=0.0)
    model = model_of(problem)
    for k in range(MAX_STEPS + 2):
        changed = replace(problem, losses=partial(weighted, k, problem.losses))
        found = graphed_sgd(changed, model, task, theta, momentum=0.0, decay=0.0)
        assert (found is None) == (k >= MAX_STEPS)
        assert len(model.steps) == (k + 1 if k < MAX_STEPS else 0)


@pytest.mark.parametrize("change", ["precision", "replica"])
def test_what_was_compiled_is_for_one_precision(change: str) -> None:
    problem, _, _ = case("imaged", "cross-entropy", ridge=0.0)
    own = compiled(problem)
    other = own.autocast(torch.bfloat16) if change == "precision" else own.replica()
    assert (kept_model(other).compiled is None) == (change == "precision")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("momentum", "weight_decay"), SETTINGS)
@pytest.mark.parametrize("kind", FORCES)
def test_a_gpu_replays_the_same(kind: str, momentum: float, weight_decay: float) -> None:
    problem, task, theta = case("imaged", "cross-entropy", ridge=0.2)
    pull, extra = forces(kind, len(theta))
    expected = written_out(problem, task, theta, momentum, weight_decay, pull, extra)
    there, task, theta = problem.to("cuda"), map_tensors(lambda t: t.to("cuda"), task), theta.to("cuda")
    if pull is not None:
        pull = pull._replace(anchor=pull.anchor.to("cuda"))
    extra = None if extra is None else extra.to("cuda")
    for _ in range(2):
        found = local_sgd(there, task, theta, momentum=momentum, weight_decay=weight_decay, pull=pull, correction=extra)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-9, atol=1e-11)
    assert len(kept_model(there).steps) == 1


@pytest.mark.slow
def test_a_compiled_step_is_the_step() -> None:
    """Also in another replica, which shares what was compiled."""
    problem, task, theta = case("imaged", "cross-entropy", ridge=0.2)
    pull, extra = forces("both", len(theta))
    expected = written_out(problem, task, theta, 0.9, 0.1, pull, extra)
    own = compiled(problem)
    for copy in (own, own.replica()):
        model = kept_model(copy)
        assert model.compiled is not None
        found = graphed_sgd(
            copy, model, task, theta, momentum=0.9, decay=0.1 + problem.ridge, pull=pull, correction=extra
        )
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_many_models_are_compiled_in_one_thread() -> None:
    """More than the eight times that torch compiles one function for, where streams do it: outside the main thread."""

    def all_compiled() -> int:
        for n_outputs in range(2, 12):
            module = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(8, n_outputs))
            problem = compiled(Problem.from_module(module))
            task = Task(
                torch.ones(4, 1, 3, 3),
                torch.zeros(4, dtype=torch.long),
                torch.ones(4),
                torch.arange(4)[None],
                torch.zeros(0),
                torch.tensor(0.1),
            )
            graphed_sgd(problem, kept_model(problem), task, problem.theta0, momentum=0.0, decay=0.0)
        return n_outputs

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(all_compiled).result() == 11

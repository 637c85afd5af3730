"""The faster forms of a gradient, and of a step of SGD, give what torch.func gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

from dqnfed.accel import dense as dense_layers
from dqnfed.accel.fast_model import FastModel, fast_model
from dqnfed.accel.gradients import (
    analytic_gradient,
    batch_gradient,
    gradient_in_parts,
    vmappable_analytic,
)
from dqnfed.accel.kernels import FastKernels
from dqnfed.core.gradients import loss_gradient, loss_gradient_and_value
from dqnfed.core.local_work import draw_batches
from dqnfed.core.problem import ModuleModel, Problem, Task, cast_inputs
from dqnfed.core.seeds import seed_for
from tests.helpers.bowls import normal

N, WIDTH = 11, 6


def dense(n_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(), nn.Dropout(0.5)),
        nn.Linear(5, 4, bias=False),
        nn.Linear(4, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
        nn.Sigmoid(),
        nn.Linear(3, n_outputs),
    )


def convolved(n_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, n_outputs)
    )


def imaged(n_outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 3, 3, padding="same"),
        nn.Tanh(),
        nn.Conv2d(3, 4, 2),
        nn.Flatten(),
        nn.Linear(8, n_outputs),
    )


class Branched(nn.Module):
    """No chain: the input takes two ways."""

    def __init__(self, n_outputs: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, n_outputs), nn.Linear(WIDTH, n_outputs)

    def forward(self, x: Tensor) -> Tensor:
        left: Tensor = self.left(x)
        return left + torch.tanh(self.right(x))


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda n: nn.Linear(WIDTH, n),
    "dense": dense,
    "convolved": convolved,
    "imaged": imaged,
    "branched": Branched,
}
TARGETS: dict[str, tuple[int, Tensor]] = {
    "cross-entropy": (3, torch.arange(N) % 3),
    "squared-error": (2, normal(N, 2, seed=3)),
    "logistic": (1, torch.where(torch.arange(N) % 2 == 0, 1.0, -1.0).double()),
}


def fast(problem: Problem) -> Problem:
    """Return the problem with the faster kernels."""
    return replace(problem, kernels=FastKernels())


def model_of(problem: Problem) -> FastModel:
    """Return what the kernels know of the problem's module."""
    found = fast_model(problem)
    assert found is not None
    return found


def local_sgd(
    problem: Problem, task: Task, theta: Tensor, *, momentum: float = 0.0, weight_decay: float = 0.0, **forces: Any
) -> Tensor:
    """Return what the problem's kernels make of the task."""
    settings = {"momentum": momentum, "weight_decay": weight_decay, "pull": None, "correction": None, **forces}
    return problem.kernels.sgd(problem, task, theta, **settings)


def case(model: str, loss: str, *, ridge: float, batch_size: int | None = 4) -> tuple[Problem, Task, Tensor]:
    """Return a problem, a task with two examples of padding, and a model away from the start."""
    n_outputs, targets = TARGETS[loss]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        problem = fast(Problem.from_module(MODELS[model](n_outputs).double(), loss=loss, ridge=ridge))
    mask = torch.ones(N, dtype=torch.float64)
    mask[-2:] = 0.0
    batches = draw_batches(N - 2, epochs=2, batch_size=batch_size, generator=seed_for(1))
    if batch_size is not None:
        batches = torch.cat([batches, torch.full((1, batch_size), -1)])  # a step that this client does not have
    task = Task(normal(N, WIDTH, seed=2), targets, mask, batches, mask[:0], torch.tensor(0.3, dtype=torch.float64))
    return problem, task, problem.theta0 + 0.1 * normal(problem.n_parameters, seed=4)


def general_sgd(problem: Problem, task: Task, theta: Tensor, momentum: float, weight_decay: float) -> Tensor:
    """Return what the form under vmap gives."""
    one = Task(*(t[None] for t in task))
    found: Tensor = vmap(lambda its: local_sgd(problem, its, theta, momentum=momentum, weight_decay=weight_decay))(one)
    return found[0]


@pytest.mark.parametrize("ridge", [0.0, 0.2])
@pytest.mark.parametrize("loss", TARGETS)
@pytest.mark.parametrize("model", MODELS)
def test_the_gradient_is_that_of_torch_func(model: str, loss: str, ridge: float) -> None:
    problem, task, theta = case(model, loss, ridge=ridge)
    found, value = loss_gradient_and_value(problem, theta, task)
    torch.testing.assert_close(found, grad(problem.loss)(theta, task), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(value, problem.loss(theta, task), rtol=1e-13, atol=0)
    batch = torch.tensor([3, -1, 0, 7])
    expected = grad(problem.batch_loss)(theta, task, batch)
    torch.testing.assert_close(
        batch_gradient(problem, model_of(problem), theta, task, batch), expected, rtol=1e-12, atol=1e-14
    )
    assert not found.requires_grad
    assert not value.requires_grad


@pytest.mark.parametrize("rows", [1, 4, N])
@pytest.mark.parametrize("loss", TARGETS)
@pytest.mark.parametrize("model", ["linear", "dense"])
def test_many_examples_are_taken_some_at_a_time(
    model: str, loss: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient, loss and full-batch steps are those of all at once."""
    problem, task, theta = case(model, loss, ridge=0.1, batch_size=None)
    expected, value = loss_gradient_and_value(problem, theta, task)
    moved = local_sgd(problem, task, theta, momentum=0.9, weight_decay=0.1)
    plain = local_sgd(problem, task, theta)
    monkeypatch.setattr(dense_layers, "ROWS", rows)
    found, its_value = loss_gradient_and_value(problem, theta, task)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(its_value, value, rtol=1e-13, atol=0)
    torch.testing.assert_close(
        local_sgd(problem, task, theta, momentum=0.9, weight_decay=0.1), moved, rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(local_sgd(problem, task, theta), plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("linear", "logistic"),
        ("dense", "cross-entropy"),
        ("dense", "squared-error"),
        ("convolved", "squared-error"),
        ("imaged", "cross-entropy"),
    ],
)
def test_fused_sgd_is_sgd(model: str, loss: str, weight_decay: float, momentum: float, batch_size: int | None) -> None:
    problem, task, theta = case(model, loss, ridge=0.05, batch_size=batch_size)
    given = theta.clone()
    found = local_sgd(problem, task, theta, momentum=momentum, weight_decay=weight_decay)
    expected = general_sgd(problem, task, theta, momentum, weight_decay)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(theta, given)


def test_dense_networks_have_a_formula_and_others_do_not() -> None:
    by_formula = {}
    for model in MODELS:
        problem, task, theta = case(model, "cross-entropy", ridge=0.0)
        found = analytic_gradient(problem, model_of(problem), cast_inputs(task.inputs, theta.dtype), task.targets)
        by_formula[model] = found is not None
    assert by_formula == {"linear": True, "dense": True, "convolved": False, "imaged": False, "branched": False}


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(WIDTH, 3), nn.Softmax(dim=1)),  # the last layer has an activation
        nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(WIDTH, 4), nn.GELU(), nn.Linear(4, 3)),
        nn.Sequential(*[layer := nn.Linear(WIDTH, WIDTH), nn.ReLU(), layer]),  # one layer twice
    ],
)
def test_what_is_no_chain_of_dense_layers_goes_to_autograd(module: nn.Module) -> None:
    problem = fast(Problem.from_module(module.double()))
    task = case("dense", "cross-entropy", ridge=0.0)[1]
    assert analytic_gradient(problem, model_of(problem), task.inputs, task.targets) is None
    expected = grad(problem.loss)(problem.theta0, task)
    torch.testing.assert_close(loss_gradient(problem, problem.theta0, task), expected, rtol=1e-12, atol=1e-14)


def test_targets_that_are_no_classes_go_to_autograd() -> None:
    problem, task, theta = case("dense", "cross-entropy", ridge=0.0)
    soft = task._replace(targets=torch.softmax(normal(N, 3, seed=5), dim=1))
    ignored = task._replace(targets=torch.where(torch.arange(N) == 2, -100, task.targets))
    for its in (soft, ignored):
        expected = grad(problem.loss)(theta, its)
        torch.testing.assert_close(loss_gradient(problem, theta, its), expected, rtol=1e-12, atol=1e-14)


def test_a_module_with_hooks_is_left_to_torch() -> None:
    problem, task, theta = case("dense", "cross-entropy", ridge=0.0)
    assert problem.module is not None
    problem.module.register_forward_hook(lambda *_: None)
    copied = problem.replica()
    assert analytic_gradient(copied, model_of(copied), task.inputs, task.targets) is None
    assert torch.isfinite(loss_gradient(problem, theta, task)).all()


def test_a_gradient_of_a_gradient_still_goes_through() -> None:
    problem, task, theta = case("dense", "cross-entropy", ridge=0.1)

    def squared_length(at: Tensor) -> Tensor:
        return loss_gradient(problem, at, task).square().sum()

    expected = grad(lambda at: grad(problem.loss)(at, task).square().sum())(theta)
    torch.testing.assert_close(grad(squared_length)(theta), expected, rtol=1e-12, atol=1e-14)
    leaf = theta.clone().requires_grad_()
    squared_length(leaf).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("ridge", [0.0, 0.2])
@pytest.mark.parametrize("loss", TARGETS)
def test_the_formula_vectorises_and_is_the_gradient_of_torch_func(loss: str, ridge: float) -> None:
    problem, task, theta = case("dense", loss, ridge=ridge)
    assert vmappable_analytic(problem, model_of(problem), task) is not None
    both = Task(*(torch.stack([t, t.flip(0) if t.dim() else t]) for t in task))
    slopes, losses = vmap(lambda its: loss_gradient_and_value(problem, theta, its))(both)
    expected, values = vmap(lambda its: grad_and_value(problem.loss)(theta, its))(both)
    torch.testing.assert_close(slopes, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(losses, values, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("loss", TARGETS)
def test_vectorised_sgd_by_layers_is_sgd(loss: str, batch_size: int | None, weight_decay: float) -> None:
    """The oracle takes torch.func's gradient of each batch; the last step has no examples and changes nothing."""
    problem, task, theta = case("dense", loss, ridge=0.2, batch_size=batch_size)
    expected = theta
    for batch in task.batches:
        if batch_size is not None and not (batch >= 0).any():
            continue
        slope = grad(problem.loss)(expected, task) if batch_size is None else None
        slope = grad(problem.batch_loss)(expected, task, batch) if slope is None else slope
        expected = expected - task.lr * (slope + weight_decay * expected)
    found = general_sgd(problem, task, theta, momentum=0.0, weight_decay=weight_decay)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_the_formula_leaves_out_targets_that_are_no_class() -> None:
    problem, task, theta = case("dense", "cross-entropy", ridge=0.0)
    targets = task.targets.clone()
    targets[2] = -100  # what torch's own loss ignores
    one = Task(*(t[None] for t in task._replace(targets=targets)))
    slopes = vmap(lambda its: loss_gradient(problem, theta, its))(one)
    expected = vmap(lambda its: grad(problem.loss)(theta, its))(one)
    torch.testing.assert_close(slopes, expected, rtol=1e-12, atol=1e-14)


def test_a_replica_has_its_own_module_and_the_same_gradients() -> None:
    problem, task, theta = case("convolved", "cross-entropy", ridge=0.1)
    other = problem.replica()
    assert other.module is not problem.module
    assert torch.equal(loss_gradient(other, theta, task), loss_gradient(problem, theta, task))


@pytest.mark.parametrize("size", [1, 3, 4, 100])
def test_a_gradient_by_parts_is_the_gradient(size: int) -> None:
    """Parts that do not divide the examples, one of each alone, and one of all; examples without a share among them."""
    problem, task, theta = case("imaged", "cross-entropy", ridge=0.2)
    shares = normal(len(task.mask), seed=31).abs() * (torch.arange(len(task.mask)) != 2)
    found, loss = gradient_in_parts(problem, model_of(problem), theta, task, shares, size=size)

    def weighted(at: Tensor) -> Tensor:
        losses = problem.losses(problem.predict(at, task.inputs), task.targets)
        return (losses * shares).sum() + 0.5 * problem.ridge * at.square().sum()

    torch.testing.assert_close(found, grad(weighted)(theta), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(loss, weighted(theta), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("n", "sizes"), [(3, [3]), (4, [4]), (5, [4, 4]), (9, [4, 4, 4])])
def test_compiled_parts_are_of_one_size_and_small_clients_are_not_compiled(n: int, sizes: list[int]) -> None:
    problem, task, theta = case("imaged", "cross-entropy", ridge=0.0)
    model = problem.predict
    assert isinstance(model, ModuleModel)
    seen = []

    def spied(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        seen.append(len(inputs))
        return model.outputs(parameters, inputs)

    watched = FastModel(model, compiled=spied)
    rows = torch.arange(n) % len(task.mask)
    task = task._replace(inputs=task.inputs[rows], targets=task.targets[rows], mask=torch.ones(n).double())
    shares = torch.full((n,), 1.0 / n).double()
    found, _ = gradient_in_parts(problem, watched, theta, task, shares, size=4)
    expected, _ = gradient_in_parts(problem, FastModel(model), theta, task, shares, size=4)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    assert seen == (sizes if n >= 4 else [])


def test_a_class_that_the_model_has_no_output_for_is_refused() -> None:
    problem, task, theta = case("dense", "cross-entropy", ridge=0.0)
    wrong = task._replace(targets=task.targets.index_fill(0, torch.tensor([1]), 3))
    with pytest.raises(ValueError, match="a target is class 3, but the model has 3 outputs, for the classes 0 to 2"):
        local_sgd(problem, wrong, theta)
    with pytest.raises(ValueError, match="mend the labels"):
        loss_gradient(problem, theta, wrong)

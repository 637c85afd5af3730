"""The gradient of one client's loss, by the shortest way there is.

For networks of dense layers with a known loss that is the formula. For others it is plain autograd with the parameters
as leaves for one client alone on a CPU, and `torch.func.grad` under torch.func's transforms (a vectorised cohort).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import grad_and_value

from dqnfed.core.dense import DenseChain
from dqnfed.core.problem import (
    ModuleModel,
    Problem,
    Task,
    cast_inputs,
    cross_entropies,
    logistic_losses,
    squared_errors,
)
from dqnfed.core.tensors import named_parameters

Slope = Callable[[Tensor], Tensor]  # outputs [N, c] -> derivative [N, c]
Judged = Callable[[Tensor], tuple[Tensor, Tensor]]  # outputs [N, c] -> derivative [N, c], value []
EXAMPLES_AT_ONCE = 1024  # of one client's on a GPU, outside vmap


def loss_gradient(problem: Problem, theta: Tensor, task: Task) -> Tensor:
    """Return the gradient of the client's mean training loss."""
    return loss_gradient_and_value(problem, theta, task)[0]


def loss_gradient_and_value(problem: Problem, theta: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Return the gradient of the client's mean training loss, and that loss."""
    return gradients_and_values(problem, (theta,), task)[0]


def gradients_and_values(problem: Problem, thetas: Sequence[Tensor], task: Task) -> list[tuple[Tensor, Tensor]]:
    """Return gradient and loss at each of several models; what does not depend on the model is done once."""
    shares = task_shares(task)
    if all(is_plain(problem, theta) for theta in thetas):
        inputs = cast_inputs(task.inputs, thetas[0].dtype)
        by_formula = by_hand(problem, inputs, task.targets)
        return [mean_gradient(problem, theta, inputs, task.targets, shares, by_formula) for theta in thetas]
    if (found := in_formulas(problem, task)) is not None:
        judged = weighted_loss(problem, found.chain, task.targets, shares)
        return [_by_formula(problem, theta, found, judged) for theta in thetas]
    if task.inputs.is_cuda and not is_transformed() and not is_watched(thetas) and is_usual(problem):
        return [by_parts(problem, theta, task, shares) for theta in thetas]
    return [grad_and_value(problem.loss)(theta, task) for theta in thetas]


def batch_gradient(problem: Problem, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
    """Return the gradient of the mean loss over the rows that the batch names; a batch of no width means all."""
    if not batch.shape[-1]:
        return loss_gradient(problem, theta, task)
    if not is_plain(problem, theta):
        if (found := in_formulas(problem, task)) is not None:
            rows = batch.clamp(min=0)
            features = Features(found.chain, found.features[rows])
            judged = weighted_loss(problem, found.chain, task.targets[rows], batch_shares(task, batch))
            return _by_formula(problem, theta, features, judged)[0]
        slope: Tensor = grad_and_value(problem.batch_loss)(theta, task, batch)[0]
        return slope
    rows = batch[batch >= 0]
    inputs, targets = cast_inputs(task.inputs[rows], theta.dtype), task.targets[rows]
    found_here = by_hand(problem, inputs, targets)
    return mean_gradient(problem, theta, inputs, targets, equal_shares(theta, len(rows)), found_here)[0]


class Features(NamedTuple):
    """What the dense layers of a client's model see."""

    chain: DenseChain
    features: Tensor  # [N, d]


def in_formulas(problem: Problem, task: Task) -> Features | None:
    """Return the dense layers and their inputs, where the gradient is a formula that vectorises; else None."""
    model = problem.predict
    if not isinstance(model, ModuleModel) or model.chain is None or problem.losses not in SLOPES:
        return None
    if type(problem).loss is not Problem.loss or type(problem).batch_loss is not Problem.batch_loss:
        return None
    if problem.losses is cross_entropies and (task.targets.dim() != 1 or task.targets.is_floating_point()):
        return None
    features = model.chain.features(cast_inputs(task.inputs, problem.theta0.dtype))
    return None if features is None else Features(model.chain, features)


def weighted_slopes(problem: Problem, targets: Tensor, shares: Tensor) -> Slope:
    """Return the derivative of the weighted sum of the losses in the outputs, in operations that vectorise."""
    known = SLOPES[problem.losses]
    if problem.losses is cross_entropies:
        shares = shares * (targets >= 0)  # torch's own loss leaves out targets that are no class
    return lambda outputs: (
        known.slope(outputs, known.wanted(targets, outputs.shape[1], outputs.dtype)) * shares[:, None]
    )


def weighted_loss(problem: Problem, chain: DenseChain, targets: Tensor, shares: Tensor) -> Judged:
    """Return a function that gives the derivative and the value of the weighted sum of the losses, and vectorises."""
    if problem.losses is not cross_entropies:
        slopes = weighted_slopes(problem, targets, shares)
        return lambda outputs: (slopes(outputs), (problem.losses(outputs, targets) * shares).sum())
    shares = (shares * (targets >= 0))[:, None]  # targets that are no class are left out
    wanted = _one_hot(targets, chain.layers[-1].n_outputs, shares.dtype)
    blame = wanted * -shares

    def judged(outputs: Tensor) -> tuple[Tensor, Tensor]:
        slope = _cross_entropy_slope(outputs, wanted) * shares
        return slope, (torch.log_softmax(outputs, dim=1) * blame).sum()

    return judged


def batch_shares(task: Task, batch: Tensor) -> Tensor:
    """Return every row's share of the mean over a batch; entries of -1 have none."""
    mask = (batch >= 0).to(task.mask.dtype)
    return mask / mask.sum().clamp(min=1)


def _by_formula(problem: Problem, theta: Tensor, found: Features, judged: Judged) -> tuple[Tensor, Tensor]:
    slope, loss = found.chain.formula(theta, found.features, judged)
    if problem.ridge:
        slope, loss = slope + problem.ridge * theta, loss + 0.5 * problem.ridge * theta.square().sum()
    return slope, loss


def is_plain(problem: Problem, theta: Tensor) -> bool:
    """Return whether this is one client alone on a CPU with an ordinary mean as its loss, and nothing looks on."""
    return (
        is_on_host(theta)
        and not is_watched([theta])
        and not torch.compiler.is_compiling()
        and type(problem).loss is Problem.loss
        and type(problem).batch_loss is Problem.batch_loss
    )


def is_watched(thetas: Sequence[Tensor]) -> bool:
    """Return whether somebody may differentiate through what is made of these models."""
    return torch.is_grad_enabled() and any(theta.requires_grad for theta in thetas)


def is_usual(problem: Problem) -> bool:
    """Return whether the loss is the mean of the examples' losses on a module, and so can be taken in parts."""
    return isinstance(problem.predict, ModuleModel) and type(problem).loss is Problem.loss


def is_on_host(t: Tensor) -> bool:
    """Return whether this is one client alone on a CPU, where the value of a number costs nothing to ask for."""
    return t.device.type == "cpu" and not is_transformed()


def is_transformed() -> bool:
    """Return whether one of torch.func's transforms, such as vmap, is at work."""
    return cast(Any, torch._C)._functorch.peek_interpreter_stack() is not None


def task_shares(task: Task) -> Tensor:
    """Return every example's share of the client's mean, [N]."""
    return task.mask / task.mask.sum().clamp(min=1)


def equal_shares(theta: Tensor, n: int) -> Tensor:
    """Return n equal shares of a mean."""
    return theta.new_full((n,), 1.0 / max(n, 1))


def mean_gradient(
    problem: Problem, theta: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor, found: ByHand | None
) -> tuple[Tensor, Tensor]:
    """Return the gradient and the value of the weighted sum of the examples' losses, ridge included.

    `found` is what `by_hand` says of these examples.
    """
    with torch.no_grad():
        if found is not None:
            moved, outputs = found.chain.gradient(theta, found.features, found.weighted_slope(shares))
            loss = problem.losses(outputs, targets) @ shares
        else:
            moved, loss = _by_autograd(problem, theta, inputs, targets, shares)
        if problem.ridge:
            moved, loss = moved.add_(theta, alpha=problem.ridge), loss + 0.5 * problem.ridge * theta.square().sum()
    return moved, loss


def by_parts(
    problem: Problem, theta: Tensor, task: Task, shares: Tensor, *, size: int = EXAMPLES_AT_ONCE
) -> tuple[Tensor, Tensor]:
    """Return what `mean_gradient` does, from a part of the examples at a time: a GPU may not hold the activations of
    all.

    A compiled model wants parts of one size: the last one goes back far enough, and what was seen before has no share
    in it. Clients that are smaller than a part are many sizes, and not compiled.
    """
    n, model = len(shares), problem.predict
    assert isinstance(model, ModuleModel)
    if model.compiled is None or n < size:
        model, size = replace(model, compiled=None), -(-n // max(1, -(-n // size)))
    leaves, inputs = parameter_leaves(theta, model), cast_inputs(task.inputs, theta.dtype)
    total, loss = [torch.zeros_like(leaf) for leaf in leaves.values()], torch.zeros_like(shares[0])
    for start in range(0, n, size):
        first = max(0, min(start, n - size))
        rows = slice(first, min(start + size, n))
        mine = shares[rows]
        if first < start:
            mine = mine * (torch.arange(first, n, device=mine.device) >= start)
        slopes, part = leaf_slopes(problem, model, leaves, inputs[rows], task.targets[rows], mine)
        torch._foreach_add_(total, list(slopes))
        loss = loss + part
    gradient = torch.cat([slope.reshape(-1) for slope in total])
    if problem.ridge:
        gradient, loss = gradient.add_(theta, alpha=problem.ridge), loss + 0.5 * problem.ridge * theta.square().sum()
    return gradient, loss


class ByHand(NamedTuple):
    """What a gradient by formula is made from."""

    chain: DenseChain
    features: Tensor  # [N, d] what the first dense layer sees
    wanted: Tensor  # [N, c] what the loss wants of the outputs
    slope: Callable[[Tensor, Tensor], Tensor]  # outputs [N, c], wanted [N, c] -> derivative [N, c]

    def weighted_slope(self, shares: Tensor) -> Callable[[Tensor, slice], Tensor]:
        """Return the derivative of the weighted sum of all examples' losses, in the outputs of some of them."""
        return lambda outputs, rows: self.slope(outputs, self.wanted[rows]).mul_(shares[rows, None])


@torch.no_grad()
def by_hand(problem: Problem, inputs: Tensor, targets: Tensor) -> ByHand | None:
    """Return the dense layers, what they see of the inputs, and their loss' slope; None where autograd is needed."""
    model = problem.predict
    if not isinstance(model, ModuleModel) or model.chain is None or problem.losses not in SLOPES:
        return None
    if problem.losses is cross_entropies and not _are_classes(targets):
        return None
    features, known = model.chain.features(inputs), SLOPES[problem.losses]
    if features is None:
        return None
    n_outputs = model.chain.layers[-1].n_outputs
    if problem.losses is cross_entropies and len(targets) and (largest := int(targets.max())) >= n_outputs:
        raise ValueError(
            f"a target is class {largest}, but the model has {n_outputs} outputs, for the classes 0 to "
            f"{n_outputs - 1}; give the model more outputs, or mend the labels."
        )
    wanted = known.wanted(targets, n_outputs, features.dtype)
    return ByHand(model.chain, features, wanted, known.slope)


def _by_autograd(
    problem: Problem, theta: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        if isinstance(problem.predict, ModuleModel):
            leaves = parameter_leaves(theta, problem.predict)
            slopes, loss = leaf_slopes(problem, problem.predict, leaves, inputs, targets, shares)
            return torch.cat([slope.reshape(-1) for slope in slopes]), loss
        leaf = theta.detach().requires_grad_()
        loss = problem.losses(problem.predict(leaf, inputs), targets) @ shares
        return torch.autograd.grad(loss, leaf, materialize_grads=True)[0].clone(), loss.detach()


def parameter_leaves(theta: Tensor, model: ModuleModel) -> dict[str, Tensor]:
    """Return what autograd takes for parameters, by name: views of theta, but copies of the kernels of images.

    These have their channels last, which is how a CPU convolves fastest.
    """
    return {name: _leaf(view) for name, view in named_parameters(theta, model.layout).items()}


def _leaf(view: Tensor) -> Tensor:
    if view.dim() == 4:
        return view.detach().clone(memory_format=torch.channels_last).requires_grad_()
    return view.detach().requires_grad_()


@torch.enable_grad()
def leaf_slopes(
    problem: Problem, model: ModuleModel, leaves: dict[str, Tensor], inputs: Tensor, targets: Tensor, shares: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradient in every leaf, and the loss."""
    loss = problem.losses(model.trained_outputs(leaves, inputs), targets) @ shares
    return torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True), loss.detach()


def _are_classes(targets: Tensor) -> bool:
    return targets.dim() == 1 and not targets.is_floating_point() and bool((targets >= 0).all())


class LossSlope(NamedTuple):
    """The derivative of a loss in a model's outputs, in operations that vectorise."""

    wanted: Callable[[Tensor, int, torch.dtype], Tensor]  # targets, number of outputs, precision -> [N, c]
    slope: Callable[[Tensor, Tensor], Tensor]  # outputs [N, c], wanted [N, c] -> [N, c]


def _one_hot(targets: Tensor, n_outputs: int, dtype: torch.dtype) -> Tensor:
    return (targets[:, None] == torch.arange(n_outputs, device=targets.device)).to(dtype)


def _columns(targets: Tensor, n_outputs: int, dtype: torch.dtype) -> Tensor:
    return targets.reshape(len(targets), n_outputs).to(dtype)


def _cross_entropy_slope(outputs: Tensor, wanted: Tensor) -> Tensor:
    return torch.softmax(outputs, dim=1) - wanted


def _logistic_slope(outputs: Tensor, signs: Tensor) -> Tensor:
    return torch.sigmoid(-signs * outputs) * -signs


SLOPES: dict[Callable[[Tensor, Tensor], Tensor], LossSlope] = {
    cross_entropies: LossSlope(_one_hot, _cross_entropy_slope),
    squared_errors: LossSlope(_columns, torch.sub),
    logistic_losses: LossSlope(_columns, _logistic_slope),
}

"""The gradient of one client's loss in its fastest form.

For networks of dense layers with a known loss that is the formula. For others it is autograd with the parameters as
leaves for one client on a CPU, and `torch.func.grad` under torch.func's transforms (a vectorised cohort).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.func import grad_and_value

from dqnfed.accel.dense import DenseChain, LossSlope
from dqnfed.accel.fast_model import FastModel, Outputs
from dqnfed.core.problem import (
    Problem,
    Task,
    cast_inputs,
    cross_entropies,
    logistic_losses,
    squared_errors,
)
from dqnfed.core.tensors import Layout, named_parameters

Slope = Callable[[Tensor], Tensor]  # outputs [N, c] -> derivative [N, c]
EXAMPLES_AT_ONCE = 1024  # of one client's on a GPU, outside vmap
IMAGES_AT_ONCE = 64  # through convolutions on a CPU: the activations of more do not fit in its caches


def gradients_and_values(
    problem: Problem, model: FastModel | None, thetas: Sequence[Tensor], task: Task
) -> list[tuple[Tensor, Tensor]]:
    """Return gradient and loss at each of several models; what does not depend on the model is computed once."""
    shares = task_shares(task)
    if all(single_cpu_client(problem, theta) for theta in thetas):
        inputs = cast_inputs(task.inputs, thetas[0].dtype)
        formula = analytic_gradient(problem, model, inputs, task.targets)
        return [mean_gradient(problem, model, theta, inputs, task.targets, shares, formula) for theta in thetas]
    if (found := vmappable_analytic(problem, model, task)) is not None:
        loss_slope = weighted_loss(problem, found.chain, task.targets, shares)
        return [_by_formula(problem, theta, found, loss_slope) for theta in thetas]
    is_alone = not is_transformed() and not needs_outer_grad(thetas)
    if task.inputs.is_cuda and is_alone and model is not None and is_mean_loss(problem):
        return [gradient_in_parts(problem, model, theta, task, shares) for theta in thetas]
    if model is not None and is_transformed():
        problem = model.for_vmap(problem)
    return [grad_and_value(problem.loss)(theta, task) for theta in thetas]


def mean_loss(problem: Problem, model: FastModel | None, theta: Tensor, task: Task) -> Tensor:
    """Return the client's mean training loss; of one client on a CPU and dense layers without a call of the module."""
    if model is None or not single_cpu_client(problem, theta):
        return problem.loss(theta, task)
    with torch.no_grad():
        if model.has_images:
            outputs = image_outputs(model, theta, task.inputs)
        elif model.chain is None:
            return problem.loss(theta, task)
        elif (features := model.chain.features(cast_inputs(task.inputs, theta.dtype))) is not None:
            outputs = model.chain.outputs(theta, features)
        else:
            return problem.loss(theta, task)
        losses = problem.losses(outputs, task.targets)  # their mean not by shares: what is equal stays equal to the bit
        return problem.regularised(theta, (losses * task.mask).sum() / task.mask.sum().clamp(min=1))


@torch.no_grad()
def image_outputs(model: FastModel, theta: Tensor, images: Tensor) -> Tensor:
    """Return the outputs of a network with convolutions on a CPU, of some images at a time, channels last."""
    leaves = parameter_leaves(theta, model.layout)
    parts = images.split(IMAGES_AT_ONCE)
    return torch.cat([model.on_cpu.outputs(leaves, cast_inputs(part, theta.dtype)) for part in parts])


def batch_gradient(problem: Problem, model: FastModel | None, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
    """Return the gradient of the mean loss over the rows that the batch names; a batch of no width means all."""
    if not batch.shape[-1]:
        return gradients_and_values(problem, model, (theta,), task)[0][0]
    if not single_cpu_client(problem, theta):
        if (found := vmappable_analytic(problem, model, task)) is not None:
            rows = batch.clamp(min=0)
            features = Features(found.chain, found.features[rows])
            loss_slope = weighted_loss(problem, found.chain, task.targets[rows], batch_shares(task, batch))
            return _by_formula(problem, theta, features, loss_slope)[0]
        if model is not None and is_transformed():
            problem = model.for_vmap(problem)
        slope: Tensor = grad_and_value(problem.batch_loss)(theta, task, batch)[0]
        return slope
    rows = batch[batch >= 0]
    inputs, targets = cast_inputs(task.inputs[rows], theta.dtype), task.targets[rows]
    formula = analytic_gradient(problem, model, inputs, targets)
    return mean_gradient(problem, model, theta, inputs, targets, equal_shares(theta, len(rows)), formula)[0]


class Features(NamedTuple):
    """The dense layers of a model, and a client's inputs to the first of them."""

    chain: DenseChain
    features: Tensor  # [N, d]


def vmappable_analytic(problem: Problem, model: FastModel | None, task: Task) -> Features | None:
    """Return the dense layers and their inputs, where the gradient is a formula that vmap takes; else None."""
    if model is None or model.chain is None or problem.losses not in SLOPES or not is_mean_loss(problem):
        return None
    if problem.losses is cross_entropies and (task.targets.dim() != 1 or task.targets.is_floating_point()):
        return None
    features = model.chain.features(cast_inputs(task.inputs, problem.theta0.dtype))
    return None if features is None else Features(model.chain, features)


def weighted_slopes(problem: Problem, targets: Tensor, shares: Tensor) -> Slope:
    """Return the derivative of the weighted sum of the losses in the outputs, in operations that vmap takes."""
    known = SLOPES[problem.losses]
    if problem.losses is cross_entropies:
        shares = shares * (targets >= 0)  # torch's own loss leaves out targets that are no class
    return lambda outputs: (
        known.slope(outputs, known.encoded(targets, outputs.shape[1], outputs.dtype)) * shares[:, None]
    )


def weighted_loss(problem: Problem, chain: DenseChain, targets: Tensor, shares: Tensor) -> LossSlope:
    """Return a function that gives the derivative and the value of the weighted sum of the losses; vmap takes it."""
    if problem.losses is not cross_entropies:
        slopes = weighted_slopes(problem, targets, shares)
        return lambda outputs: (slopes(outputs), (problem.losses(outputs, targets) * shares).sum())
    shares = (shares * (targets >= 0))[:, None]  # targets that are no class are left out
    encoded = _one_hot(targets, chain.layers[-1].n_outputs, shares.dtype)
    weights = encoded * -shares

    def loss_slope(outputs: Tensor) -> tuple[Tensor, Tensor]:
        slope = _cross_entropy_slope(outputs, encoded) * shares
        return slope, (torch.log_softmax(outputs, dim=1) * weights).sum()

    return loss_slope


def batch_shares(task: Task, batch: Tensor) -> Tensor:
    """Return every row's share of the mean over a batch; entries of -1 have none."""
    mask = (batch >= 0).to(task.mask.dtype)
    return mask / mask.sum().clamp(min=1)


def _by_formula(problem: Problem, theta: Tensor, found: Features, loss_slope: LossSlope) -> tuple[Tensor, Tensor]:
    slope, loss = found.chain.vmappable_gradient(theta, found.features, loss_slope)
    if problem.ridge:
        slope, loss = slope + problem.ridge * theta, loss + 0.5 * problem.ridge * theta.square().sum()
    return slope, loss


def single_cpu_client(problem: Problem, theta: Tensor) -> bool:
    """Return whether this is one client on a CPU with a mean as its loss, and nothing is differentiated through it."""
    return (
        theta.device.type == "cpu"
        and not is_transformed()
        and not needs_outer_grad([theta])
        and not torch.compiler.is_compiling()
        and is_mean_loss(problem)
    )


def needs_outer_grad(thetas: Sequence[Tensor]) -> bool:
    """Return whether what is computed from these models may be differentiated."""
    return torch.is_grad_enabled() and any(theta.requires_grad for theta in thetas)


def is_mean_loss(problem: Problem) -> bool:
    """Return whether a client's loss is the mean of its examples' losses, as `Problem` itself computes it."""
    return type(problem).loss is Problem.loss and type(problem).batch_loss is Problem.batch_loss


def is_transformed() -> bool:
    """Return whether this is computed under one of torch.func's transforms, such as vmap."""
    return cast(Any, torch._C)._functorch.peek_interpreter_stack() is not None


def task_shares(task: Task) -> Tensor:
    """Return every example's share of the client's mean, [N]."""
    return task.mask / task.mask.sum().clamp(min=1)


def equal_shares(theta: Tensor, n: int) -> Tensor:
    """Return n equal shares of a mean."""
    return theta.new_full((n,), 1.0 / max(n, 1))


def mean_gradient(
    problem: Problem,
    model: FastModel | None,
    theta: Tensor,
    inputs: Tensor,
    targets: Tensor,
    shares: Tensor,
    formula: Analytic | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradient and the value of the weighted sum of the examples' losses, ridge included.

    `formula` is the `analytic_gradient` of these examples.
    """
    with torch.no_grad():
        if formula is not None:
            slope, outputs = formula.chain.gradient(theta, formula.features, formula.weighted_slope(shares))
            loss = problem.losses(outputs, targets) @ shares
        else:
            slope, loss = _by_autograd(problem, model, theta, inputs, targets, shares)
        if problem.ridge:
            slope, loss = slope.add_(theta, alpha=problem.ridge), loss + 0.5 * problem.ridge * theta.square().sum()
    return slope, loss


def gradient_in_parts(
    problem: Problem, model: FastModel, theta: Tensor, task: Task, shares: Tensor, *, size: int = EXAMPLES_AT_ONCE
) -> tuple[Tensor, Tensor]:
    """Return what `mean_gradient` does, from a part of the examples at a time: a GPU may not hold all activations.

    A compiled model needs parts of one size: the last one begins earlier, and examples of the part before have no share
    in it. Clients that are smaller than a part have many sizes, and are not compiled.
    """
    n, outputs = len(shares), model.outputs
    if model.compiled is None or n < size:
        outputs, size = model.model.outputs, -(-n // max(1, -(-n // size)))
    leaves, inputs = parameter_leaves(theta, model.layout), cast_inputs(task.inputs, theta.dtype)
    total, loss = [torch.zeros_like(leaf) for leaf in leaves.values()], torch.zeros_like(shares[0])
    for start in range(0, n, size):
        first = max(0, min(start, n - size))
        rows = slice(first, min(start + size, n))
        mine = shares[rows]
        if first < start:
            mine = mine * (torch.arange(first, n, device=mine.device) >= start)
        slopes, part = leaf_slopes(problem, outputs, leaves, inputs[rows], task.targets[rows], mine)
        torch._foreach_add_(total, list(slopes))
        loss = loss + part
    gradient = torch.cat([slope.reshape(-1) for slope in total])
    if problem.ridge:
        gradient, loss = gradient.add_(theta, alpha=problem.ridge), loss + 0.5 * problem.ridge * theta.square().sum()
    return gradient, loss


class Analytic(NamedTuple):
    """What a gradient by formula is computed from."""

    chain: DenseChain
    features: Tensor  # [N, d] the inputs of the first dense layer
    encoded: Tensor  # [N, c] the targets, as the slope takes them
    slope: Callable[[Tensor, Tensor], Tensor]  # outputs [N, c], encoded [N, c] -> derivative [N, c]

    def weighted_slope(self, shares: Tensor) -> Callable[[Tensor, slice], Tensor]:
        """Return the derivative of the weighted sum of all examples' losses, in the outputs of some of them."""
        return lambda outputs, rows: self.slope(outputs, self.encoded[rows]).mul_(shares[rows, None])


@torch.no_grad()
def analytic_gradient(problem: Problem, model: FastModel | None, inputs: Tensor, targets: Tensor) -> Analytic | None:
    """Return the dense layers, their inputs and the slope of their loss; None where autograd is needed."""
    if model is None or model.chain is None or problem.losses not in SLOPES:
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
    encoded = known.encoded(targets, n_outputs, features.dtype)
    return Analytic(model.chain, features, encoded, known.slope)


def _by_autograd(
    problem: Problem, model: FastModel | None, theta: Tensor, inputs: Tensor, targets: Tensor, shares: Tensor
) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        if model is not None:
            leaves, outputs = parameter_leaves(theta, model.layout), model.outputs
            size = IMAGES_AT_ONCE if model.has_images and model.compiled is None else max(1, len(inputs))
            total, loss = None, torch.zeros_like(theta[:1]).sum()
            for given in zip(inputs.split(size), targets.split(size), shares.split(size), strict=True):
                slopes, part = leaf_slopes(problem, outputs, leaves, *given)
                total, loss = slopes if total is None else torch._foreach_add(total, slopes), loss + part
            assert total is not None  # of no examples there is one part, without any
            return torch.cat([slope.reshape(-1) for slope in total]), loss
        leaf = theta.detach().requires_grad_()
        loss = problem.losses(problem.predict(leaf, inputs), targets) @ shares
        return torch.autograd.grad(loss, leaf, materialize_grads=True)[0].clone(), loss.detach()


def parameter_leaves(theta: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return autograd's leaves by parameter name: views of theta, but copies of the kernels of images.

    These have their channels last, the fastest layout for convolutions on a CPU.
    """
    return {name: _leaf(view) for name, view in named_parameters(theta, layout).items()}


def _leaf(view: Tensor) -> Tensor:
    if view.dim() == 4:
        return view.detach().clone(memory_format=torch.channels_last).requires_grad_()
    return view.detach().requires_grad_()


@torch.enable_grad()
def leaf_slopes(
    problem: Problem, outputs: Outputs, leaves: dict[str, Tensor], inputs: Tensor, targets: Tensor, shares: Tensor
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the gradient in every leaf, and the loss."""
    loss = problem.losses(outputs(leaves, inputs), targets) @ shares
    return torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True), loss.detach()


def _are_classes(targets: Tensor) -> bool:
    return targets.dim() == 1 and not targets.is_floating_point() and bool((targets >= 0).all())


class KnownSlope(NamedTuple):
    """The derivative of a loss in a model's outputs, in operations that vmap takes."""

    encoded: Callable[[Tensor, int, torch.dtype], Tensor]  # targets, number of outputs, precision -> [N, c]
    slope: Callable[[Tensor, Tensor], Tensor]  # outputs [N, c], encoded [N, c] -> [N, c]


def _one_hot(targets: Tensor, n_outputs: int, dtype: torch.dtype) -> Tensor:
    return (targets[:, None] == torch.arange(n_outputs, device=targets.device)).to(dtype)


def _columns(targets: Tensor, n_outputs: int, dtype: torch.dtype) -> Tensor:
    return targets.reshape(len(targets), n_outputs).to(dtype)


def _cross_entropy_slope(outputs: Tensor, one_hot: Tensor) -> Tensor:
    return torch.softmax(outputs, dim=1) - one_hot


def _logistic_slope(outputs: Tensor, signs: Tensor) -> Tensor:
    return torch.sigmoid(-signs * outputs) * -signs


SLOPES: dict[Callable[[Tensor, Tensor], Tensor], KnownSlope] = {
    cross_entropies: KnownSlope(_one_hot, _cross_entropy_slope),
    squared_errors: KnownSlope(_columns, torch.sub),
    logistic_losses: KnownSlope(_columns, _logistic_slope),
}

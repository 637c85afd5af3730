"""Local SGD in its fastest form; equal to the plain form up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from dqnfed.accel.dense import Weights
from dqnfed.accel.dense_sgd import dense_sgd
from dqnfed.accel.fast_model import FastModel, Outputs
from dqnfed.accel.fused_linear import set_step
from dqnfed.accel.gradients import (
    Features,
    analytic_gradient,
    batch_shares,
    equal_shares,
    is_mean_loss,
    is_transformed,
    needs_outer_grad,
    parameter_leaves,
    single_cpu_client,
    task_shares,
    vmappable_analytic,
    weighted_slopes,
)
from dqnfed.accel.graphed_sgd import graphed_sgd
from dqnfed.core.kernels import Pull, pulled
from dqnfed.core.problem import Problem, Task, cast_inputs
from dqnfed.core.tensors import named_parameters


def fast_sgd(
    problem: Problem,
    model: FastModel,
    task: Task,
    theta: Tensor,
    *,
    momentum: float,
    weight_decay: float,
    pull: Pull | None,
    correction: Tensor | None,
) -> Tensor | None:
    """Return theta after the task's local steps of SGD, or None where only the plain form applies."""
    decay = weight_decay + problem.ridge
    if pull is None and correction is None and single_cpu_client(problem, theta):
        moved = theta.clone()
        sgd_in_place(problem, model, task, moved, momentum=momentum, decay=decay)
        return moved
    if theta.is_cuda and _can_be_captured(problem, task, theta):
        return graphed_sgd(
            problem, model, task, theta, momentum=momentum, decay=decay, pull=pull, correction=correction
        )
    if momentum == 0.0 and is_transformed() and (found := vmappable_analytic(problem, model, task)) is not None:
        return sgd_by_layers(problem, task, theta, found, decay=decay, pull=pull, correction=correction)
    return None


def _can_be_captured(problem: Problem, task: Task, theta: Tensor) -> bool:
    """Return whether one client's step on a GPU can be captured and replayed: its batches all have one shape."""
    is_alone = not (is_transformed() or needs_outer_grad([theta]) or torch.cuda.is_current_stream_capturing())
    return is_alone and is_mean_loss(problem) and task.batches.shape[-1] > 0


def sgd_by_layers(
    problem: Problem,
    task: Task,
    theta: Tensor,
    found: Features,
    *,
    decay: float,
    pull: Pull | None = None,
    correction: Tensor | None = None,
) -> Tensor:
    """Return theta after the task's local steps of SGD without momentum on dense layers, in operations vmap takes.

    No whole gradient is put together: every layer moves by its own. A step without examples has no length.
    """
    chain, weights, everyone = found.chain, found.chain.views(theta), task_shares(task)
    anchors = None if pull is None else chain.views(pull.anchor)
    corrections = None if correction is None else chain.views(correction)
    for batch in task.batches:
        features, targets, shares, lr = found.features, task.targets, everyone, task.lr
        if batch.shape[-1]:
            rows = batch.clamp(min=0)
            features, targets, shares = features[rows], targets[rows], batch_shares(task, batch)
            lr = lr * (batch >= 0).any()
        steps = chain.layer_gradients(weights, features, weighted_slopes(problem, targets, lr * shares))
        kept = 1.0 - lr * decay if decay else None
        moved = [_moved(place, step, kept) for place, step in zip(weights, steps, strict=True)]
        if corrections is not None:
            moved = _corrected(moved, corrections, lr)
        if pull is not None and anchors is not None:
            moved = _pulled(moved, weights, anchors, lr * pull.strength, implicit=pull.implicit)
        weights = moved
    return chain.joined(weights)


def _moved(place: Weights, step: Weights, kept: Tensor | None) -> Weights:
    """Return the layer after a step; `kept` is the factor that weight decay leaves of it."""
    matrix, bias = place if kept is None else (kept * place.matrix, None if place.bias is None else kept * place.bias)
    return Weights(matrix - step.matrix, None if bias is None or step.bias is None else bias - step.bias)


def _corrected(moved: Sequence[Weights], corrections: Sequence[Weights], lr: Tensor) -> list[Weights]:
    return _each(lambda now, given: now - lr * given, moved, corrections)


def _pulled(
    moved: Sequence[Weights], before: Sequence[Weights], anchors: Sequence[Weights], way: Tensor, *, implicit: bool
) -> list[Weights]:
    if implicit:
        return _each(lambda now, anchor: pulled(now, anchor, way), moved, anchors)
    return _each(lambda now, was, anchor: now - way * (was - anchor), moved, before, anchors)


def _each(change: Callable[..., Tensor], *layers: Sequence[Weights]) -> list[Weights]:
    """Return the layers whose every parameter is a function of the parameters at that place."""
    return [
        Weights(
            change(*(part.matrix for part in parts)),
            None if parts[0].bias is None else change(*(part.bias for part in parts)),
        )
        for parts in zip(*layers, strict=True)
    ]


@torch.enable_grad()
def sgd_slopes(
    problem: Problem,
    outputs: Outputs,
    leaves: dict[str, Tensor],
    inside: Collection[str],
    inputs: Tensor,
    targets: Tensor,
    shares: Tensor,
) -> list[Tensor]:
    """Return the gradient in every leaf but those `inside` fused layers, which make their step meanwhile."""
    loss = problem.losses(outputs(leaves, inputs), targets) @ shares
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)  # a fused layer's gradients are unused
    named = [(leaf, slope) for (name, leaf), slope in zip(leaves.items(), found, strict=True) if name not in inside]
    return [torch.zeros_like(leaf) if slope is None else slope for leaf, slope in named]


@torch.no_grad()
def sgd_in_place(
    problem: Problem, model: FastModel, task: Task, theta: Tensor, *, momentum: float, decay: float
) -> None:
    """Change theta by the task's local steps of SGD, for one client on a CPU; `decay` includes the ridge.

    Networks of dense layers never have a gradient in memory, nor have the dense layers of others; their other layers
    have what autograd makes.
    """
    inputs = cast_inputs(task.inputs, theta.dtype)
    found = analytic_gradient(problem, model, inputs, task.targets)
    if found is not None:
        dense_sgd(task, theta, found, momentum=momentum, decay=decay)
        return
    lr, everyone, leaves = float(task.lr), task_shares(task), parameter_leaves(theta, model.layout)
    velocity = list(named_parameters(torch.zeros_like(theta), model.layout).values()) if momentum else []
    fused = None if momentum else model.fused
    outputs = model.outputs if fused is None else fused.outputs
    inside = () if fused is None else set_step(fused.module, lr, 1.0 - lr * decay)
    places = [leaf for name, leaf in leaves.items() if name not in inside]
    for batch, n_rows in zip(task.batches, (task.batches >= 0).sum(1).tolist(), strict=True):
        rows = None if batch.shape[-1] == 0 else batch if n_rows == len(batch) else batch[batch >= 0]
        if rows is not None and n_rows == 0:
            continue
        targets = task.targets if rows is None else task.targets.index_select(0, rows)
        shares = everyone if rows is None else equal_shares(theta, n_rows)
        examples = inputs if rows is None else inputs.index_select(0, rows)
        slopes = sgd_slopes(problem, outputs, leaves, inside, examples, targets, shares)
        if velocity:
            torch._foreach_mul_(velocity, momentum)
            torch._foreach_add_(velocity, slopes)
            if decay:
                torch._foreach_add_(velocity, places, alpha=decay)
            torch._foreach_add_(places, velocity, alpha=-lr)
        elif places:
            if decay:
                torch._foreach_mul_(places, 1.0 - lr * decay)
            torch._foreach_add_(places, slopes, alpha=-lr)
    views = named_parameters(theta, model.layout)
    for name, leaf in leaves.items():
        if leaf.data_ptr() != views[name].data_ptr():  # a copy in another layout
            views[name].copy_(leaf)

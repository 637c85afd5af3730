"""What clients do between two messages: local epochs of SGD, shared by every method that trains locally."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from dqnfed.core.dense import Weights
from dqnfed.core.dense_sgd import dense_sgd
from dqnfed.core.gradients import (
    Features,
    batch_gradient,
    batch_shares,
    by_hand,
    equal_shares,
    in_formulas,
    is_plain,
    is_transformed,
    is_watched,
    leaf_slopes,
    parameter_leaves,
    task_shares,
    weighted_slopes,
)
from dqnfed.core.graphed_sgd import Pull, graphed_sgd
from dqnfed.core.problem import ModuleModel, Problem, Task, cast_inputs
from dqnfed.core.tensors import named_parameters


def local_sgd(
    problem: Problem,
    task: Task,
    theta: Tensor,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    pull: Pull | None = None,
    correction: Tensor | None = None,
) -> Tensor:
    """Return theta after the task's local steps of SGD; a `correction` [n] is added to every step's gradient.

    A `pull` draws theta towards another model in every step. A client with fewer batches than the others of its cohort
    stands still in the steps it does not have.
    """
    model, decay = problem.predict, weight_decay + problem.ridge
    if isinstance(model, ModuleModel):
        if pull is None and correction is None and is_plain(problem, theta):
            moved = theta.clone()
            sgd_in_place(problem, model, task, moved, momentum=momentum, decay=decay)
            return moved
        if theta.is_cuda and _is_captured(problem, task, theta):
            return graphed_sgd(
                problem, model, task, theta, momentum=momentum, decay=decay, pull=pull, correction=correction
            )
        if momentum == 0.0 and is_transformed() and (found := in_formulas(problem, task)) is not None:
            return sgd_by_layers(problem, task, theta, found, decay=decay, pull=pull, correction=correction)
    velocity = torch.zeros_like(theta)
    for batch in task.batches:
        slope = batch_gradient(problem, theta, task, batch)
        if weight_decay:
            slope = slope + weight_decay * theta
        if pull is not None and not pull.implicit:
            slope = slope + pull.strength * (theta - pull.anchor)
        if correction is not None:
            slope = slope + correction
        moved = momentum * velocity + slope
        stepped = theta - task.lr * moved
        if pull is not None and pull.implicit:
            stepped = drawn(stepped, pull.anchor, task.lr * pull.strength)
        if batch.shape[-1]:
            has_examples = (batch >= 0).any()
            velocity = torch.where(has_examples, moved, velocity)
            theta = torch.where(has_examples, stepped, theta)
        else:
            velocity, theta = moved, stepped
    return theta


def _is_captured(problem: Problem, task: Task, theta: Tensor) -> bool:
    """Return whether one client's step on a GPU can be captured and replayed: its batches all have one shape."""
    usual = isinstance(problem.predict, ModuleModel) and type(problem).batch_loss is Problem.batch_loss
    alone = not (is_transformed() or is_watched([theta]) or torch.cuda.is_current_stream_capturing())
    return usual and alone and task.batches.shape[-1] > 0


def drawn(theta: Tensor, anchor: Tensor, way: Tensor) -> Tensor:
    """Return argmin_v ||v - theta||^2 / 2 + way ||v - anchor||^2 / 2: an implicit step towards the anchor."""
    return (theta + way * anchor) / (1.0 + way)


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
    """Return theta after the task's local steps of plain SGD on dense layers, in operations that vectorise.

    A gradient is never put together: every layer is changed by its own. A step without examples has no length.
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
        steps = chain.changes(weights, features, weighted_slopes(problem, targets, lr * shares))
        kept = 1.0 - lr * decay if decay else None
        moved = [_moved(place, step, kept) for place, step in zip(weights, steps, strict=True)]
        if corrections is not None:
            moved = _corrected(moved, corrections, lr)
        if pull is not None and anchors is not None:
            moved = _pulled(moved, weights, anchors, lr * pull.strength, implicit=pull.implicit)
        weights = moved
    return chain.joined(weights)


def _corrected(moved: Sequence[Weights], corrections: Sequence[Weights], lr: Tensor) -> list[Weights]:
    return _each(lambda now, given: now - lr * given, moved, corrections)


def _pulled(
    moved: Sequence[Weights], before: Sequence[Weights], anchors: Sequence[Weights], way: Tensor, *, implicit: bool
) -> list[Weights]:
    if implicit:
        return _each(lambda now, anchor: drawn(now, anchor, way), moved, anchors)
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


@torch.no_grad()
def sgd_in_place(
    problem: Problem, model: ModuleModel, task: Task, theta: Tensor, *, momentum: float, decay: float
) -> None:
    """Change theta by the task's local steps of SGD, for one client alone; `decay` is on theta, the ridge included.

    Equal to the general form up to rounding. Networks of dense layers never have a gradient in memory; others have no
    more than autograd makes.
    """
    inputs = cast_inputs(task.inputs, theta.dtype)
    found = by_hand(problem, inputs, task.targets)
    if found is not None:
        dense_sgd(task, theta, found, momentum=momentum, decay=decay)
        return
    lr, everyone, leaves = float(task.lr), task_shares(task), parameter_leaves(theta, model)
    speeds = list(named_parameters(torch.zeros_like(theta), model.layout).values()) if momentum else []
    for batch, n_rows in zip(task.batches, (task.batches >= 0).sum(1).tolist(), strict=True):
        rows = None if batch.shape[-1] == 0 else batch if n_rows == len(batch) else batch[batch >= 0]
        if rows is not None and n_rows == 0:
            continue
        targets = task.targets if rows is None else task.targets.index_select(0, rows)
        shares = everyone if rows is None else equal_shares(theta, n_rows)
        examples = inputs if rows is None else inputs.index_select(0, rows)
        slopes, _ = leaf_slopes(problem, model, leaves, examples, targets, shares)
        places = list(leaves.values())
        if speeds:
            torch._foreach_mul_(speeds, momentum)
            torch._foreach_add_(speeds, slopes)
            if decay:
                torch._foreach_add_(speeds, places, alpha=decay)
            torch._foreach_add_(places, speeds, alpha=-lr)
        else:
            if decay:
                torch._foreach_mul_(places, 1.0 - lr * decay)
            torch._foreach_add_(places, slopes, alpha=-lr)
    views = named_parameters(theta, model.layout)
    for name, leaf in leaves.items():
        if leaf.data_ptr() != views[name].data_ptr():  # a copy in another layout
            views[name].copy_(leaf)


def _moved(place: Weights, step: Weights, kept: Tensor | None) -> Weights:
    """Return the layer after a step; `kept` is the share of it that weight decay leaves."""
    matrix, bias = place if kept is None else (kept * place.matrix, None if place.bias is None else kept * place.bias)
    return Weights(matrix - step.matrix, None if bias is None or step.bias is None else bias - step.bias)


def draw_batches(n_examples: int, *, epochs: int, batch_size: int | None, generator: torch.Generator) -> Tensor:
    """Return the rows of each local step [S, B]: every epoch is a fresh shuffle, the last batch may be short (-1)."""
    if batch_size is None:
        return torch.zeros(epochs, 0, dtype=torch.long)
    per_epoch = -(-n_examples // batch_size)
    rows = torch.stack([torch.randperm(n_examples, generator=generator) for _ in range(epochs)])
    if n_missing := per_epoch * batch_size - n_examples:
        rows = pad(rows, (0, n_missing), value=-1)
    return rows.view(epochs * per_epoch, batch_size)

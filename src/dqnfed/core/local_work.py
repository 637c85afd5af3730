"""What clients do between two messages: local epochs of SGD, shared by every method that trains locally."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad

from dqnfed.core.problem import Problem, Task


def local_sgd(
    problem: Problem,
    task: Task,
    theta: Tensor,
    *,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    extra_gradient: Callable[[Tensor], Tensor] | None = None,
    proximal: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return theta after the task's local steps of SGD; `extra_gradient(theta)` is added to every step's gradient.

    `proximal(theta)` is applied after every step, for penalties whose step is taken implicitly. A client with fewer
    batches than the others of its cohort stands still in the steps it does not have.
    """
    velocity = torch.zeros_like(theta)
    for batch in task.batches:
        slope = grad(problem.batch_loss)(theta, task, batch) if batch.shape[-1] else grad(problem.loss)(theta, task)
        if weight_decay:
            slope = slope + weight_decay * theta
        if extra_gradient is not None:
            slope = slope + extra_gradient(theta)
        moved = momentum * velocity + slope
        stepped = theta - task.lr * moved
        if proximal is not None:
            stepped = proximal(stepped)
        if batch.shape[-1]:
            has_examples = (batch >= 0).any()
            velocity = torch.where(has_examples, moved, velocity)
            theta = torch.where(has_examples, stepped, theta)
        else:
            velocity, theta = moved, stepped
    return theta


def draw_batches(n_examples: int, *, epochs: int, batch_size: int | None, generator: torch.Generator) -> Tensor:
    """Return the rows of each local step [S, B]: every epoch is a fresh shuffle, the last batch may be short (-1)."""
    if batch_size is None:
        return torch.zeros(epochs, 0, dtype=torch.long)
    per_epoch = -(-n_examples // batch_size)
    rows = torch.full((epochs, per_epoch * batch_size), -1)
    for epoch in range(epochs):
        rows[epoch, :n_examples] = torch.randperm(n_examples, generator=generator)
    return rows.view(epochs * per_epoch, batch_size)

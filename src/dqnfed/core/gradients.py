"""One client's mean training loss and its gradient, in the forms that the problem's kernels have."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dqnfed.core.problem import Problem, Task


def client_loss(problem: Problem, theta: Tensor, task: Task) -> Tensor:
    """Return the client's mean training loss."""
    return problem.kernels.loss(problem, theta, task)


def loss_gradient(problem: Problem, theta: Tensor, task: Task) -> Tensor:
    """Return the gradient of the client's mean training loss."""
    return problem.kernels.gradients(problem, (theta,), task)[0][0]


def loss_gradient_and_value(problem: Problem, theta: Tensor, task: Task) -> tuple[Tensor, Tensor]:
    """Return the gradient of the client's mean training loss, and that loss."""
    return problem.kernels.gradients(problem, (theta,), task)[0]


def gradients_and_values(problem: Problem, thetas: Sequence[Tensor], task: Task) -> list[tuple[Tensor, Tensor]]:
    """Return gradient and loss at each of several models."""
    return problem.kernels.gradients(problem, thetas, task)

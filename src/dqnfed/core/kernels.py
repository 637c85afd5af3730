"""The computations on clients' data that a faster form may replace; here they are as plain as their formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import grad_and_value

from dqnfed.core.optimizers import PLAIN_SGD, Optimizer

if TYPE_CHECKING:
    from dqnfed.core.problem import Problem, Task

EXAMPLES_AT_ONCE = 1024  # of an evaluation: bounds its activations


class Pull(NamedTuple):
    """A proximal term of local SGD: it pulls every step towards a model."""

    anchor: Tensor  # [n]
    strength: float  # > 0
    implicit: bool = False  # (moved + s anchor) / (1 + s), s = lr strength; else the slope strength (theta - anchor)


class Kernels(Protocol):
    """What `Problem.kernels` computes."""

    def gradients(self, problem: Problem, thetas: Sequence[Tensor], task: Task) -> list[tuple[Tensor, Tensor]]:
        """Return the gradient and the value of the client's mean training loss at each of the models."""

    def loss(self, problem: Problem, theta: Tensor, task: Task) -> Tensor:
        """Return the client's mean training loss."""

    def sgd(
        self,
        problem: Problem,
        task: Task,
        theta: Tensor,
        *,
        momentum: float,
        weight_decay: float,
        pull: Pull | None,
        correction: Tensor | None,
        optimizer: Optimizer = PLAIN_SGD,
    ) -> Tensor:
        """Return theta after the task's local steps; the correction [n] is added to every step's gradient."""

    def forward(
        self, problem: Problem, theta: Tensor, inputs: Tensor, targets: Tensor, *, fixed: bool
    ) -> tuple[Tensor, Tensor]:
        """Return every example's loss and outputs; `fixed`: the examples are the same tensors in every call."""

    def forward_each(
        self, problem: Problem, thetas: Tensor, inputs: Tensor, targets: Tensor, sizes: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return every example's loss and outputs, the first sizes[0] at thetas[0], the next sizes[1] at thetas[1]."""

    def fresh(self) -> Kernels:
        """Return the same kernels for another copy of the model."""


class PlainKernels:
    """Each computation as its formula says, with `torch.func`: one client, or many under vmap, on any device."""

    def gradients(self, problem: Problem, thetas: Sequence[Tensor], task: Task) -> list[tuple[Tensor, Tensor]]:
        return [grad_and_value(problem.loss)(theta, task) for theta in thetas]

    def loss(self, problem: Problem, theta: Tensor, task: Task) -> Tensor:
        return problem.loss(theta, task)

    def sgd(
        self,
        problem: Problem,
        task: Task,
        theta: Tensor,
        *,
        momentum: float,
        weight_decay: float,
        pull: Pull | None,
        correction: Tensor | None,
        optimizer: Optimizer = PLAIN_SGD,
    ) -> Tensor:
        state, inside = optimizer.start(theta), 0.0 if optimizer.name == "adamw" else weight_decay
        for batch in task.batches:
            slope = optimizer.clipped(self._slope(problem, theta, task, batch)) + inside * theta
            if pull is not None and not pull.implicit:
                slope = slope + pull.strength * (theta - pull.anchor)
            if correction is not None:
                slope = slope + correction
            moved, next_state = optimizer.step(theta, slope, state, task.lr, momentum=momentum, decay=weight_decay)
            if pull is not None and pull.implicit:
                moved = pulled(moved, pull.anchor, task.lr * pull.strength)
            if batch.shape[-1]:  # a client with fewer batches than others of its cohort stands still in the rest
                has_examples = (batch >= 0).any()
                state = tuple(torch.where(has_examples, *pair) for pair in zip(next_state, state, strict=True))
                theta = torch.where(has_examples, moved, theta)
            else:
                state, theta = next_state, moved
        return theta

    def forward(
        self, problem: Problem, theta: Tensor, inputs: Tensor, targets: Tensor, *, fixed: bool
    ) -> tuple[Tensor, Tensor]:
        outputs = [problem.predict(theta, part) for part in inputs.split(EXAMPLES_AT_ONCE)]
        losses = [problem.losses(*given) for given in zip(outputs, targets.split(EXAMPLES_AT_ONCE), strict=True)]
        return torch.cat(losses), torch.cat(outputs)

    def forward_each(
        self, problem: Problem, thetas: Tensor, inputs: Tensor, targets: Tensor, sizes: Tensor
    ) -> tuple[Tensor, Tensor]:
        counts: list[int] = sizes.tolist()
        each = zip(thetas, inputs.split(counts), targets.split(counts), strict=True)
        found = [PlainKernels.forward(self, problem, *one, fixed=False) for one in each]
        return torch.cat([losses for losses, _ in found]), torch.cat([outputs for _, outputs in found])

    def fresh(self) -> PlainKernels:
        return self

    def _slope(self, problem: Problem, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
        if not batch.shape[-1]:  # the full batch
            return grad_and_value(problem.loss)(theta, task)[0]  # type: ignore[no-any-return]
        return grad_and_value(problem.batch_loss)(theta, task, batch)[0]  # type: ignore[no-any-return]


PLAIN = PlainKernels()


def pulled(theta: Tensor, anchor: Tensor, way: Tensor) -> Tensor:
    """Return argmin_v ||v - theta||^2 / 2 + way ||v - anchor||^2 / 2: an implicit step towards the anchor."""
    return (theta + way * anchor) / (1.0 + way)

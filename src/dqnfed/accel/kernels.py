"""The faster forms of the computations on clients' data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from dqnfed.accel.fast_model import Compiled, FastModel, compiled_outputs, fast_model
from dqnfed.accel.gradients import (
    batch_gradient,
    gradients_and_values,
    image_outputs,
    is_transformed,
    mean_loss,
    needs_outer_grad,
)
from dqnfed.accel.graphs import GraphedFunction
from dqnfed.accel.local_sgd import fast_sgd
from dqnfed.accel.transfer import to_device_async
from dqnfed.core.kernels import EXAMPLES_AT_ONCE, PlainKernels, Pull
from dqnfed.core.optimizers import PLAIN_SGD, Optimizer
from dqnfed.core.problem import Problem, Task

EXAMPLES_ON_GPU = 8192  # of an evaluation at once: bounds its activations
PADDED_ON_GPU = 2**15  # examples of clients that are evaluated together, each padded to the largest


class FastKernels(PlainKernels):
    """Each computation in the fastest form that the model, the loss and the device allow; else in its plain form.

    An instance belongs to one copy of a model: it keeps what was derived from the module.
    """

    def __init__(
        self,
        *,
        compiled: Compiled | None = None,
        emulate_graphs: bool = False,
        on_gpu: int = EXAMPLES_ON_GPU,  # examples of an evaluation at once
    ) -> None:
        self._compiled, self._emulate, self._on_gpu = compiled, emulate_graphs, on_gpu
        self._model: FastModel | None = None
        self._forwards: dict[tuple[int, int], GraphedFunction] = {}  # by model and loss, which they hold

    def __reduce__(self) -> tuple[Any, ...]:
        return FastKernels, ()  # graphs and compiled functions belong to this process

    def model(self, problem: Problem) -> FastModel | None:
        """Return what is kept about the problem's module; None if its model is a plain function."""
        if self._model is None or self._model.model is not problem.predict:
            self._model = fast_model(problem, self._compiled, patches_on_cpu=self._emulate)
        return self._model

    def gradients(self, problem: Problem, thetas: Sequence[Tensor], task: Task) -> list[tuple[Tensor, Tensor]]:
        return gradients_and_values(problem, self.model(problem), thetas, task)

    def loss(self, problem: Problem, theta: Tensor, task: Task) -> Tensor:
        return mean_loss(problem, self.model(problem), theta, task)

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
        settings: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay}
        forces: dict[str, Any] = {"pull": pull, "correction": correction}
        if optimizer.is_plain and (model := self.model(problem)) is not None:
            moved = fast_sgd(problem, model, task, theta, **settings, **forces)
            if moved is not None:
                return moved
        return super().sgd(problem, task, theta, **settings, **forces, optimizer=optimizer)

    def forward(
        self, problem: Problem, theta: Tensor, inputs: Tensor, targets: Tensor, *, fixed: bool
    ) -> tuple[Tensor, Tensor]:
        if (model := self._of_images(problem, theta)) is not None:
            outputs = image_outputs(model, theta, inputs)
            return problem.losses(outputs, targets), outputs
        key = (id(problem.predict), id(problem.losses))
        if key not in self._forwards:
            forward = _forward(problem.predict, problem.losses, self._on_gpu)
            self._forwards[key] = GraphedFunction(forward, emulate=self._emulate)
        losses, outputs = self._forwards[key](theta, inputs, targets, fixed=(1, 2) if fixed else ())
        return losses, outputs

    def forward_each(
        self, problem: Problem, thetas: Tensor, inputs: Tensor, targets: Tensor, sizes: Tensor
    ) -> tuple[Tensor, Tensor]:
        model = self.model(problem)
        is_dense = model is not None and model.chain is not None
        if thetas.is_cuda and is_dense and len(sizes) * int(sizes.max()) <= min(PADDED_ON_GPU, 4 * self._on_gpu):
            return forward_together(problem, thetas, inputs, targets, sizes)
        counts = sizes.tolist()
        each = zip(thetas, inputs.split(counts), targets.split(counts), strict=True)
        if self._of_images(problem, thetas) is not None:
            losses, outputs = zip(*(self.forward(problem, *one, fixed=False) for one in each), strict=True)
            return torch.cat(losses), torch.cat(outputs)
        if not thetas.is_cuda or self._on_gpu >= EXAMPLES_AT_ONCE:
            return super().forward_each(problem, thetas, inputs, targets, sizes)
        forward = _forward(problem.predict, problem.losses, self._on_gpu)
        losses, outputs = zip(*(forward(*one) for one in each), strict=True)
        return torch.cat(losses), torch.cat(outputs)

    def _of_images(self, problem: Problem, theta: Tensor) -> FastModel | None:
        """Return the model where it has convolutions that are evaluated on a CPU; else None."""
        is_plain = theta.device.type == "cpu" and not self._emulate and not is_transformed()
        model = self.model(problem) if is_plain and not needs_outer_grad([theta]) else None
        return model if model is not None and model.has_images else None

    def fresh(self) -> FastKernels:
        return FastKernels(compiled=self._compiled, emulate_graphs=self._emulate, on_gpu=self._on_gpu)

    def _slope(self, problem: Problem, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
        return batch_gradient(problem, self.model(problem), theta, task, batch)


def _forward(
    predict: Callable[[Tensor, Tensor], Tensor], losses_of: Callable[[Tensor, Tensor], Tensor], on_gpu: int
) -> Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]:
    """Return the function of (theta, inputs, targets) that gives the examples' losses and outputs."""

    def forward(theta: Tensor, inputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        size = on_gpu if inputs.is_cuda else EXAMPLES_AT_ONCE
        outputs = [predict(theta, part) for part in inputs.split(size)]
        losses = [losses_of(*given) for given in zip(outputs, targets.split(size), strict=True)]
        return torch.cat(losses), torch.cat(outputs)

    return forward


def forward_together(
    problem: Problem, thetas: Tensor, inputs: Tensor, targets: Tensor, sizes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return every example's loss and outputs, each at its client's model, with all clients at once under vmap."""
    ends = sizes.cumsum(0)
    rows = [torch.arange(int(end - size), int(end)) for end, size in zip(ends, sizes, strict=True)]
    padded = pad_sequence(rows, batch_first=True)  # with the first row of all, which is not read back
    is_real = torch.arange(padded.shape[1])[None] < sizes[:, None]
    index = to_device_async(inputs.device, padded)
    real = to_device_async(inputs.device, is_real.flatten().nonzero().flatten())
    outputs = vmap(problem.predict)(thetas, inputs[index])
    losses = vmap(problem.losses)(outputs, targets[index])
    return losses.flatten()[real], outputs.flatten(0, 1)[real]


def compiled(problem: Problem) -> Problem:
    """Return the same problem whose steps of training are compiled by torch when they are first taken."""
    return replace(problem, kernels=FastKernels(compiled=compiled_outputs(problem)))


def evaluating(problem: Problem, n_examples: int) -> Problem:
    """Return the same problem, of which so many examples are evaluated at once on a GPU."""
    held = problem.kernels
    compiled_for = held._compiled if isinstance(held, FastKernels) else None
    return replace(problem, kernels=FastKernels(compiled=compiled_for, on_gpu=n_examples))

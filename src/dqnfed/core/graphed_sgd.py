"""Local SGD of one client on a GPU: a step is captured in a CUDA graph once, and replayed for every batch."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dqnfed.core.gradients import leaf_slopes, parameter_leaves
from dqnfed.core.problem import ModuleModel, Problem, Task, cast_inputs
from dqnfed.core.tensors import named_parameters

ONE_CAPTURE = threading.Lock()  # at a time: another thread's waiting for the GPU would break it
WARM_UPS = 3  # libraries choose their kernels and make their workspaces before a capture


class BatchStep:
    """One step of SGD on tensors that stay where they are: fill them, call it, and theta has moved."""

    def __init__(self, problem: Problem, model: ModuleModel, task: Task, *, momentum: float, decay: float) -> None:
        size = task.batches.shape[-1]
        self._problem, self._model, self._momentum, self._decay = problem, model, momentum, decay
        self.theta = torch.zeros_like(problem.theta0)
        self.velocity = torch.zeros_like(self.theta) if momentum else None
        self.inputs = task.inputs.new_zeros((size, *task.inputs.shape[1:]))
        self.targets = task.targets.new_zeros((size, *task.targets.shape[1:]))
        self.batch = torch.zeros_like(task.batches[0])
        self.lr = torch.zeros_like(task.lr)
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self, theta: Tensor, lr: Tensor) -> None:
        """Take the model and the learning rate that the next steps start from."""
        self.theta.copy_(theta)
        self.lr.copy_(lr)
        if self.velocity is not None:
            self.velocity.zero_()

    def take(self, task: Task, batch: Tensor, rows: Tensor) -> None:
        """Move theta by one batch; `rows` are the batch's with 0 for those that are none."""
        self.batch.copy_(batch)
        torch.index_select(task.inputs, 0, rows, out=self.inputs)
        torch.index_select(task.targets, 0, rows, out=self.targets)
        if not self.theta.is_cuda:
            self.descend()
            return
        if self._graph is None:
            with ONE_CAPTURE:
                self._graph = self._captured()
        self._graph.replay()

    @torch.no_grad()
    def descend(self) -> None:
        """Move theta by the batch that lies ready; entries of -1 do not count, and nothing moves if all are."""
        mask = (self.batch >= 0).to(self.theta.dtype)
        any_row = mask.amax()
        leaves = parameter_leaves(self.theta, self._model)
        inputs = cast_inputs(self.inputs, self.theta.dtype)
        shares = mask / mask.sum().clamp(min=1)
        slopes, _ = leaf_slopes(self._problem, self._model, leaves, inputs, self.targets, shares)
        places, moves = [leaf.detach() for leaf in leaves.values()], list(slopes)
        if self._decay:
            torch._foreach_add_(moves, torch._foreach_mul(places, self._decay * any_row))
        if self.velocity is not None:
            speeds = list(named_parameters(self.velocity, self._model.layout).values())
            torch._foreach_mul_(speeds, 1.0 - any_row * (1.0 - self._momentum))
            torch._foreach_add_(speeds, moves)
            moves = speeds
        torch._foreach_sub_(places, torch._foreach_mul(moves, self.lr * any_row))

    def _captured(self) -> torch.cuda.CUDAGraph:
        before = self.theta.clone(), None if self.velocity is None else self.velocity.clone()
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.descend()
        here.wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, side):
            self.descend()
        self.theta.copy_(before[0])
        if self.velocity is not None and before[1] is not None:
            self.velocity.copy_(before[1])
        return graph


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Capture what this thread launches; meanwhile no forgotten graph is collected: freeing one would break it."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if was_enabled:
            gc.enable()


def graphed_sgd(
    problem: Problem, model: ModuleModel, task: Task, theta: Tensor, *, momentum: float, decay: float
) -> Tensor:
    """Return theta after the task's batches of SGD, for one client alone; `decay` is on theta, the ridge included.

    Equal to the general form up to rounding. Each CUDA stream has steps of its own, so that clients can overlap.
    """
    stream = torch.cuda.current_stream().cuda_stream if theta.is_cuda else 0
    key = (stream, task.batches.shape[-1], task.inputs.shape[1:], task.inputs.dtype, momentum, decay, problem.losses)
    step = model.steps.get(key)
    if step is None:
        step = model.steps[key] = BatchStep(problem, model, task, momentum=momentum, decay=decay)
    step.begin(theta, task.lr)
    for batch, rows in zip(task.batches, task.batches.clamp(min=0), strict=True):
        step.take(task, batch, rows)
    return step.theta.clone()

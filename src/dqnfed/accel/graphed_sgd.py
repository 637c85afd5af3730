"""Local SGD of one client on a GPU: a step is captured in a CUDA graph once, and replayed for every batch."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from dqnfed.accel.fast_model import FastModel
from dqnfed.accel.gradients import leaf_slopes, parameter_leaves
from dqnfed.accel.graphs import capturing
from dqnfed.core.kernels import Pull
from dqnfed.core.problem import Problem, Task, cast_inputs
from dqnfed.core.tensors import named_parameters

ONE_CAPTURE = threading.Lock()  # at a time: another thread's synchronisation with the GPU would break it
WARM_UPS = 3  # libraries choose their kernels and make their workspaces before a capture
MAX_STEPS = 12  # of one model; losses or shapes that keep changing are cheaper without graphs


class BatchStep:
    """One step of SGD on static tensors: fill them, call it, and theta has moved."""

    def __init__(
        self,
        problem: Problem,
        model: FastModel,
        task: Task,
        *,
        momentum: float,
        decay: float,
        pull: Pull | None = None,
        is_corrected: bool = False,
    ) -> None:
        size = task.batches.shape[-1]
        self._problem, self._model, self._momentum, self._decay = problem, model, momentum, decay
        self._theta = torch.zeros_like(problem.theta0)
        self._leaves = parameter_leaves(self._theta, model.layout)  # kernels of images are copies in another layout
        self._places = [leaf.detach() for leaf in self._leaves.values()]
        self._velocity = [torch.zeros_like(place) for place in self._places] if momentum else []
        self._pull = None if pull is None else pull._replace(anchor=self._theta[:0])  # the anchor is every client's own
        self._anchors = [torch.zeros_like(place) for place in self._places] if pull is not None else []
        self._corrections = [torch.zeros_like(place) for place in self._places] if is_corrected else []
        self._inputs = task.inputs.new_zeros((size, *task.inputs.shape[1:]))
        self._targets = task.targets.new_zeros((size, *task.targets.shape[1:]))
        self._batch = torch.zeros_like(task.batches[0])
        self._lr = torch.zeros_like(task.lr)
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self, theta: Tensor, lr: Tensor, anchor: Tensor | None, correction: Tensor | None) -> None:
        """Copy one client's model, learning rate, anchor and correction to the static tensors; no velocity yet."""
        for places, vector in ((self._places, theta), (self._anchors, anchor), (self._corrections, correction)):
            if vector is not None:
                torch._foreach_copy_(places, self._parts(vector))
        self._lr.copy_(lr)
        if self._velocity:
            torch._foreach_zero_(self._velocity)

    def result(self) -> Tensor:
        """Return theta after the steps."""
        torch._foreach_copy_(self._parts(self._theta), self._places)
        return self._theta.clone()

    def step(self, task: Task, batch: Tensor, rows: Tensor) -> None:
        """Move theta by one batch; `rows` are the batch's with 0 in place of -1."""
        self._batch.copy_(batch)
        torch.index_select(task.inputs, 0, rows, out=self._inputs)
        torch.index_select(task.targets, 0, rows, out=self._targets)
        if not self._theta.is_cuda:
            self._descend()
            return
        if self._graph is None:
            with ONE_CAPTURE:
                self._graph = self._captured()
        self._graph.replay()

    @torch.no_grad()
    def _descend(self) -> None:
        """Move theta by the batch in the static tensors; entries of -1 do not count, and nothing moves if all are."""
        mask = (self._batch >= 0).to(self._theta.dtype)
        lr = self._lr * mask.amax()  # 0: no row
        inputs = cast_inputs(self._inputs, self._theta.dtype)
        shares = mask / mask.sum().clamp(min=1)
        slopes, _ = leaf_slopes(self._problem, self._model.outputs, self._leaves, inputs, self._targets, shares)
        places, moves, pull = self._places, list(slopes), self._pull
        if self._decay:
            torch._foreach_add_(moves, places, alpha=self._decay)
        if pull is not None and not pull.implicit:
            torch._foreach_add_(moves, torch._foreach_sub(places, self._anchors), alpha=pull.strength)
        if self._corrections:
            torch._foreach_add_(moves, self._corrections)
        if self._velocity:
            has_rows = mask.amax()
            torch._foreach_mul_(self._velocity, 1.0 - has_rows * (1.0 - self._momentum))
            torch._foreach_add_(self._velocity, torch._foreach_mul(moves, has_rows))
            moves = self._velocity
        torch._foreach_sub_(places, torch._foreach_mul(moves, lr))
        if pull is not None and pull.implicit:
            way = lr * pull.strength
            torch._foreach_add_(
                places, torch._foreach_mul(torch._foreach_sub(self._anchors, places), way / (1.0 + way))
            )

    def _captured(self) -> torch.cuda.CUDAGraph:
        before = [t.clone() for t in (*self._places, *self._velocity)]
        here, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._descend()
        here.wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, side):
            self._descend()
        torch._foreach_copy_([*self._places, *self._velocity], before)
        return graph

    def _parts(self, vector: Tensor) -> list[Tensor]:
        return list(named_parameters(vector, self._model.layout).values())


def graphed_sgd(
    problem: Problem,
    model: FastModel,
    task: Task,
    theta: Tensor,
    *,
    momentum: float,
    decay: float,
    pull: Pull | None = None,
    correction: Tensor | None = None,
) -> Tensor | None:
    """Return theta after the task's batches of SGD, for one client; `decay` is on theta, the ridge included.

    Equal to the plain form up to rounding. Each CUDA stream has steps of its own, so that clients can overlap. None,
    now and later, for a model whose steps keep changing.
    """
    stream = torch.cuda.current_stream().cuda_stream if theta.is_cuda else 0
    examples = (task.inputs, task.targets)
    shapes = (task.batches.shape[-1], theta.dtype, *((t.shape[1:], t.dtype) for t in examples))
    forces = (None if pull is None else pull[1:], correction is not None)
    key = (stream, *shapes, momentum, decay, *forces, problem.losses)
    step: BatchStep | None = model.steps.get(key)
    if step is None:
        if not model.captures_steps or len(model.steps) >= MAX_STEPS:
            model.captures_steps = False
            model.steps.clear()
            return None
        step = BatchStep(
            problem, model, task, momentum=momentum, decay=decay, pull=pull, is_corrected=correction is not None
        )
        model.steps[key] = step
    step.load(theta, task.lr, None if pull is None else pull.anchor, correction)
    for batch, rows in zip(task.batches, task.batches.clamp(min=0), strict=True):
        step.step(task, batch, rows)
    return step.result()

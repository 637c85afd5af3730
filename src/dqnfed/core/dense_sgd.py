"""Local SGD on dense layers, for one client on a CPU: the updates happen inside the products.

A step on a small batch is bound by memory as much as by arithmetic. Here the gradient of a weight matrix is never
stored: its product is added, times minus the learning rate, to the weights themselves (GEMM's own `beta C + alpha A
B`), which saves two of the three passes over the weights that an optimiser makes. Everything that a step reads and
writes has its place, so that its calls are laid out once: between two products that have swept the caches, every other
instruction is a slow one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dqnfed.core import dense
from dqnfed.core.dense import IN_PLACE, DenseChain, pull_back
from dqnfed.core.gradients import ByHand, task_shares
from dqnfed.core.problem import Task

Calls = list[Callable[[], object]]


class Batch(NamedTuple):
    """The place of what a step looks at."""

    features: Tensor  # [n, d]
    wanted: Tensor  # [n, c]
    shares: Tensor | float  # [n, 1], or the same for all: of the mean whose gradient is followed


class Sgd(NamedTuple):
    """How steps are taken."""

    lr: float
    momentum: float
    decay: float


def dense_sgd(task: Task, theta: Tensor, found: ByHand, *, momentum: float, decay: float) -> None:
    """Change theta by the task's local steps; `decay` is on theta, the ridge included."""
    features, wanted, width = found.features, found.wanted, task.batches.shape[-1]
    velocity = torch.zeros_like(theta) if momentum else None
    lay_out = partial(step_calls, found.chain, theta, velocity, found.slope, Sgd(float(task.lr), momentum, decay))
    if width == 0 and len(features) > dense.ROWS:  # beside so many rows, a pass over the weights is nothing
        for _ in task.batches:
            slope, _ = found.chain.gradient(theta, features, found.weighted_slope(task_shares(task)))
            slope.add_(theta, alpha=decay)
            moved = slope if velocity is None else velocity.mul_(momentum).add_(slope)
            theta.sub_(moved, alpha=float(task.lr))
        return
    if width == 0:
        calls = lay_out(Batch(features, wanted, task_shares(task)[:, None]))
        for _ in task.batches:
            _make(calls)
        return
    room, goals = features.new_empty(width, features.shape[1]), wanted.new_empty(width, wanted.shape[1])
    laid_out: dict[int, tuple[Batch, Calls]] = {}
    for rows, n_rows in zip(task.batches, (task.batches >= 0).sum(1).tolist(), strict=True):
        if n_rows == 0:
            continue
        if n_rows not in laid_out:
            batch = Batch(room[:n_rows], goals[:n_rows], 1.0 / n_rows)
            laid_out[n_rows] = batch, lay_out(batch)
        batch, calls = laid_out[n_rows]
        real = rows if n_rows == width else rows[rows >= 0]
        torch.index_select(features, 0, real, out=batch.features)
        torch.index_select(wanted, 0, real, out=batch.wanted)
        _make(calls)


def step_calls(
    chain: DenseChain,
    theta: Tensor,
    velocity: Tensor | None,
    slope: Callable[[Tensor, Tensor], Tensor],
    sgd: Sgd,
    batch: Batch,
) -> Calls:
    """Return the calls that make one step of SGD on whatever is in the batch's place; theta changes in place."""
    weights, layers, n = chain.views(theta), chain.layers, len(batch.features)
    changed, beta, alpha = weights, 1.0 - sgd.lr * sgd.decay, -sgd.lr
    if velocity is not None:
        changed, beta, alpha = chain.views(velocity), sgd.momentum, 1.0
    made = [theta.new_empty(n, layer.n_outputs) for layer in layers]
    deltas = [torch.empty_like(outputs) for outputs in made]  # the loss' derivative before every activation
    seen, ones = [batch.features, *made], theta.new_ones(n)

    calls: Calls = []
    for k, (matrix, bias) in enumerate(weights):
        if bias is None:
            calls.append(partial(torch.mm, seen[k], matrix.t(), out=made[k]))
        else:
            calls.append(partial(torch.addmm, bias, seen[k], matrix.t(), out=made[k]))
        if layers[k].activation:
            calls.append(partial(IN_PLACE[layers[k].activation], made[k]))
    calls.append(lambda: torch.mul(slope(made[-1], batch.wanted), batch.shares, out=deltas[-1]))
    for k in reversed(range(len(layers))):
        if k:
            calls.append(partial(torch.mm, deltas[k], weights[k].matrix, out=deltas[k - 1]))
            if name := layers[k - 1].activation:
                calls.append(partial(pull_back, name, deltas[k - 1], seen[k]))
        matrix, bias = changed[k]
        calls.append(partial(matrix.addmm_, deltas[k].t(), seen[k], beta=beta, alpha=alpha))
        if bias is not None:
            calls.append(partial(bias.addmv_, deltas[k].t(), ones, beta=beta, alpha=alpha))
    if velocity is not None:
        if sgd.decay:
            calls.append(partial(velocity.add_, theta, alpha=sgd.decay))
        calls.append(partial(theta.add_, velocity, alpha=-sgd.lr))
    return calls


def _make(calls: Calls) -> None:
    for call in calls:
        call()

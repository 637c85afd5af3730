"""Local SGD on dense layers, for one client on a CPU: the updates happen inside the products.

A step on a small batch is bound by memory as much as by arithmetic. Here the gradient of a weight matrix is never
stored: its product is added, times minus the learning rate, to the weights themselves (GEMM's own `beta C + alpha A
B`), which saves two of the three passes over the weights that an optimiser makes. All tensors of a step are allocated
once, and its calls are prepared once: with small batches the calls themselves would take most of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dqnfed.accel import dense
from dqnfed.accel.dense import IN_PLACE, DenseChain, activation_slope_
from dqnfed.accel.gradients import Analytic, task_shares
from dqnfed.core.problem import Task

Calls = list[Callable[[], object]]


class Batch(NamedTuple):
    """The tensors that a step reads its batch from."""

    features: Tensor  # [n, d]
    encoded: Tensor  # [n, c] the targets, as the slope takes them
    shares: Tensor | float  # [n, 1], or the same for all: weights of the mean loss


class Sgd(NamedTuple):
    """How steps are taken."""

    lr: float
    momentum: float
    decay: float


def dense_sgd(task: Task, theta: Tensor, found: Analytic, *, momentum: float, decay: float) -> None:
    """Change theta by the task's local steps; `decay` is on theta, the ridge included."""
    features, encoded, width = found.features, found.encoded, task.batches.shape[-1]
    velocity = torch.zeros_like(theta) if momentum else None
    prepared = partial(step_calls, found.chain, theta, velocity, found.slope, Sgd(float(task.lr), momentum, decay))
    if width == 0 and len(features) > dense.ROWS:  # with so many rows, a pass over the weights costs little
        for _ in task.batches:
            slope, _ = found.chain.gradient(theta, features, found.weighted_slope(task_shares(task)))
            slope.add_(theta, alpha=decay)
            moved = slope if velocity is None else velocity.mul_(momentum).add_(slope)
            theta.sub_(moved, alpha=float(task.lr))
        return
    if width == 0:
        calls = prepared(Batch(features, encoded, task_shares(task)[:, None]))
        for _ in task.batches:
            _run(calls)
        return
    inputs, targets = features.new_empty(width, features.shape[1]), encoded.new_empty(width, encoded.shape[1])
    by_size: dict[int, tuple[Batch, Calls]] = {}
    for rows, n_rows in zip(task.batches, (task.batches >= 0).sum(1).tolist(), strict=True):
        if n_rows == 0:
            continue
        if n_rows not in by_size:
            batch = Batch(inputs[:n_rows], targets[:n_rows], 1.0 / n_rows)
            by_size[n_rows] = batch, prepared(batch)
        batch, calls = by_size[n_rows]
        real = rows if n_rows == width else rows[rows >= 0]
        torch.index_select(features, 0, real, out=batch.features)
        torch.index_select(encoded, 0, real, out=batch.encoded)
        _run(calls)


def step_calls(
    chain: DenseChain,
    theta: Tensor,
    velocity: Tensor | None,
    slope: Callable[[Tensor, Tensor], Tensor],
    sgd: Sgd,
    batch: Batch,
) -> Calls:
    """Return the calls that make one step of SGD on what the batch's tensors hold; theta changes in place."""
    weights, layers, n = chain.views(theta), chain.layers, len(batch.features)
    changed, beta, alpha = weights, 1.0 - sgd.lr * sgd.decay, -sgd.lr
    if velocity is not None:
        changed, beta, alpha = chain.views(velocity), sgd.momentum, 1.0
    outputs = [theta.new_empty(n, layer.n_outputs) for layer in layers]
    deltas = [torch.empty_like(t) for t in outputs]  # the loss' derivative before every activation
    activations, ones = [batch.features, *outputs], theta.new_ones(n)

    calls: Calls = []
    for k, (matrix, bias) in enumerate(weights):
        if bias is None:
            calls.append(partial(torch.mm, activations[k], matrix.t(), out=outputs[k]))
        else:
            calls.append(partial(torch.addmm, bias, activations[k], matrix.t(), out=outputs[k]))
        if layers[k].activation:
            calls.append(partial(IN_PLACE[layers[k].activation], outputs[k]))
    calls.append(lambda: torch.mul(slope(outputs[-1], batch.encoded), batch.shares, out=deltas[-1]))
    for k in reversed(range(len(layers))):
        if k:
            calls.append(partial(torch.mm, deltas[k], weights[k].matrix, out=deltas[k - 1]))
            if name := layers[k - 1].activation:
                calls.append(partial(activation_slope_, name, deltas[k - 1], activations[k]))
        matrix, bias = changed[k]
        calls.append(partial(matrix.addmm_, deltas[k].t(), activations[k], beta=beta, alpha=alpha))
        if bias is not None:
            calls.append(partial(bias.addmv_, deltas[k].t(), ones, beta=beta, alpha=alpha))
    if velocity is not None:
        if sgd.decay:
            calls.append(partial(velocity.add_, theta, alpha=sgd.decay))
        calls.append(partial(theta.add_, velocity, alpha=-sgd.lr))
    return calls


def _run(calls: Calls) -> None:
    for call in calls:
        call()

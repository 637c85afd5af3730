"""Local SGD on dense layers, for one client on a CPU: the updates happen inside the products.

A step on a small batch is bound by memory as much as by arithmetic. Here the gradient of a weight matrix is never
stored: its product is added, times minus the learning rate, to the weights themselves (GEMM's own `beta C + alpha A
B`), which saves two of the three passes over the weights that an optimiser makes. What a step writes has its place
from one batch to the next, and a step is few calls: threads side by side wait for each other at every one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dqnfed.core.dense import IN_PLACE, DenseChain, Weights, pull_back
from dqnfed.core.gradients import ByHand, Slope, task_shares
from dqnfed.core.problem import Task


class Places(NamedTuple):
    """What a step on n examples writes."""

    seen: list[Tensor]  # every layer's inputs [n, units] and, last, the outputs
    deltas: list[Tensor]  # the loss' derivatives [n, units] in what the layers but the last make of their inputs
    turned: list[Tensor]  # their transposes
    ones: Tensor  # [n]


class Descent:
    """SGD on the layers that a vector theta holds, in place."""

    def __init__(self, chain: DenseChain, theta: Tensor, *, lr: float, momentum: float, decay: float) -> None:
        self._layers, self._weights = chain.layers, chain.views(theta)
        self._turned = [matrix.t() for matrix, _ in self._weights]
        self._moving = chain.views(torch.zeros_like(theta)) if momentum else None
        self._lr, self._momentum, self._decay = lr, momentum, decay

    def places(self, features: Tensor) -> Places:
        """Return places for steps on features [n, d], which are looked at again in every step."""
        made = [features.new_empty(len(features), layer.n_outputs) for layer in self._layers]
        deltas = [torch.empty_like(hidden) for hidden in made[:-1]]
        return Places([features, *made], deltas, [delta.t() for delta in deltas], features.new_ones(len(features)))

    def step(self, places: Places, slope: Slope, share: float) -> None:
        """Take one step; its gradient is `share` times that of the loss whose derivative in the outputs is `slope`."""
        seen, deltas, all_turned, ones = places
        for k, layer in enumerate(self._layers):
            bias = self._weights[k].bias
            if bias is None:
                torch.mm(seen[k], self._turned[k], out=seen[k + 1])
            else:
                torch.addmm(bias, seen[k], self._turned[k], out=seen[k + 1])
            if layer.activation:
                IN_PLACE[layer.activation](seen[k + 1])
        if self._moving is None:
            changed, beta, alpha = self._weights, 1.0 - self._lr * self._decay, -self._lr * share
        else:
            changed, beta, alpha = self._moving, self._momentum, share
        delta = slope(seen[-1])
        turned = delta.t()
        for k in reversed(range(len(self._layers))):
            if k:
                torch.mm(delta, self._weights[k].matrix, out=deltas[k - 1])
                pull_back(self._layers[k - 1].activation, deltas[k - 1], seen[k])
            matrix, bias = changed[k]
            matrix.addmm_(turned, seen[k], beta=beta, alpha=alpha)
            if bias is not None:
                bias.addmv_(turned, ones, beta=beta, alpha=alpha)
            if k:
                delta, turned = deltas[k - 1], all_turned[k - 1]
        if self._moving is not None:
            self._follow(self._moving)

    def _follow(self, moving: Sequence[Weights]) -> None:
        """Move all layers with their velocities, to which weight decay is added."""
        for weights, speeds in zip(self._weights, moving, strict=True):
            for place, speed in zip(weights, speeds, strict=True):
                if place is not None and speed is not None:
                    place.add_(speed.add_(place, alpha=self._decay) if self._decay else speed, alpha=-self._lr)


def dense_sgd(task: Task, theta: Tensor, found: ByHand, *, momentum: float, decay: float) -> None:
    """Change theta by the task's local steps; `decay` is on theta, the ridge included."""
    descent = Descent(found.chain, theta, lr=float(task.lr), momentum=momentum, decay=decay)
    features, width = found.features, task.batches.shape[-1]
    if width == 0:
        places, slope = descent.places(features), found.weighted_slope(task_shares(task))
        for _ in task.batches:
            descent.step(places, slope, 1.0)
        return
    room, made = features.new_empty(width, features.shape[1]), dict[int, Places]()
    for batch, n_rows in zip(task.batches, (task.batches >= 0).sum(1).tolist(), strict=True):
        if n_rows == 0:
            continue
        rows = batch if n_rows == width else batch[batch >= 0]
        if n_rows not in made:
            made[n_rows] = descent.places(room[:n_rows])
        torch.index_select(features, 0, rows, out=made[n_rows].seen[0])
        descent.step(made[n_rows], found.slope_at(rows), 1.0 / n_rows)

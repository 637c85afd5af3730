"""The last linear layer of a network: where it is in theta, what it sees, and its exact Hessian."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from dqnfed.core.problem import Problem, Task


class Head(NamedTuple):
    """A linear layer at the end of theta: weight [classes, features], then the bias [classes] if it has one."""

    n_classes: int
    n_features: int
    has_bias: bool
    start: int  # where its weight begins in theta

    @property
    def n_columns(self) -> int:
        """The parameters of one class."""
        return self.n_features + int(self.has_bias)

    @property
    def n_parameters(self) -> int:
        return self.n_classes * self.n_columns

    def places(self) -> Tensor:
        """Return the positions in theta [classes, columns]: of every class its weights, then its bias."""
        weights = self.start + torch.arange(self.n_classes * self.n_features).view(self.n_classes, -1)
        if not self.has_bias:
            return weights
        biases = self.start + self.n_classes * self.n_features + torch.arange(self.n_classes)
        return torch.cat([weights, biases[:, None]], dim=1)


def last_layer(problem: Problem) -> Head:
    """Return the head of the problem's model; refuses models that do not end in a linear layer."""
    shapes = [shape for _, shape in problem.layout]
    has_bias = len(shapes) >= 2 and len(shapes[-1]) == 1 and len(shapes[-2]) == 2 and shapes[-1][0] == shapes[-2][0]
    weight = shapes[-2] if has_bias else shapes[-1]
    if len(weight) != 2:
        ends = ", ".join(f"{name} {tuple(shape)}" for name, shape in problem.layout[-2:])
        raise ValueError(
            f"a head is a linear layer at the end of the model, but the model ends with {ends}. "
            "Add nn.Linear(features, classes) as its last layer, or use fednl-diag or fedns-ggn."
        )
    n_classes, n_features = weight
    n_parameters = n_classes * (n_features + int(has_bias))
    return Head(n_classes, n_features, has_bias, problem.n_parameters - n_parameters)


def head_features(problem: Problem, task: Task, theta: Tensor, head: Head) -> Tensor:
    """Return what the head sees [N, columns], the last column being 1 if there is a bias."""
    layer = _layer(problem, head)
    features = _hooked_features(problem, task, theta, layer) if layer is not None else _read(problem, task, theta, head)
    return torch.cat([features, torch.ones_like(features[:, :1])], dim=1) if head.has_bias else features


def _layer(problem: Problem, head: Head) -> nn.Linear | None:
    """Return the module of the head, if the problem was made from modules and it is an ordinary linear layer."""
    if problem.module is None:
        return None
    name = problem.layout[-2 if head.has_bias else -1][0].rpartition(".")[0]
    found = problem.module.get_submodule(name)
    return found if isinstance(found, nn.Linear) else None


def _hooked_features(problem: Problem, task: Task, theta: Tensor, layer: nn.Linear) -> Tensor:
    """Return the layer's inputs in one forward pass."""
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        problem.predict(theta, task.inputs)
    finally:
        hook.remove()
    return seen[0].reshape(len(task.mask), -1)


def _read(problem: Problem, task: Task, theta: Tensor, head: Head) -> Tensor:
    """Return the head's inputs, read off the outputs: unit vectors as weights show as many as there are classes."""
    blocks = []
    body = theta[: head.start]
    for first in range(0, head.n_features, head.n_classes):
        weight = theta.new_zeros(head.n_classes, head.n_features)
        n_read = min(head.n_classes, head.n_features - first)
        weight[:n_read, first : first + n_read] = torch.eye(n_read, dtype=theta.dtype, device=theta.device)
        reading = torch.cat([body, weight.reshape(-1), theta.new_zeros(head.n_classes * int(head.has_bias))])
        blocks.append(problem.predict(reading, task.inputs)[:, :n_read])
    return torch.cat(blocks, dim=1)


def head_hessians(features: Tensor, outputs: Tensor, mask: Tensor, *, is_full: bool) -> Tensor:
    """Return the cross-entropy's Hessian in the head, classes outermost: [1, d, d] whole, or [classes, f, f] blocks.

    Whole: entries (a, b) of (diag p - pp') times zz', averaged over examples; blocks: those with a = b.
    """
    p = torch.softmax(outputs, dim=1)
    share = mask / mask.sum().clamp(min=1)
    if not is_full:
        weights = (p * (1.0 - p) * share[:, None]).T  # [C, N]
        return (weights[:, None, :] * features.T) @ features
    n, n_classes = p.shape
    weights = (torch.diag_embed(p) - p[:, :, None] * p[:, None, :]) * share[:, None, None]
    rows = [
        features.T @ (weights[:, a, :, None] * features[:, None, :]).reshape(n, -1) for a in range(n_classes)
    ]  # each [f, C f]
    return torch.cat(rows)[None]

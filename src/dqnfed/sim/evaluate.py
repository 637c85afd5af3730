"""Every client's loss and score, at one shared model or at a model of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.federation import Examples
from dqnfed.core.problem import Problem


class Measured(NamedTuple):
    """What an evaluation found, per client, in float64, on the device of the examples."""

    loss: Tensor  # [K] mean loss
    score: Tensor | None  # [K] the problem's score

    @property
    def scores(self) -> Tensor:
        """The scores, where they were asked for."""
        assert self.score is not None
        return self.score


@torch.no_grad()
def evaluate(
    problem: Problem, theta: Tensor, examples: Examples, clients: Tensor, *, with_score: bool = True
) -> Measured:
    """Return the given clients' losses and scores at one shared model.

    The model is the same for all, so the clients' examples form one long batch: no per-client call, no padding.
    """
    everyone = torch.equal(clients, torch.arange(len(examples.starts) - 1))
    inputs, targets = (examples.inputs, examples.targets) if everyone else _gathered(examples, clients)
    losses, outputs = problem.kernels.forward(problem, theta, inputs, targets, fixed=everyone)
    sizes = examples.sizes[clients]
    means = _mean_losses(problem, theta, losses, sizes)
    return Measured(means, _scores(problem, outputs, targets, sizes) if with_score else None)


@torch.no_grad()
def evaluate_personal(problem: Problem, thetas: Tensor, examples: Examples, clients: Tensor) -> Measured:
    """Return the given clients' losses and scores, each at its own model (a row of thetas)."""
    inputs, targets = _gathered(examples, clients)
    sizes = examples.sizes[clients]
    losses, outputs = problem.kernels.forward_each(problem, thetas, inputs, targets, sizes)
    return Measured(_mean_losses(problem, thetas, losses, sizes), _scores(problem, outputs, targets, sizes))


def _gathered(examples: Examples, clients: Tensor) -> tuple[Tensor, Tensor]:
    rows = examples.rows(clients).to(examples.inputs.device, non_blocking=True)
    return examples.inputs[rows], examples.targets[rows]


def _mean_losses(problem: Problem, theta: Tensor, losses: Tensor, sizes: Tensor) -> Tensor:
    """Return the clients' mean losses, ridge included; theta is the model of all [n], or of each [K, n]."""
    means = segment_means(losses.to(torch.float64), sizes)
    return means + 0.5 * problem.ridge * theta.square().sum(-1).double() if problem.ridge else means


def _scores(problem: Problem, outputs: Tensor, targets: Tensor, sizes: Tensor) -> Tensor:
    padded = Examples(outputs, targets, torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]))
    index, real = (t.to(outputs.device, non_blocking=True) for t in padded.padded_rows(torch.arange(len(sizes))))
    return vmap(problem.score)(outputs[index], targets[index], real.to(outputs.dtype)).double()


def segment_means(values: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of each consecutive segment of the values."""
    if bool((sizes == sizes[0]).all()):
        return values.view(len(sizes), -1).mean(1)
    return torch.segment_reduce(values, "mean", lengths=sizes.to(values.device))

"""Every client's loss and score, at one shared model or at a model of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.federation import Examples
from dqnfed.core.problem import Problem

EXAMPLES_AT_ONCE = 8192  # bounds the activations of an evaluation


class Judged(NamedTuple):
    """What an evaluation found, per client."""

    loss: Tensor  # [K] mean loss, host float64
    score: Tensor | None  # [K] the problem's score, host float64

    @property
    def scores(self) -> Tensor:
        """The scores, where they were asked for."""
        assert self.score is not None
        return self.score


@torch.no_grad()
def judge(problem: Problem, theta: Tensor, examples: Examples, clients: Tensor, *, with_score: bool = True) -> Judged:
    """Return the given clients' losses and scores at one shared model.

    The model is the same for all, so the clients' examples form one long batch: no per-client call, no padding.
    """
    everyone = torch.equal(clients, torch.arange(len(examples.starts) - 1))
    rows = None if everyone else examples.rows(clients).to(examples.inputs.device)
    inputs = examples.inputs if rows is None else examples.inputs[rows]
    targets = examples.targets if rows is None else examples.targets[rows]
    outputs = torch.cat([problem.predict(theta, part) for part in inputs.split(EXAMPLES_AT_ONCE)])
    losses = problem.losses(outputs, targets).to(torch.float64)
    sizes = examples.sizes[clients]
    means = segment_means(losses, sizes) + 0.5 * problem.ridge * float(theta.square().sum())
    if not with_score:
        return Judged(means.cpu(), None)
    padded = Examples(outputs, targets, torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]))
    index, mask = padded.padded_rows(torch.arange(len(clients)))
    index, mask = index.to(outputs.device), mask.to(outputs.device, outputs.dtype)
    scores = vmap(problem.score)(outputs[index], targets[index], mask)
    return Judged(means.cpu(), scores.to("cpu", torch.float64))


@torch.no_grad()
def judge_personal(problem: Problem, thetas: Tensor, examples: Examples, clients: Tensor) -> Judged:
    """Return the given clients' losses and scores, each at its own model (a row of thetas)."""
    losses, scores = [], []
    for theta, client in zip(thetas, clients, strict=True):
        found = judge(problem, theta, examples, client[None])
        losses.append(found.loss)
        scores.append(found.score)
    return Judged(torch.cat(losses), torch.cat([s for s in scores if s is not None]))


def segment_means(values: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of each consecutive segment of the values."""
    return torch.segment_reduce(values, "mean", lengths=sizes.to(values.device))

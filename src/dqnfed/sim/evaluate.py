"""Every client's loss and score, at one shared model or at a model of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.federation import Examples
from dqnfed.core.problem import ModuleModel, Problem
from dqnfed.maths.transfer import sent_to
from dqnfed.sim.graphs import GraphedFunction

EXAMPLES_AT_ONCE = 8192  # bounds the activations of an evaluation on a GPU
PADDED_AT_ONCE = 2**15  # of clients that are judged together, each padded to the largest
EXAMPLES_IN_CACHE = 1024  # and on a processor, which is slower when they fall out of its cache


class Judged(NamedTuple):
    """What an evaluation found, per client, in float64, where the examples are: a GPU can go on meanwhile."""

    loss: Tensor  # [K] mean loss
    score: Tensor | None  # [K] the problem's score

    @property
    def scores(self) -> Tensor:
        """The scores, where they were asked for."""
        assert self.score is not None
        return self.score


def forward_of(problem: Problem) -> GraphedFunction:
    """Return the function of (theta, inputs, targets) that gives the examples' losses and outputs."""

    def forward(theta: Tensor, inputs: Tensor, targets: Tensor) -> Sequence[Tensor]:
        size = EXAMPLES_AT_ONCE if inputs.is_cuda else EXAMPLES_IN_CACHE
        outputs = [problem.predict(theta, part) for part in inputs.split(size)]
        losses = [problem.losses(*given) for given in zip(outputs, targets.split(size), strict=True)]
        return torch.cat(losses), torch.cat(outputs)

    return GraphedFunction(forward)


@torch.no_grad()
def judge(
    problem: Problem,
    theta: Tensor,
    examples: Examples,
    clients: Tensor,
    *,
    with_score: bool = True,
    forward: GraphedFunction | None = None,  # `forward_of` the problem, from an earlier time
) -> Judged:
    """Return the given clients' losses and scores at one shared model.

    The model is the same for all, so the clients' examples form one long batch: no per-client call, no padding.
    """
    forward = forward or forward_of(problem)
    everyone = torch.equal(clients, torch.arange(len(examples.starts) - 1))
    rows = None if everyone else sent_to(examples.inputs.device, examples.rows(clients))
    inputs = examples.inputs if rows is None else examples.inputs[rows]
    targets = examples.targets if rows is None else examples.targets[rows]
    losses, outputs = forward(theta, inputs, targets, lying=(1, 2) if everyone else ())
    sizes = examples.sizes[clients]
    means = segment_means(losses.to(torch.float64), sizes)
    if problem.ridge:
        means = means + 0.5 * problem.ridge * theta.square().sum().double()
    if not with_score:
        return Judged(means, None)
    padded = Examples(outputs, targets, torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]))
    index, real = padded.padded_rows(torch.arange(len(clients)))
    index, mask = sent_to(outputs.device, index), sent_to(outputs.device, real).to(outputs.dtype)
    scores = vmap(problem.score)(outputs[index], targets[index], mask)
    return Judged(means, scores.double())


@torch.no_grad()
def judge_personal(problem: Problem, thetas: Tensor, examples: Examples, clients: Tensor) -> Judged:
    """Return the given clients' losses and scores, each at its own model (a row of thetas)."""
    n_rows = len(clients) * int(examples.sizes[clients].max())
    if thetas.is_cuda and is_dense(problem) and n_rows <= PADDED_AT_ONCE:
        return judge_personal_together(problem, thetas, examples, clients)
    losses, scores = [], []
    for theta, client in zip(thetas, clients, strict=True):
        found = judge(problem, theta, examples, client[None])
        losses.append(found.loss)
        scores.append(found.score)
    return Judged(torch.cat(losses), torch.cat([s for s in scores if s is not None]))


@torch.no_grad()
def judge_personal_together(problem: Problem, thetas: Tensor, examples: Examples, clients: Tensor) -> Judged:
    """Return what `judge_personal` does, for all clients in one go: a GPU does nothing while it is asked one by one."""
    rows, real = examples.padded_rows(clients)
    rows, real = sent_to(examples.inputs.device, rows), sent_to(thetas.device, real)
    mask, targets = real.to(thetas.dtype), examples.targets[rows]
    outputs = vmap(problem.predict)(thetas, examples.inputs[rows])
    losses = vmap(problem.losses)(outputs, targets).where(real, 0.0).double().sum(1) / real.sum(1)
    ridge = 0.5 * problem.ridge * thetas.double().square().sum(1)
    scores = vmap(problem.score)(outputs, targets, mask)
    return Judged(losses + ridge, scores.double())


def is_dense(problem: Problem) -> bool:
    """Return whether the model is of dense layers alone, whose products vectorise well over models too."""
    return isinstance(problem.predict, ModuleModel) and problem.predict.chain is not None


def segment_means(values: Tensor, sizes: Tensor) -> Tensor:
    """Return the mean of each consecutive segment of the values."""
    if bool((sizes == sizes[0]).all()):
        return values.view(len(sizes), -1).mean(1)
    return torch.segment_reduce(values, "mean", lengths=sizes.to(values.device))

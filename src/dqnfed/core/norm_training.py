"""Local training of a model with BatchNorm: steps with the statistics of each batch, then those of all examples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dqnfed.core.kernels import PLAIN, Pull
from dqnfed.core.norms import batch_statistics
from dqnfed.core.problem import ModuleModel, Problem, Task


@dataclass(frozen=True)
class NormTraining(Problem):
    """The problem of training all of theta but BatchNorm's statistics, which are those of the examples of a loss."""

    def loss(self, theta: Tensor, task: Task) -> Tensor:
        with batch_statistics(_module(self), task.mask):
            return super().loss(theta, task)

    def batch_loss(self, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
        with batch_statistics(_module(self), (batch >= 0).to(task.mask.dtype)):
            return super().batch_loss(theta, task, batch)


def _module(problem: Problem) -> nn.Module:
    assert isinstance(problem.predict, ModuleModel)
    return problem.predict.module


def sgd_with_norms(
    problem: Problem, task: Task, theta: Tensor, *, pull: Pull | None, correction: Tensor | None, **settings: Any
) -> Tensor:
    """Return theta after the task's local steps, with the statistics that all the client's examples have then."""
    assert problem.norms is not None
    n = problem.norms.n_trained
    if pull is not None:
        pull = pull._replace(anchor=pull.anchor[:n])
    correction = None if correction is None else correction[:n]
    view = _of_trained(problem, theta[n:])
    trained = PLAIN.sgd(view, task, theta[:n], pull=pull, correction=correction, **settings)
    return with_statistics(problem, torch.cat([trained, theta[n:]]), task)


def with_statistics(problem: Problem, theta: Tensor, task: Task) -> Tensor:
    """Return theta with the statistics of the task's examples in it, from one forward pass over them."""
    assert problem.norms is not None
    n, model = problem.norms.n_trained, problem.predict
    if not isinstance(model, ModuleModel):  # no module, no layers: it stands in for one
        return theta
    with torch.no_grad(), batch_statistics(model.module, task.mask) as layers:
        model(theta, task.inputs)
        found = [layer.seen for layer in layers]
    if None in found:
        raise ValueError("a BatchNorm layer of the model is not used in its forward pass; remove it.")
    return torch.cat([theta[:n], *(t.reshape(-1) for pair in found if pair is not None for t in pair)])


def _of_trained(problem: Problem, statistics: Tensor) -> Problem:
    model = problem.predict
    if not isinstance(model, ModuleModel):
        return replace(problem, predict=lambda part, x: model(torch.cat([part, statistics]), x), norms=None)
    layout = problem.layout[: sum(1 for _ in model.module.parameters())]
    given = {name: getattr(problem, name) for name in ("losses", "score", "score_name", "ridge", "loss_floor")}
    return NormTraining(
        theta0=problem.theta0[: len(problem.theta0) - len(statistics)],
        layout=layout,
        predict=replace(model, layout=layout),
        **given,
    )

"""Which runner suits a model: a rule, so that the same run has the same bits on every machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dqnfed.accel.fast_model import FastModel
from dqnfed.accel.graph_runner import cuda_graph_safe, graphed
from dqnfed.accel.patches import in_patches
from dqnfed.accel.threads import threads
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import ModuleModel, Problem
from dqnfed.core.runners import CohortRunner, vectorised

# Parameters times examples of one gradient, from which on a client on one core of a CPU takes less time alone than
# under vmap: products of dense layers vectorise well, convolutions and recurrences do not.
DENSE_WORK = 3e6
OTHER_WORK = 1e5
# Numbers that the convolutions of one batch multiply (`accel.patches`), up to which clients of a GPU are computed
# together: their steps are then so small that launching them one by one takes longer than computing them.
SMALL_PATCHES = 2**23


def automatic(algorithm: AnyAlgorithm, problem: Problem, federation: Federation) -> CohortRunner:
    """Return the runner for this model: CUDA graphs on a GPU; on a CPU threads, or vmap where there is little work."""
    model = problem.predict
    if problem.theta0.device.type != "cpu":
        return graphed()
    if not isinstance(model, ModuleModel):
        return vectorised()
    batch_size: int | None = getattr(algorithm, "batch_size", None)
    n_examples = batch_size or float(federation.n_examples.double().mean())
    enough = OTHER_WORK if FastModel(model).chain is None else DENSE_WORK
    return threads() if problem.n_parameters * n_examples >= enough else vectorised()


def on_streams(algorithm: AnyAlgorithm, problem: Problem, federation: Federation) -> bool:
    """Return whether a GPU's clients are run apart from each other: a network with convolutions, but for small ones."""
    parts = [part for part in (problem.module or nn.Identity()).modules() if isinstance(part, nn.Conv2d)]
    if not parts:
        return False
    batch_size: int | None = getattr(algorithm, "batch_size", None)
    if batch_size is None or not cuda_graph_safe(algorithm) or algorithm.info.looped_messages:
        return True
    model = problem.predict
    if not isinstance(model, ModuleModel) or model.autocast is not None or in_patches(model.module) is None:
        return True
    return batch_size * patch_numbers(problem, federation) > SMALL_PATCHES


def patch_numbers(problem: Problem, federation: Federation) -> int:
    """Return how many numbers the convolutions of one example multiply by their kernels."""
    found = 0

    def count(layer: nn.Module, _: object, output: Tensor) -> None:
        nonlocal found
        assert isinstance(layer, nn.Conv2d)
        found += output[0, 0].numel() * layer.weight[0].numel()

    inputs, _ = federation.train.taken(torch.arange(1))
    replica = problem.replica()
    assert replica.module is not None
    hooks = [part.register_forward_hook(count) for part in replica.module.modules() if isinstance(part, nn.Conv2d)]
    with torch.no_grad():
        replica.predict(problem.theta0, inputs[:1].to(problem.theta0.device))
    for hook in hooks:
        hook.remove()
    return found

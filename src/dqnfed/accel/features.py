"""The layers before the first dense one applied to all images once, where a GPU has memory for the floats."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor, nn

from dqnfed.accel.dense import DenseChain
from dqnfed.accel.fast_model import FastModel
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import ModuleModel, Problem
from dqnfed.models.layers import Normalise

APPLIED = (Normalise, nn.Flatten)  # without parameters, and the same for an example in any batch
SHARE = 1 / 16  # of the free memory that the floats may take, four times as much as bytes
ROWS = 8192  # at once


def with_features(problem: Problem, federation: Federation) -> tuple[Problem, Federation]:
    """Return a problem of the same values on examples to which the layers before the first dense one were applied.

    As given, where that does not pay: on a CPU, whose caches hold more of the bytes, for models that are no chain of
    dense layers, for inputs that are floats already, and where the floats would take too much of the GPU's memory.
    """
    model, parts = problem.predict, _parts(federation)
    chain = FastModel(model).chain if isinstance(model, ModuleModel) else None
    if not isinstance(model, ModuleModel) or chain is None or not _pays(chain, parts, problem.theta0):
        return problem, federation
    train, test, *validation = (_applied(chain, part, problem.theta0) for part in parts)
    changed = replace(federation, train=train, test=test, validation=validation[0] if validation else None)
    return replace(problem, predict=replace(model, module=_without_applied(model.module))), changed


def _without_applied(module: nn.Module) -> nn.Module:
    """Return a chain of the same dense layers, not of copies: hooks on one of them still work."""
    if type(module) in APPLIED:
        return nn.Identity()
    if type(module) is not nn.Sequential:
        return module
    return nn.Sequential(OrderedDict((name, _without_applied(part)) for name, part in module.named_children())).eval()


def _parts(federation: Federation) -> list[Examples]:
    return [part for part in (federation.train, federation.test, federation.validation) if part is not None]


def _pays(chain: DenseChain, parts: list[Examples], theta: Tensor) -> bool:
    if not all(part.inputs.is_cuda and part.inputs.dtype == torch.uint8 for part in parts):
        return False
    if not chain.preparation or any(type(part) not in APPLIED for part in chain.preparation):
        return False
    n_numbers = sum(len(part.inputs) for part in parts) * chain.layers[0].n_inputs
    free, _ = torch.cuda.mem_get_info(theta.device)
    return n_numbers * theta.element_size() <= SHARE * free


@torch.no_grad()
def _applied(chain: DenseChain, part: Examples, theta: Tensor) -> Examples:
    features = theta.new_empty(len(part.inputs), chain.layers[0].n_inputs)
    for rows, place in zip(part.inputs.split(ROWS), features.split(ROWS), strict=True):
        found = chain.features(rows)
        assert found is not None  # the model takes these inputs
        place.copy_(found)
    return part._replace(inputs=features)

"""What the faster forms keep about one module: its dense layers, its compiled form and its captured steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dqnfed.accel.dense import DenseChain, dense_chain
from dqnfed.accel.fused_linear import fused_module
from dqnfed.accel.patches import in_patches
from dqnfed.accel.pooling import pooled_first
from dqnfed.core.problem import ModuleModel, Problem
from dqnfed.core.tensors import Layout

Outputs = Callable[[dict[str, Tensor], Tensor], Tensor]  # parameters by name, inputs [N, ...] -> outputs [N, ...]


class Compiled(NamedTuple):
    """A model's outputs, compiled by torch when they are first computed, and for what."""

    outputs: Outputs
    autocast: torch.dtype | None
    device: torch.device

    def fits(self, problem: Problem) -> bool:
        """Return whether it was compiled for the precision and the device of this problem."""
        autocast = problem.predict.autocast if isinstance(problem.predict, ModuleModel) else None
        return autocast == self.autocast and problem.theta0.device == self.device


@dataclass(eq=False)
class FastModel:
    """One module and what was derived from it."""

    model: ModuleModel
    compiled: Outputs | None = None
    steps: dict[Any, Any] = field(default_factory=dict)  # of local SGD, captured for a GPU
    captures_steps: bool = True
    patches_on_cpu: bool = False  # for tests without a GPU

    @cached_property
    def chain(self) -> DenseChain | None:
        """The module as dense layers, where it is nothing else."""
        return None if self.model.autocast is not None else dense_chain(self.model.module, self.model.layout)

    @cached_property
    def has_images(self) -> bool:
        """Whether the module has kernels of images, whose layout and whose number at once count on a CPU."""
        return any(len(shape) == 4 for _, shape in self.layout)

    @cached_property
    def on_cpu(self) -> ModuleModel:
        """The model as a CPU computes it: a ReLU after the pooling that follows it."""
        return replace(self.model, module=pooled_first(self.model.module)) if self.has_images else self.model

    @cached_property
    def in_patches(self) -> ModuleModel | None:
        """The model with convolutions as products, which vmap takes well; None where it has no such form."""
        module = None if self.model.autocast is not None else in_patches(self.model.module)
        return None if module is None else replace(self.model, module=module)

    @cached_property
    def fused(self) -> ModuleModel | None:
        """The model with dense layers that make a step of SGD in their backward pass; None where it has none."""
        is_plain = self.compiled is None and self.model.autocast is None
        module = fused_module(self.on_cpu.module) if is_plain else None
        return None if module is None else replace(self.model, module=module)

    def for_vmap(self, problem: Problem) -> Problem:
        """Return the problem whose gradients at each client's own model are computed fast under vmap."""
        if self.in_patches is None or not (problem.theta0.is_cuda or self.patches_on_cpu):
            return problem
        return replace(problem, predict=self.in_patches)

    @property
    def layout(self) -> Layout:
        return self.model.layout

    def outputs(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        """Return the outputs in a step of training, whose shapes come again and again: compiled, where it is."""
        model = self.model if inputs.is_cuda else self.on_cpu
        return (self.compiled or model.outputs)(parameters, inputs)


def fast_model(problem: Problem, compiled: Compiled | None = None, *, patches_on_cpu: bool = False) -> FastModel | None:
    """Return the problem's module with nothing derived from it yet, or None if the model is a plain function."""
    if not isinstance(problem.predict, ModuleModel):
        return None
    outputs = compiled.outputs if compiled is not None and compiled.fits(problem) else None
    return FastModel(problem.predict, outputs, patches_on_cpu=patches_on_cpu)


def compiled_outputs(problem: Problem) -> Compiled:
    """Return the model's outputs as a function that torch compiles when it is first called.

    Replicas share it: it reads the module while it is being compiled, and never after.
    """
    model = problem.predict
    if not isinstance(model, ModuleModel):
        raise ValueError("only problems made from modules can be compiled; leave `run.compile` out.")

    def outputs(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        return model.outputs(parameters, inputs)

    # torch gives up on a function that it has compiled eight times over; so every model has a function of its own
    own = FunctionType(outputs.__code__.replace(), outputs.__globals__, "outputs", None, outputs.__closure__)
    return Compiled(torch.compile(own, fullgraph=True, dynamic=False), model.autocast, problem.theta0.device)

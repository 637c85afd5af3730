"""Local SGD of networks with dense layers and others, on a CPU: dense layers change inside the backward pass.

The gradient of a large weight matrix takes as much memory as the matrix, and is read once. As in
`dqnfed.accel.dense_sgd`, its product is added to the weights themselves instead, and never stored.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from dqnfed.accel.dense import has_hooks
from dqnfed.accel.onednn import linear


class FusedLinear(nn.Module):
    """A dense layer that makes its step of SGD in its backward pass, after the gradient in its inputs."""

    lr, kept = 0.0, 1.0  # of the present task: the learning rate, and what weight decay leaves of a parameter in a step

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        found: Tensor = _Step.apply(rows, self.weight, self.bias, self.lr, self.kept)  # type: ignore[no-untyped-call]
        return found.view(*inputs.shape[:-1], -1)


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, lr: float, kept: float) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.weight, ctx.bias, ctx.lr, ctx.kept = weight, bias, lr, kept
        return linear(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (rows,) = ctx.saved_tensors
        weight = ctx.weight.data  # autograd counts changes of theta, of which other layers' parameters are views too
        in_rows = linear(slope, weight.t()) if ctx.needs_input_grad[0] else None
        weight.addmm_(slope.t(), rows, beta=ctx.kept, alpha=-ctx.lr)
        if ctx.bias is not None:
            ctx.bias.data.mul_(ctx.kept).sub_(slope.sum(0), alpha=ctx.lr)
        return in_rows, None, None, None, None


def fused_module(module: nn.Module) -> nn.Module | None:
    """Return a copy whose dense layers are `FusedLinear`, where it is certain that each is called once; else None.

    It is certain of layers of an `nn.Sequential` if no module and no parameter is in the network twice.
    """
    once, all_times = (
        [*module.named_modules(remove_duplicate=once), *module.named_parameters(remove_duplicate=once)]
        for once in (True, False)
    )
    if len(once) < len(all_times):
        return None
    found = copy.deepcopy(module)
    return found if _fuse(found) else None


def _fuse(chain: nn.Module) -> bool:
    """Put fused layers into a chain, and return whether it has any."""
    if type(chain) is not nn.Sequential or has_hooks(chain):
        return False
    is_fused = False
    for name, part in list(chain.named_children()):
        if type(part) is nn.Linear and not has_hooks(part):
            setattr(chain, name, FusedLinear(part))
            is_fused = True
        else:
            is_fused |= _fuse(part)
    return is_fused


def set_step(module: nn.Module, lr: float, kept: float) -> set[str]:
    """Set the fused layers' step, and return their parameters' names."""
    found: set[str] = set()
    for path, part in module.named_modules():
        if isinstance(part, FusedLinear):
            part.lr, part.kept = lr, kept
            found |= {f"{path}.{name}" for name, _ in part.named_parameters()}
    return found

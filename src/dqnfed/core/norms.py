"""BatchNorm layers of clients: where they are in theta, and their statistics of examples of which some are padding."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dqnfed.core.tensors import Layout

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
Moments = tuple[Tensor, Tensor]  # mean and variance of each channel


class Norms(NamedTuple):
    """The parts of theta: first all that is common, then BatchNorm's weights and biases, then its statistics."""

    n_shared: int  # theta[:n_shared]
    n_trained: int  # theta[n_shared:n_trained] are weights and biases, the rest means and variances


class ClientBatchNorm(nn.modules.batchnorm._BatchNorm):
    """BatchNorm with the statistics that it holds or, while it has a mask, with those of the examples in the mask."""

    mask: Tensor | None = None  # [N] 1 = a real example
    seen: Moments | None = None  # the statistics of the forward pass with a mask

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        mean, var = self.running_mean, self.running_var
        if self.mask is not None:
            if self.seen is not None:
                raise ValueError("a BatchNorm layer is used twice in one forward pass, and has one set of statistics.")
            mean, var = self.seen = moments(x, self.mask)
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        found = (x - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.affine:
            found = found * self.weight.view(shape) + self.bias.view(shape)
        return found.to(x.dtype)


def moments(x: Tensor, mask: Tensor) -> Moments:
    """Return mean and variance (over the count) of each channel of x [N, C, ...] over the examples in the mask."""
    wide = x.to(mask.dtype)
    shares = mask.view(-1, *(1 for _ in x.shape[1:]))
    others = [d for d in range(x.dim()) if d != 1]
    count = mask.sum().clamp(min=1) * x[0, 0].numel()
    mean = (shares * wide).sum(others) / count
    centred = wide - mean.view(1, -1, *(1 for _ in x.shape[2:]))
    return mean, (shares * centred.square()).sum(others) / count


def with_client_norms(module: nn.Module) -> nn.Module:
    """Return a copy of the module whose BatchNorm layers are `ClientBatchNorm`."""
    found = copy.deepcopy(module)
    for layer in found.modules():
        if type(layer) in BATCH_NORMS:
            layer.__class__ = ClientBatchNorm
    return found


def norms_of(module: nn.Module) -> tuple[Layout, Tensor, Norms] | None:
    """Return how theta holds a module with BatchNorm, theta itself and its parts; None where it has no such layer."""
    layers = {name: part for name, part in module.named_modules() if type(part) in BATCH_NORMS}
    if not layers:
        return None
    held = {f"{name}." if name else "": layer for name, layer in layers.items()}
    own = {f"{prefix}{key}" for prefix, layer in held.items() for key, _ in layer.named_parameters()}
    parameters = dict(module.named_parameters())
    shared = [name for name in parameters if name not in own]
    statistics = {f"{prefix}{key}": layer.get_buffer(key) for prefix, layer in held.items() for key in STATISTICS}
    named = {
        **{name: parameters[name].detach() for name in [*shared, *(n for n in parameters if n in own)]},
        **statistics,
    }
    sizes = [t.numel() for t in named.values()]
    layout = tuple((name, t.shape) for name, t in named.items())
    theta = torch.cat([t.reshape(-1) for t in named.values()])
    return layout, theta, Norms(sum(sizes[: len(shared)]), sum(sizes[: len(parameters)]))


STATISTICS = ("running_mean", "running_var")


@contextmanager
def batch_statistics(module: nn.Module, mask: Tensor) -> Iterator[list[ClientBatchNorm]]:
    """Let the module's BatchNorm layers take the statistics of the examples in the mask, and yield these layers."""
    layers = [part for part in module.modules() if isinstance(part, ClientBatchNorm)]
    for layer in layers:
        layer.mask, layer.seen = mask, None
    try:
        yield layers
    finally:
        for layer in layers:
            layer.mask = layer.seen = None

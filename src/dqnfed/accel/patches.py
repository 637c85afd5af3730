"""Convolutions as products of matrices, which `torch.func.vmap` makes one batched product for all clients.

Under vmap a convolution whose kernels differ from client to client becomes a grouped one, whose gradients are slow.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def patches(images: Tensor, size: int, padding: int) -> Tensor:
    """Return what a square kernel sees at each place of the padded images, [N H' W', C size size]."""
    padded = F.pad(images, (padding,) * 4) if padding else images
    windows = padded.unfold(2, size, 1).unfold(3, size, 1)  # [N, C, H', W', size, size]
    return windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(0, 2)


class Convolution(torch.autograd.Function):
    """The convolution of images [N, C, H, W] with square kernels [O, C, k, k], stride 1 and zeros around the images."""

    generate_vmap_rule = True

    @staticmethod
    def forward(images: Tensor, kernels: Tensor, padding: int) -> tuple[Tensor, Tensor]:
        """Return the convolution, and the patches that it multiplies, for its gradient."""
        size = kernels.shape[-1]
        seen = patches(images, size, padding)
        height, width = (extent + 2 * padding - size + 1 for extent in images.shape[2:])
        found = seen @ kernels.flatten(1).T
        return found.unflatten(0, (len(images), height, width)).permute(0, 3, 1, 2), seen

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the gradient needs."""
        _, kernels, ctx.padding = inputs
        ctx.save_for_backward(kernels, output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor, None]:
        """Return the gradients: that in the images is a convolution with the kernels turned around."""
        kernels, seen = ctx.saved_tensors
        by_place = slope.permute(0, 2, 3, 1).flatten(0, 2)
        in_kernels = (by_place.T @ seen).reshape(kernels.shape)
        if not ctx.needs_input_grad[0]:
            return None, in_kernels, None
        turned, size = kernels.flip(2, 3).transpose(0, 1), kernels.shape[-1]
        in_images, _ = Convolution.forward(slope, turned, size - 1 - ctx.padding)
        return in_images, in_kernels, None


class PatchConv2d(nn.Module):
    """A `nn.Conv2d` with the same parameters, computed as a product of matrices."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        self.weight, self.bias, self._padding = layer.weight, layer.bias, _padding_of(layer)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = Convolution.apply(images, self.weight, self._padding)[0]  # type: ignore[no-untyped-call]
        return found if self.bias is None else found + self.bias[:, None, None]


def has_patches(layer: nn.Conv2d) -> bool:
    """Return whether the convolution has a form here: square kernels, no stride, groups or holes, zeros around."""
    height, width = layer.kernel_size
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1
    padded = isinstance(layer.padding, str) or len({*layer.padding}) == 1
    fits = height == width and layer.padding_mode == "zeros" and padded
    return plain and fits and _padding_of(layer) < height and (layer.padding != "same" or height % 2 == 1)


def in_patches(module: nn.Module) -> nn.Module | None:
    """Return a copy of the module whose convolutions are products; None if it has none, or some that have no form."""
    layers = [part for part in module.modules() if isinstance(part, nn.modules.conv._ConvNd)]
    if not layers or not all(type(part) is nn.Conv2d and has_patches(part) for part in layers):
        return None
    if isinstance(module, nn.Conv2d):
        return PatchConv2d(copy.deepcopy(module))
    found = copy.deepcopy(module)
    for part in list(found.modules()):
        for name, child in part.named_children():
            if isinstance(child, nn.Conv2d):
                setattr(part, name, PatchConv2d(child))
    return found


def _padding_of(layer: nn.Conv2d) -> int:
    if isinstance(layer.padding, str):
        return (layer.kernel_size[0] - 1) // 2 if layer.padding == "same" else 0
    return int(layer.padding[0])

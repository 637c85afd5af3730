"""Layers that several models share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dqnfed.models.group_norm import ImageGroupNorm


class Normalise(nn.Module):
    """Turns bytes 0..255 into floats, (x / 255 - mean) / std per channel, so that images stay uint8 until the device.

    `mean` and `std` are constants of the dataset, not running statistics: they never change and no client sends them.
    Inputs that already are floats are taken to be in 0..1.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not mean:
            raise ValueError(f"mean and std need one value a channel each, got {len(mean)} and {len(std)}.")
        if min(std) <= 0:
            raise ValueError(f"every std must be positive, got {list(std)}.")
        middle, spread = (torch.tensor(list(values), dtype=torch.float64).view(-1, 1, 1) for values in (mean, std))
        self.register_buffer("scale", (1.0 / spread).to(torch.get_default_dtype()))
        self.register_buffer("shift", (-middle / spread).to(torch.get_default_dtype()))

    def forward(self, images: Tensor) -> Tensor:
        if images.is_floating_point():
            return images * self.scale + self.shift
        if images.is_cuda:
            return torch.addcmul(self.shift, images, self.scale / 255.0)  # bytes become floats on the way: one pass
        # In place on the fresh copy: at a pass over all images this layer is otherwise dearer than a small model.
        return images.to(self.scale.dtype).mul_(self.scale / 255.0).add_(self.shift)


def group_norm(channels: int, groups: int | None) -> nn.GroupNorm:
    """Return GroupNorm (Wu & He, ECCV 2018) with `groups` groups, or min(32, channels / 2) when None.

    Unlike the paper, which names no number of groups, ours is fixed and the same for every method.
    """
    chosen = min(32, max(1, channels // 2)) if groups is None else groups
    if channels % chosen:
        raise ValueError(f"{chosen} groups do not divide {channels} channels; choose a divisor of {channels}.")
    return ImageGroupNorm(chosen, channels)


def norm_layers(norm: str, batch_norm: type[nn.Module]) -> Callable[[int], list[nn.Module]]:
    """Return what stands behind a layer of so many channels: nothing, or BatchNorm."""
    if norm not in ("none", "batch"):
        raise ValueError(f"norm must be none or batch, but is {norm!r}.")
    return lambda channels: [batch_norm(channels)] if norm == "batch" else []

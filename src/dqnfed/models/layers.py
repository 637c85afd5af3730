"""Layers without running statistics that several models share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalise(nn.Module):
    """Turns bytes 0..255 into floats, (x / 255 - mean) / std per channel, so that images stay uint8 until the device.

    `mean` and `std` are constants of the dataset, not running statistics: they never change and no client sends them.
    Inputs that already are floats are taken to be in 0..1.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        if len(mean) != len(std) or not mean:
            raise ValueError(f"mean and std need one value a channel each, got {len(mean)} and {len(std)}.")
        if min(std) <= 0:
            raise ValueError(f"every std must be positive, got {list(std)}.")
        self.register_buffer("mean", torch.tensor(list(mean)).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(list(std)).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        scaled = images if images.is_floating_point() else images.to(self.mean.dtype) / 255.0
        return (scaled - self.mean) / self.std


def group_norm(channels: int, groups: int | None) -> nn.GroupNorm:
    """Return GroupNorm (Wu & He, ECCV 2018) with `groups` groups, or min(32, channels / 2) when None.

    Unlike the paper, which names no number of groups, ours is fixed and the same for every method.
    """
    chosen = min(32, max(1, channels // 2)) if groups is None else groups
    if channels % chosen:
        raise ValueError(f"{chosen} groups do not divide {channels} channels; choose a divisor of {channels}.")
    return nn.GroupNorm(chosen, channels)

"""ResNet-18 with GroupNorm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from dqnfed.models.layers import group_norm

Stem = Literal["cifar", "tinyimagenet", "imagenet"]


@dataclass(frozen=True)
class ResNet18Settings:
    stem: Stem = "cifar"  # cifar: 3x3, stride 1; tinyimagenet: 3x3, stride 2; imagenet: 7x7, stride 2, then max-pool
    groups: int | None = None  # of GroupNorm; None: min(32, channels / 2)
    width: int = 64  # channels of the first stage, doubled at each of the three next


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al., CVPR 2016), GroupNorm instead of BatchNorm."""

    def __init__(self, channels_in: int, channels: int, stride: int, groups: int | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = group_norm(channels, groups)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = group_norm(channels, groups)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), group_norm(channels, groups)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        total: Tensor = self.norm2(self.conv2(y)) + self.shortcut(x)
        return total.relu()


class GlobalAverage(nn.Module):
    """The mean over all pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


def resnet18(input_shape: tuple[int, ...], n_outputs: int, settings: ResNet18Settings) -> nn.Module:
    """Return ResNet-18 with GroupNorm: 11,173,962 parameters for 10 classes with the CIFAR stem, 11,181,642 with
    ImageNet's.
    """
    if len(input_shape) != 3:
        raise ValueError(f"resnet18 needs images [channels, height, width], got inputs of shape {list(input_shape)}.")
    width = settings.width
    if settings.stem == "cifar":
        stem = [nn.Conv2d(input_shape[0], width, 3, 1, padding=1, bias=False)]
    elif settings.stem == "tinyimagenet":
        stem = [nn.Conv2d(input_shape[0], width, 3, 2, padding=1, bias=False)]
    elif settings.stem == "imagenet":
        stem = [nn.Conv2d(input_shape[0], width, 7, 2, padding=3, bias=False)]
    else:
        raise ValueError(f"stem must be cifar, tinyimagenet or imagenet, got {settings.stem!r}.")
    pool = [nn.MaxPool2d(3, 2, padding=1)] if settings.stem == "imagenet" else []
    blocks: list[nn.Module] = []
    channels = width
    for stage in range(4):
        for block in range(2):
            wider = width * 2**stage
            blocks.append(BasicBlock(channels, wider, 2 if stage > 0 and block == 0 else 1, settings.groups))
            channels = wider
    model = nn.Sequential(
        *stem,
        group_norm(width, settings.groups),
        nn.ReLU(),
        *pool,
        *blocks,
        GlobalAverage(),
        nn.Linear(channels, n_outputs),
    )
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return model

"""ResNet-50 whose normalisation is frozen, and a loader for pretrained weights in a local file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from dqnfed.models.resnet18 import GlobalAverage

BATCH_NORM_EPS = 1e-5  # the constant inside published BatchNorm layers


@dataclass(frozen=True)
class ResNet50Settings:
    weights: str | None = None  # a local .safetensors or .pth state dict in torchvision's naming; None: random
    blocks: tuple[int, int, int, int] = (3, 4, 6, 3)
    width: int = 64


class FrozenNorm(nn.Module):
    """BatchNorm with everything fixed: x * scale + shift per channel, from pretrained statistics. Nothing here is
    trained or sent.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, channels: int, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((channels, 1, 1), scale))
        self.register_buffer("shift", torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut; the stride is on the 3x3 one."""

    def __init__(self, channels_in: int, width: int, stride: int, residual_scale: float) -> None:
        super().__init__()
        channels = 4 * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = FrozenNorm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = FrozenNorm(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.bn3 = FrozenNorm(channels, residual_scale)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), FrozenNorm(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        total: Tensor = self.bn3(self.conv3(y)) + self.downsample(x)
        return total.relu()


class ResNet50(nn.Module):
    """The network of He et al. (CVPR 2016) with torchvision's names, so that its published weights fit."""

    def __init__(self, n_channels: int, n_outputs: int, settings: ResNet50Settings) -> None:
        super().__init__()
        width = settings.width
        self.conv1 = nn.Conv2d(n_channels, width, 7, 2, padding=3, bias=False)
        self.bn1 = FrozenNorm(width)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        # With identity normalisation (no weights given) each residual branch is damped, else activations double per
        # block.
        damping = sum(settings.blocks) ** -0.5
        channels = width
        for stage, n_blocks in enumerate(settings.blocks):
            blocks = []
            for block in range(n_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                blocks.append(Bottleneck(channels, width * 2**stage, stride, damping))
                channels = 4 * width * 2**stage
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.average = GlobalAverage()
        self.fc = nn.Linear(channels, n_outputs)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.bn1(self.conv1(x)).relu())
        for stage in (1, 2, 3, 4):
            x = self.get_submodule(f"layer{stage}")(x)
        logits: Tensor = self.fc(self.average(x))
        return logits


def resnet50(input_shape: tuple[int, ...], n_outputs: int, settings: ResNet50Settings) -> nn.Module:
    """Return ResNet-50 with frozen normalisation, started from `settings.weights` where given (a new last layer
    aside).
    """
    if len(input_shape) != 3:
        raise ValueError(f"resnet50 needs images [channels, height, width], got inputs of shape {list(input_shape)}.")
    model = ResNet50(input_shape[0], n_outputs, settings)
    if settings.weights is not None:
        load_pretrained(model, read_weights(Path(settings.weights)))
    return model


def read_weights(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a .safetensors file or of a .pth state dict, the latter without running any code in it."""
    if not path.is_file():
        raise FileNotFoundError(
            f"model.weights names {path}, which is not a file. Put a ResNet-50 state dict there (torchvision's naming, "
            ".safetensors or .pth), or leave model.weights out to start from random weights."
        )
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(
            f"{path} does not hold a state dict, a mapping from names to tensors; save `model.state_dict()`."
        )
    return dict(loaded)


def load_pretrained(model: ResNet50, weights: Mapping[str, Tensor]) -> None:
    """Fill `model` from a BatchNorm state dict: statistics are folded into scale and shift; another class count
    keeps the new head.
    """
    folded: dict[str, Tensor] = {}
    for name, value in weights.items():
        stem, _, kind = name.rpartition(".")
        if f"{stem}.running_var" not in weights:
            folded[name] = value
        elif kind == "weight":
            scale = value / (weights[f"{stem}.running_var"] + BATCH_NORM_EPS).sqrt()
            folded[f"{stem}.scale"] = scale.view(-1, 1, 1)
            folded[f"{stem}.shift"] = (weights[f"{stem}.bias"] - weights[f"{stem}.running_mean"] * scale).view(-1, 1, 1)
    if "fc.weight" in folded and folded["fc.weight"].shape != model.fc.weight.shape:
        del folded["fc.weight"], folded["fc.bias"]
    missing, unexpected = model.load_state_dict(folded, strict=False)
    missing = [name for name in missing if not name.startswith("fc.")]
    if missing or unexpected:
        raise ValueError(
            f"these weights do not fit ResNet-50: missing {missing[:3]}, unexpected {unexpected[:3]} "
            f"({len(missing)} and {len(unexpected)} in all). Use a state dict in torchvision's naming."
        )

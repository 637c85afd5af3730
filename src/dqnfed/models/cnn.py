"""Two convolutions and two dense layers: the FEMNIST model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class CNNSettings:
    channels: tuple[int, int] = (16, 32)  # widths of Ditto's FEMNIST model; LEAF's has (32, 64)
    hidden: int = 128  # LEAF's has 2048
    kernel: int = 5  # odd, so that padding keeps the size


def cnn(input_shape: tuple[int, ...], n_outputs: int, settings: CNNSettings) -> nn.Module:
    """Return conv-pool-conv-pool-dense-dense with ReLU (Li et al., ICML 2021, FEMNIST): 222,078 parameters for 62
    classes.

    Unlike that code, there is no dropout: theirs stays active during testing.
    """
    if len(input_shape) != 3:
        raise ValueError(
            f"cnn needs images [channels, height, width], got inputs of shape {list(input_shape)}; use 'mlp'."
        )
    channels, height, width = input_shape
    if min(height, width) < 4:
        raise ValueError(f"cnn halves the image twice and needs at least 4x4 pixels, got {height}x{width}; use 'mlp'.")
    first, second = settings.channels
    padding = settings.kernel // 2
    return nn.Sequential(
        nn.Conv2d(channels, first, settings.kernel, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, settings.kernel, padding=padding),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 4) * (width // 4), settings.hidden),
        nn.ReLU(),
        nn.Linear(settings.hidden, n_outputs),
    )

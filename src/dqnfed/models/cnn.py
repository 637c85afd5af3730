"""Two convolutions and two or more dense layers: the FEMNIST model."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from dqnfed.models.layers import norm_layers


@dataclass(frozen=True)
class CNNSettings:
    channels: tuple[int, int] = (16, 32)  # widths of Ditto's FEMNIST model; LEAF's has (32, 64)
    hidden: int | tuple[int, ...] = 128  # width of the dense layer before the last, or of several; LEAF's has 2048
    kernel: int = 5  # odd, so that padding keeps the size
    padded: bool = True  # whether convolutions keep the image's size; else each takes kernel - 1 pixels
    norm: str = "none"  # none | batch: BatchNorm after each convolution, for fedbn


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
    lost = 0 if settings.padded else settings.kernel - 1
    rows, columns = (((size - lost) // 2 - lost) // 2 for size in (height, width))
    if min(rows, columns) < 1:
        least = 4 + 3 * lost
        raise ValueError(
            f"cnn halves the image twice and needs at least {least}x{least} pixels, got {height}x{width}; use 'mlp'"
            + (", or padded = true." if lost else ".")
        )
    first, second = settings.channels
    padding = settings.kernel // 2 if settings.padded else 0
    hidden = (settings.hidden,) if isinstance(settings.hidden, int) else settings.hidden
    norms = norm_layers(settings.norm, nn.BatchNorm2d)
    layers = [
        nn.Conv2d(channels, first, settings.kernel, padding=padding),
        *norms(first),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, settings.kernel, padding=padding),
        *norms(second),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    ]
    widths = (second * rows * columns, *hidden)
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], n_outputs))

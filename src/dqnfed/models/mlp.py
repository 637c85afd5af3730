"""Feed-forward networks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from dqnfed.models.layers import norm_layers

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass(frozen=True)
class MLPSettings:
    hidden: tuple[int, ...] = (200, 200)  # widths; 200-200 is what CIFAR-10 setup 1 was published with
    activation: str = "relu"  # relu | tanh (smooth, as quasi-Newton theory assumes)
    norm: str = "none"  # none | batch: BatchNorm before each activation, for fedbn


def mlp(input_shape: tuple[int, ...], n_outputs: int, settings: MLPSettings) -> nn.Module:
    """Return a feed-forward network on the flattened input: 3072-200-200-10 for CIFAR-10 by default."""
    if not settings.hidden or min(settings.hidden) < 1:
        raise ValueError(f"hidden must list at least one positive width, got {list(settings.hidden)}; or use 'linear'.")
    if settings.activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, but is {settings.activation!r}.")
    norms = norm_layers(settings.norm, nn.BatchNorm1d)
    widths = (math.prod(input_shape), *settings.hidden)
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), *norms(fan_out), ACTIVATIONS[settings.activation]()]
    return nn.Sequential(*layers, nn.Linear(widths[-1], n_outputs))

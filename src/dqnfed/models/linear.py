"""Linear models: softmax and ridge regression."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LinearSettings:
    """A linear model has nothing to set."""


def linear(input_shape: tuple[int, ...], n_outputs: int, settings: LinearSettings) -> nn.Module:
    """Return one affine map of the flattened input."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), n_outputs))

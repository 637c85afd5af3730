"""One local step by the optimisers that local work may use: SGD, Adam and AdamW, as torch defines them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

OPTIMIZERS = ("sgd", "adam", "adamw")
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8  # of Adam and AdamW: torch's defaults


class Optimizer(NamedTuple):
    """Which steps local work makes, beside momentum and weight decay."""

    name: str = "sgd"
    nesterov: bool = False
    clip_norm: float | None = None  # the longest gradient of the loss; None: any

    @property
    def is_plain(self) -> bool:
        """Whether it is SGD with or without momentum."""
        return self == PLAIN_SGD

    def clipped(self, slope: Tensor) -> Tensor:
        """Return the gradient of the loss, at most as long as `clip_norm`."""
        if self.clip_norm is None or self.clip_norm > torch.finfo(slope.dtype).max:  # no finite gradient is as long
            return slope
        length: Tensor = torch.linalg.vector_norm(slope)
        clipped: Tensor = slope * (self.clip_norm / length.clamp(min=self.clip_norm))
        return clipped

    def start(self, theta: Tensor) -> tuple[Tensor, ...]:
        """Return the state before the first step of a round: nothing is kept from round to round."""
        zeros = torch.zeros_like(theta)
        return (zeros,) if self.name == "sgd" else (zeros, torch.zeros_like(theta), theta.new_zeros(()))

    def step(
        self, theta: Tensor, slope: Tensor, state: tuple[Tensor, ...], lr: Tensor, *, momentum: float, decay: float
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return theta and the state after a step; `slope` includes weight decay but for AdamW, whose is `decay`."""
        if self.name == "sgd":
            velocity = momentum * state[0] + slope
            return theta - lr * (slope + momentum * velocity if self.nesterov else velocity), (velocity,)
        if self.name == "adamw":
            theta = theta - lr * decay * theta
        first, second, n = BETA1 * state[0] + (1 - BETA1) * slope, state[1], state[2] + 1
        second = BETA2 * second + (1 - BETA2) * slope.square()
        root = (second / (1 - BETA2**n)).sqrt() + EPS
        return theta - lr * first / (1 - BETA1**n) / root, (first, second, n)


PLAIN_SGD = Optimizer()

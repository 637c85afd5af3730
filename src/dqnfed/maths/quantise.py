"""Unbiased stochastic rounding of a vector to a few bits a coordinate."""

from typing import NamedTuple

import torch
from torch import Tensor


class Quantised(NamedTuple):
    """A vector in levels of equal width from -radius to +radius."""

    levels: Tensor  # [..., n] int32 in 0 ... 2^bits - 1
    radius: Tensor  # [...] largest |coordinate|


def quantised(v: Tensor, uniform: Tensor, *, bits: int) -> Quantised:
    """Return v rounded to 2^bits levels, up with the probability that makes it unbiased; `uniform` is in [0, 1).

    A zero vector has radius 0 and is exact: the width of a level is 2 radius / (2^bits - 1), and no step divides by it.
    """
    top = 2**bits - 1
    radius = v.abs().amax(-1)
    width = 2.0 * radius / top
    place = (v + radius.unsqueeze(-1)) / torch.where(width > 0, width, torch.ones_like(width)).unsqueeze(-1)
    levels = torch.floor(place + uniform).clamp(0, top)
    return Quantised(levels.to(torch.int32), radius)


def dequantised(q: Quantised, *, bits: int) -> Tensor:
    """Return the vector, or rows of vectors, that the levels stand for: off by one width at most in a coordinate."""
    radius = q.radius.unsqueeze(-1)
    values: Tensor = q.levels.to(q.radius.dtype) * (2.0 * radius / (2**bits - 1)) - radius
    return values

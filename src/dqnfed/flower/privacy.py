"""Clipping and Gaussian noise on what a client sends up."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dqnfed.core.algorithm import check_range
from dqnfed.core.tensors import map_tensors, named_tensors

U = TypeVar("U", bound=tuple[Any, ...])


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """The Gaussian mechanism on every reply; an accountant says what it is worth."""

    clip: float  # largest Euclidean norm of a reply, all its numbers taken together; > 0
    noise_multiplier: float = 0.0  # standard deviation of the noise over `clip`; >= 0

    def __post_init__(self) -> None:
        check_range(self, "clip", low=0.0, open_low=True)
        check_range(self, "noise_multiplier", low=0.0)


def noised(update: U, privacy: Privacy, generator: torch.Generator | None = None) -> U:
    """Return the reply with its norm clipped and Gaussian noise on every number of it.

    All its tensors count as one vector, so that nothing leaves the client without noise; NaN, which says "not known",
    stays. The noise comes from torch's generator, a Mersenne twister, which is seeded anew for every reply with a
    number from the operating system: a run's seed is known to the server, which could subtract the noise. It is no
    cryptographic generator. Give one in tests only.
    """
    whole = [name for name, t in named_tensors(update).items() if not t.is_floating_point()]
    if whole:
        raise ValueError(
            f"{type(update).__name__} sends whole numbers ({', '.join(whole)}), to which Gaussian noise cannot be "
            "added; choose a method whose replies are real numbers, or switch the noise off."
        )
    if generator is None:
        generator = torch.Generator().manual_seed(secrets.randbits(63))
    norms = [torch.linalg.vector_norm(t.nan_to_num(0.0), dtype=torch.float64) for t in named_tensors(update).values()]
    norm = math.hypot(*(float(n) for n in norms))
    factor = min(1.0, privacy.clip / norm) if norm > 0 else 1.0
    spread = privacy.noise_multiplier * privacy.clip

    def released(t: Tensor) -> Tensor:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device, t.dtype)
        return factor * t + spread * noise

    return map_tensors(released, update)

"""Cubic regularisation: the step that minimises a quadratic model plus a cube of its length."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

MIN_LIPSCHITZ = 1e-12  # a quadratic has none; the cube is then as good as absent


class CubicStep(NamedTuple):
    """The step, to be subtracted, and its length."""

    step: Tensor  # [n]
    radius: float  # r = ||step||


def cubic_step(A: Tensor, g: Tensor, lipschitz: float) -> CubicStep:
    r"""Return u = -h, on the host, with h the minimiser of :math:`g'h + h'Ah/2 + (M/6)\|h\|^3` for positive A.

    h = -(A + (M r / 2) I)^-1 g where r = ||h|| solves the secular equation; its right side falls in r and is at most
    ||g|| / (M r / 2), so r lies in [0, sqrt(2 ||g|| / M)] and bracketing cannot fail (Nesterov & Polyak 2006, Sec. 5).
    """
    from scipy.optimize import brentq

    values, vectors = torch.linalg.eigh((A + A.T) / 2.0)
    spectrum = np.clip(values.double().cpu().numpy(), 0.0, None)
    along = (vectors.T @ g).double().cpu().numpy()
    norm = float(np.linalg.norm(along))
    if norm == 0.0:
        return CubicStep(torch.zeros_like(g), 0.0)

    def excess(r: float) -> float:
        return float(np.linalg.norm(along / (spectrum + lipschitz * r / 2.0)) - r)

    lipschitz = max(lipschitz, MIN_LIPSCHITZ)
    longest = float(np.sqrt(2.0 * norm / lipschitz))
    shortest = longest * 1e-16
    radius = brentq(excess, shortest, longest * (1.0 + 1e-12), xtol=1e-300, rtol=1e-14) if excess(shortest) > 0 else 0.0
    step = along / (spectrum + lipschitz * radius / 2.0)
    return CubicStep(vectors @ torch.from_numpy(step).to(g), radius)

"""Solves with a multiple of the identity plus a few outer products: nothing n x n."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.maths.gramian import combine, gramian


class Woodbury(NamedTuple):
    """The solution and the multiple of the identity that was used."""

    step: Tensor  # [n]
    mu: float


def woodbury_solution(Y: Tensor, g: Tensor, *, weight: float, damping: float, mu: float | None = None) -> Woodbury:
    r"""Return :math:`(\mu I + w Y^\top Y)^{-1} g` for rows Y [m, n], in the precision of Y, K-sized algebra in float64.

    :math:`= (g - w Y^\top (\mu I + w Y Y^\top)^{-1} Y g) / \mu` (Woodbury 1950). mu defaults to `damping` times the
    mean eigenvalue of w Y Y'; rows that are all zero leave the step g / damping.
    """
    products = gramian(Y, g.unsqueeze(0)).numpy()
    m = len(Y)
    M, Yg = weight * products[:, :m], products[:, m]
    scale = float(np.trace(M)) / max(m, 1)
    mu = mu if mu is not None else damping * (scale if scale > 0.0 else 1.0)
    inner = np.linalg.solve(mu * np.eye(m) + M, Yg)
    return Woodbury((g - combine(torch.from_numpy(weight * inner), Y)) / mu, mu)

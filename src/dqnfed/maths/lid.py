"""Local intrinsic dimension: how many directions the points around a point spread into."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
CLOSEST = 1e-12  # a neighbour at distance 0, a duplicate, counts as this close
FLOOR = 1e-6  # distances far below this are no structure, but rounding


def local_dimensions(distances: FloatArray) -> FloatArray:
    r"""Return the local intrinsic dimension [N] of points with neighbour distances [N, k], ascending.

    The maximum-likelihood estimate is :math:`-k / \sum_{j \le k} \log(r_j / r_k)` (Amsaleg et al., KDD 2015, Sec. 4.1):
    uniform points on an m-dimensional manifold have :math:`P(r_j < t r_k) = t^m`, so that the sum is a Gamma(k - 1)
    variable over -m and the estimate has mean m k / (k - 2). `FLOOR` is added to r_k and to the sum as in FedCorr's
    code: points that lie on each other have dimension 0.
    """
    k = distances.shape[1]
    sums = np.log(np.maximum(distances, CLOSEST) / (distances[:, -1:] + FLOOR)).sum(axis=1)
    return np.asarray(-k / np.minimum(sums + FLOOR, -FLOOR))

"""Samplers of gradient rows and rates; every one is a function of its seed."""

import math

import torch
from torch import Tensor


def gaussian_rows(K: int, n: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return K independent Gaussian rows of length n."""
    return torch.randn(K, n, dtype=torch.float64, generator=_generator(seed)).to(dtype)


def rows_of_condition(K: int, n: int, condition: float, seed: int = 0) -> Tensor:
    """Return float64 rows whose singular values fall evenly (on a log scale) from 1 to 1 / condition."""
    left = torch.linalg.qr(gaussian_rows(K, K, seed=seed)).Q
    right = torch.linalg.qr(gaussian_rows(n, K, seed=seed + 1)).Q.T
    values = torch.logspace(0.0, -math.log10(condition), K, dtype=torch.float64)
    return torch.einsum("ki,i,in->kn", left, values, right)


def agreeing_rows(
    K: int, n: int, dtype: torch.dtype = torch.float64, seed: int = 0, *, agreement: float = 1.0
) -> Tensor:
    """Return Gaussian rows around a common direction, as clients early in training have."""
    rows = gaussian_rows(K + 1, n, seed=seed)
    return (rows[:-1] + agreement * rows[-1]).to(dtype)


def positive_rates(K: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return rates spread evenly over (0.1, 2)."""
    return (0.1 + 1.9 * torch.rand(K, dtype=torch.float64, generator=_generator(seed + 1000))).to(dtype)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)

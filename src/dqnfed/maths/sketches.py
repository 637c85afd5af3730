"""Random sketches whose entries are a function of (key, row, column): no shape has to be known when keys are drawn.

The same entry comes out whether clients are padded, vectorised, looped or remote.
"""

import torch
from torch import Tensor

KINDS = ("gaussian", "rademacher")
N_KEYS = 2  # numbers that make one sketch
_MASK = 0x7FFF_FFFF
_COLUMNS = 1 << 24  # rows of a sketch lie this far apart in the counter


def sketch(keys: Tensor, n_rows: int, n_columns: int, *, kind: str = "gaussian", dtype: torch.dtype) -> Tensor:
    """Return S [n_rows, n_columns] with independent entries of mean 0 and E S'S = I; keys [2] are int64 below 2^31."""
    device = keys.device
    counter = torch.arange(n_rows, device=device)[:, None] * _COLUMNS + torch.arange(n_columns, device=device)
    first = _uniform(counter, keys[0], dtype)
    scale = float(max(n_rows, 1)) ** -0.5
    if kind == "rademacher":
        return torch.where(first < 0.5, -scale, scale).to(dtype)
    second = _uniform(counter, keys[1], dtype)
    normal = torch.sqrt(-2.0 * torch.log(first)) * torch.cos(2.0 * torch.pi * second)  # Box & Muller 1958
    return torch.mul(normal, scale)


def draw_keys(generator: torch.Generator) -> Tensor:
    """Return the keys of one sketch."""
    return torch.randint(0, _MASK, (N_KEYS,), generator=generator)


def _uniform(counter: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in (0, 1) from a 31-bit integer hash of counter and key: three rounds of xor-shift-multiply."""
    low, high = counter & _MASK, counter >> 31
    x = (low ^ key) & _MASK
    x = _mixed(x)
    x = _mixed((x + high * 0x1F12_3BB5 + key) & _MASK)
    x = _mixed((x ^ (key >> 7)) & _MASK)
    return (x.to(torch.float64) + 0.5).div(float(_MASK) + 1.0).to(dtype)


def _mixed(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 15)) * 0x2C1B_3C6D) & _MASK  # 31 x 30 bits stay inside int64
    x = ((x ^ (x >> 12)) * 0x297A_2D39) & _MASK
    return x ^ (x >> 15)

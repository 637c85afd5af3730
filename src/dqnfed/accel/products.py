"""Products of the client matrix G [K, n] in one launch: blocks of columns side by side, on a GPU or a CPU's cores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.accel.onednn import linear
from dqnfed.accel.threads import one_core_workers
from dqnfed.maths.gramian import full_precision

FloatArray = NDArray[np.float64]
BLOCK = 4096  # columns of one product; a single one of few rows would leave most cores or multiprocessors idle
COLUMNS = 2**20  # columns at once: bounds what is copied
PANEL = 2**21  # numbers of a panel on the host, which lies in a cache
NARROWEST, WIDEST = 1024, 2**15  # columns of it


def fast_gramian(G: Tensor, extra: Tensor | Sequence[Tensor] | None = None, *, block: int | None = None) -> Tensor:
    """Return G [G; extra]' as `dqnfed.maths.gramian.gramian` does: float64 on the CPU, [K, K] or [K, K + m]."""
    if G.ndim != 2:
        raise ValueError(
            f"G must hold one row per client, [K, n], but has shape {tuple(G.shape)}; stack the rows first."
        )
    others = [] if extra is None else [extra] if isinstance(extra, Tensor) else list(extra)
    for other in others:
        if other.ndim != 2 or other.shape[1] != G.shape[1]:
            raise ValueError(
                f"extra rows must be as long as the rows of G, {G.shape[1]}, but have shape {tuple(other.shape)}."
            )
    rows, more = G.detach(), [other.detach().to(G.device) for other in others if len(other)]
    if rows.device.type == "cpu":
        return host_gramian(rows, more, width=block)
    block = block or BLOCK
    found = [device_gramian(rows, block=block), *(device_products(rows, other, block=block) for other in more)]
    return torch.cat(found, dim=1).cpu()


def fast_cross_products(G: Tensor, others: Sequence[Tensor]) -> list[FloatArray]:
    """Return G H' of several matrices H as float64 on the host, from one transfer."""
    if not others:
        return []
    found = torch.cat([device_products(G.detach(), H.detach().to(G.device)) for H in others], dim=1).cpu().numpy()
    return np.split(found, np.cumsum([len(H) for H in others])[:-1], axis=1)


def device_gramian(G: Tensor, *, block: int = BLOCK) -> Tensor:
    """Return G G' in float64 on the device of G: nothing waits for a GPU, so that a CUDA graph may hold it."""
    products = device_products(G, G, block=block)
    return (products + products.T) / 2


def device_products(G: Tensor, H: Tensor, *, block: int = BLOCK) -> Tensor:
    """Return G H' in float64 on the device of G: blocks of columns in the precision of G, float32 at least."""
    dtype = torch.promote_types(G.dtype, torch.float32)
    parts: list[Tensor] = []
    with full_precision():
        for start in range(0, G.shape[1], COLUMNS):
            columns = slice(start, start + COLUMNS)
            left = G[:, columns].to(dtype)
            right = left if H is G else H[:, columns].to(dtype)
            if len(right) == 1 and right.device.type != "cpu":  # two launches
                parts.append((left * right).sum(1, keepdim=True, dtype=torch.float64))
                continue
            n_blocks, rest = divmod(left.shape[1], block)
            if n_blocks:  # all in one launch
                whole = n_blocks * block
                a, b = (X[:, :whole].unflatten(1, (n_blocks, block)).transpose(0, 1) for X in (left, right))
                parts.append((a @ b.mT).sum(0, dtype=torch.float64))
            if rest:
                parts.append(left[:, -rest:] @ right[:, -rest:].T)
    if not parts:
        return torch.zeros(len(G), len(H), dtype=torch.float64, device=G.device)
    return reduce(torch.add, parts).double()


def host_gramian(G: Tensor, others: Sequence[Tensor], *, width: int | None = None) -> Tensor:
    """Return G [G; others]' in float64, of rows on the host, from one pass over all of them.

    A panel of some columns of all rows is copied, so that it lies in one piece in a cache, and multiplied: BLAS copies
    rows that are far apart too, in a form that pays for larger products alone. Every thread has its own panels, of
    which a product is computed by one core, so that their number does not change a bit.
    """
    dtype, sizes = torch.promote_types(G.dtype, torch.float32), [len(G), *(len(other) for other in others)]
    width = width or min(max(PANEL // max(1, sum(sizes)), NARROWEST), WIDEST)
    starts, n_threads = range(0, G.shape[1], width), torch.get_num_threads()

    def products(mine: Sequence[int]) -> list[Tensor]:
        store, found = torch.empty(sum(sizes) * width, dtype=dtype), []
        for start in mine:
            n_columns = min(width, G.shape[1] - start)
            panel = store[: sum(sizes) * n_columns].view(-1, n_columns)
            for place, rows in zip(panel.split(sizes), (G, *others), strict=True):
                place.copy_(rows[:, start : start + n_columns])
            found.append(linear(panel, panel[: len(G)]))
        return found

    each = [starts[k::n_threads] for k in range(n_threads)]
    made = list(one_core_workers(n_threads).map(products, each)) if n_threads > 1 else [products(starts)]
    total = torch.zeros(sum(sizes), len(G), dtype=torch.float64)
    for k in range(len(starts)):
        total += made[k % n_threads][k // n_threads]
    among = (total[: len(G)] + total[: len(G)].T) / 2
    return torch.cat([among, total[len(G) :].T], dim=1)

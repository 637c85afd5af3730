"""Products of the client matrix G [K, n]: on a CPU by all its cores, on a GPU in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from dqnfed.maths.gramian import BLOCK, full_precision

FloatArray = NDArray[np.float64]
MANY_BLOCKS = 8  # blocks a thread from which on threads pay
DEVICE_BLOCK = BLOCK // 8  # a GPU computes many of them at once, each on a multiprocessor of its own
DEVICE_COLUMNS = 2**20  # columns at once there: bounds what is copied


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
    if G.device.type == "cpu":
        return torch.from_numpy(_host_products(rows, more, block or BLOCK))
    found = [device_gramian(rows, block=block or DEVICE_BLOCK)]
    found += [device_products(rows, other, block=block or DEVICE_BLOCK) for other in more]
    return torch.cat(found, dim=1).cpu()


def fast_cross_products(G: Tensor, H: Tensor) -> Tensor:
    """Return G H' as a float64 matrix on the CPU."""
    if G.device.type == "cpu":
        return torch.from_numpy(_in_strips(partial(_cross_strip, G.detach(), H.detach()), G.shape[1], BLOCK))
    return device_products(G.detach(), H.detach().to(G.device)).cpu()


def device_gramian(G: Tensor, *, block: int = DEVICE_BLOCK) -> Tensor:
    """Return G G' in float64 on the device of G: nothing waits for a GPU, so that a CUDA graph may hold it."""
    products = device_products(G, G, block=block)
    return (products + products.T) / 2


def device_products(G: Tensor, H: Tensor, *, block: int = DEVICE_BLOCK) -> Tensor:
    """Return G H' in float64 on the device of G: blocks of columns in the precision of G, float32 at least."""
    dtype = torch.promote_types(G.dtype, torch.float32)
    parts: list[Tensor] = []
    with full_precision():
        for start in range(0, G.shape[1], DEVICE_COLUMNS):
            columns = slice(start, start + DEVICE_COLUMNS)
            left = G[:, columns].to(dtype)
            right = left if H is G else H[:, columns].to(dtype)
            n_blocks, rest = divmod(left.shape[1], block)
            if n_blocks:  # all in one launch: a single product of few rows would leave most of a GPU idle
                whole = n_blocks * block
                a, b = (X[:, :whole].unflatten(1, (n_blocks, block)).transpose(0, 1) for X in (left, right))
                parts.append((a @ b.mT).sum(0, dtype=torch.float64))
            if rest:
                parts.append(left[:, -rest:] @ right[:, -rest:].T)
    if not parts:
        return torch.zeros(len(G), len(H), dtype=torch.float64, device=G.device)
    return reduce(torch.add, parts).double()


def _host_products(G: Tensor, others: list[Tensor], block: int) -> FloatArray:
    products = _in_strips(partial(_gramian_strip, G, others), G.shape[1], block)
    square = products[:, : len(G)]
    products[:, : len(G)] = (square + square.T) / 2
    return products


def _in_strips(strip_products: partial[FloatArray], n_columns: int, block: int) -> FloatArray:
    """Return the sum of products over strips of columns, one a thread: BLAS does not split products of so few rows."""
    n_blocks, workers = -(-n_columns // block), torch.get_num_threads()
    if workers == 1 or n_blocks < MANY_BLOCKS * workers:
        return strip_products(block, 0, n_columns)
    cuts = [min(block * (n_blocks * i // workers), n_columns) for i in range(workers)] + [n_columns]
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        strips = list(pool.map(partial(strip_products, block), cuts[:-1], cuts[1:]))
    return np.asarray(np.sum(strips, axis=0))


def _gramian_strip(G: Tensor, others: list[Tensor], block: int, first: int, last: int) -> FloatArray:
    # through numpy: its BLAS sees that both sides are one matrix and does half the work (SYRK), which torch does not
    K = len(G)
    products = np.zeros((K, K + sum(map(len, others))))
    places = np.cumsum([K, *map(len, others)])[:-1]
    for start in range(first, last, block):
        rows, *more = (_columns(matrix, start, min(start + block, last)) for matrix in (G, *others))
        products[:, :K] += rows @ rows.T
        for column, other in zip(places, more, strict=True):  # not joined, which would copy them
            products[:, column : column + len(other)] += rows @ other.T
    return products


def _cross_strip(G: Tensor, H: Tensor, block: int, first: int, last: int) -> FloatArray:
    products = np.zeros((len(G), len(H)))
    for start in range(first, last, block):
        stop = min(start + block, last)
        products += _columns(G, start, stop) @ _columns(H, start, stop).T
    return products


def _columns(matrix: Tensor, start: int, stop: int) -> NDArray[np.floating]:
    dtype = torch.promote_types(matrix.dtype, torch.float32)
    found: NDArray[np.floating] = matrix[:, start:stop].to(dtype).numpy()
    return found

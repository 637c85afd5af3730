"""Products of the client matrix G [K, n] that read it block by block and never copy it."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, reduce
from math import nan, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits
from torch import Tensor

from dqnfed.maths.transfer import sent_to

FloatArray = NDArray[np.float64]
BLOCK = 32768  # columns a block: long enough for BLAS to run at full speed, short enough to sum in float32
MANY_BLOCKS = 8  # blocks a thread from which on threads pay
DEVICE_BLOCK = BLOCK // 8  # an accelerator takes many of them at once, each on a processor of its own
DEVICE_COLUMNS = 2**20  # columns at once there: bounds what is copied


def gramian(G: Tensor, extra: Tensor | Sequence[Tensor] | None = None, *, block: int | None = None) -> Tensor:
    """Return G [G; extra]' as a float64 matrix on the CPU, [K, K] or with extra rows [m, n] next to it [K, K + m].

    Columns are taken in blocks: one product a block in the precision of G (float32 at least), summed in float64, so
    that G is read once and nothing n-long is allocated. `extra` may be several matrices; their products come in order.
    """
    return joint_gramian(G, extra, block=block)[: len(G)]


def joint_gramian(G: Tensor, extra: Tensor | Sequence[Tensor] | None = None, *, block: int | None = None) -> Tensor:
    """Return [G; extra] [G; extra]' as `gramian` does, the products of the extra rows with each other too."""
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
        products = _host_products(rows, more, block or BLOCK)
    else:
        products = _device_products(rows, more, block or DEVICE_BLOCK)
    return torch.from_numpy((products + products.T) / 2)


def cross_products(G: Tensor, H: Tensor) -> Tensor:
    """Return G H' as a float64 matrix on the CPU, in blocks as `gramian` does; H's rows are not multiplied together."""
    if G.is_cuda:
        return resident_cross_products(G, H).cpu()
    total = torch.zeros(len(G), len(H), dtype=torch.float64)
    with _whole_precision():
        for start in range(0, G.shape[1], BLOCK):
            total += G[:, start : start + BLOCK] @ H[:, start : start + BLOCK].T
    return total


def resident_cross_products(G: Tensor, H: Tensor) -> Tensor:
    """Return G H' as `cross_products` does, but where G is: nothing waits for a GPU."""
    n_blocks = G.shape[1] // DEVICE_BLOCK
    whole = n_blocks * DEVICE_BLOCK
    with _whole_precision():
        total: Tensor = (G[:, whole:] @ H[:, whole:].T).double()
        if n_blocks:  # all in one launch
            left, right = (X[:, :whole].unflatten(1, (n_blocks, DEVICE_BLOCK)).transpose(0, 1) for X in (G, H))
            total += (left @ right.mT).sum(0, dtype=torch.float64)
    return total


def resident_gramian(G: Tensor) -> Tensor:
    """Return G G' as `gramian` does, but where G is: nothing waits for a GPU, so that a CUDA graph may hold it."""
    products = _resident_products(G.detach(), [], DEVICE_BLOCK)
    return (products + products.T) / 2


def _host_products(G: Tensor, others: list[Tensor], block: int) -> FloatArray:
    # BLAS does not share out a product with so few rows; strips of columns, one a thread, do
    blocks, workers = -(-G.shape[1] // block), torch.get_num_threads()
    if workers == 1 or blocks < MANY_BLOCKS * workers:
        return _strip_products(G, others, block, 0, G.shape[1])
    cuts = [min(block * (blocks * i // workers), G.shape[1]) for i in range(workers)] + [G.shape[1]]
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(workers) as pool:
        strips = list(pool.map(partial(_strip_products, G, others, block), cuts[:-1], cuts[1:]))
    return np.asarray(np.sum(strips, axis=0))


def _strip_products(G: Tensor, others: list[Tensor], block: int, first: int, last: int) -> FloatArray:
    # through numpy: its BLAS sees that both sides are one matrix and does half the work (SYRK), which torch does not
    dtype = torch.promote_types(G.dtype, torch.float32)
    K = len(G)
    products = np.zeros((K + sum(map(len, others)),) * 2)
    for start in range(first, last, block):
        rows, *more = (matrix[:, start : min(start + block, last)].to(dtype).numpy() for matrix in (G, *others))
        products[:K, :K] += rows @ rows.T  # on G as it lies: joining it to the others would copy it
        if more:
            joined = np.concatenate(more)
            crossed = rows @ joined.T
            products[:K, K:] += crossed
            products[K:, :K] += crossed.T
            products[K:, K:] += joined @ joined.T
    return products


def _device_products(G: Tensor, others: list[Tensor], block: int) -> FloatArray:
    return _resident_products(G, others, block).cpu().numpy()


def _resident_products(G: Tensor, others: list[Tensor], block: int) -> Tensor:
    dtype = torch.promote_types(G.dtype, torch.float32)
    parts: list[Tensor] = []
    with _whole_precision():
        for start in range(0, G.shape[1], DEVICE_COLUMNS):
            rows, *more = (matrix[:, start : start + DEVICE_COLUMNS].to(dtype) for matrix in (G, *others))
            joined = torch.cat([rows, *more]) if more else rows
            n_blocks, rest = divmod(joined.shape[1], block)
            if n_blocks:  # all in one launch, which a single product of few rows would not fill a GPU with
                blocks = joined[:, : n_blocks * block].unflatten(1, (n_blocks, block)).transpose(0, 1)
                parts.append((blocks @ blocks.mT).sum(0, dtype=torch.float64))
            if rest:
                parts.append(joined[:, -rest:] @ joined[:, -rest:].T)
    if not parts:
        return torch.zeros((len(G) + sum(map(len, others)),) * 2, dtype=torch.float64, device=G.device)
    return reduce(torch.add, parts).double()


@contextmanager
def _whole_precision() -> Iterator[None]:
    """Compute products in float32 itself: TF32, which a run may have asked for, would blur which gradients disagree."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def combine(weights: Tensor, G: Tensor) -> Tensor:
    """Return weights @ G [n], in the precision and on the device of G, from one pass over G."""
    if weights.ndim != 1 or G.ndim != 2 or weights.shape[0] != G.shape[0]:
        raise ValueError(
            f"one weight per row is needed, but weights have shape {tuple(weights.shape)} and G {tuple(G.shape)}."
        )
    return sent_to(G.device, weights, G.dtype) @ G


def combination_norm(weights: FloatArray, slopes: FloatArray, squares: FloatArray) -> float:
    """Return the length of weights @ G from slopes = G G' weights and the rows' squares; NaN where they cannot tell.

    The square is weights' slopes. Products of single precision make it wrong by about 1e-7 of the square that the rows
    would have if all pointed one way; where it is a ten-thousandth of that or more, its root is good to three digits,
    as good as the slopes that it is compared with. Rows that cancel further have to be added up and measured, and so
    have those with a weight that single precision may not hold.
    """
    square = float(weights @ slopes)
    aligned = float(np.abs(weights) @ np.sqrt(squares))
    if not square >= 1e-4 * aligned * aligned or np.abs(weights).max(initial=0.0) > 1e18:
        return nan
    return sqrt(square)


def squared_norms(G: Tensor, *, block: int = 8 * BLOCK) -> Tensor:
    """Return the squared length of every row of G, float64 on the CPU, from one pass over G."""
    dtype = torch.promote_types(G.dtype, torch.float32)
    total = torch.zeros(len(G), dtype=torch.float64, device=G.device)
    for start in range(0, G.shape[1], block):
        total += torch.linalg.vector_norm(G[:, start : start + block].to(dtype), dim=1).double().square()
    return total.cpu()

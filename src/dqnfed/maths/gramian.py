"""Products of the client matrix G [K, n] that read it block by block and never copy it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FloatArray = NDArray[np.float64]
BLOCK = 32768  # columns a block: long enough for BLAS to run at full speed, short enough to sum in float32
FEW = 2**22  # multiplications on a processor, of which float64 costs nothing that is noticed


def gramian(G: Tensor, extra: Tensor | Sequence[Tensor] | None = None, *, block: int = BLOCK) -> Tensor:
    """Return G [G; extra]' as a float64 matrix on the CPU, [K, K] or with extra rows [m, n] next to it [K, K + m].

    Columns are taken in blocks: one product a block in the precision of G (float32 at least, float64 where these are
    few), summed in float64, so that nothing n-long is allocated. `extra` may be several matrices; their products come
    in order.
    """
    if G.ndim != 2:
        raise ValueError(
            f"G must hold one row per client, [K, n], but has shape {tuple(G.shape)}; stack the rows first."
        )
    products = [cross_products(G, G, block=block)]
    products[0] = (products[0] + products[0].T) / 2
    for other in [] if extra is None else [extra] if isinstance(extra, Tensor) else extra:
        if other.ndim != 2 or other.shape[1] != G.shape[1]:
            raise ValueError(
                f"extra rows must be as long as the rows of G, {G.shape[1]}, but have shape {tuple(other.shape)}."
            )
        products.append(cross_products(G, other.to(G.device), block=block))
    return torch.cat(products, dim=1)


def cross_products(G: Tensor, H: Tensor, *, block: int = BLOCK) -> Tensor:
    """Return G H' as a float64 matrix on the CPU, in blocks as `gramian` does."""
    are_few = G.device.type == "cpu" and len(G) * H.numel() <= FEW
    dtype = torch.float64 if are_few else torch.promote_types(G.dtype, torch.float32)
    total = torch.zeros(len(G), len(H), dtype=torch.float64, device=G.device)
    with full_precision():
        for start in range(0, G.shape[1], block):
            columns = slice(start, start + block)
            total += G.detach()[:, columns].to(dtype) @ H.detach()[:, columns].to(dtype).T
    return total.cpu()


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute products in float32 itself: TF32, which a run may have asked for, would blur which gradients disagree."""
    chosen = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(chosen)


def combine(weights: Tensor, G: Tensor) -> Tensor:
    """Return weights @ G [n], in the precision and on the device of G, from one pass over G.

    Where that is little work it is computed in float64, and rounded.
    """
    if weights.ndim != 1 or G.ndim != 2 or weights.shape[0] != G.shape[0]:
        raise ValueError(
            f"one weight per row is needed, but weights have shape {tuple(weights.shape)} and G {tuple(G.shape)}."
        )
    if G.device.type == "cpu" and G.numel() <= FEW:
        return (weights.double() @ G.double()).to(G.dtype)
    # from pageable memory the copy does not wait for the device's earlier work, and is safe all the same
    return weights.to(G.device, G.dtype, non_blocking=True) @ G


def norm_of(v: Tensor) -> float:
    """Return the Euclidean norm of a vector, summed in float64."""
    return float(torch.linalg.vector_norm(v, dtype=torch.float64))


def bordered(A: FloatArray, B: FloatArray, C: FloatArray) -> FloatArray:
    """Return [A B; B' C]."""
    return np.block([[A, B], [B.T, C]])

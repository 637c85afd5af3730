"""Products of the client matrix G [K, n] that read it block by block and never copy it."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 32768  # columns a block: 50 float32 rows of it fill a few MiB of cache and keep GEMM at full speed


def gramian(G: Tensor, extra: Tensor | Sequence[Tensor] | None = None, *, block: int = BLOCK) -> Tensor:
    """Return G [G; extra]' as a float64 matrix on the CPU, [K, K] or with extra rows [m, n] next to it [K, K + m].

    Columns are taken in blocks: one GEMM a block in the precision of G (float32 at least), summed in float64, so that
    G is read once and nothing n-long is allocated. `extra` may be several matrices; their products follow in order.
    """
    if G.ndim != 2:
        raise ValueError(
            f"G must hold one row per client, [K, n], but has shape {tuple(G.shape)}; stack the rows first."
        )
    G = G.detach()
    others = (
        [] if extra is None else [extra.detach()] if isinstance(extra, Tensor) else [rows.detach() for rows in extra]
    )
    for other in others:
        if other.ndim != 2 or other.shape[1] != G.shape[1]:
            raise ValueError(
                f"extra rows must be as long as the rows of G, {G.shape[1]}, but have shape {tuple(other.shape)}."
            )
    dtype = torch.promote_types(G.dtype, torch.float32)
    sums = [torch.zeros(len(G), len(other), dtype=torch.float64, device=G.device) for other in (G, *others)]
    for start in range(0, G.shape[1], block):
        columns = slice(start, start + block)
        rows = G[:, columns].to(dtype)
        sums[0] += rows @ rows.T
        for total, other in zip(sums[1:], others, strict=True):
            total += rows @ other[:, columns].to(dtype).T
    sums[0] = (sums[0] + sums[0].T) / 2
    return torch.cat(sums, dim=1).cpu()


def combine(weights: Tensor, G: Tensor) -> Tensor:
    """Return weights @ G [n], in the precision and on the device of G, from one pass over G."""
    if weights.ndim != 1 or G.ndim != 2 or len(weights) != len(G):
        raise ValueError(
            f"one weight per row is needed, but weights have shape {tuple(weights.shape)} and G {tuple(G.shape)}."
        )
    return weights.to(dtype=G.dtype, device=G.device) @ G


def squared_norms(G: Tensor, *, block: int = BLOCK) -> Tensor:
    """Return the squared length of every row of G, float64 on the CPU, from one pass over G."""
    dtype = torch.promote_types(G.dtype, torch.float32)
    total = torch.zeros(len(G), dtype=torch.float64, device=G.device)
    for start in range(0, G.shape[1], block):
        total += torch.linalg.vector_norm(G[:, start : start + block].to(dtype), dim=1).double().square()
    return total.cpu()

"""Products of float32 rows on a CPU by oneDNN, whose kernels are up to twice as fast as BLAS on some processors."""

from __future__ import annotations

import torch
from torch import Tensor

HAS_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
LEAST_WORK = 5_000_000  # multiplications from which on its calls, which take some 40 microseconds more, pay


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows weight' + bias; by BLAS where the matrices are no float32, do not lie in one piece, or are small."""
    if HAS_ONEDNN and _suits(rows, weight):
        found: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
        return found
    return torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())


def _suits(rows: Tensor, weight: Tensor) -> bool:
    return (
        rows.dtype == weight.dtype == torch.float32
        and rows.numel() * len(weight) >= LEAST_WORK
        and rows.is_contiguous()
        and (weight.is_contiguous() or weight.t().is_contiguous())
        and rows.device.type == "cpu"
    )

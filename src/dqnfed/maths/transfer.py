"""Small tensors on their way from the host to a GPU: many a round, so that every one of them has to be cheap."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLAB = 2**17  # numbers; what is sent in some hundred rounds
SMALL = SLAB // 64
Key = tuple[torch.device, torch.dtype]


class _Slabs(threading.local):
    """Pinned memory of one thread, of which every transfer takes the next piece.

    Asking for pinned memory costs more than the transfer. When a slab is used up, all that was sent from it has to have
    arrived before its first piece is written to again.
    """

    def __init__(self) -> None:
        self._slabs: dict[Key, tuple[Tensor, NDArray[np.generic]]] = {}
        self._used: dict[Key, int] = {}

    def sent(self, device: torch.device, host: Tensor, dtype: torch.dtype) -> Tensor:
        key = (device, dtype)
        if key not in self._slabs:
            pinned = torch.empty(SLAB, dtype=dtype, pin_memory=True)
            self._slabs[key], self._used[key] = (pinned, pinned.numpy()), 0
        (pinned, on_host), start = self._slabs[key], self._used[key]
        if start + host.numel() > SLAB:
            torch.cuda.synchronize(device)
            start = 0
        end = self._used[key] = start + host.numel()
        with np.errstate(over="ignore"):  # as torch does, in the precision that is asked for
            on_host[start:end] = host.numpy().reshape(-1)
        there = pinned[start:end].to(device, non_blocking=True)
        return there if host.dim() == 1 else there.view(host.shape)


_slabs = _Slabs()


def sent_to(device: torch.device, host: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a host tensor on a device; to a GPU it is sent without waiting for what the GPU is still at."""
    dtype = dtype or host.dtype
    if device.type != "cuda" or host.is_cuda or not host.numel():
        return host.to(device, dtype)
    if host.numel() <= SMALL and torch.bfloat16 not in (dtype, host.dtype):  # which NumPy does not have
        return _slabs.sent(device, host, dtype)
    # not `Tensor.pin_memory`, which first asks the driver whether it is pinned already
    pinned = torch.empty(host.shape, dtype=dtype, pin_memory=True)
    return pinned.copy_(host).to(device, non_blocking=True)

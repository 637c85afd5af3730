"""Small tensors on their way from the host to a GPU: many a round, so that every one of them has to be cheap."""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLAB = 2**17  # numbers; what is sent in some hundred rounds
SMALL = SLAB // 64


class _Slabs(threading.local):
    """Pinned memory of one thread, of which every transfer takes the next piece.

    Asking for pinned memory costs more than the transfer. When a slab is used up, all that was sent from it has to have
    arrived before its first piece is written to again.
    """

    def __init__(self) -> None:
        self._slabs: dict[torch.dtype, tuple[Tensor, NDArray[np.generic]]] = {}
        self._used: dict[torch.dtype, int] = {}

    def sent(self, device: torch.device, host: Tensor) -> Tensor:
        if host.dtype not in self._slabs:
            pinned = torch.empty(SLAB, dtype=host.dtype, pin_memory=True)
            self._slabs[host.dtype], self._used[host.dtype] = (pinned, pinned.numpy()), 0
        (pinned, on_host), start = self._slabs[host.dtype], self._used[host.dtype]
        if start + host.numel() > SLAB:
            torch.cuda.synchronize(device)
            start = 0
        end = self._used[host.dtype] = start + host.numel()
        on_host[start:end] = host.numpy().reshape(-1)
        there = pinned[start:end].to(device, non_blocking=True)
        return there if host.dim() == 1 else there.view(host.shape)


_slabs = _Slabs()


def sent_to(device: torch.device, host: Tensor) -> Tensor:
    """Return a host tensor on a device; to a GPU it is sent without waiting for what the GPU is still at."""
    if device.type != "cuda" or host.is_cuda or not host.numel():
        return host.to(device)
    if host.numel() <= SMALL and host.dtype != torch.bfloat16:  # which NumPy does not have
        return _slabs.sent(device, host)
    # not `Tensor.pin_memory`, which first asks the driver whether it is pinned already
    pinned = torch.empty(host.shape, dtype=host.dtype, pin_memory=True)
    return pinned.copy_(host).to(device, non_blocking=True)

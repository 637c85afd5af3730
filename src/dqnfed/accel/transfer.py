"""Small tensors between the host and a GPU, without waiting for the GPU's earlier work."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SLAB = 2**17  # numbers; enough for some hundred rounds
SMALL = SLAB // 64
Key = tuple[torch.device, torch.dtype]


class _Slabs(threading.local):
    """Pinned memory of one thread, of which every transfer takes the next piece.

    To allocate pinned memory takes longer than the transfer. When a slab is used up, everything sent from it must have
    arrived before its first piece is written to again.
    """

    def __init__(self) -> None:
        self._slabs: dict[Key, tuple[Tensor, NDArray[np.generic]]] = {}
        self._used: dict[Key, int] = {}

    def to_device(self, device: torch.device, host: Tensor, dtype: torch.dtype) -> Tensor:
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


def to_device_async(device: torch.device, host: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a host tensor on a device; a GPU's earlier work is not waited for."""
    dtype = dtype or host.dtype
    if device.type != "cuda" or host.is_cuda or not host.numel():
        return host.to(device, dtype)
    if host.numel() <= SMALL and torch.bfloat16 not in (dtype, host.dtype):  # which NumPy does not have
        return _slabs.to_device(device, host, dtype)
    # not `Tensor.pin_memory`, which first asks the driver whether it is pinned already
    pinned = torch.empty(host.shape, dtype=dtype, pin_memory=True)
    return pinned.copy_(host).to(device, non_blocking=True)


class PinnedReadback:
    """Pinned memory for what a GPU sends to the host again and again."""

    def __init__(self) -> None:
        self._made: tuple[Tensor, torch.cuda.Event] | None = None

    def start(self, t: Tensor) -> Callable[[], Tensor]:
        """Start the transfer of a tensor, and return a function that waits for it and returns it on the host.

        The tensor may be overwritten as soon as this returns. Memory whose transfer was not waited for is not used for
        the next one.
        """
        if not t.is_cuda:
            copied = t.clone()
            return lambda: copied
        if self._made is None or self._made[0].shape != t.shape or self._made[0].dtype != t.dtype:
            self._made = torch.empty(t.shape, dtype=t.dtype, pin_memory=True), torch.cuda.Event()
        (place, is_there), self._made = self._made, None
        place.copy_(t, non_blocking=True)
        is_there.record(torch.cuda.current_stream(t.device))
        arrived: list[Tensor] = []

        def wait() -> Tensor:
            if not arrived:
                is_there.synchronize()
                arrived.append(place.clone())
                self._made = (place, is_there)
            return arrived[0]

        return wait

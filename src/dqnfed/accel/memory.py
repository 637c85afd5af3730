"""The process's memory during a run: what is freed is used again, and goes back to the system now and then.

The C library gives a large block back as soon as it is freed. The next one comes from the system again, which makes
every page of it anew: with the activations of convolutions that is up to a third of the time.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

LARGEST = 2**28  # bytes of a block that is kept when it is freed
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # in glibc's malloc.h
SECONDS = 10.0  # between two calls of malloc_trim: one takes some hundredths of a second, and more to get it all again


class Heap:
    """The C library's heap: with a hundred clients' memories it keeps hundreds of megabytes of freed pieces."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds, self._last = seconds, time.monotonic()
        self._trim = _of_c_library("malloc_trim")

    def trim_malloc(self) -> None:
        """Give freed memory back to the system if that is due."""
        if time.monotonic() - self._last >= self._seconds:
            self.trim_now()
            self._last = time.monotonic()

    def trim_now(self) -> None:
        """Give freed memory back to the system; no effect where the C library has no such call."""
        if self._trim is not None:
            self._trim(0)


@cache
def keep_freed_blocks() -> None:
    """Have this process use freed blocks again, once and for all; no effect where the C library has no such call."""
    mallopt = _of_c_library("mallopt")
    if mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGEST):
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def frozen_gc() -> Iterator[None]:
    """Collect garbage once, and then have Python's collector leave alone what is there: libraries have many objects.

    What an earlier run left goes first, captured graphs above all, which hold a GPU's memory.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _of_c_library(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]  # glibc's
    except (AttributeError, OSError, TypeError):
        return None

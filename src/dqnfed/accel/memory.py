"""The process's memory during a run: freed memory goes back to the system, and old objects are not collected."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 1.0  # between two calls of malloc_trim; one takes some hundredths of a second


class Heap:
    """The C library's heap: with a hundred clients' memories it keeps hundreds of megabytes of freed pieces."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds, self._last = seconds, time.monotonic()
        self._trim = _malloc_trim()

    def trim_malloc(self) -> None:
        """Give freed memory back to the system if that is due; no effect where the C library has no such call."""
        if self._trim is not None and time.monotonic() - self._last >= self._seconds:
            self._trim(0)
            self._last = time.monotonic()


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


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # glibc's
    except (AttributeError, OSError, TypeError):
        return None

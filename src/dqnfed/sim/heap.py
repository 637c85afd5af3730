"""Memory that was freed goes back to the system from time to time: the C library keeps it in pieces otherwise."""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 1.0  # between two times; giving back and asking again costs some hundredths of a second


class Heap:
    """The process's free memory; with a hundred clients' memories it comes to hundreds of megabytes."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds, self._last = seconds, time.monotonic()
        self._trim = _malloc_trim()

    def tidy(self) -> None:
        """Give free memory back if that is due; nothing happens where the C library has no such call."""
        if self._trim is not None and time.monotonic() - self._last >= self._seconds:
            self._trim(0)
            self._last = time.monotonic()


@contextmanager
def nothing_old_collected() -> Iterator[None]:
    """Have Python's collector look at what is here once, and then leave it alone: the libraries' objects take long.

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

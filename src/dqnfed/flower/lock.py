"""One writer a run folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with this process however it ends; refuse if another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.lock").open("w") as file:
        if sys.platform != "win32":
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise BlockingIOError(
                    f"another process writes to {folder}; end it (a server app outlives a killed SuperLink), or choose "
                    "another `out`."
                ) from error
        yield

"""Who follows a run, and when they are told."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from dqnfed.core.run_folder import ClientRow
from dqnfed.sim.journal import Journal
from dqnfed.sim.state import Record

logger = logging.getLogger("dqnfed")


class Observer(Protocol):
    """Anything that wants to follow a run: progress bars, trackers, live pages."""

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...
    def round(self, record: Mapping[str, Any]) -> None: ...
    def end(self, summary: Mapping[str, Any]) -> None: ...


class Afterwards:
    """Writes a round down and tells of it: at once, or when the next round's clients are at work on a GPU.

    There the host has time, while between two rounds the GPU would wait for it.
    """

    def __init__(self, journal: Journal, observers: Sequence[Observer]) -> None:
        self._journal, self._observers = journal, observers
        self._unwritten: tuple[Record, list[ClientRow]] | None = None
        self._untold: Record | None = None

    def later(self, record: Record, rows: list[ClientRow]) -> None:
        """Have this told at the next call of `now`."""
        self._unwritten, self._untold = (record, rows), record

    def write(self) -> None:
        """Write down what waits for it; nobody is told yet."""
        if self._unwritten is not None:
            waiting, self._unwritten = self._unwritten, None
            self._journal.add(*waiting)

    def now(self) -> None:
        """Write down and tell what waits for it."""
        self.write()
        if self._untold is not None:
            record, self._untold = self._untold, None
            for observer in self._observers:
                observer.round(record)

    close = now  # nothing is lost when the round after fails


@contextmanager
def told_of_failure(observers: Sequence[Observer]) -> Iterator[None]:
    """Tell the observers that the run failed, if it does, so that they can close what they opened."""
    try:
        yield
    except BaseException as error:
        for observer in observers:
            try:
                observer.end({"status": "failed", "reason": str(error)})
            except Exception:
                logger.exception("an observer could not close after the run failed")
        raise

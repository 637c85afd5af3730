"""Observers of a run, and when they get its records."""

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


class DeferredLog:
    """Writes a round's record and passes it to the observers: at once, or while the next round's clients compute.

    On a GPU the host has time then, while between two rounds the GPU would wait for it.
    """

    def __init__(self, journal: Journal, observers: Sequence[Observer]) -> None:
        self._journal, self._observers = journal, observers
        self._unwritten: tuple[Record, list[ClientRow]] | None = None
        self._unreported: Record | None = None

    def enqueue(self, record: Record, rows: list[ClientRow]) -> None:
        """Keep a record for the next call of `flush`."""
        self._unwritten, self._unreported = (record, rows), record

    def write(self) -> None:
        """Write the record that waits; observers get it at the next `flush`."""
        if self._unwritten is not None:
            waiting, self._unwritten = self._unwritten, None
            self._journal.add(*waiting)

    def flush(self) -> None:
        """Write the record that waits and pass it to the observers."""
        self.write()
        if self._unreported is not None:
            record, self._unreported = self._unreported, None
            for observer in self._observers:
                observer.round(record)

    close = flush  # nothing is lost when the round after fails


@contextmanager
def report_failure(observers: Sequence[Observer]) -> Iterator[None]:
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

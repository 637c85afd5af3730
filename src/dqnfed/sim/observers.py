"""Observers of a run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger("dqnfed")


class Observer(Protocol):
    """Anything that wants to follow a run: progress bars, trackers, live pages."""

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...
    def round(self, record: Mapping[str, Any]) -> None: ...
    def end(self, summary: Mapping[str, Any]) -> None: ...


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

"""A process that plays one run after the other for the process that started it, and tells it how far it is.

The two talk over a pipe of their own: a worker that dies takes no lock and no half of a message with it that others
would wait for, and one whose parent dies saves its run and ends.
"""

from __future__ import annotations

import logging
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dqnfed.experiments.planned import Ending, Planned, run_planned
from dqnfed.experiments.progress import current_numbers
from dqnfed.experiments.trackers import trackers_of

SECONDS = 0.2  # between two reports of one run


class Advanced(NamedTuple):
    """How far a run is."""

    done: int
    rounds: int
    numbers: str  # the fairness right now


class Logged(NamedTuple):
    """A line of a run's log."""

    logger: str
    level: int
    text: str


class Broken(NamedTuple):
    """An error that ends the whole comparison."""

    error: Exception


Message = Advanced | Logged | Ending | Broken


def serve(connection: Connection, threads: int, level: int) -> None:
    """Play the runs that come in, with so many threads of torch, until None comes or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C reaches everyone, but the parent decides
    line = Line(connection)
    logging.basicConfig(level=level, format="%(message)s", handlers=[LogOverLine(line)], force=True)
    while (run := line.next_run()) is not None:
        torch.set_num_threads(threads)
        line.tell(outcome(run, line))


def outcome(run: Planned, line: Line) -> Ending | Broken:
    """Return what became of the run; errors that are not the method's own are the parent's business."""
    if line.says_stop():
        return Ending("interrupted")
    try:
        return run_planned(run, [Reporter(line), *trackers_of(run.config)])
    except KeyboardInterrupt:
        return Ending("interrupted")
    except Exception as error:
        error.add_note(f"in the process of {run.name}:\n{traceback.format_exc()}")
        return Broken(portable(error))


def portable(error: Exception) -> Exception:
    """Return the error if it bears to be sent to another process, else one that says the same."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class Line:
    """The worker's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.RLock()  # threads of a run may log at the same time
        self._stopped = False

    def tell(self, message: Message) -> None:
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:  # nobody is there any more
            self._stopped = True

    def says_stop(self) -> bool:
        """Return whether the run is to stop: while it is under way, nothing else comes in but that or the end."""
        self._stopped = self._stopped or self._connection.poll()
        return self._stopped

    def next_run(self) -> Planned | None:
        if self._stopped:
            return None
        try:
            run: Planned | None = self._connection.recv()
        except (EOFError, OSError):
            return None
        return run


class LogOverLine(logging.Handler):
    """Sends what a run logs to the parent, which knows whose it is and where it is shown."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.tell(Logged(record.name, record.levelno, self.format(record)))


class Reporter:
    """An observer that tells the parent how far the run is, and stops the run when the parent says so."""

    def __init__(self, line: Line) -> None:
        self._line, self._numbers, self._last, self._interrupted = line, "", 0.0, False

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None:
        if self._line.says_stop():
            raise KeyboardInterrupt
        self._rounds = config["train"]["rounds"]
        self._line.tell(Advanced(0, self._rounds, ""))

    def round(self, record: Mapping[str, Any]) -> None:
        self._numbers = current_numbers(record) or self._numbers
        if time.monotonic() - self._last >= SECONDS:
            self._line.tell(Advanced(record["round"] + 1, self._rounds, self._numbers))
            self._last = time.monotonic()
        if not self._interrupted and self._line.says_stop():
            self._interrupted = True  # a second time would stop the run before it is saved
            interrupt()

    def end(self, summary: Mapping[str, Any]) -> None:
        """Nothing: the worker tells the parent what became of the run."""


def interrupt() -> None:
    """Do to this process what Ctrl-C does to a run that is alone: the engine saves it after this round."""
    logging.disable(logging.WARNING)  # the parent has said so already
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.raise_signal(signal.SIGINT)

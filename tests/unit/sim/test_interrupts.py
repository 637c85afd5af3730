"""Ctrl-C: the first is noted, the second counts, and the handler that was there comes back."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from dqnfed.sim.engine import interrupt_flag


@pytest.fixture(autouse=True)
def as_in_a_terminal() -> Iterator[None]:
    """Let Ctrl-C mean what it means in a terminal: a process started in the background inherits that it is ignored."""
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_is_noted_and_the_second_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupt_flag() as flag:
        assert not flag.is_set()
        press()
        assert flag.is_set()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is before


def test_without_an_interrupt_nothing_is_set() -> None:
    before = signal.getsignal(signal.SIGINT)
    with interrupt_flag() as flag:
        assert signal.getsignal(signal.SIGINT) is not before
    assert not flag.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_cannot_catch_signals_and_do_not_try() -> None:
    seen: list[bool] = []

    def work() -> None:
        with interrupt_flag() as flag:
            seen.append(flag.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]

"""Free memory goes back to the system when it is due, and nothing breaks where it cannot."""

from __future__ import annotations

import ctypes

import pytest

from dqnfed.accel import Accelerated, memory


def test_memory_is_given_back_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    now = [0.0]
    monkeypatch.setattr(memory, "_of_c_library", lambda name: given.append)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    kept = memory.Heap(seconds=2.0)
    for now[0] in (0.5, 1.9, 2.1, 3.0, 4.2):
        kept.trim_malloc()
    assert len(given) == 2  # at 2.1, and two seconds after that


def test_memory_is_given_back_at_the_end_of_a_run_that_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    faster = Accelerated()
    monkeypatch.setattr(memory, "_of_c_library", lambda name: given.append)
    with pytest.raises(KeyError), faster.memory():
        raise KeyError
    assert given == [0]


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    memory.Heap(seconds=0.0).trim_malloc()
    assert memory._of_c_library("malloc_trim") is None

"""Free memory goes back to the system when it is due, and nothing breaks where it cannot."""

from __future__ import annotations

import ctypes

import pytest

from dqnfed.sim import heap


def test_memory_is_given_back_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    now = [0.0]
    monkeypatch.setattr(heap, "_malloc_trim", lambda: given.append)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    kept = heap.Heap(seconds=2.0)
    for now[0] in (0.5, 1.9, 2.1, 3.0, 4.2):
        kept.tidy()
    assert len(given) == 2  # at 2.1, and two seconds after that


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    heap.Heap(seconds=0.0).tidy()
    assert heap._malloc_trim() is None

"""Parameters of which `make test` tries a part; `make test-all` tries all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def in_turn(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Return all pairs; every row is quick with one of the columns, the next row with the next one."""
    rows, columns = list(rows), list(columns)
    return [
        pytest.param(row, column, marks=[] if k % len(columns) == m else pytest.mark.slow)
        for k, row in enumerate(rows)
        for m, column in enumerate(columns)
    ]


def every(n: int, values: Iterable[Any]) -> list[Any]:
    """Return the values, of which every n-th is quick; a tuple is several parameters."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=[] if k % n == 0 else pytest.mark.slow)
        for k, value in enumerate(values)
    ]

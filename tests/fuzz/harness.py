"""What every fuzzer shares: seeded cases, and the judgement of what a call may do with them.

A call returns a right result, or raises an error in the words of dqnfed: one that its own code raised, with a message.
Anything else (an error out of another library, an assertion, a hang) is a failure, and the seed repeats it.
"""

from __future__ import annotations

import random
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dqnfed

CLEAR = (ValueError, OSError, RuntimeError, ImportError)  # what the command line prints without a traceback
SOURCE = Path(dqnfed.__file__).parent
SECONDS = 300  # longer than any case takes on a busy machine
QUICK = range(20)  # seeds of the usual suite


class HangError(BaseException):
    """A case did not end."""


def slow_seeds(n_cases: int) -> list[Any]:
    """Return blocks of a hundred seeds each, for the exhaustive suite."""
    blocks = [range(start, start + 100) for start in range(1000, 1000 + n_cases, 100)]
    return [pytest.param(block, marks=pytest.mark.slow, id=f"{block[0]}-{block[-1]}") for block in blocks]


@contextmanager
def no_hang() -> Iterator[None]:
    """Raise where the block takes minutes."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise HangError(f"no end after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(call: Callable[[], Any], case: str) -> tuple[Any, str]:
    """Return what a call returned, or why it refused; anything but a clear error fails with the case."""
    try:
        with no_hang(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return call(), ""
    except CLEAR as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        is_raised_here = Path(place.filename).is_relative_to(SOURCE) and str(place.line).startswith("raise")
        is_own = is_raised_here or isinstance(error, OSError)  # which names the file
        if not is_own or not str(error).strip() or " object at 0x" in str(error):
            raise AssertionError(f"{case}: an unclear error, {type(error).__name__}: {error}") from error
        return None, str(error)
    except HangError as error:
        raise AssertionError(f"{case}: {error}") from error
    except Exception as error:
        raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error


ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 10**30, -(10**30), 0.0, -0.5, 0.5, 1.0, 1.5, 1e300, float("inf"), -float("inf"),
    float("nan"), "", "x", "full", "auto", "1", "../x", "\x00", "é\u2028", [], [1], ["a", 2], [[1], 2], {}, {"a": 1},
)  # fmt: skip


def odd_value(chance: random.Random) -> Any:
    """Return some value of some type."""
    return chance.choice(ODD)


def spoiled(raw: bytes, chance: random.Random) -> bytes:
    """Return the bytes of a file with bits flipped, bytes cut, put in, repeated or replaced."""
    data = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 5, 20))):
        place = chance.randrange(len(data) + 1)
        kind = chance.randrange(7)
        if kind == 0 and data:
            data[place % len(data)] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[place:]
        elif kind == 2:
            del data[place : place + chance.randrange(1, 50)]
        elif kind == 3:
            data[place:place] = bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9)))
        elif kind == 4:
            data[place:place] = data[place : place + chance.randrange(1, 200)]
        elif kind == 5 and data:
            data[place % len(data)] = chance.choice(b"\x00\xff\n,\"'{}[]-0159.eE")
        elif kind == 6:
            data[place : place + 8] = chance.choice((b"\xff" * 8, b"\x00" * 8, b"9" * 8, b"-1,inf,\n", b"NaN"))
    return bytes(data)

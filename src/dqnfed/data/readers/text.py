"""Text: the 80-symbol alphabet of LEAF, windows of characters, and who speaks in a play."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from dqnfed.data.raw import DataError

# LEAF's symbols in LEAF's order. Anything else becomes symbol 0, the newline, which cleaned text never contains
# (LEAF's own -1 would silently mean the last symbol).
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
UNKNOWN = 0
WINDOW = 80

_CODES = np.full(128, UNKNOWN, np.uint8)
_CODES[[ord(symbol) for symbol in ALPHABET]] = np.arange(len(ALPHABET))


class Speech(NamedTuple):
    role: str  # PLAY_ROLE, as in LEAF
    text: str


def encode(text: str) -> np.ndarray:
    """Return the symbol number of every character."""
    points = np.frombuffer(text.encode("utf-32-le"), "<u4")
    return np.where(points < 128, _CODES[np.minimum(points, 127)], UNKNOWN).astype(np.uint8)


def decode(codes: np.ndarray) -> str:
    """Return the characters of symbol numbers."""
    return "".join(ALPHABET[code] for code in codes)


def cleaned(text: str) -> str:
    """Return the text as one line: line breaks become spaces, runs of spaces one space."""
    return re.sub(r" {2,}", " ", text.replace("\n", " "))


def windows(codes: np.ndarray, length: int = WINDOW) -> tuple[np.ndarray, np.ndarray]:
    """Return every window [N, length] of the text, one character apart, and the character that follows each [N]."""
    if len(codes) <= length:
        return np.empty((0, length), np.uint8), np.empty(0, np.uint8)
    return np.lib.stride_tricks.sliding_window_view(codes, length)[:-1], codes[length:]


# A speaker: a name in capitals, or any short name after one to four spaces, ended by a full stop.
_CAPITALS = r"[A-Z][A-Z0-9 '\u2019&,\-]*"
_ALONE = re.compile(rf"^\s{{0,4}}({_CAPITALS})\.$")
_WITH_SPEECH = re.compile(rf"^ {{0,4}}({_CAPITALS}|(?<= )[A-Z][A-Za-z '\u2019\-]{{0,30}}?)\. +(\S.*)$")
_BY_AUTHOR = re.compile(r"^\s*by William Shakespeare\s*$", re.IGNORECASE)
_HEADING = re.compile(r"^\s*(ACT|SCENE|PROLOGUE|EPILOGUE|THE END|FINIS|DRAMATIS|Dramatis|Scene|SCENA|ACTUS)\b")
_STAGE = re.compile(r"\[[^\]]*\]|_[^_]*_")


def speeches(lines: Iterable[str], title: str | None = None) -> Iterator[Speech]:
    """Yield who says what in plain-text plays.

    A speaker's name in capitals with a full stop stands alone on a line (speech below) or before the speech on the same
    line; the speech lasts until a blank line, a heading or the next speaker. Stage directions in [brackets] or
    _underscores_ are dropped. The play's title is `title`, or the last line above "by William Shakespeare".
    """
    play, above = title or "", ""
    role, said = "", list[str]()
    for line in lines:
        line = line.rstrip()
        if title is None and _BY_AUTHOR.match(line):
            yield from spoken(play, role, said)
            play, role, said = above, "", []
        elif not line.strip() or _HEADING.match(line):
            if said:
                yield from spoken(play, role, said)
                role, said = "", []
        elif play and (alone := _ALONE.match(line)):
            yield from spoken(play, role, said)
            role, said = alone[1], []
        elif play and (opening := _WITH_SPEECH.match(line)):
            yield from spoken(play, role, said)
            role, said = opening[1], [opening[2]]
        elif role:
            said.append(line.strip())
        above = line.strip() or above
    yield from spoken(play, role, said)


def spoken(play: str, role: str, said: list[str]) -> Iterator[Speech]:
    text = cleaned(_STAGE.sub("", " ".join(said))).strip()
    if role and text:
        yield Speech(f"{identifier(play)}_{identifier(role)}", text)


def identifier(name: str) -> str:
    return re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_")


def text_by_role(all_speeches: Iterable[Speech]) -> dict[str, str]:
    """Return everything each role says, in order, as one line."""
    said: dict[str, list[str]] = {}
    for speech in all_speeches:
        said.setdefault(speech.role, []).append(speech.text)
    if not said:
        raise DataError(
            "no speeches were found in the text. A speaker's name must stand in capitals with a full stop, "
            "as in Project Gutenberg's plain-text plays."
        )
    return {role: " ".join(texts) for role, texts in said.items()}

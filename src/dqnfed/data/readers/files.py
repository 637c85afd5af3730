"""Small things that all readers need: finding files, and saying what is wrong with them."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from dqnfed.data.raw import DataError


class MissingFiles(DataError):
    """A file that the format requires is not there."""


def find(folder: Path, *candidates: str) -> Path:
    """Return the first of the candidate paths that exists under `folder`."""
    for candidate in candidates:
        path = folder / candidate
        if path.exists():
            return path
    raise MissingFiles(f"{folder} holds none of: {', '.join(candidates)}.")


def is_there(folder: Path, *candidates: str) -> bool:
    return any((folder / candidate).exists() for candidate in candidates)


def bytes_of(path: Path) -> bytes:
    """Return the contents of a file, unpacked where its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as file:
            return file.read()
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path} is not a whole gzip file ({error}); it was cut or damaged. Fetch it again.") from error


def text_of(path: Path) -> str:
    """Return the text of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8 ({error}); it was damaged. Fetch it again.") from error

"""Checksums of a run's files, so that damage on a disk is named and never computed with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CHECKSUMS = "checksums.json"
BLOCK = 1 << 20
BLANK = "0" * 64
FIELD = re.compile(rb'"checksum": "([0-9a-f]{64})"')


def sha256_of(path: Path, n_bytes: int | None = None) -> str:
    """Return the SHA-256 of a file, or of its first bytes; of a shorter file it is another one."""
    digest, left = hashlib.sha256(), n_bytes
    with path.open("rb") as file:
        while block := file.read(BLOCK if left is None else min(BLOCK, left)):
            digest.update(block)
            left = None if left is None else left - len(block)
    if left:
        digest.update(b"cut")
    return digest.hexdigest()


def with_checksum(facts: Mapping[str, Any], text_of: Any) -> str:
    """Return the facts as JSON that holds the checksum of its own text, taken with zeros in that place."""
    text: str = text_of({**facts, "checksum": BLANK})
    head, _, tail = text.rpartition(BLANK)
    return head + hashlib.sha256(text.encode()).hexdigest() + tail


def checked_facts(path: Path) -> dict[str, Any] | None:
    """Return the facts that `with_checksum` wrote to a file; None where it is missing or not as it was written."""
    try:
        raw = path.read_bytes()
    except OSError:
        return None
    found = list(FIELD.finditer(raw))
    if not found:
        return None
    start, end = found[-1].span(1)
    blank = raw[:start] + BLANK.encode() + raw[end:]
    if hashlib.sha256(blank).hexdigest() != raw[start:end].decode():
        return None
    facts: dict[str, Any] = json.loads(raw)
    del facts["checksum"]
    return facts


def checksums_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the checksums of those of the files that are there."""
    return {name: sha256_of(folder / name) for name in names if (folder / name).is_file()}


def listed_checksums(folder: Path) -> dict[str, str] | None:
    """Return the checksums that the run wrote down; None where there is no list, or it is damaged."""
    facts = checked_facts(folder / CHECKSUMS)
    return None if facts is None else facts["files"]


def damaged_files(folder: Path) -> list[str]:
    """Return the names of the listed files that are not as they were written, and of a list that is damaged itself.

    Folders of versions that wrote no list have none.
    """
    if not (folder / CHECKSUMS).is_file():
        return []
    listed = listed_checksums(folder)
    if listed is None:
        return [CHECKSUMS]
    return [name for name, checksum in listed.items() if not is_intact(folder / name, checksum)]


def is_intact(path: Path, checksum: str, n_bytes: int | None = None) -> bool:
    """Return whether the file, or its first bytes, still have this checksum."""
    return path.is_file() and sha256_of(path, n_bytes) == checksum


def damage_line(name: str) -> str:
    """Return the sentence that names a damaged file."""
    return f"damaged: {name}, checksum differs"


def refuse_damaged(folder: Path) -> None:
    """Raise where a listed file of the run is not as it was written."""
    if found := damaged_files(folder):
        raise ValueError(
            f"{folder} cannot be used: {'; '.join(map(damage_line, found))}. `dqnfed resume {folder}` mends it from "
            "the newest intact checkpoint, or put the file back from a copy."
        )

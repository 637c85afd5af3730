"""One way to any dataset: by name."""

from __future__ import annotations

from pathlib import Path

from dqnfed.data.raw import DataError, RawData
from dqnfed.data.readers.digits import read_digits


def load(name: str, data_dir: Path | None = None) -> RawData:
    """Return the dataset called `name`."""
    if name == "digits":
        return read_digits()
    raise DataError(f"dataset {name!r} is unknown.")

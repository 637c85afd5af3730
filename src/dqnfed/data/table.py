"""Tables from files: CSV, Parquet and NPZ, with numbers, text and holes."""

from __future__ import annotations

import csv
import difflib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dqnfed.data.raw import DataError

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})  # compared in lower case


@dataclass(frozen=True)
class Table:
    """Columns of equal length: float64 with NaN for holes, or text with "" for holes."""

    source: str
    columns: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))) if self.columns else 0

    def column(self, name: str, role: str) -> np.ndarray:
        """Return a column; an unknown name raises with what there is and the nearest."""
        if name not in self.columns:
            close = difflib.get_close_matches(name, self.columns, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise DataError(
                f"{self.source} has no column {name!r} for the {role}.{hint} It has: {', '.join(self.columns)}."
            )
        return self.columns[name]

    def rows(self, kept: np.ndarray) -> Table:
        """Return these rows only."""
        return Table(self.source, {name: values[kept] for name, values in self.columns.items()})


def is_numeric(values: np.ndarray) -> bool:
    return values.dtype.kind == "f"


def is_hole(values: np.ndarray) -> np.ndarray:
    """Return where a column has no value."""
    holes: np.ndarray = np.isnan(values) if is_numeric(values) else values == ""
    return holes


def as_text(values: np.ndarray) -> np.ndarray:
    """Return a column as text: whole numbers without a decimal point, holes as ""."""
    if not is_numeric(values):
        return values
    text = [("" if np.isnan(v) else str(int(v)) if float(v).is_integer() else repr(float(v))) for v in values]
    return np.array(text, dtype=np.str_)


def read_table(path: Path) -> Table:
    """Return the table in a .csv (or .tsv), .parquet or .npz file."""
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of a CSV, Parquet or NPZ file.")
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv", ".txt"):
        table = read_csv(path)
    elif suffix in (".parquet", ".pq"):
        table = read_parquet(path)
    elif suffix == ".npz":
        table = read_npz(path)
    else:
        raise DataError(f"{path} is not one of .csv, .tsv, .parquet, .npz; convert it to one of these.")
    if len(table) == 0:
        raise DataError(f"{path} has no rows.")
    return table


def read_csv(path: Path) -> Table:
    """Return a CSV file with a header line; commas, semicolons or tabs are told apart by the header."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        header = file.readline()
        delimiter = max(",;\t", key=header.count)
        file.seek(0)
        rows = list(csv.reader(file, delimiter=delimiter))
    rows = [row for row in rows if row]
    if not rows:
        raise DataError(f"{path} is empty.")
    names, body = [name.strip() for name in rows[0]], rows[1:]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"{path} has more than one column called {', '.join(map(repr, twice))}; rename them.")
    for number, row in enumerate(body, start=2):
        if len(row) != len(names):
            raise DataError(f"{path}, line {number}: {len(row)} values for {len(names)} columns.")
    return Table(str(path), {name: typed([row[i] for row in body]) for i, name in enumerate(names)})


def typed(values: Sequence[str]) -> np.ndarray:
    """Return values as numbers where all that are there are numbers, else as text."""
    stripped = [value.strip() for value in values]
    holes = [value.lower() in MISSING for value in stripped]
    try:
        return np.array(
            [np.nan if hole else float(v) for v, hole in zip(stripped, holes, strict=True)], dtype=np.float64
        )
    except ValueError:
        return np.array(["" if hole else v for v, hole in zip(stripped, holes, strict=True)], dtype=np.str_)


def read_parquet(path: Path) -> Table:
    """Return a Parquet file's columns of numbers, booleans, text and dates (as text)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("reading Parquet needs pyarrow; install it with `pip install dqnfed[tables]`.") from error
    try:
        content = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} is not a whole Parquet file ({error}).") from error
    columns: dict[str, np.ndarray] = {}
    for name in content.column_names:
        values = content.column(name).to_pylist()
        if all(value is None or isinstance(value, int | float) for value in values):
            columns[name] = np.array([np.nan if value is None else float(value) for value in values])
        else:
            columns[name] = np.array(["" if value is None else str(value) for value in values], dtype=np.str_)
    return Table(str(path), columns)


def read_npz(path: Path) -> Table:
    """Return an NPZ file's arrays as columns; an array x of [N, F] gives columns x0, x1, ..."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            content = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not an .npz file with plain arrays ({error}).") from error
    columns: dict[str, np.ndarray] = {}
    for name, values in content.items():
        if values.ndim == 0:
            continue
        flat = values.reshape(len(values), -1)
        for i in range(flat.shape[1]):
            columns[name if values.ndim == 1 else f"{name}{i}"] = (
                flat[:, i].astype(np.float64) if values.dtype.kind in "fiub" else typed([str(v) for v in flat[:, i]])
            )
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{path}: the arrays must have one row an example each, but their lengths are {lengths}.")
    return Table(str(path), columns)

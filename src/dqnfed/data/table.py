"""Tables from files: CSV, Parquet and NPZ, with numbers, text and holes."""

from __future__ import annotations

import csv
import difflib
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np

from dqnfed.data.raw import DataError

LARGEST = 1e30  # in size, of a number in a table
FARTHEST = 1e8  # times the usual distance from a column's median
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
    text = [
        ("" if np.isnan(v) else str(int(v)) if np.isfinite(v) and v == np.floor(v) else repr(float(v))) for v in values
    ]
    return np.array(text, dtype=np.str_)


def with_extremes(
    table: Table, names: Sequence[str], rule: str, notes: list[str], *, farthest: float = FARTHEST
) -> Table:
    """Return the table after its numbers were checked: one that is not finite or absurd is refused or left out.

    `rule` is "refuse", which names row and column, or "missing", which makes holes of such values and notes them.
    """
    columns = dict(table.columns)
    for name in names:
        values = table.column(name, "inputs")
        if not is_numeric(values) or not (bad := is_extreme(values, farthest)).any():
            continue
        row, n = int(bad.argmax()), int(bad.sum())
        what = "not a finite number" if not np.isfinite(values[row]) else "absurdly far from the column's other values"
        if rule == "refuse":
            raise DataError(
                f"{table.source}, row {row + 1}, column {name!r}: {values[row]:g} is {what} ({n} such "
                f"{'value' if n == 1 else 'values'} in this column). Correct the cell or leave it empty (an empty cell "
                "is a missing value), leave the column out (--drop), or take such values for missing ones with "
                "`--set data.extremes=missing`."
            )
        columns[name] = np.where(bad, np.nan, values)
        notes.append(
            f"{n} {'value' if n == 1 else 'values'} of column {name!r} taken for missing, not finite or absurd "
            f'(data.extremes = "missing"); the first is {values[row]:g} in row {row + 1}'
        )
    return Table(table.source, columns)


def is_extreme(values: np.ndarray, farthest: float = FARTHEST) -> np.ndarray:
    """Return which numbers are infinite, larger than 1e30, or `farthest` times as far from the median as is usual.

    What is usual is the median of the distances that are not zero: an outlier does not move it, and heavy tails of
    incomes or counts stay far below the factor.
    """
    bad: np.ndarray = np.abs(values) > LARGEST
    known = values[~bad & ~np.isnan(values)]
    if len(known) < 3:
        return bad
    middle = float(np.median(known))
    distances = np.abs(known - middle)
    usual = float(np.median(distances[distances > 0])) if (distances > 0).any() else 0.0
    if usual == 0.0:
        return bad
    with np.errstate(invalid="ignore"):
        far: np.ndarray = np.abs(values - middle) > farthest * usual
    both: np.ndarray = bad | far
    return both


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
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            file.seek(0)
            rows = list(csv.reader(file, delimiter=delimiter))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a text table in UTF-8 ({error}); save it as CSV in UTF-8.") from error
    rows = [row for row in rows if row]
    if not rows:
        raise DataError(f"{path} is empty.")
    names, body = [name.strip() for name in rows[0]], rows[1:]
    if "" in names:
        raise DataError(f"{path}: column {names.index('') + 1} has no name in the header line; name it.")
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
        columns = {name: parquet_column(content.column(i).to_pylist()) for i, name in enumerate(content.column_names)}
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, NotImplementedError, KeyError) as error:
        raise DataError(f"{path} is not a whole Parquet file ({error}).") from error
    if len(columns) < len(content.column_names):
        raise DataError(f"{path} has two columns of the same name among {', '.join(content.column_names)}; rename one.")
    return Table(str(path), columns)


def parquet_column(values: Sequence[object]) -> np.ndarray:
    """Return a column as numbers where all that are there are numbers, else as text."""
    if all(value is None or isinstance(value, int | float | Decimal) for value in values):
        return np.array([np.nan if value is None else _as_float(value) for value in values], dtype=np.float64)
    return np.array(["" if value is None else str(value) for value in values], dtype=np.str_)


def _as_float(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond float64
        return np.inf


# what NumPy, the zip archive and its decoders raise for a file that is cut, damaged or another one
NPZ_ERRORS = (
    OSError, ValueError, EOFError, KeyError, TypeError, AttributeError, SyntaxError, MemoryError, OverflowError,
    NotImplementedError, RuntimeError, struct.error, tokenize.TokenError, zipfile.BadZipFile, zlib.error,
    lzma.LZMAError,
)  # fmt: skip


def read_npz(path: Path) -> Table:
    """Return an NPZ file's arrays as columns; an array x of [N, F] gives columns x0, x1, ..."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            content = {name: np.asarray(arrays[name]) for name in arrays.files}
    except NPZ_ERRORS as error:
        raise DataError(f"{path} is not an .npz file with plain arrays ({type(error).__name__}).") from error
    columns: dict[str, np.ndarray] = {}
    for name, values in content.items():
        if values.ndim == 0 or values.dtype.kind == "c" or values.dtype.kind == "V":
            continue
        flat = values.reshape(len(values), math.prod(values.shape[1:]))
        for i in range(flat.shape[1]):
            columns[name if values.ndim == 1 else f"{name}{i}"] = (
                flat[:, i].astype(np.float64) if values.dtype.kind in "fiub" else typed([str(v) for v in flat[:, i]])
            )
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{path}: the arrays must have one row an example each, but their lengths are {lengths}.")
    return Table(str(path), columns)

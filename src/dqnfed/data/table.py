"""Tables from files, or from a folder of files: CSV, Parquet and NPZ, with numbers, text and holes."""

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
from typing import Any

import numpy as np

from dqnfed.data.raw import DataError

LARGEST = 1e30  # in size, of a number in a table
FARTHEST = 1e8  # times the usual distance from a column's median
FILE_COLUMN = "(file)"  # of a table that was read from a folder: the name of each row's file, without its ending
TEXT_FILES, TABLE_FILES = (".csv", ".tsv", ".txt"), (".csv", ".tsv", ".txt", ".parquet", ".pq", ".npz")
MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})  # compared in lower case


@dataclass(frozen=True)
class Table:
    """Columns of equal length: float64 with NaN for holes, or text with "" for holes."""

    source: str
    columns: Mapping[str, np.ndarray]
    ignored: tuple[str, ...] = ()  # files of the folder that are no tables

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
        return Table(self.source, {name: values[kept] for name, values in self.columns.items()}, self.ignored)


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
    return Table(table.source, columns, table.ignored)


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
    """Return the table in a .csv (or .tsv), .parquet or .npz file, or in a folder of such files."""
    if path.is_dir():
        return read_folder(path)
    if not path.is_file():
        raise DataError(f"there is no file {path}; give the path of a CSV, Parquet or NPZ file, or a folder of them.")
    suffix = path.suffix.lower()
    if suffix in TEXT_FILES:
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


def read_folder(folder: Path) -> Table:
    """Return the rows of all tables in a folder, file after file by name; `FILE_COLUMN` says from which each comes.

    A column is numbers where it is in every file: those of CSV files are told apart after they were put together, as
    in one file.
    """
    shown = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    files = [path for path in shown if path.suffix.lower() in TABLE_FILES and not path.is_dir()]
    ignored = tuple(path.name for path in shown if path not in files)
    if not files:
        raise DataError(f"{folder} holds no table: one file for each client, .csv, .tsv, .parquet or .npz.")
    for path in files:
        if not path.is_file():
            raise DataError(f"{path} is a link to a file that is not there, or no file at all; mend or remove it.")
    stems = [path.stem for path in files]
    if twice := sorted({stem for stem in stems if stems.count(stem) > 1}):
        raise DataError(
            f"{folder} has more than one file called {twice[0]!r} but for the ending; rename or remove one."
        )
    if all(path.suffix.lower() in TEXT_FILES for path in files):
        texts = [read_texts(path) for path in files]
        parts: list[Mapping[str, Sequence[str] | np.ndarray]] = [dict(text) for text in texts]
        lengths = [len(next(iter(text.values()))) for text in texts]
    else:
        tables = [read_table(path) for path in files]
        parts, lengths = [dict(table.columns) for table in tables], [len(table) for table in tables]
    for path, part, n in zip(files, parts, lengths, strict=True):
        if n == 0:
            raise DataError(f"{path} has no rows.")
        if set(part) != set(parts[0]):
            odd = sorted(set(part) ^ set(parts[0]))[0]
            has, lacks = (path, files[0]) if odd in part else (files[0], path)
            raise DataError(f"{has} has a column {odd!r}, and {lacks} has none; every file needs the same columns.")
    columns = {name: merged_column([part[name] for part in parts]) for name in parts[0]}
    return Table(str(folder), {FILE_COLUMN: np.repeat(np.array(stems, dtype=np.str_), lengths), **columns}, ignored)


def merged_column(parts: Sequence[Sequence[str] | np.ndarray]) -> np.ndarray:
    """Return the column whose values stand in several files: numbers where all of them are."""
    if not isinstance(parts[0], np.ndarray):
        return typed([str(value) for part in parts for value in part])
    arrays = [np.asarray(part) for part in parts]
    if all(is_numeric(part) or bool((part == "").all()) for part in arrays):
        return np.concatenate([part if is_numeric(part) else np.full(len(part), np.nan) for part in arrays])
    return np.concatenate([as_text(part) for part in arrays])


def read_csv(path: Path) -> Table:
    """Return a CSV file with a header line; a column is numbers where all of its values are."""
    return Table(str(path), {name: typed(values) for name, values in read_texts(path).items()})


def read_texts(path: Path) -> dict[str, list[str]]:
    """Return the texts of a CSV file by column; commas, semicolons or tabs are told apart by the header."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
            delimiter = max(",;\t", key=header.count)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter)
            lines = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a text table in UTF-8 ({error}); save it as CSV in UTF-8.") from error
    if not lines:
        raise DataError(f"{path} is empty.")
    names, body = [name.strip() for name in lines[0][1]], [row for _, row in lines[1:]]
    if "" in names:
        raise DataError(f"{path}: column {names.index('') + 1} has no name in the header line; name it.")
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"{path} has more than one column called {', '.join(map(repr, twice))}; rename them.")
    for number, row in lines[1:]:
        if len(row) != len(names):
            raise DataError(
                f"{path}, line {number}: {len(row)} values for {len(names)} columns; every line needs as many as the "
                "header line names, and a value with a comma in it stands in quotes."
            )
        if any("\0" in value for value in row):
            raise DataError(f"{path}, line {number} holds a NUL character; save the table as CSV in UTF-8.")
    return {name: [row[i] for row in body] for i, name in enumerate(names)}


def typed(values: Sequence[str]) -> np.ndarray:
    """Return values as numbers where all that are there are numbers, else as text."""
    stripped = [value.strip() for value in values]
    holes = [value.lower() in MISSING for value in stripped]
    try:
        return np.array(
            [np.nan if hole else number_in(v) for v, hole in zip(stripped, holes, strict=True)], dtype=np.float64
        )
    except ValueError:
        return np.array(["" if hole else v for v, hole in zip(stripped, holes, strict=True)], dtype=np.str_)


def number_in(text: str) -> float:
    """Return the number that a cell holds; Python's 1_000 is text, such as a code, and no number."""
    if "_" in text:
        raise ValueError(text)
    return float(text)


def is_number(text: str) -> bool:
    """Return whether a cell holds a number."""
    try:
        number_in(text)
    except ValueError:
        return False
    return True


def read_parquet(path: Path) -> Table:
    """Return a Parquet file's columns of numbers, booleans, text and dates (as text)."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError("reading Parquet needs pyarrow; install it with `pip install dqnfed[tables]`.") from error
    try:
        content = pyarrow.parquet.read_table(path)
        refuse_nested(path, content)
        columns = {name: parquet_column(content.column(i).to_pylist()) for i, name in enumerate(content.column_names)}
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, NotImplementedError, KeyError) as error:
        raise DataError(f"{path} is not a whole Parquet file ({error}).") from error
    if len(columns) < len(content.column_names):
        raise DataError(f"{path} has two columns of the same name among {', '.join(content.column_names)}; rename one.")
    return Table(str(path), columns)


def refuse_nested(path: Path, content: Any) -> None:
    """Raise where a column of a Parquet file holds more than one number or text a cell."""
    for field in content.schema:
        if any(word in str(field.type) for word in ("list", "struct", "map<", "union", "binary")):
            raise DataError(
                f"{path}: column {field.name!r} is of type {field.type}, but a cell of a table is one number or one "
                "text; write the file without this column, or with its parts as columns."
            )


def parquet_column(values: Sequence[object]) -> np.ndarray:
    """Return a column as numbers where all that are there are numbers, else as text."""
    if all(value is None or isinstance(value, int | float | Decimal) for value in values):
        return np.array([np.nan if value is None else _as_float(value) for value in values], dtype=np.float64)
    return typed(["" if value is None else str(value) for value in values])


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
        if values.ndim == 0:  # a note, and no column
            continue
        if values.dtype.kind in "cV":
            raise DataError(
                f"{path}: array {name!r} is of type {values.dtype}, but a cell of a table is one number or one text; "
                "write the file without it, or with its parts as arrays."
            )
        flat = values.reshape(len(values), math.prod(values.shape[1:]))
        for i in range(flat.shape[1]):
            column = name if values.ndim == 1 else f"{name}{i}"
            if column in columns:
                raise DataError(f"{path} has two columns {column!r}: of a matrix and an array; rename one.")
            columns[column] = npz_column(path, name, flat[:, i])
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{path}: the arrays must have one row an example each, but their lengths are {lengths}.")
    return Table(str(path), columns)


def npz_column(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    """Return one column of an array as numbers or as text."""
    if values.dtype.kind in "fiub":
        return values.astype(np.float64)
    if values.dtype.kind == "S":
        try:
            values = np.char.decode(values, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: array {name!r} holds bytes that are no text in UTF-8 ({error}).") from error
    holes = np.isnat(values) if values.dtype.kind in "mM" else np.zeros(len(values), dtype=np.bool_)
    return typed(["" if hole else str(value) for value, hole in zip(values, holes, strict=True)])

"""The schema that sites agree on before anything is computed: columns, what they hold, and what is to be learnt."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dqnfed.data.raw import DataError
from dqnfed.data.table import LARGEST, Table, as_text, is_hole, is_number, is_numeric

NUMBER, CATEGORY = "number", "category"
KEYS = {
    "": ("label", "classes", "columns", "split"),
    "split": ("test", "validation", "seed"),
    NUMBER: ("kind", "low", "high"),
    CATEGORY: ("kind", "categories"),
}


@dataclass(frozen=True)
class SchemaColumn:
    """One column that the model reads."""

    name: str
    kind: str  # number | category
    low: float | None = None  # smallest and largest number that may occur
    high: float | None = None
    categories: tuple[str, ...] = ()  # those that may occur; empty: found out from all sites


@dataclass(frozen=True)
class Schema:
    """What every site's table must hold; further columns are not read."""

    label: str
    classes: tuple[str, ...]  # empty: the label is a number
    columns: tuple[SchemaColumn, ...]
    test: float = 0.2  # shares of every site's rows, drawn from the seed and the site's number
    validation: float = 0.0
    seed: int = 0

    @property
    def numeric(self) -> tuple[SchemaColumn, ...]:
        return tuple(column for column in self.columns if column.kind == NUMBER)

    @property
    def categorical(self) -> tuple[SchemaColumn, ...]:
        return tuple(column for column in self.columns if column.kind == CATEGORY)

    def fingerprint(self) -> str:
        """Return the SHA-256 of what the schema says, however its file is laid out."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def read_schema(path: Path) -> Schema:
    """Return the schema in a TOML file."""
    if not path.is_file():
        raise DataError(f"there is no schema {path}; write one, as in the guide 'Deploy without code'.")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not TOML ({error}).") from error
    return schema_in(content, str(path))


def schema_in(content: Mapping[str, Any], source: str) -> Schema:
    """Return the schema that a TOML file's content describes."""
    refuse_unknown(content, KEYS[""], source)
    label, columns = content.get("label"), content.get("columns")
    if not isinstance(label, str) or not label or not isinstance(columns, Mapping) or not columns:
        raise DataError(
            f'{source} must name the column to be learnt, label = "outcome", and the columns: [columns.age].'
        )
    if label in columns:
        raise DataError(f"{source}: column {label!r} is the label; it cannot be an input as well.")
    classes = texts_in(content.get("classes", []), f"{source}: classes")
    if len(classes) == 1:
        raise DataError(f"{source}: classes needs at least two names; for a label that is a number leave it out.")
    found = tuple(column_in(name, about, source) for name, about in columns.items())
    return Schema(label, classes, found, *split_in(content.get("split", {}), f"{source}: [split]"))


def split_in(about: Any, where: str) -> tuple[float, float, int]:
    """Return the shares of test and validation rows, and the seed."""
    if not isinstance(about, Mapping):
        raise DataError(f"{where} must be a block, but is {about!r}.")
    refuse_unknown(about, KEYS["split"], where)
    test, validation, seed = about.get("test", 0.2), about.get("validation", 0.0), about.get("seed", 0)
    shares = [bound_in(value, f"{where}: {key}") or 0.0 for key, value in (("test", test), ("validation", validation))]
    if not 0 < shares[0] < 1 or not 0 <= shares[1] < 1 or sum(shares) >= 1:
        raise DataError(
            f"{where}: test and validation must be shares that leave something to train on, as 0.2 and 0.1, but are "
            f"{test} and {validation}."
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise DataError(f"{where}: seed must be a whole number from 0, but is {seed!r}.")
    return shares[0], shares[1], seed


def column_in(name: str, about: Any, source: str) -> SchemaColumn:
    where = f"{source}: [columns.{name}]"
    kind = about.get("kind") if isinstance(about, Mapping) else None
    if kind not in (NUMBER, CATEGORY):
        raise DataError(f'{where} needs kind = "{NUMBER}" or kind = "{CATEGORY}", but has {kind!r}.')
    refuse_unknown(about, KEYS[kind], where)
    low, high = (bound_in(about.get(key), f"{where}: {key}") for key in ("low", "high"))
    if low is not None and high is not None and not low < high:
        raise DataError(f"{where}: low must be below high, but they are {low:g} and {high:g}.")
    return SchemaColumn(name, kind, low, high, texts_in(about.get("categories", []), f"{where}: categories"))


def bound_in(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{where} must be a finite number, but is {value!r}.")
    return float(value)


def texts_in(values: Any, where: str) -> tuple[str, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or len(set(map(str, values))) != len(values):
        raise DataError(f"{where} must be a list of different texts, but is {values!r}.")
    return tuple(str(value) for value in values)


def refuse_unknown(content: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in content:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise DataError(f"{where} has no key {key!r}{hint}; it has {', '.join(known)}.")


def fitting_table(table: Table, schema: Schema) -> Table:
    """Return the schema's columns of a site's table, rows without a label left out; what does not fit is an error."""
    table = table.rows(~is_hole(table.column(schema.label, "label")))
    if not len(table):
        raise DataError(f"{table.source} has no row with a label in column {schema.label!r}.")
    found = {schema.label: label_values(table, schema)}
    for column in schema.columns:
        values = table.column(column.name, "inputs")
        found[column.name] = number_values(table, column, values) if column.kind == NUMBER else as_text(values)
        if column.categories:
            known = np.isin(found[column.name], np.array([*column.categories, ""], dtype=np.str_))
            refuse_rows(table, column.name, ~known, f"is none of {', '.join(column.categories)}")
    return Table(table.source, found)


def number_values(table: Table, column: SchemaColumn, values: np.ndarray) -> np.ndarray:
    if not is_numeric(values):
        row, value = next((row, str(v)) for row, v in enumerate(values) if v and not is_number(str(v)))
        raise DataError(
            f"{table.source}, row {row + 1} with a label: column {column.name!r} must hold numbers by the schema, "
            f"written as 1234.5, but holds {value!r}."
        )
    low, high = -LARGEST if column.low is None else column.low, LARGEST if column.high is None else column.high
    refuse_rows(table, column.name, (values < low) | (values > high), f"is outside {low:g} to {high:g}")
    return values


def label_values(table: Table, schema: Schema) -> np.ndarray:
    """Return the labels: numbers of the classes, or values."""
    values = table.column(schema.label, "label")
    if not schema.classes:
        return number_values(table, SchemaColumn(schema.label, NUMBER), values)
    text = as_text(values)
    refuse_rows(table, schema.label, ~np.isin(text, np.array(schema.classes, dtype=np.str_)),
                f"is none of the classes {', '.join(schema.classes)}")  # fmt: skip
    number = {name: float(c) for c, name in enumerate(schema.classes)}
    return np.array([number[str(v)] for v in text], dtype=np.float64)


def refuse_rows(table: Table, name: str, bad: np.ndarray, what: str) -> None:
    """Raise where a value does not fit; the message stays on the site that reads the table."""
    if bad.any():
        row = int(bad.argmax())
        value = as_text(table.columns[name])[row]
        raise DataError(
            f"{table.source}, row {row + 1} with a label: column {name!r} {what}, but holds {str(value)!r} "
            f"({int(bad.sum())} such rows). Correct the table, or agree on another schema."
        )

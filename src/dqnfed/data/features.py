"""From table columns to model inputs: standardised numbers, one-hot categories, holes filled and marked."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import numpy as np

from dqnfed.data.manifest import Manifest
from dqnfed.data.raw import DataError, RawData
from dqnfed.data.table import Table, as_text, is_hole, is_number, is_numeric

MAX_CATEGORIES = 50
FEW_CATEGORIES = 10
# a whole cell: 1,5 or 1.234,5 or 1 234 or 12 % or EUR 7 or a number behind a printed minus
OTHER_NOTATION = re.compile(
    r"[-+\u2212]?\s*[$\u20ac\u00a3]?\s*(\d{1,3}([., '\u00a0\u202f\u2019]\d{3})+|\d+)([.,]\d+)?\s*[%$\u20ac\u00a3]?"
)


@dataclass(frozen=True)
class NumericColumn:
    name: str
    mean: float
    std: float
    has_holes: bool  # then a second input says where the value was missing
    low: float | None = None  # smallest and largest value in training; None where they are not known
    high: float | None = None

    @property
    def width(self) -> int:
        return 1 + self.has_holes

    def out_of_range(self, values: np.ndarray) -> np.ndarray:
        """Return which values lie outside what training saw, to the digits of float32; a missing one does not."""
        low, high = -np.inf if self.low is None else self.low, np.inf if self.high is None else self.high
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float32)
        outside: np.ndarray = (rounded < np.float32(low)) | (rounded > np.float32(high))
        return outside

    def apply(self, values: np.ndarray) -> np.ndarray:
        holes = np.isnan(values)
        scaled = np.where(holes, 0.0, (values - self.mean) / self.std)
        return np.column_stack([scaled, holes]) if self.has_holes else scaled[:, None]


@dataclass(frozen=True)
class CategoricalColumn:
    name: str
    categories: tuple[str, ...]  # "" stands for a hole; a category never seen in training gives all zeros

    @property
    def width(self) -> int:
        return len(self.categories)

    def apply(self, values: np.ndarray) -> np.ndarray:
        hot: np.ndarray = values[:, None] == np.array(self.categories, dtype=np.str_)[None]
        return hot.astype(np.float64)

    def unseen(self, values: np.ndarray) -> np.ndarray:
        """Return which values are no category of training."""
        return ~np.isin(values, np.array(self.categories, dtype=np.str_))


@dataclass(frozen=True)
class Preprocessing:
    """How a table's columns become inputs; fitted on training rows only, saved with the run, applied to new data."""

    numeric: tuple[NumericColumn, ...]
    categorical: tuple[CategoricalColumn, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return (*(column.name for column in self.numeric), *(column.name for column in self.categorical))

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the columns that hold numbers."""
        return tuple(column.name for column in self.numeric)

    @property
    def n_inputs(self) -> int:
        return sum(column.width for column in self.numeric) + sum(column.width for column in self.categorical)

    def apply(self, table: Table) -> np.ndarray:
        """Return the inputs [N, n_inputs] as float32."""
        blocks = []
        for number in self.numeric:
            values = table.column(number.name, "inputs")
            if not is_numeric(values):
                bad = next(v for v in values if v and not is_number(v))
                raise DataError(
                    f"column {number.name!r} held numbers in training, but {table.source} has {str(bad)!r} there."
                )
            if not number.has_holes and is_hole(values).any():
                row = int(is_hole(values).argmax())
                raise DataError(
                    f"{table.source}, row {row + 1}: column {number.name!r} is empty or no number, but no value of it "
                    "was missing in training, so the model does not know what that means. Fill it in or remove the "
                    "row."
                )
            blocks.append(number.apply(values))
        blocks += [column.apply(as_text(table.column(column.name, "inputs"))) for column in self.categorical]
        return np.concatenate(blocks, axis=1).astype(np.float32)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        content: dict[str, Any] = json.loads(text)
        return cls(
            tuple(NumericColumn(**column) for column in content["numeric"]),
            tuple(CategoricalColumn(c["name"], tuple(c["categories"])) for c in content["categorical"]),
        )


def fit_preprocessing(table: Table, training: np.ndarray, columns: list[str]) -> Preprocessing:
    """Return the preprocessing of these columns: means, spreads and categories of the training rows of all clients
    together.
    """
    numeric, categorical = [], []
    refuse_free_text(table, training, columns)
    for name in columns:
        values = table.column(name, "inputs")
        seen = values[training]
        if is_numeric(values):
            known = seen[~np.isnan(seen)]
            spread = float(known.std()) if len(known) else 0.0
            mean = float(known.mean()) if len(known) else 0.0
            low, high = (float(known.min()), float(known.max())) if len(known) else (None, None)
            spread = spread if spread > 0 else 1.0
            numeric.append(NumericColumn(name, mean, spread, bool(is_hole(values).any()), low, high))
        else:
            categorical.append(CategoricalColumn(name, tuple(sorted({str(v) for v in seen}))))
    if not numeric and not categorical:
        raise DataError(
            f"{table.source} has no columns left to learn from besides the client, the label and the group."
        )
    return Preprocessing(tuple(numeric), tuple(categorical))


def refuse_free_text(table: Table, training: np.ndarray, columns: list[str]) -> None:
    """Raise where columns hold more different texts than categories may: names, dates, free text; all are named."""
    texts = {name: values for name in columns if not is_numeric(values := table.column(name, "inputs"))}
    counts = {name: len(np.unique(values[training])) for name, values in texts.items()}
    many = {name: n for name, n in counts.items() if n > MAX_CATEGORIES}
    if not many:
        return
    for name in many:
        if stray := stray_text(texts[name]):
            raise DataError(
                f"{table.source}, row {stray[0] + 1}, column {name!r}: {stray[1]!r} is no number, but nearly all other "
                f"values of this column are. Correct the cell or leave it empty, or leave the column out with "
                f"`--drop {name}`."
            )
    named = ", ".join(f"{name!r} ({n:,} texts)" for name, n in many.items())
    what = "column {} holds" if len(many) == 1 else "columns {} hold"
    raise DataError(
        f"{what.format(named)} more than {MAX_CATEGORIES} different ones in training: identifiers, dates or free text "
        f"are no categories. Leave them out with `--drop {','.join(many)}`, or replace them by groups or numbers."
    )


def refuse_other_notation(table: Table, columns: Sequence[str]) -> None:
    """Raise where nearly all cells of a column are numbers, some of them written as 1,5 or 1 234 or 12 %.

    Read as texts, every number would be a category of its own.
    """
    for name in columns:
        values = table.column(name, "inputs")
        if is_numeric(values):
            continue
        texts = [(row, str(value)) for row, value in enumerate(values) if value and not is_number(str(value))]
        odd = [(row, text) for row, text in texts if OTHER_NOTATION.fullmatch(text)]
        if odd and 10 * (len(texts) - len(odd)) <= int((values != "").sum()):
            raise DataError(
                f"{table.source}, row {odd[0][0] + 1}, column {name!r}: {odd[0][1]!r} is a number in a notation that "
                "is not read (a decimal comma, separated thousands, a unit). Write numbers as 1234.5, or leave the "
                f"column out with `--drop {name}`."
            )


def stray_text(values: np.ndarray) -> tuple[int, str] | None:
    """Return the first cell that is no number, in a column of text in which nine of ten values are numbers."""
    known = [(row, str(value)) for row, value in enumerate(values) if value]
    strays = [(row, value) for row, value in known if not is_number(value)]
    return strays[0] if strays and 10 * len(strays) <= len(known) else None


def constant_columns(preprocessing: Preprocessing) -> list[str]:
    """Return the columns that have one value in training, from which nothing can be learnt."""
    numbers = [c.name for c in preprocessing.numeric if c.low == c.high and not c.has_holes]
    return [*numbers, *(c.name for c in preprocessing.categorical if len(c.categories) == 1)]


def dataset_preprocessing(raw: RawData, manifest: Manifest) -> Preprocessing:
    """Return the preprocessing of a dataset that is a table: means and spreads of the clients' training rows, and the
    documented codes, so that the number of inputs does not depend on the split.
    """
    training = np.concatenate([client.train for client in manifest])
    fitted = fit_preprocessing(dataset_table(raw), training, [c.name for c in raw.columns if not c.codes])
    return replace(fitted, categorical=tuple(CategoricalColumn(c.name, c.codes) for c in raw.columns if c.codes))


def dataset_table(raw: RawData) -> Table:
    """Return the inputs of a dataset that is a table, by column."""
    values = raw.inputs.numpy().astype(np.float64)
    return Table(raw.name, {column.name: values[:, i] for i, column in enumerate(raw.columns)})


def told_about_texts(table: Table, training: np.ndarray, columns: Sequence[CategoricalColumn]) -> list[str]:
    """Return what stands out in columns of text: strays among numbers, and more categories than can be learnt."""
    notes = []
    for column in columns:
        n = len(column.categories)
        if stray := stray_text(table.columns[column.name]):
            row, value = stray
            notes.append(
                f"column {column.name!r} is read as {n} categories, since {value!r} in row {row + 1} is no number; "
                "correct the cell or leave it empty if the column holds numbers"
            )
        elif n > FEW_CATEGORIES and 2 * n > len(training):
            notes.append(
                f"column {column.name!r} has {n} different texts (such as {column.categories[-1]!r}) in "
                f"{len(training)} training rows, so hardly any tells about two rows: dates and identifiers are better "
                f"left out (--drop {column.name})"
            )
    return notes


def row_counters(table: Table, columns: Sequence[NumericColumn]) -> list[str]:
    """Return the columns that count the rows, from any start: an exported index says nothing about an example."""
    counted = []
    for column in columns:
        values = table.columns[column.name]
        if len(values) > FEW_CATEGORIES and bool((np.diff(values) == 1).all()):
            counted.append(column.name)
    return counted

"""Federated statistics: what each site says about its training rows, and the preprocessing that follows from all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dqnfed.data.features import MAX_CATEGORIES, CategoricalColumn, NumericColumn, Preprocessing
from dqnfed.data.raw import DataError
from dqnfed.data.schema import Schema
from dqnfed.data.table import LARGEST, Table, is_hole

FEWEST_ROWS = 5  # of a site: a category that fewer rows have is not named, and fewer training rows take no part


class Moments(NamedTuple):
    """Number, mean, and sum of squared deviations from it."""

    n: int
    mean: float
    squares: float

    @property
    def std(self) -> float:
        spread = math.sqrt(self.squares / self.n) if self.n else 0.0
        return spread if spread > 0 else 1.0


def moments(values: np.ndarray) -> Moments:
    """Return the moments of the numbers that are there."""
    known = values[~np.isnan(values)]
    if not len(known):
        return Moments(0, 0.0, 0.0)
    mean = float(known.mean())
    return Moments(len(known), mean, float(np.square(known - mean).sum()))


def combined(parts: Sequence[Moments]) -> Moments:
    """Return the moments of all numbers together, from those of the parts (Chan, Golub & LeVeque, 1979)."""
    count = sum(part.n for part in parts)
    if not count:
        return Moments(0, 0.0, 0.0)
    mean = math.fsum(part.n * part.mean for part in parts) / count
    between = math.fsum(part.n * (part.mean - mean) ** 2 for part in parts)
    return Moments(count, mean, math.fsum(part.squares for part in parts) + between)


def site_statistics(table: Table, training: np.ndarray, schema: Schema) -> dict[str, Any]:
    """Return all that a site says about its table: counts and moments of numbers, and names of frequent categories.

    `training` are the rows that train. Missing values are counted in all rows; categories that the schema lists are not
    sent.
    """
    if len(training) < FEWEST_ROWS:
        raise DataError(
            f"{table.source} has {len(training)} training rows, fewer than {FEWEST_ROWS}: its means would be those of "
            "single rows. This site cannot take part."
        )
    found: dict[str, Any] = {"schema": schema.fingerprint(), "rows": len(table), "training": len(training)}
    numbers, names = {}, {}
    for column in schema.numeric:
        values = table.columns[column.name]
        about = moments(values[training])
        if 0 < about.n < FEWEST_ROWS:
            raise DataError(
                f"{table.source}: column {column.name!r} has {about.n} known values in training, fewer than "
                f"{FEWEST_ROWS}: their mean would tell single values. Fill more in, or leave all of them empty."
            )
        numbers[column.name] = [*about, int(is_hole(values).sum())]
    for column in schema.categorical:
        if not column.categories:
            seen, counts = np.unique(table.columns[column.name][training], return_counts=True)
            names[column.name] = [str(name) for name in seen[counts >= FEWEST_ROWS]]
    found |= {"numbers": numbers, "categories": names}
    if not schema.classes:
        found["label"] = list(moments(table.columns[schema.label][training]))
    return found


def checked_statistics(found: Any, schema: Schema) -> dict[str, Any]:
    """Return a site's statistics, or raise where they are not what the schema allows: a site is not believed unread."""
    if not isinstance(found, Mapping) or found.get("schema") != schema.fingerprint():
        raise DataError("it has another schema; give every site the server's schema.toml.")
    try:
        rows, training = int(found["rows"]), int(found["training"])
        numbers = {name: read_moments(values) for name, values in found["numbers"].items()}
        names = {name: [str(text) for text in texts] for name, texts in found["categories"].items()}
        label = None if schema.classes else read_moments([*found["label"], 0])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"its statistics cannot be read ({type(error).__name__}).") from error
    if not FEWEST_ROWS <= training <= rows <= 10**12:
        raise DataError(f"it claims {training} training rows of {rows}.")
    open_names = {column.name for column in schema.categorical if not column.categories}
    if numbers.keys() != {column.name for column in schema.numeric} or names.keys() != open_names:
        raise DataError("its statistics are of other columns than the schema's.")
    for column in schema.numeric:
        (count, mean, _), missing = numbers[column.name]
        low, high = -LARGEST if column.low is None else column.low, LARGEST if column.high is None else column.high
        if count > training or missing > rows or (count and not low <= mean <= high):
            raise DataError(f"its numbers about column {column.name!r} are not possible.")
    for name, texts in names.items():
        if len(texts) > MAX_CATEGORIES or any(len(text) > 200 for text in texts):
            raise DataError(
                f"column {name!r} has more than {MAX_CATEGORIES} categories, or long ones; it looks like free text. "
                "Leave it out of the schema, or list its categories there."
            )
    return {"rows": rows, "training": training, "numbers": numbers, "categories": names, "label": label}


def read_moments(values: Sequence[Any]) -> tuple[Moments, int]:
    """Return the moments and the number of missing values."""
    count, mean, squares, missing = values
    found = Moments(int(count), float(mean), float(squares))
    is_possible = math.isfinite(found.mean) and 0 <= found.squares < math.inf and abs(found.mean) <= LARGEST
    if found.n < 0 or int(missing) < 0 or not is_possible:
        raise ValueError("impossible moments")
    return found, int(missing)


class Agreed(NamedTuple):
    """How columns become inputs, and the target's mean and spread, from all sites together."""

    preprocessing: Preprocessing
    target: Moments | None  # None: classes


def agreed(statistics: Sequence[Mapping[str, Any]], schema: Schema) -> Agreed:
    """Return the preprocessing that checked statistics of all sites give: that of their pooled training rows, but for
    categories that no site may name.
    """
    numeric = []
    for column in schema.numeric:
        about = [site["numbers"][column.name] for site in statistics]
        together = combined([part for part, _ in about])
        has_holes = sum(missing for _, missing in about) > 0
        numeric.append(NumericColumn(column.name, together.mean, together.std, has_holes, column.low, column.high))
    categorical = []
    for column in schema.categorical:
        found = {text for site in statistics for text in site["categories"].get(column.name, ())}
        names = (*column.categories, "") if column.categories else tuple(sorted(found))
        if len(names) > MAX_CATEGORIES:
            raise DataError(
                f"column {column.name!r} has {len(names)} categories at all sites together, more than "
                f"{MAX_CATEGORIES}; leave it out of the schema, or list its categories there."
            )
        categorical.append(CategoricalColumn(column.name, names))
    target = None if schema.classes else combined([site["label"][0] for site in statistics])
    return Agreed(Preprocessing(tuple(numeric), tuple(categorical)), target)

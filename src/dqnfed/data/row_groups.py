"""Groups of rows inside clients: the categories of a column, or bands of its numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from dqnfed.data.manifest import Manifest
from dqnfed.data.raw import DataError
from dqnfed.data.table import Table, as_text, is_numeric

MAX_GROUPS = 12
FEW_NUMBERS = 6  # a column with at most as many different numbers is not cut into bands
MISSING = "missing"


@dataclass(frozen=True)
class RowGroups:
    """A column's groups, and which of them every row is in: of all rows, or of clients' test rows."""

    column: str
    names: tuple[str, ...]
    numbers: np.ndarray  # [N] each row's group
    is_cut: bool = False  # whether the groups are bands of numbers
    held: np.ndarray | None = None  # [K, G] how many rows of a group each client has, test rows and others

    def titled(self, titles: Mapping[str, str]) -> RowGroups:
        """Return the groups under the titles that some of them have."""
        return replace(self, names=tuple(titles.get(name, name) for name in self.names))

    def tested(self, manifest: Manifest) -> RowGroups:
        """Return the groups of the clients' test rows, client after client."""
        held = [np.bincount(self.numbers[client.all], minlength=len(self.names)) for client in manifest]
        rows = np.concatenate([client.test for client in manifest])
        return replace(self, numbers=self.numbers[rows], held=np.stack(held))


def row_groups(table: Table, wanted: Sequence[str]) -> tuple[RowGroups, ...]:
    """Return the groups of each named column; `age:45:65` cuts at 45 and 65, `age` at the quartiles of all rows."""
    found = []
    for text in wanted:
        name, edges = (text, ()) if text in table.columns else named_edges(text)
        values = table.column(name, "groups of rows")
        if edges and not is_numeric(values):
            raise DataError(f"{text!r} cuts column {name!r} into bands, but it holds text; name it alone.")
        n_different = len(np.unique(values[~np.isnan(values)])) if is_numeric(values) else 0
        found.append(bands(name, values, edges) if edges or n_different > FEW_NUMBERS else categories(name, values))
    return tuple(found)


def named_edges(text: str) -> tuple[str, tuple[float, ...]]:
    """Return the column and the edges that `age:45:65` names."""
    name, *parts = text.split(":")
    try:
        edges = tuple(float(part) for part in parts)
    except ValueError:
        edges = (np.nan,)
    if not all(np.isfinite(edges)) or any(b <= a for a, b in pairwise(edges)):
        raise DataError(f"bands read COLUMN:NUMBER:NUMBER with rising numbers, such as age:45:65, but are {text!r}.")
    return name, edges


def categories(name: str, values: np.ndarray) -> RowGroups:
    """Return one group for each text or number of a column, those without one last."""
    text = as_text(values)
    different = np.unique(text)
    order = sorted(different, key=lambda v: (v == "", float(v) if v and is_numeric(values) else 0.0, str(v)))
    if len(order) > MAX_GROUPS:
        raise DataError(
            f"column {name!r} has {len(order)} different values, more than {MAX_GROUPS} groups; name another column "
            "for the breakdown."
        )
    place = {value: i for i, value in enumerate(order)}
    names = tuple(str(value) or MISSING for value in order)
    return RowGroups(name, names, np.array([place[value] for value in text], dtype=np.int64))


def bands(name: str, values: np.ndarray, edges: Sequence[float] = ()) -> RowGroups:
    """Return bands of numbers, each from its edge to below the next one; those that no row is in are left out."""
    holes = np.isnan(values)
    known = values[~holes]
    whole = bool((known == np.floor(known)).all())
    cuts = np.array(edges) if edges else quartiles(known, whole=whole)
    place = np.where(holes, len(cuts) + 1, np.searchsorted(cuts, values, side="right"))
    present, numbers = np.unique(place, return_inverse=True)
    titles = [*band_names(cuts, whole=whole and bool((cuts == np.floor(cuts)).all())), MISSING]
    return RowGroups(name, tuple(titles[i] for i in present), numbers.astype(np.int64), is_cut=True)


def quartiles(known: np.ndarray, *, whole: bool) -> np.ndarray:
    """Return the quartiles in few digits: whole ones of whole numbers, else three significant digits."""
    found = [float(q) for q in np.quantile(known, (0.25, 0.5, 0.75))]
    rounded = np.unique([round(q) if whole else float(f"{q:.3g}") for q in found])
    inside: np.ndarray = rounded[rounded > known.min()]
    return inside


def band_names(cuts: np.ndarray, *, whole: bool) -> list[str]:
    """Return what the bands between the cuts are called."""
    if not len(cuts):
        return ["all"]
    between = []
    for low, high in pairwise(cuts):
        if whole:
            between.append(f"{low:g}" if high - low == 1 else f"{low:g} to {high - 1:g}")
        else:
            between.append(f"{low:g} to under {high:g}")
    return [f"under {cuts[0]:g}", *between, f"{cuts[-1]:g} and over"]

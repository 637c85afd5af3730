"""Your own table as a federation: one row an example, one column that says whose it is, one that says what is to be
learnt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from dqnfed.core.federation import Federation, untested_line
from dqnfed.data.features import (
    Preprocessing,
    constant_columns,
    fit_preprocessing,
    refuse_other_notation,
    row_counters,
    told_about_texts,
)
from dqnfed.data.federate import federation_of
from dqnfed.data.manifest import Manifest
from dqnfed.data.partition import partition
from dqnfed.data.raw import DataError, RawData
from dqnfed.data.row_groups import RowGroups, row_groups
from dqnfed.data.split import split
from dqnfed.data.table import FILE_COLUMN, Table, as_text, is_hole, is_numeric, read_table, with_extremes

Task = Literal["auto", "classification", "regression"]
Extremes = Literal["refuse", "missing"]
MAX_CLASSES = 50
MANY_FILES = 5  # named one by one
TABLE = "table"  # in the draw of the split: the same rows are split alike, whatever their file is called
FEATURES_FILE = "features.json"


@dataclass(frozen=True)
class OwnData:
    """Where the table is and what its columns mean."""

    path: Path  # a file, or a folder of files
    client: str  # column: who holds the row; FILE_COLUMN: the file is the client
    label: str  # column: what is to be learnt
    group: str | None = None  # column: a declared group of clients (rural, urban), constant within a client
    drop: tuple[str, ...] = ()  # columns to leave out
    task: Task = "auto"  # auto: text and few whole numbers are classes, other numbers are values
    test: float = 0.2  # share of each client's rows
    validation: float = 0.0
    seed: int = 0
    extremes: Extremes = "refuse"  # numbers that are not finite or absurd: refuse the table, or take them for missing
    breakdown: tuple[str, ...] = ()  # columns whose groups of rows are reported


class Columns(NamedTuple):
    """What was learnt about the columns, kept with the run so that new rows are read in the same way."""

    preprocessing: Preprocessing
    classes: tuple[str, ...] = ()  # names of the classes; empty for regression
    target_mean: float = 0.0  # regression: targets are (value - mean) / std
    target_std: float = 1.0


class OwnFederation(NamedTuple):
    """The federation, what was learnt about the columns, and what a reader should know."""

    federation: Federation
    columns: Columns
    notes: tuple[str, ...]
    fingerprint: Mapping[str, str] | None = None  # of the table, by column
    groups: tuple[RowGroups, ...] = ()  # of the test rows, client after client

    def text(self) -> str:
        """Return what `FEATURES_FILE` holds: all that is needed to read new rows as these."""
        return columns_text(self.columns)


def columns_text(columns: Columns) -> str:
    """Return the columns as JSON."""
    return json.dumps(columns._asdict() | {"preprocessing": json.loads(columns.preprocessing.to_json())}, indent=1)


def columns_in(content: Mapping[str, Any]) -> Columns:
    """Return the columns that JSON describes."""
    preprocessing = Preprocessing.from_json(json.dumps(content["preprocessing"]))
    return Columns(preprocessing, tuple(content["classes"]), content["target_mean"], content["target_std"])


def load_columns(folder: Path) -> Columns:
    """Return what a run folder says about the columns."""
    try:
        return columns_in(json.loads((folder / FEATURES_FILE).read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"damaged: {folder / FEATURES_FILE} is not what a run writes ({error!r}).") from error


def own_federation(own: OwnData) -> OwnFederation:
    """Return the federation of a table: split within every client, then inputs standardised on all training rows
    together.
    """
    if own.test <= 0:
        raise DataError(
            f"the test share of your own data is {own.test}, but every client is evaluated on rows that it did not "
            "train on; use data.test = 0.2 or so."
        )
    notes: list[str] = []
    table = read_table(own.path)
    fingerprint = table_fingerprint(table, own)
    table = with_extremes(table, [name for name in table.columns if name not in own.drop], own.extremes, notes)
    table = labelled_rows(table, own, notes)
    inputs = [c for c in table.columns if c not in {own.client, own.label, own.group, FILE_COLUMN, *own.drop}]
    refuse_other_notation(table, [own.label, *inputs])
    names, owner = owners(table, own)
    targets, classes = learnt(table, own, notes)
    raw = RawData(
        name=TABLE,
        inputs=torch.zeros(len(table), 0),
        targets=torch.from_numpy(targets),
        n_classes=len(classes),
        clients=torch.from_numpy(owner),
        client_names=tuple(names),
    )
    dealt = partition(raw, "natural", None, own.seed, min_examples=1)
    manifest = split(raw, dealt, test=own.test, validation=own.validation)
    training = np.concatenate([client.train for client in manifest])
    preprocessing = fit_preprocessing(table, training, inputs)
    columns = Columns(preprocessing, classes)
    if not classes:
        scaled, mean, std = standardised(table.column(own.label, "label"), training)
        raw = replace(raw, targets=torch.from_numpy(scaled))
        columns = Columns(preprocessing, (), mean, std)
        notes.append(f"targets are standardised: (value - {mean:.4g}) / {std:.4g}")
    notes += told_about(table, preprocessing, manifest, raw, classes)
    raw = replace(raw, inputs=torch.from_numpy(preprocessing.apply(table)))
    federation = federation_of(raw, manifest, groups(table, own, names, owner))
    broken_down = tuple(found.tested(manifest) for found in row_groups(table, own.breakdown))
    return OwnFederation(federation, columns, tuple(notes), fingerprint, broken_down)


def labelled_rows(table: Table, own: OwnData, notes: list[str]) -> Table:
    """Return the rows that have a label, after checking that every row has a client and every named column is there."""
    client = table.column(own.client, "client")
    label = table.column(own.label, "label")
    for name in own.drop:
        table.column(name, "columns to drop")
    nameless = np.flatnonzero(is_hole(client))
    if len(nameless):
        raise DataError(
            f"{len(nameless)} rows of {table.source} have no client in column {own.client!r}, the first is row "
            f"{nameless[0] + 1}; "
            "fill the name in or remove these rows."
        )
    unlabelled = is_hole(label)
    if unlabelled.any():
        everyone, counts = np.unique(as_text(client), return_counts=True)
        lost = dict(zip(*np.unique(as_text(client)[unlabelled], return_counts=True), strict=True))
        for name, count in zip(everyone, counts, strict=True):
            if lost.get(name, 0) == count:
                raise DataError(
                    f"client {str(name)!r} has no row with a label: all {count} are empty in column {own.label!r}. "
                    "Remove this client, or give it labels."
                )
        notes.append(f"{int(unlabelled.sum())} rows without a label were left out")
    return table.rows(~unlabelled)


def owners(table: Table, own: OwnData) -> tuple[list[str], np.ndarray]:
    """Return the clients' names in order and the number of each row's client."""
    text = as_text(table.column(own.client, "client"))
    names, owner = np.unique(text, return_inverse=True)
    if len(names) == len(text) > 20:
        raise DataError(
            f"column {own.client!r} has a different value in each of {len(text)} rows, so every client would hold one; "
            "name the column that says who holds the row."
        )
    return [str(name) for name in names], owner.astype(np.int64)


def table_fingerprint(table: Table, own: OwnData) -> dict[str, str]:
    """Return the SHA-256 of every column that counts, and of how the rows are shared out."""
    shares = f"test {own.test}, validation {own.validation}, seed {own.seed}, task {own.task}, drawn for '{TABLE}'"
    found = {"number of rows": str(len(table)), "shares": shares}
    for name, values in table.columns.items():
        if name not in own.drop or name in own.breakdown:
            text = (
                values.tobytes() if is_numeric(values) else "\0".join(values.tolist()).encode("utf-8", "surrogatepass")
            )
            found[f"column {name!r}"] = hashlib.sha256(text).hexdigest()
    return found


def learnt(table: Table, own: OwnData, notes: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the targets, and the names of the classes whose numbers they are; no names: they are values."""
    values = table.column(own.label, "label")
    whole = is_numeric(values) and bool(np.all(values == np.floor(values)))
    n_different = len(np.unique(values))
    classification = own.task == "classification" or (
        own.task == "auto" and (not is_numeric(values) or (whole and n_different <= 20))
    )
    if not classification:
        if not is_numeric(values):
            raise DataError(
                f"label {own.label!r} is text (such as {str(values[0])!r}), and regression needs numbers; "
                "use --task classification, or name another label."
            )
        if n_different < 2:
            raise DataError(f"label {own.label!r} is {values[0]:g} in every row; there is nothing to learn.")
        return values.astype(np.float32), ()
    text = as_text(values)
    classes = sorted({str(v) for v in text}, key=lambda v: (0, float(v), v) if is_numeric(values) else (1, 0.0, v))
    if len(classes) > MAX_CLASSES:
        raise DataError(
            f"label {own.label!r} has {len(classes)} different values, more than {MAX_CLASSES} classes; it looks like "
            f"{'a number: use --task regression' if is_numeric(values) else 'free text: name another label'}."
        )
    if len(classes) < 2:
        raise DataError(f"label {own.label!r} is {classes[0]!r} in every row; there is nothing to learn.")
    number = {name: c for c, name in enumerate(classes)}
    if not is_numeric(values):
        notes.append(
            f"label {own.label!r} is text; its classes are " + ", ".join(f"{name} = {c}" for name, c in number.items())
        )
    return np.array([number[str(v)] for v in text], dtype=np.int64), tuple(classes)


def standardised(values: np.ndarray, training: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Return values less their training rows' mean over these rows' spread, as float32, and both.

    In float64 where float32 would lose digits: values far from 0 beside their spread, very large or very small ones.
    """
    seen = values[training]
    size, spread = float(np.abs(seen).max()), float(seen.std())
    is_exact = 1e-15 < spread < 1e15 and size < 1e3 * spread
    values = values.astype(np.float32) if is_exact or spread == 0.0 else values
    mean, std = float(values[training].mean()), float(values[training].std()) or 1.0
    return ((values - mean) / std).astype(np.float32), mean, std


def groups(table: Table, own: OwnData, names: list[str], owner: np.ndarray) -> tuple[str, ...] | None:
    """Return each client's declared group, or None; a client in two groups is an error."""
    if own.group is None:
        return None
    text = as_text(table.column(own.group, "group"))
    found = []
    for k, name in enumerate(names):
        mine = sorted({str(v) for v in text[owner == k]})
        if len(mine) != 1 or not mine[0]:
            raise DataError(
                f"client {name!r} must belong to one group, but column {own.group!r} says "
                f"{', '.join(repr(v or 'nothing') for v in mine)}; correct the table."
            )
        found.append(mine[0])
    return tuple(found)


def told_about(
    table: Table, preprocessing: Preprocessing, manifest: Manifest, raw: RawData, classes: tuple[str, ...]
) -> list[str]:
    """Return what the user should know before trusting a number."""
    used = preprocessing.columns
    holes = sum(int(is_hole(table.columns[name]).sum()) for name in used)
    clients = f"{len(manifest)} client{'' if len(manifest) == 1 else 's'}"
    notes = [
        f"{len(table)} rows of {clients}; {len(preprocessing.numeric)} numeric and {len(preprocessing.categorical)} "
        f"categorical columns make {preprocessing.n_inputs} inputs"
        + (
            f"; {holes} missing values ({100 * holes / (len(used) * len(table)):.1f} %) are filled and marked"
            if holes
            else ""
        )
    ]
    training = np.concatenate([client.train for client in manifest])
    notes += told_about_texts(table, training, preprocessing.categorical)
    if counters := row_counters(table, preprocessing.numeric):
        notes.append(
            f"counts the rows, so it says nothing about an example; leave it out with --drop: {', '.join(counters)}"
        )
    if table.ignored:
        notes.append(
            f"not read, since they are no tables: {', '.join(table.ignored[:MANY_FILES])}"
            + (f" and {len(table.ignored) - MANY_FILES} more" if len(table.ignored) > MANY_FILES else "")
        )
    for what, found in ("clients", manifest.names), ("classes", classes):
        if alike := alike_names(found):
            notes.append(
                f"{what} {alike[0]!r} and {alike[1]!r} differ in case or spaces only; correct the table if they are one"
            )
    if constant := constant_columns(preprocessing):
        notes.append(f"one value in all training rows, so nothing to learn from: {', '.join(constant)}")
    tested = manifest.sizes[:, 2] > 0
    if not tested.all():
        notes.append(
            untested_line([name for name, is_tested in zip(manifest.names, tested, strict=True) if not is_tested])
        )
    if not tested.any():
        return notes
    smallest = int(np.where(tested, manifest.sizes.sum(axis=1), np.iinfo(np.int64).max).argmin())
    n_train, _, n_test = (int(n) for n in manifest.sizes[smallest])
    if n_test < 10:
        notes.append(
            f"client {manifest.names[smallest]!r} is tested on {n_test} rows only (trained on {n_train})"
            + (f": its score moves in steps of {100 / n_test:.0f} points" if classes else "")
        )
    if classes:
        held = manifest.label_counts(raw)
        for k in np.flatnonzero((held > 0).sum(axis=1) == 1):
            only = classes[int(held[k].argmax())]
            notes.append(
                f"client {manifest.names[k]!r} has one class only ({only}): predicting it always scores 100 % "
                "there, and AUC is undefined"
            )
    return notes


def alike_names(names: Sequence[str]) -> tuple[str, str] | None:
    """Return the first two names that differ in case or spaces only."""
    seen: dict[str, str] = {}
    for name in names:
        key = "".join(name.split()).casefold()
        if key in seen:
            return seen[key], name
        seen[key] = name
    return None


def check_score(score: str, own: OwnFederation) -> None:
    """Raise where a client's score would be undefined: AUC needs two classes among a client's test rows."""
    if score != "auc":
        return
    test = own.federation.test
    for k, name in enumerate(own.federation.names):
        labels = test.targets[int(test.starts[k]) : int(test.starts[k + 1])]
        if len(labels) > 0 and len(labels.unique()) < 2:
            raise DataError(
                f"AUC is undefined for client {name!r}: its {len(labels)} test rows have one class. Use another score "
                "(accuracy, f1, loss), a larger test share, or leave this client out."
            )

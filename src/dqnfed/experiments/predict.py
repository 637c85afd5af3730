"""A trained model used: predictions for new data."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

import dqnfed.models  # noqa: F401  a loaded run builds its module with these
from dqnfed.core.result import RunResult
from dqnfed.data.features import Preprocessing
from dqnfed.data.raw import DataError
from dqnfed.data.table import NPZ_ERRORS, Table, as_text, read_table, with_extremes
from dqnfed.experiments.own_data import FEATURES_FILE, load_columns


def read_inputs(path: Path, input_shape: tuple[int, ...]) -> torch.Tensor:
    """Return the examples of an .npy, .npz (array `x`) or .csv file, shaped as the model wants them."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    array = read_array(path)
    if array.dtype.kind not in "fiub" or array.ndim == 0 or len(array) == 0:
        raise DataError(
            f"{path.name} holds {array.dtype} of shape {array.shape}, but predictions need numbers, one row an example."
        )
    if array.dtype.kind == "f":
        array = array.astype(np.float64 if array.dtype.itemsize > 4 else np.float32)
    refuse_not_finite(array, path)
    inputs = torch.as_tensor(array)
    if inputs[0].numel() != int(np.prod(input_shape)):
        raise DataError(
            f"{path.name} has {inputs[0].numel()} numbers an example, but the model was trained on {input_shape}."
        )
    return inputs.reshape(-1, *input_shape)


def read_array(path: Path) -> np.ndarray:
    """Return the numbers in an .npy, .npz (array `x`) or .csv file."""
    match path.suffix:
        case ".npy":
            try:
                return np.asarray(np.load(path, allow_pickle=False))
            except NPZ_ERRORS as error:
                raise DataError(f"{path} is not a whole .npy file of numbers ({type(error).__name__}).") from error
        case ".npz":
            try:
                with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                    names, found = archive.files, np.asarray(archive["x"]) if "x" in archive.files else None
            except NPZ_ERRORS as error:
                raise DataError(f"{path} is not an .npz file with plain arrays ({type(error).__name__}).") from error
            if found is None:
                raise DataError(f"{path} has the arrays {names}, but predictions need one called 'x'.")
            return found
        case ".csv":
            return read_numbers(path)
        case suffix:
            raise DataError(f"predictions read .npy, .npz and .csv, but {path.name} is '{suffix}'.")


def read_numbers(path: Path) -> np.ndarray:
    """Return the rows of a CSV file of numbers; a first line without any number is a header."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} is not a text table in UTF-8 ({error}).") from error
    if rows and not any(map(_is_number, rows[0])):
        rows = rows[1:]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise DataError(f"{path}: row {number} has {len(row)} values, the first has {len(rows[0])}.")
        if not all(map(_is_number, row)):
            bad = next(i for i, value in enumerate(row) if not _is_number(value))
            raise DataError(
                f"{path}: row {number} is not all numbers ({row[bad]!r} in column {bad + 1}); predictions need numeric "
                "columns."
            )
    values = np.array([[float(value) for value in row] for row in rows], dtype=np.float64)
    with np.errstate(over="ignore"):  # what is too large for float32 becomes infinite, and is refused
        return values.astype(np.float32)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def refuse_not_finite(inputs: np.ndarray, path: Path) -> None:
    """Raise where an example holds a number that is not finite: the model's answer would mean nothing."""
    if inputs.dtype.kind != "f":
        return
    bad = ~np.isfinite(inputs.reshape(len(inputs), -1))
    if bad.any():
        row, column = (int(i) for i in np.argwhere(bad)[0])
        n = int(bad.any(1).sum())
        raise DataError(
            f"{path}: row {row + 1}, column {column + 1} is {inputs.reshape(len(inputs), -1)[row, column]}, not a "
            f"finite number ({n} such {'row' if n == 1 else 'rows'}); there is no prediction for it. Remove these "
            "rows, or fill the values in."
        )


class Predictions(NamedTuple):
    """What the model says about every row, and which values of it training had not seen."""

    ids: list[str]
    probabilities: np.ndarray | None  # [N, classes]; None for regression
    values: np.ndarray | None  # [N] in the target's own units; None for classification
    classes: tuple[str, ...]  # names of the classes; empty for regression
    unseen: list[str] | None  # names of the columns whose category is new, separated by ;
    out_of_range: list[str] | None  # names of the columns whose number lies outside training; None: not known

    def answers(self) -> list[str]:
        """Return the class or the value of every row, as text."""
        if self.probabilities is not None:
            return [self.classes[i] for i in self.probabilities.argmax(1)]
        assert self.values is not None
        return [number(value) for value in self.values.tolist()]

    def csv_text(self) -> str:
        """Return a table with a header: id, class and probability of each class (or value), then the marks."""
        head, columns = ["id"], [self.ids, self.answers()]
        if self.probabilities is None:
            head.append("value")
        else:
            head += ["class", *(f"probability_{name}" for name in self.classes)]
            columns += [[number(p) for p in column] for column in self.probabilities.T.tolist()]
        for name, marks in (("unseen", self.unseen), ("out_of_range", self.out_of_range)):
            if marks is not None:
                head.append(name)
                columns.append(marks)
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([head, *zip(*columns, strict=True)])
        return text.getvalue()


def number(value: float) -> str:
    """Return nine significant digits: as many as float32 has, and one more."""
    return f"{value:.9g}"


def predictions(run: Path, data: Path, id_column: str | None = None) -> Predictions:
    """Return what the trained model says about every example of a file.

    A model trained on a table reads one with the same columns; `id_column` names the rows, by default a column called
    id, else they are counted from 1.
    """
    result = trained_run(run)
    module = result.model()
    if not (run / FEATURES_FILE).is_file():
        if id_column is not None:
            raise DataError(
                f"{run} was trained on arrays, whose rows have no names; leave --id out, and rows are counted from 1."
            )
        assert result.model_spec is not None
        outputs = outputs_of(module, read_inputs(data, tuple(result.model_spec["input_shape"])))
        ids = [str(row) for row in range(1, len(outputs) + 1)]
        if outputs.shape[-1] == 1:
            return Predictions(ids, None, outputs.squeeze(-1).double().numpy(), (), None, None)
        classes = tuple(str(c) for c in range(outputs.shape[-1]))
        return Predictions(ids, probabilities_of(outputs), None, classes, None, None)
    learnt = load_columns(run)
    table = with_extremes(read_table(data), learnt.preprocessing.numbers, "refuse", [], farthest=math.inf)
    outputs = outputs_of(module, torch.from_numpy(learnt.preprocessing.apply(table)))
    ids, unseen, outside = ids_of(table, id_column), *marks_of(learnt.preprocessing, table)
    if learnt.classes:
        return Predictions(ids, probabilities_of(outputs), None, learnt.classes, unseen, outside)
    values = outputs.squeeze(-1).double().numpy() * learnt.target_std + learnt.target_mean
    return Predictions(ids, None, values, (), unseen, outside)


def trained_run(run: Path) -> RunResult:
    """Return a finished run whose model can be built and used, or raise with what is missing."""
    result = RunResult.load(run)
    if result.model_spec is None:
        raise ValueError(f"{run} was trained on a module of your own; use RunResult.load(...).model(MyModule()).")
    if not bool(result.theta.isfinite().all()):
        n = int((~result.theta.isfinite()).sum())
        raise ValueError(
            f"the model of {run} has {n} of {len(result.theta)} weights that are not finite numbers, so it predicts "
            f"nothing (status: {result.summary['status']}); train again with a smaller learning rate."
        )
    return result


def probabilities_of(outputs: torch.Tensor) -> np.ndarray:
    """Return the classes' probabilities [N, C] in float64."""
    return np.asarray(outputs.double().softmax(-1).numpy())


def ids_of(table: Table, column: str | None) -> list[str]:
    """Return the rows' names: those of a column, by default one called id, else the numbers from 1."""
    if column is None:
        column = next((name for name in table.columns if name.lower() == "id"), None)
    if column is None:
        return [str(row) for row in range(1, len(table) + 1)]
    return [str(name) for name in as_text(table.column(column, "rows' names"))]


def marks_of(preprocessing: Preprocessing, table: Table) -> tuple[list[str], list[str] | None]:
    """Return for every row the columns whose category is new, and those whose number is outside training's range.

    The second is None where the run kept no ranges.
    """
    unseen = {c.name: c.unseen(as_text(table.column(c.name, "inputs"))) for c in preprocessing.categorical}
    ranged = [c for c in preprocessing.numeric if c.low is not None or c.high is not None]
    outside = {c.name: c.out_of_range(table.column(c.name, "inputs")) for c in ranged}
    known = bool(ranged) or not preprocessing.numeric
    return marked(unseen, len(table)), marked(outside, len(table)) if known else None


def marked(found: Mapping[str, np.ndarray], n_rows: int) -> list[str]:
    return [";".join(name for name, is_marked in found.items() if is_marked[row]) for row in range(n_rows)]


@torch.no_grad()
def outputs_of(module: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    """Return the model's outputs, or raise where they are not finite: no prediction follows from them."""
    if inputs.is_floating_point():
        inputs = inputs.to(next(module.parameters()).dtype)
    try:
        outputs = torch.cat([module(part) for part in inputs.split(4096)])
    except (RuntimeError, IndexError) as error:
        raise DataError(
            f"the model cannot read inputs of type {inputs.dtype} and shape {tuple(inputs.shape[1:])} ({error}); give "
            "them as those it was trained on."
        ) from error
    if not bool(outputs.isfinite().all()):
        row = int((~outputs.reshape(len(outputs), -1).isfinite()).any(1).nonzero()[0])
        raise DataError(
            f"the model's output for row {row + 1} is not finite: the row's numbers are too large. Correct or remove "
            "the row."
        )
    return outputs

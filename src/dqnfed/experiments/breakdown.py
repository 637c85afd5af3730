"""What the groups of rows inside clients get: counted on test rows at the kept model, for every client and overall."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.federation import Examples
from dqnfed.core.problem import Problem
from dqnfed.core.run_folder import write_atomically
from dqnfed.data.row_groups import RowGroups
from dqnfed.experiments.own_data import Columns
from dqnfed.experiments.scores import auc

BREAKDOWN_FILE = "breakdown.json"
Entry = dict[str, Any]


def write_breakdown(
    folder: Path, groups: Sequence[RowGroups], problem: Problem, test: Examples, outputs: Tensor, columns: Columns
) -> None:
    """Write what every group of test rows gets into a run's folder."""
    content = {
        "score": problem.score_name,
        "classes": list(columns.classes),
        "columns": [{"name": g.column, "groups": list(g.names), "bands": g.is_cut} for g in groups],
        "rows": group_entries(groups, problem, test, outputs, columns),
    }
    write_atomically(folder / BREAKDOWN_FILE, json.dumps(content, indent=1))


def group_entries(
    groups: Sequence[RowGroups], problem: Problem, test: Examples, outputs: Tensor, columns: Columns
) -> list[Entry]:
    """Return one entry for every group of all rows together (client null) and of each client that has such rows."""
    outputs, targets = outputs.detach().cpu(), test.targets.cpu()
    owner = np.repeat(np.arange(len(test.starts) - 1), test.sizes.numpy())
    found = []
    for column in groups:
        for client in (None, *range(len(test.starts) - 1)):
            mine = np.ones(len(owner), dtype=bool) if client is None else owner == client
            for g, name in enumerate(column.names):
                rows = torch.from_numpy(np.flatnonzero(mine & (column.numbers == g)))
                if len(rows):
                    assert column.held is not None
                    held = int(column.held[:, g].sum() if client is None else column.held[client, g])
                    facts = group_facts(problem, outputs[rows], targets[rows], columns)
                    about = {"client": client, "column": column.column, "group": name, "n": len(rows), "held": held}
                    found.append({**about, **facts})
    return found


def group_facts(problem: Problem, outputs: Tensor, targets: Tensor, columns: Columns) -> Entry:
    """Return a group's score, and the counts from which rates follow."""
    real = torch.ones(len(targets))
    found: Entry = {"score": number(problem.score(outputs, targets, real))}
    if not columns.classes:
        error = (outputs.reshape(-1).double() - targets.double()) * columns.target_std
        return found | {"bias": number(error.mean())}
    said, n_classes = outputs.argmax(-1), len(columns.classes)
    found |= {
        "of_class": torch.bincount(targets, minlength=n_classes).tolist(),
        "right": torch.bincount(targets[said == targets], minlength=n_classes).tolist(),
        "said": torch.bincount(said, minlength=n_classes).tolist(),
    }
    is_mixed = len(targets.unique()) > 1
    found["auc"] = number(auc(outputs, targets, real)) if is_mixed else None
    return found if is_mixed or problem.score_name != "auc" else found | {"score": None}


def number(value: Tensor) -> float | None:
    """Return a finite number, or None."""
    return float(value) if bool(value.isfinite()) else None


def check_breakdown(wanted: Sequence[str], *, has_table: bool, metrics: str, part: str) -> None:
    """Raise where groups of rows are asked for and there can be none."""
    if not wanted:
        return
    if not has_table:
        raise ValueError(
            f"data.breakdown names {', '.join(wanted)}, but these data are no table with columns; leave it out, or use "
            "a table of your own (--data) or a dataset that is one (heart)."
        )
    if metrics != "per-client" or part != "test":
        raise ValueError(
            "data.breakdown reports groups inside every client on test rows, but eval.metrics is "
            f"{metrics!r} and eval.part {part!r}; leave it out, or use 'per-client' and 'test'."
        )

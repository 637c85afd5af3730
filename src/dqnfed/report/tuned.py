"""Tables whose methods are tuned alike: what is declared, which trial is chosen, and what of it a page shows.

The declarations are in `docs/results/tuned.toml`; `benchmarks/tuned_tables.py` runs them and writes one line a run.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dqnfed.report.result_summaries import KEPT, Json
from dqnfed.report.run_files import read_toml

DECLARATIONS = "tuned.toml"
NETWORKS = "networks"  # in place of names: every method that trains networks, and the declared rows
ANY = "any"  # the trials of methods that have none of their own
MADE = ("config", "hardware", "commit")  # by which a run is known again, and what it was made with
TRIAL_KEPT = ("experiment", "algorithm", "trial", "score", "error", *MADE)
FAILED_KEPT = ("experiment", "algorithm", "seed", "trial", "error", *MADE)
Trial = dict[str, Any]


class Row(NamedTuple):
    """A method with its fixed settings, under the name that a table shows."""

    label: str
    method: str
    fixed: Trial


class Table(NamedTuple):
    """What is declared of one table."""

    name: str
    experiments: dict[str, tuple[str, ...]]  # by name: the preset, and what is changed in it
    methods: str | tuple[str, ...]
    seeds: int
    budget: str
    validation: float  # share of every client's training examples, for trials
    settings_from: tuple[str, str] | None  # a smaller table and its experiment, whose choices are taken
    trials: dict[str, list[Trial]]
    rows: dict[str, Trial]
    fixed: dict[str, Trial]

    def row(self, label: str) -> Row:
        """Return a row by its name."""
        declared = dict(self.rows.get(label, {}))
        method = str(declared.pop("method", label))
        return Row(label, method, {**self.fixed.get(method, {}), **declared})

    def trials_of(self, label: str) -> list[Trial]:
        """Return the settings that are tried for a row."""
        if self.settings_from is not None:
            return []
        return self.trials.get(label, self.trials[ANY])


def declared_names(folder: Path) -> list[str]:
    """Return the names of the tables that are declared in a folder of pages."""
    return list(read_toml(folder / DECLARATIONS, []).get("tables", {}))


def declared(name: str, folder: Path) -> Table:
    """Return what is declared of a table in a folder of pages."""
    said: list[str] = []
    whole = read_toml(folder / DECLARATIONS, said)
    tables = whole.get("tables", {})
    if name not in tables:
        raise ValueError(
            f"there is no tuned table '{name}' in {folder / DECLARATIONS}{': ' + said[0] if said else ''}; it has "
            f"{', '.join(tables) or 'none'}."
        )
    found = tables[name]
    experiments = found.get("experiments") or {name: [found["preset"], *found.get("change", [])]}
    trials = {label: points(some) for label, some in {**whole["trials"], **found.get("trials", {})}.items()}
    if not found.get("tune", True):
        trials = {ANY: []}
    methods, chosen_by = found["methods"], found.get("settings_from")
    return Table(
        name=name,
        experiments={key: tuple(words) for key, words in experiments.items()},
        methods=methods if methods == NETWORKS else tuple(methods),
        seeds=int(found["seeds"]),
        budget=str(found["budget"]),
        validation=float(found.get("validation", 0.1)),
        settings_from=None if chosen_by is None else (str(chosen_by[0]), str(chosen_by[1])),
        trials=trials,
        rows=whole.get("rows", {}),
        fixed={**whole.get("fixed", {}), **found.get("fixed", {})},
    )


def points(some: Iterable[Mapping[str, Sequence[Any]]]) -> list[Trial]:
    """Return the combinations of each table of lists, one table after the other."""
    return [dict(zip(table, values, strict=True)) for table in some for values in itertools.product(*table.values())]


def best_trial(lines: Iterable[Json], experiment: str, label: str) -> Trial | None:
    """Return the trial with the highest validation score; of equal ones the first, None where none has a score."""
    best: Trial | None = None
    highest = -math.inf
    for line in lines:
        is_it = (line["kind"], line["experiment"], line["algorithm"]) == ("tune", experiment, label)
        if is_it and line.get("score") is not None and line["score"] > highest:
            best, highest = line["trial"], line["score"]
    return best


def read_lines(paths: Iterable[Path]) -> list[Json]:
    """Return the lines of files of runs; one that a kill cut short is left out."""
    found: list[Json] = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError:
                continue
    return found


def stored_lines(path: Path, table: Table, numerics: int | None) -> list[Json]:
    """Return the lines that a page's summary was made of, to which more rows and seeds are added later.

    None where there is no summary, where it is of another NUMERICS, or was made before summaries said what made a run;
    and none of an experiment that is declared otherwise now.
    """
    if not path.is_file():
        return []
    data = json.loads(path.read_text(encoding="utf-8"))
    if numerics is not None and data.get("numerics") != numerics:
        return []
    was = data.get("experiments", {})
    same = {name for name, words in table.experiments.items() if was.get(name) == list(words)}
    common = {"numerics": data.get("numerics")}
    found = [{"kind": "tune", **common, **line} for line in data.get("trials", [])]
    for line in [*data["runs"], *data.get("failed", [])]:
        found.append({"kind": "test", **common, "personal": line["algorithm"] in data["personal"], **line})
    return [line for line in found if line["experiment"] in same and "config" in line]


def refuse_mixed(lines: Iterable[Json], numerics: int | None = None) -> int:
    """Return the one NUMERICS of all lines, or say which differ: rows of different computations make no table."""
    by_number: dict[int, Json] = {}
    for line in lines:
        by_number.setdefault(line["numerics"], line)
    first = numerics if numerics is not None else next(iter(by_number), None)
    if first is None:
        raise ValueError("there is no run; give a file that `benchmarks/tuned_tables.py` wrote.")
    for number, line in by_number.items():
        if number != first:
            raise ValueError(
                f"a page's rows share one NUMERICS, but {line['algorithm']} on {line['experiment']} was run with "
                f"{number}, and it is {first} for the others; run the older rows again, into another file."
            )
    return first


def place_of(table: Table) -> Callable[[Json], tuple[int, str, int]]:
    """Return how trials are ordered: as they are declared."""
    order = list(table.experiments)

    def place(line: Json) -> tuple[int, str, int]:
        label = line["algorithm"]
        return order.index(line["experiment"]), label, table.trials_of(label).index(line["trial"])

    return place


def collected(lines: Sequence[Json], table: Table, *, hardware: str = "", commit: str = "", command: str = "") -> Json:
    """Return a tuned page's summary: runs at the settings that the trials chose, all trials, and what failed.

    Runs at settings that are no longer chosen, and trials that are no longer declared, are left out.
    """
    numerics = refuse_mixed(lines)
    lines = [line for line in lines if line["experiment"] in table.experiments]
    trials = {
        (line["experiment"], line["algorithm"], json.dumps(line["trial"], sort_keys=True)): line
        for line in lines
        if line["kind"] == "tune" and line["trial"] in table.trials_of(line["algorithm"])
    }
    runs: dict[tuple[str, str, int], Json] = {}
    failed: dict[tuple[str, str, int], Json] = {}
    for line in lines:
        if line["kind"] != "test":
            continue
        if table.trials_of(line["algorithm"]):
            chosen = best_trial(trials.values(), line["experiment"], line["algorithm"])
            if line["trial"] != (chosen or {}):
                continue
        place = failed if "error" in line else runs
        place[line["experiment"], line["algorithm"], line["seed"]] = line
    if not runs:
        raise ValueError(
            f"no run of the table '{table.name}' is done; `benchmarks/tuned_tables.py {table.name}` goes on."
        )
    order = list(table.experiments)
    keys = sorted(runs, key=lambda key: (order.index(key[0]), *key[1:]))
    machines = list(dict.fromkeys(line["hardware"] for line in runs.values()))
    commits = list(dict.fromkeys(line["commit"] for line in runs.values()))
    return {
        "table": table.name,
        "command": command or f"python benchmarks/tuned_tables.py {table.name} --out runs/{table.name}.jsonl",
        "hardware": hardware or "; ".join(machines),
        "commit": commit or ", ".join(commits),
        "numerics": numerics,
        "budget": table.budget,
        "personal": sorted({line["algorithm"] for line in runs.values() if line["personal"]}),
        "experiments": {name: list(table.experiments[name]) for name in order if any(key[0] == name for key in keys)},
        "runs": [{k: runs[key][k] for k in (*KEPT, "trial", *MADE) if k in runs[key]} for key in keys],
        "trials": [
            {k: line[k] for k in TRIAL_KEPT if k in line} for line in sorted(trials.values(), key=place_of(table))
        ],
        "failed": [{k: line[k] for k in FAILED_KEPT if k in line} for key, line in failed.items() if key not in runs],
    }

"""Reads run folders, whole or half-written, and says in plain words what could not be read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dqnfed.core.checksums import damage_line, damaged_files, refuse_damaged
from dqnfed.report.measures import MEASURE, Floats, measures
from dqnfed.report.run_files import (
    Client,
    ClientRows,
    block,
    number,
    read_client_rows,
    read_clients,
    read_json,
    read_records,
    read_toml,
)
from dqnfed.report.taking_part import Part, part_of

N_HISTORY = 24  # evaluated rounds of which every client's accuracy is kept
CURVE_KEYS = ("mean", "std", "worst10")
TOTALS = ("bytes_up", "bytes_down", "passes", "seconds")
RUN_FILES = ("metrics.jsonl", "summary.json")


class Problem(NamedTuple):
    """Something a reader of the report should know: where, what, and what was done about it."""

    folder: Path
    message: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.message}"


class Evaluation(NamedTuple):
    """Accuracies of all clients after one round, in percent; NaN where not measured."""

    round: int
    accuracy: Floats  # [K]


@dataclass(frozen=True, eq=False)
class Run:
    """One evaluated model of one run folder; `history` has an entry per recorded round, NaN where unmeasured."""

    folder: Path
    experiment: str
    algorithm: str
    model: str  # "" for the model the method is evaluated by; "global" for Ditto's global model, and so on
    seed: int
    status: str  # finished | diverged | interrupted | stopped | running
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    summary: Mapping[str, Any]
    clients: tuple[Client, ...]
    rounds: Floats  # [T] -1 is the start model
    history: Mapping[str, Floats]  # CURVE_KEYS, train_loss, train_loss_max, rho, and cumulated totals
    last_scores: Mapping[str, Any]  # measures as recorded at the last evaluation
    evaluations: tuple[Evaluation, ...]  # at most N_HISTORY + 1: the first, the last and the kept model's among them
    part: Part | None = None  # who took part

    @property
    def n_rounds(self) -> int:
        """Number of rounds done."""
        return int(self.rounds[-1]) + 1 if len(self.rounds) else int(number(self.summary.get("rounds"), 0.0))

    @property
    def planned_rounds(self) -> int:
        """Number of rounds asked for, or done where the settings do not say."""
        return int(number(block(self.config, "train").get("rounds"), self.n_rounds))

    @property
    def score(self) -> str:
        """Name of what clients are evaluated by; "accuracy" is in percent, anything else in its own unit."""
        return str(self.summary.get("score") or "accuracy")

    @property
    def accuracy(self) -> Floats:
        """[K] accuracies of the kept model, in percent: at the last evaluation, or at that of the round which
        summary.json names; empty when clients.csv holds none.
        """
        if not self.evaluations:
            return np.empty(0)
        kept = _kept_round(self.summary)
        last = self.evaluations[-1].accuracy if kept is None else np.empty(0)  # of another round it is another model's
        return next((e.accuracy for e in self.evaluations if e.round == kept), last)

    @property
    def n_train(self) -> Floats:
        """[K] training examples of each client."""
        return np.array([c.n_train for c in self.clients], dtype=np.float64)

    @property
    def improved(self) -> float:
        """Mean share of improved participants over the rounds, in percent."""
        rho = self.history.get("rho", np.empty(0))
        if np.isfinite(rho).any():
            return 100.0 * float(np.nanmean(rho))
        return 100.0 * number(self.summary.get("rho_mean"))

    def measures(self, *, weighted: bool = False) -> dict[str, float]:
        """Return the fairness measures of the kept model, from the client accuracies where they are known."""
        found = measures(self.accuracy, self.n_train if weighted else None)
        if not found and not weighted:
            found = self._recorded_measures()
        return found | {"improved": self.improved}

    def _recorded_measures(self) -> dict[str, float]:
        models, primary = block(self.summary, "models"), block(self.summary, "accuracy")
        recorded = {**self.last_scores, **(block(models, self.model) if self.model else primary)}
        return {key: float(recorded[key]) for key in MEASURE if math.isfinite(number(recorded.get(key)))}


class Reading(NamedTuple):
    """All runs found and everything worth saying about them."""

    runs: tuple[Run, ...]
    problems: tuple[Problem, ...]


def find_runs(paths: Iterable[Path]) -> tuple[list[Path], list[Problem]]:
    """Return the run folders at or below the paths, in order and without repetition, and the paths that hold none."""
    found: dict[Path, None] = {}
    problems = []
    for path in map(Path, paths):
        if not path.exists():
            problems.append(Problem(path, "there is no such folder"))
            continue
        folder = path if path.is_dir() else path.parent
        below = sorted({file.parent for name in RUN_FILES for file in folder.rglob(name)}, key=_natural)
        below = [run for run in below if not _is_trial(run, folder)]
        if not below:
            problems.append(Problem(path, f"holds no run: neither it nor a folder below it has a {RUN_FILES[0]}"))
        found.update(dict.fromkeys(below))
    return list(found), problems


def read_runs(paths: Iterable[Path]) -> Reading:
    """Return every run at or below the paths; what cannot be read becomes a problem, never an exception."""
    folders, problems = find_runs(paths)
    runs: list[Run] = []
    for folder in folders:
        views, said = read_run(folder)
        runs += views
        problems += said
    return Reading(tuple(runs), tuple(problems))


def read_intact(paths: Iterable[Path]) -> Reading:
    """Return every run at or below the paths; raise where a file of one is damaged: its numbers leave the folder."""
    reading = read_runs(paths)
    for folder in dict.fromkeys(run.folder for run in reading.runs):
        refuse_damaged(folder)
    return reading


def read_run(folder: Path) -> tuple[list[Run], list[Problem]]:
    """Return the evaluated models of one run folder, the primary one first, and what could not be read."""
    said: list[str] = []
    config = read_toml(folder / "config.toml", said)
    summary = read_json(folder / "summary.json", said, expected=False)
    env = read_json(folder / "env.json", said)
    records = read_records(folder / "metrics.jsonl", said)
    _check_version(env, summary, said)
    said += [damage_line(name) for name in damaged_files(folder)]
    run = Run(
        folder=folder,
        experiment=str(config.get("name") or summary.get("name") or folder.resolve().parent.parent.name),
        algorithm=str(
            block(config, "algorithm").get("name") or summary.get("algorithm") or folder.resolve().parent.name
        ),
        model="",
        seed=_seed(config, summary, folder),
        status=str(summary.get("status", "running")),
        config=config,
        env=env,
        summary=summary,
        clients=(),
        rounds=np.array([record["round"] for record in records], dtype=np.float64),
        history=_history(records, ""),
        last_scores={},
        evaluations=(),
        part=part_of(records),
    )
    if not records and not summary:
        said.append("nothing was recorded in it; left out")
        return [], [Problem(folder, message) for message in said]
    clients = read_clients(folder / "clients.json", said)
    table = read_client_rows(folder / "clients.csv", _evaluated_rounds(records, _kept_round(summary)), said)
    run = replace(run, clients=_known_clients(clients, table))
    models = sorted({name for record in records for name in block(record, "models")})
    views = [_with_model(run, records, table, model) for model in ["", *models]]
    _check_summary(views[0], said)
    return views, [Problem(folder, message) for message in said]


def _with_model(run: Run, records: Sequence[Mapping[str, Any]], table: ClientRows, model: str) -> Run:
    column = f"accuracy_{model}" if model else "accuracy"
    numbers = [client.client for client in run.clients]
    evaluations = []
    for round_, row in sorted(table.values.get(column, {}).items()):
        accuracy = np.array([row.get(client, math.nan) for client in numbers])
        if np.isfinite(accuracy).any():
            evaluations.append(Evaluation(round_, accuracy))
    return replace(
        run,
        model=model,
        history=_history(records, model) if model else run.history,
        last_scores=next((found for record in reversed(records) if (found := _model_scores(record, model))), {}),
        evaluations=tuple(evaluations),
    )


def _history(records: Sequence[Mapping[str, Any]], model: str) -> dict[str, Floats]:
    scores = [_model_scores(record, model) for record in records]
    losses = [block(record, "train_loss") for record in records]
    history = {key: _column(scores, key) for key in CURVE_KEYS}
    history |= {"train_loss": _column(losses, "mean"), "train_loss_max": _column(losses, "max")}
    history["rho"] = _column(records, "rho")
    for key in TOTALS:
        history[key] = np.cumsum(np.nan_to_num(_column(records, key)))
    history["bytes"] = history["bytes_up"] + history["bytes_down"]
    return history


def _column(mappings: Sequence[Mapping[str, Any]], key: str) -> Floats:
    values = [mapping.get(key) for mapping in mappings]
    try:
        return np.array(values, dtype=np.float64)  # None becomes NaN
    except (TypeError, ValueError):
        return np.array([number(value) for value in values], dtype=np.float64)


def _model_scores(record: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    return block(block(record, "models"), model) if model else _scores(record)


def _scores(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = record.get("accuracy")
    return {"mean": found} if isinstance(found, int | float) else block(record, "accuracy")


def _kept_round(summary: Mapping[str, Any]) -> int | None:
    """Return the round whose model the run ended with; None before its end, and in runs of earlier versions."""
    found = summary.get("kept_round")
    return found if isinstance(found, int) else None


def _evaluated_rounds(records: Sequence[Mapping[str, Any]], kept: int | None) -> dict[int, int]:
    """Return the rounds to read, and how many clients were silent in each."""
    silent = {int(record["round"]): len(record.get("silent") or ()) for record in records if _scores(record)}
    rounds = list(silent)
    if len(rounds) <= N_HISTORY:
        return silent
    picks = np.unique(np.linspace(0, len(rounds) - 1, N_HISTORY - 1).round().astype(int))
    chosen = {rounds[i] for i in picks} | {rounds[-2], kept}  # the one before the last: the last may be half-written
    return {round_: silent[round_] for round_ in rounds if round_ in chosen}


def _known_clients(clients: Sequence[Client], table: ClientRows) -> tuple[Client, ...]:
    if clients:
        return tuple(sorted(clients))
    seen = {c for by_round in table.values.values() for row in by_round.values() for c in row}
    return tuple(Client(c, f"client {c}", table.examples.get(c, 0), 0, {}, None) for c in sorted(seen))


def _check_version(env: Mapping[str, Any], summary: Mapping[str, Any], said: list[str]) -> None:
    wrote = str(env.get("dqnfed") or summary.get("version") or "")
    try:
        here = version("dqnfed")
    except PackageNotFoundError:
        return
    if wrote and wrote.split(".")[:2] != here.split(".")[:2]:
        said.append(f"was written by dqnfed {wrote}, this is {here}: what the two do not share is left empty")


def _check_summary(run: Run, said: list[str]) -> None:
    stated, found = number(block(run.summary, "accuracy").get("mean")), measures(run.accuracy).get("mean", math.nan)
    if abs(stated - found) > 0.01:  # False where either is NaN
        said.append(f"summary.json says mean accuracy {stated:.2f}, clients.csv gives {found:.2f}; the latter is shown")


def _seed(config: Mapping[str, Any], summary: Mapping[str, Any], folder: Path) -> int:
    stated = number(block(config, "run").get("seed"), number(summary.get("seed")))
    if math.isfinite(stated):
        return int(stated)
    name = folder.resolve().name
    return int(name) if name.isdecimal() else 0


def _is_trial(run: Path, folder: Path) -> bool:
    """Return whether the run is one of a search's trials, which are evaluated on validation data."""
    inside = run.relative_to(folder).parts
    return "trials" in inside and (folder.joinpath(*inside[: inside.index("trials")]) / "sweep.json").is_file()


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.parts]

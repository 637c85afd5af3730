"""Reads run folders, whole or half-written, and says in plain words what could not be read."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dqnfed.report.measures import Floats, measures

N_HISTORY = 24  # evaluated rounds of which every client's accuracy is kept
ACCURACY_KEYS = ("mean", "std", "worst10", "best10", "worst5", "best5", "angle", "kl", "jain", "gini", "weighted_mean")
TOTALS = ("bytes_up", "bytes_down", "passes", "seconds")
RUN_FILES = ("metrics.jsonl", "summary.json")


class Problem(NamedTuple):
    """Something a reader of the report should know: where, what, and what was done about it."""

    folder: Path
    message: str

    def __str__(self) -> str:
        return f"{self.folder}: {self.message}"


class Client(NamedTuple):
    """What is known of one client's data."""

    client: int
    name: str
    n_train: int
    n_test: int
    labels: Mapping[str, int]
    group: str | None


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
    model: str  # "" for the model the method is judged by; "global" for Ditto's global model, and so on
    seed: int
    status: str  # finished | interrupted | stopped | running
    config: Mapping[str, Any]
    env: Mapping[str, Any]
    summary: Mapping[str, Any]
    clients: tuple[Client, ...]
    rounds: Floats  # [T] -1 is the start model
    history: Mapping[str, Floats]  # accuracy measures, train_loss, train_loss_max, rho, and cumulated totals
    evaluations: tuple[Evaluation, ...]  # at most N_HISTORY, the first and the last among them

    @property
    def n_rounds(self) -> int:
        """Number of rounds done."""
        return int(self.rounds[-1]) + 1 if len(self.rounds) else int(number(self.summary.get("rounds"), 0.0))

    @property
    def planned_rounds(self) -> int:
        """Number of rounds asked for, or done where the settings do not say."""
        return int(number(_block(self.config, "train").get("rounds"), self.n_rounds))

    @property
    def score(self) -> str:
        """Name of what clients are judged by; "accuracy" is in percent, anything else in its own unit."""
        return str(self.summary.get("score") or "accuracy")

    @property
    def accuracy(self) -> Floats:
        """[K] accuracies at the last evaluation, in percent; empty when clients.csv holds none."""
        return self.evaluations[-1].accuracy if self.evaluations else np.empty(0)

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
        """Return the fairness measures of the last evaluation, from the client accuracies where they are known."""
        found = measures(self.accuracy, self.n_train if weighted else None)
        if not found and not weighted:
            found = self._recorded_measures()
        return found | {"improved": self.improved}

    def _recorded_measures(self) -> dict[str, float]:
        in_summary = _block(self.summary, "accuracy")
        if self.model:
            in_summary = _block(_block(self.summary, "models"), self.model)
        values = {key: number(in_summary.get(key)) for key in ACCURACY_KEYS}
        for key in ACCURACY_KEYS:
            curve = self.history.get(key, np.empty(0))
            measured = curve[np.isfinite(curve)]
            if not math.isfinite(values[key]) and measured.size:
                values[key] = float(measured[-1])
        return {key: value for key, value in values.items() if math.isfinite(value)}


class Reading(NamedTuple):
    """All runs found and everything worth saying about them."""

    runs: tuple[Run, ...]
    problems: tuple[Problem, ...]


def number(value: object, default: float = math.nan) -> float:
    """Return `value` as a float, or `default` where it is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


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


def read_run(folder: Path) -> tuple[list[Run], list[Problem]]:
    """Return the evaluated models of one run folder, the primary one first, and what could not be read."""
    said: list[str] = []
    config = _read_toml(folder / "config.toml", said)
    summary = _read_json(folder / "summary.json", said, expected=False)
    env = _read_json(folder / "env.json", said)
    records = _read_records(folder / "metrics.jsonl", said)
    _check_version(env, summary, said)
    run = Run(
        folder=folder,
        experiment=str(config.get("name") or summary.get("name") or folder.resolve().parent.parent.name),
        algorithm=str(
            _block(config, "algorithm").get("name") or summary.get("algorithm") or folder.resolve().parent.name
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
        evaluations=(),
    )
    if not records and not summary:
        said.append("nothing was recorded in it; left out")
        return [], [Problem(folder, message) for message in said]
    clients = _read_clients(folder / "clients.json", said)
    table = _read_client_rows(folder / "clients.csv", _evaluated_rounds(records), said)
    run = replace(run, clients=_known_clients(clients, table))
    models = sorted({name for record in records for name in _block(record, "models")})
    views = [_with_model(run, records, table, model) for model in ["", *models]]
    _check_summary(views[0], said)
    return views, [Problem(folder, message) for message in said]


class ClientRows(NamedTuple):
    """Rows of clients.csv at some evaluated rounds: column -> round -> client -> value."""

    values: dict[str, dict[int, dict[int, float]]]
    examples: dict[int, int]


def _with_model(run: Run, records: Sequence[Mapping[str, Any]], table: ClientRows, model: str) -> Run:
    column = f"accuracy_{model}" if model else "accuracy"
    numbers = [client.client for client in run.clients]
    evaluations = []
    for round_, row in sorted(table.values.get(column, {}).items()):
        accuracy = np.array([row.get(client, math.nan) for client in numbers])
        if np.isfinite(accuracy).any():
            evaluations.append(Evaluation(round_, accuracy))
    return replace(run, model=model, history=_history(records, model), evaluations=tuple(evaluations))


def _history(records: Sequence[Mapping[str, Any]], model: str) -> dict[str, Floats]:
    def column(values: Iterable[object]) -> Floats:
        return np.array([number(value) for value in values], dtype=np.float64)

    scores = [_block(_block(r, "models"), model) if model else _scores(r) for r in records]
    losses = [_block(r, "train_loss") for r in records]
    history = {key: column(score.get(key) for score in scores) for key in ACCURACY_KEYS}
    history["train_loss"] = column(loss.get("mean") for loss in losses)
    history["train_loss_max"] = column(loss.get("max") for loss in losses)
    history["rho"] = column(r.get("rho") for r in records)
    for key in TOTALS:
        history[key] = np.cumsum(np.nan_to_num(column(r.get(key) for r in records)))
    history["bytes"] = history["bytes_up"] + history["bytes_down"]
    return history


def _scores(record: Mapping[str, Any]) -> Mapping[str, Any]:
    found = record.get("accuracy")
    return {"mean": found} if isinstance(found, int | float) else _block(record, "accuracy")


def _evaluated_rounds(records: Sequence[Mapping[str, Any]]) -> list[int]:
    rounds = [int(r["round"]) for r in records if _scores(r)]
    if len(rounds) <= N_HISTORY:
        return rounds
    picks = np.unique(np.linspace(0, len(rounds) - 1, N_HISTORY - 1).round().astype(int))
    return sorted({rounds[i] for i in picks} | {rounds[-2]})  # the one before the last: the last may be half-written


def _read_records(path: Path, said: list[str]) -> list[Mapping[str, Any]]:
    """Return the records in order of rounds; of a round written twice (a resumed run) the later line counts."""
    if not path.exists():
        said.append(f"{path.name} is missing: no curves from this run")
        return []
    by_round: dict[int, Mapping[str, Any]] = {}
    lines = path.read_bytes().splitlines()
    for i, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            by_round[int(record["round"])] = record
        except (ValueError, KeyError, TypeError):
            where = "its last line is half-written" if i == len(lines) else f"line {i} is not a record of a round"
            said.append(f"{path.name}: {where}; ignored")
    return [by_round[round_] for round_ in sorted(by_round)]


def _read_client_rows(path: Path, rounds: Sequence[int], said: list[str]) -> ClientRows:
    """Return the rows of the asked rounds only: a long run's file is searched, not parsed."""
    if not path.exists():
        said.append(f"{path.name} is missing: no per-client results from this run")
        return ClientRows({}, {})
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        said.append(f"{path.name}: its last line is half-written; ignored")
        data = data[: data.rfind(b"\n") + 1]
    header = data[: data.find(b"\n")].decode().strip().split(",")
    if not {"round", "client"} <= set(header):
        said.append(f"{path.name}: the header {','.join(header)!r} lacks round or client; ignored")
        return ClientRows({}, {})
    client_at = header.index("client")
    scores = [(name, i) for i, name in enumerate(header) if name == "accuracy" or name.startswith("accuracy_")]
    values: dict[str, dict[int, dict[int, float]]] = {name: {} for name, _ in scores}
    examples: dict[int, int] = {}
    n_bad, start = 0, 0
    for round_ in rounds:
        prefix = b"\n%d," % round_
        begin = data.find(prefix, start)
        if begin < 0:
            begin = data.find(prefix)  # rows out of order
        while begin >= 0 and data.startswith(prefix, begin):
            end = data.find(b"\n", begin + 1)
            cells = data[begin + 1 : end].decode(errors="replace").strip().split(",")
            try:
                client = int(cells[client_at])
                for name, i in scores:
                    if cells[i]:
                        values[name].setdefault(round_, {})[client] = float(cells[i])
                if "n" in header and cells[header.index("n")]:
                    examples[client] = int(float(cells[header.index("n")]))
            except (ValueError, IndexError):
                n_bad += 1
            start = begin = end
    if n_bad:
        said.append(f"{path.name}: {n_bad} rows are not of the form {','.join(header)}; ignored")
    return ClientRows(_whole_rounds(values), examples)


def _whole_rounds(values: dict[str, dict[int, dict[int, float]]]) -> dict[str, dict[int, dict[int, float]]]:
    """Drop a last round that has fewer clients than the others: it was being written."""
    for by_round in values.values():
        if len(by_round) > 1 and len(by_round[max(by_round)]) < max(map(len, by_round.values())):
            del by_round[max(by_round)]
    return values


def _read_clients(path: Path, said: list[str]) -> list[Client]:
    if not path.exists():
        said.append(f"{path.name} is missing: clients have no names, label mixes or groups")
        return []
    try:
        return [
            Client(
                client=int(entry.get("client", i)),
                name=str(entry.get("name") or f"client {i}"),
                n_train=int(entry.get("n_train") or 0),
                n_test=int(entry.get("n_test") or 0),
                labels={str(label): int(n) for label, n in (entry.get("labels") or {}).items()},
                group=None if entry.get("group") is None else str(entry["group"]),
            )
            for i, entry in enumerate(json.loads(path.read_text()))
        ]
    except (ValueError, TypeError, AttributeError) as error:
        said.append(f"{path.name} cannot be read ({error}): clients have no names, label mixes or groups")
        return []


def _known_clients(clients: Sequence[Client], table: ClientRows) -> tuple[Client, ...]:
    if clients:
        return tuple(sorted(clients))
    seen = {c for by_round in table.values.values() for row in by_round.values() for c in row}
    return tuple(Client(c, f"client {c}", table.examples.get(c, 0), 0, {}, None) for c in sorted(seen))


def _read_json(path: Path, said: list[str], *, expected: bool = True) -> Mapping[str, Any]:
    if not path.exists():
        if expected:
            said.append(f"{path.name} is missing")
        return {}
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        said.append(f"{path.name} cannot be read ({error})")
        return {}
    return found if isinstance(found, dict) else {}


def _read_toml(path: Path, said: list[str]) -> Mapping[str, Any]:
    if not path.exists():
        said.append(f"{path.name} is missing: settings are unknown, names are taken from the summary or the folder")
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        said.append(f"{path.name} cannot be read ({error})")
        return {}


def _check_version(env: Mapping[str, Any], summary: Mapping[str, Any], said: list[str]) -> None:
    wrote = str(env.get("dqnfed") or summary.get("version") or "")
    try:
        here = version("dqnfed")
    except PackageNotFoundError:
        return
    if wrote and wrote.split(".")[:2] != here.split(".")[:2]:
        said.append(f"was written by dqnfed {wrote}, this is {here}: what the two do not share is left empty")


def _check_summary(run: Run, said: list[str]) -> None:
    stated, found = number(_block(run.summary, "accuracy").get("mean")), measures(run.accuracy).get("mean", math.nan)
    if abs(stated - found) > 0.01:  # False where either is NaN
        said.append(f"summary.json says mean accuracy {stated:.2f}, clients.csv gives {found:.2f}; the latter is shown")


def _seed(config: Mapping[str, Any], summary: Mapping[str, Any], folder: Path) -> int:
    stated = number(_block(config, "run").get("seed"), number(summary.get("seed")))
    if math.isfinite(stated):
        return int(stated)
    name = folder.resolve().name
    return int(name) if name.isdecimal() else 0


def _block(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = mapping.get(key)
    return found if isinstance(found, Mapping) else {}


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in path.parts]

"""The files of a run folder, read as far as they go; what is wrong with them is said in a list of messages."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Client(NamedTuple):
    """What is known of one client's data."""

    client: int
    name: str
    n_train: int
    n_test: int
    labels: Mapping[str, int]
    group: str | None


class ClientRows(NamedTuple):
    """Rows of clients.csv at some evaluated rounds: column -> round -> client -> value."""

    values: dict[str, dict[int, dict[int, float]]]
    examples: dict[int, int]


def number(value: object, default: float = math.nan) -> float:
    """Return `value` as a float, or `default` where it is not a number."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def block(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = mapping.get(key)
    return found if isinstance(found, dict) else {}


def read_records(path: Path, said: list[str]) -> list[Mapping[str, Any]]:
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


def read_client_rows(path: Path, rounds: Mapping[int, int], said: list[str]) -> ClientRows:
    """Return the rows of the asked rounds only: a long run's file is searched, not parsed.

    `rounds` says for each round how many clients were asked and gave no answer, so have no row.
    """
    if not path.exists():
        said.append(f"{path.name} is missing: no per-client results from this run")
        return ClientRows({}, {})
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        said.append(f"{path.name}: its last line is half-written; ignored")
        data = data[: data.rfind(b"\n") + 1]
    header = data[: data.find(b"\n")].decode(errors="replace").strip().split(",")
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
    return ClientRows(_whole_rounds(values, rounds), examples)


def _whole_rounds(
    values: dict[str, dict[int, dict[int, float]]], n_silent: Mapping[int, int]
) -> dict[str, dict[int, dict[int, float]]]:
    """Drop a last round that has fewer clients than the others: it was being written."""
    for by_round in values.values():
        asked = {round_: len(rows) + n_silent.get(round_, 0) for round_, rows in by_round.items()}
        if len(by_round) > 1 and asked[max(asked)] < max(asked.values()):
            del by_round[max(by_round)]
    return values


def read_clients(path: Path, said: list[str]) -> list[Client]:
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


def read_json(path: Path, said: list[str], *, expected: bool = True) -> Mapping[str, Any]:
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


def read_toml(path: Path, said: list[str]) -> Mapping[str, Any]:
    if not path.exists():
        said.append(f"{path.name} is missing: settings are unknown, names are taken from the summary or the folder")
        return {}
    try:
        return tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        said.append(f"{path.name} cannot be read ({error})")
        return {}

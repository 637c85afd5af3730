"""The records of a run, in memory and, where there is a folder, on disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dqnfed.core.run_folder import (
    ClientRow,
    RunFolder,
    clear_disk_errors,
    command_line,
    environment,
    json_text,
    write_atomically,
)
from dqnfed.core.shares import MANY
from dqnfed.sim.observers import Observer
from dqnfed.sim.state import Record, Setup


class Journal:
    """The run's records, in memory and, where there is a folder, on disk."""

    def __init__(self, folder: RunFolder | None, columns: tuple[str, ...]) -> None:
        self.folder, self.columns = folder, columns
        self.history: list[Record] = []
        self.rows: list[ClientRow] = []
        self.clients: list[dict[str, Any]] = []
        self.environment: dict[str, Any] = {}

    def open(self, settings: Mapping[str, Any], setup: Setup) -> None:
        """Begin a new run."""
        self.clients, self.environment = described_clients(setup), _environment(setup)
        if self.folder is not None:
            self.folder.begin(settings, self.clients, self.environment, self.columns, setup.files)

    def reopen(self, n_rounds: int, setup: Setup, damaged: Sequence[str]) -> None:
        """Go on with a run whose first rounds are done; what is damaged and known is written anew."""
        assert self.folder is not None
        known = {"clients.json": json_text(described_clients(setup)), "env.json": json_text(_environment(setup))}
        with clear_disk_errors(self.folder.path):
            for name, text in {**known, **setup.files}.items():
                if name in damaged or not (self.folder.path / name).is_file():
                    write_atomically(self.folder.path / name, text)
        self.folder.cut_back(n_rounds)
        self.history = self.folder.metrics()
        self.clients = json.loads((self.folder.path / "clients.json").read_text(encoding="utf-8"))
        self.environment = json.loads((self.folder.path / "env.json").read_text(encoding="utf-8"))

    def add(self, record: Record, rows: list[ClientRow], observers: Sequence[Observer] = ()) -> None:
        """Write one round's record, then pass it to the observers."""
        self.history.append(record)
        if self.folder is not None:
            self.folder.append(record, rows)
        else:
            self.rows.extend(rows)
        for observer in observers:
            observer.round(record)

    def all_rows(self) -> list[ClientRow]:
        """Return the clients' rows of all rounds; those of a long run wait on disk until they are asked for."""
        return self.rows if self.folder is None else self.folder.client_table()[1]


class DeferredLog:
    """The record of the last round, written and passed on while the next round's clients compute.

    On a GPU the host has time then, while between two rounds the GPU would wait for it.
    """

    def __init__(self, journal: Journal, observers: Sequence[Observer]) -> None:
        self._journal, self._observers = journal, observers
        self._unwritten: tuple[Record, list[ClientRow]] | None = None
        self._unreported: Record | None = None

    def enqueue(self, record: Record, rows: list[ClientRow]) -> None:
        """Keep a record for the next call of `flush`."""
        self._unwritten, self._unreported = (record, rows), record

    def write(self) -> None:
        """Write the record that waits; observers get it at the next `flush`."""
        if self._unwritten is not None:
            waiting, self._unwritten = self._unwritten, None
            self._journal.add(*waiting)

    def flush(self) -> None:
        """Write the record that waits and pass it to the observers."""
        self.write()
        if self._unreported is not None:
            record, self._unreported = self._unreported, None
            for observer in self._observers:
                observer.round(record)

    close = flush  # nothing is lost when the round after fails


def _environment(setup: Setup) -> dict[str, Any]:
    return environment(command_line(sys.argv), str(setup.problem.theta0.device))


def described_clients(setup: Setup) -> list[dict[str, Any]]:
    """Return who the clients are: name, sizes, group and, unless only aggregates may be written, label mix.

    Of very many clients, only those that are evaluated.
    """
    federation = setup.federation
    described: list[dict[str, Any]] = []
    chosen = range(federation.n_clients) if federation.n_clients <= MANY else setup.evaluated.tolist()
    labels = federation.label_counts(chosen) if setup.evaluation.metrics == "per-client" else None
    parts = {"n_train": federation.train, "n_test": federation.test, "n_validation": federation.validation}
    numbers = torch.tensor(chosen)
    sizes = {name: part.sizes_of(numbers).tolist() for name, part in parts.items() if part is not None}
    for k, c in enumerate(chosen):
        described.append(
            {
                "client": c,
                "name": federation.names[c],
                **{name: of_all[k] for name, of_all in sizes.items()},
                "group": federation.groups[c] if federation.groups else None,
            }
        )
        if labels is not None:
            described[-1]["labels"] = {str(label): n for label, n in labels[k].items()}
    return described

"""The files of a run: readable by people and by `dqnfed report`, safe against a kill at any moment."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

CLIENT_COLUMNS = ("round", "client", "n", "loss_before", "loss_after", "accuracy")
ClientRow = tuple[Any, ...]


class RunFolder:
    """One run's folder: config, clients, one line a round, rows per client, summary, model, checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(
        self,
        config: Mapping[str, Any],
        clients: Sequence[Mapping[str, Any]],
        environment: Mapping[str, Any],
        columns: Sequence[str],
    ) -> None:
        """Write what is known before the first round."""
        with clear_disk_errors(self.path):
            (self.path / "checkpoint").mkdir(parents=True, exist_ok=True)
            write_atomically(self.path / "config.toml", toml_text(config))
            write_atomically(self.path / "clients.json", json_text(list(clients)))
            write_atomically(self.path / "env.json", json_text(environment))
            write_atomically(self.path / "metrics.jsonl", "")
            write_atomically(self.path / "clients.csv", ",".join(columns) + "\n")
            (self.path / "summary.json").unlink(missing_ok=True)

    def append(self, record: Mapping[str, Any], rows: Sequence[ClientRow]) -> None:
        """Add one round's line and its clients' rows; they are with the operating system when this returns."""
        table = io.StringIO()
        csv.writer(table, lineterminator="\n").writerows([["" if v is None else v for v in row] for row in rows])
        with clear_disk_errors(self.path):
            with (self.path / "clients.csv").open("a") as file:
                file.write(table.getvalue())
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")

    def cut_back(self, n_rounds: int) -> None:
        """Forget the lines of rounds that are to be played again, and any half-written line."""
        for name, first in (("metrics.jsonl", 0), ("clients.csv", 1)):
            path = self.path / name
            lines = path.read_text().splitlines(keepends=True)
            kept = lines[:first] + [line for line in lines[first:] if _round_of(line) < n_rounds]
            write_atomically(path, "".join(kept))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary: its presence says that the run is over."""
        with clear_disk_errors(self.path):
            write_atomically(self.path / "summary.json", json_text(summary))

    def write_model(self, parameters: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
        """Write the trained model's named parameters with what is needed to build the module again."""
        with clear_disk_errors(self.path):
            save_tensors(self.path / "model.safetensors", parameters, metadata)

    def read_model(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the trained model's named parameters and metadata."""
        return load_tensors(self.path / "model.safetensors")

    def config(self) -> dict[str, Any]:
        path = self.path / "config.toml"
        if not path.is_file():
            raise FileNotFoundError(f"{self.path} is no run folder: it has no config.toml.")
        return tomllib.loads(path.read_text())

    def metrics(self) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl."""
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if _round_of(line) > -2]

    def client_rows(self) -> list[dict[str, str]]:
        """Return the rows of clients.csv by column name."""
        with (self.path / "clients.csv").open() as file:
            return list(csv.DictReader(file))

    def summary(self) -> dict[str, Any] | None:
        """Return the summary, or None while the run is not over."""
        path = self.path / "summary.json"
        return json.loads(path.read_text()) if path.is_file() else None


def write_atomically(path: Path, text: str) -> None:
    """Replace the file as a whole: a reader sees the old text or the new one, never half of it."""
    scratch = path.with_name(path.name + ".new")
    with scratch.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)


def save_tensors(path: Path, named: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Replace the file by one that holds the tensors and the metadata, as a whole."""
    scratch = path.with_name(path.name + ".new")
    apart = {name: t.detach().to("cpu").contiguous().clone() for name, t in named.items()}
    save_file(apart, scratch, metadata={"dqnfed": json.dumps(metadata)})
    with scratch.open("rb") as file:
        os.fsync(file.fileno())
    scratch.replace(path)


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the metadata of a file that `save_tensors` wrote."""
    with safe_open(path, framework="pt") as file:
        names = file.keys()
        metadata = json.loads((file.metadata() or {}).get("dqnfed", "{}"))
        return {name: file.get_tensor(name) for name in names}, metadata


@contextmanager
def clear_disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or missing disk into an error that says what is safe and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
            raise
        raise OSError(
            error.errno,
            f"cannot write to {folder} ({error.strerror}). The last checkpoint in it is intact: make room, then "
            f"continue with `dqnfed resume {folder}`.",
        ) from error


def json_text(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def toml_text(config: Mapping[str, Any]) -> str:
    """Return the config as TOML; None is left out, which reads back as the default."""
    plain = [f"{key} = {_toml_value(v)}" for key, v in config.items() if v is not None and not isinstance(v, Mapping)]
    blocks = [_toml_block(key, v) for key, v in config.items() if isinstance(v, Mapping)]
    return "\n".join([*plain, *(block for block in blocks if block)]) + "\n"


def _toml_block(path: str, block: Mapping[str, Any]) -> str:
    plain = [
        f"{_toml_key(k)} = {_toml_value(v)}" for k, v in block.items() if v is not None and not isinstance(v, Mapping)
    ]
    nested = [_toml_block(f"{path}.{_toml_key(k)}", v) for k, v in block.items() if isinstance(v, Mapping)]
    head = [f"\n[{path}]", *plain] if plain or not nested else []
    return "\n".join([*head, *(part for part in nested if part)])


def _toml_key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    raise TypeError(f"a config value must be a number, text, truth value or list, but is {value!r}.")


def _round_of(line: str) -> int:
    """Return the round of a metrics or clients line; a half-written one counts as never finished."""
    if not line.endswith(("\n", "}")):
        return 10**9
    try:
        return int(json.loads(line)["round"]) if line.startswith("{") else int(line.split(",", 1)[0])
    except (ValueError, KeyError):
        return 10**9


def environment(command: str, device: str) -> dict[str, Any]:
    """Return the versions and machine facts that a result depends on."""
    import platform
    import time

    import numpy

    from dqnfed import __version__

    return {
        "dqnfed": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": device,
        "threads": torch.get_num_threads(),
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }

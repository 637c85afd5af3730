"""The files of a run: readable by people and by `dqnfed report`, safe against a kill at any moment."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dqnfed.core.checksums import CHECKSUMS, checksums_of, listed_checksums, with_checksum
from dqnfed.core.numerics import NUMERICS

try:
    import fcntl
except ImportError:  # not on Windows: there, nobody watches over the folder
    fcntl = None  # type: ignore[assignment]

CLIENT_COLUMNS = ("round", "client", "n", "loss_before", "loss_after", "accuracy")
LINE_FILES = ("metrics.jsonl", "clients.csv")  # a line or some a round
FIXED_FILES = (  # written before round 0
    "config.toml",
    "clients.json",
    "env.json",
    "machine.json",
    "features.json",
    "flower.json",
)
FINAL_FILES = (*FIXED_FILES, *LINE_FILES, "model.safetensors", "noise.json", "breakdown.json", "summary.json")
ClientRow = tuple[Any, ...]
UNFINISHED = 10**9  # the round of a half-written line: later than any other
HIDDEN = "***"
SECRET = re.compile(r"pass(word|wd|phrase)?$|token$|secret$|api[-_]?key$|(^|[-_.])(pw|pwd|key)$", re.IGNORECASE)
URL_LOGIN = re.compile(r"(\w://)[^/\s]*@")  # user and password of a URL; a password may hold @, but no /
SECRET_PARAMETER = re.compile(r"([?&;](?:password|passwd|pwd|token|secret|api[-_]?key|key)=)[^&;\s]*", re.IGNORECASE)
SAFETENSORS_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class RunFolder:
    """One run's folder: config, clients, one line a round, rows per client, summary, model, checkpoint."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: dict[str, FileIO] = {}  # what lines are added to: to open a file takes longer than to write a line
        self._written: dict[str, tuple[Any, int]] = {}  # SHA-256 and length of these files so far

    def begin(
        self,
        config: Mapping[str, Any],
        clients: Sequence[Mapping[str, Any]],
        environment: Mapping[str, Any],
        columns: Sequence[str],
        files: Mapping[str, str] | None = None,  # further texts by file name, of `FIXED_FILES`
    ) -> None:
        """Write what is known before the first round; whatever an earlier run left here is gone first."""
        self.close()
        with clear_disk_errors(self.path):
            (self.path / "checkpoint").mkdir(parents=True, exist_ok=True)
            for left_over in (CHECKSUMS, "summary.json", "model.safetensors", "noise.json", "breakdown.json"):
                (self.path / left_over).unlink(missing_ok=True)
            for pattern in ("checkpoint*.json", "state-*"):
                for left in (self.path / "checkpoint").glob(pattern):
                    left.unlink()
            for name, text in (files or {}).items():
                write_atomically(self.path / name, text)
            write_atomically(self.path / "config.toml", toml_text(config))
            write_atomically(self.path / "clients.json", json_text(list(clients)))
            write_atomically(self.path / "env.json", json_text(environment))
            write_atomically(self.path / "metrics.jsonl", "")
            head = ",".join(columns) + "\n"
            write_atomically(self.path / "clients.csv", head)
            self.write_checksums(FIXED_FILES)
        texts = {"metrics.jsonl": b"", "clients.csv": head.encode()}
        self._written = {name: (hashlib.sha256(text), len(text)) for name, text in texts.items()}

    def write_checksums(self, names: Sequence[str]) -> None:
        """List the checksums of these files; a summary that is not listed does not end the run."""
        facts = {"files": checksums_of(self.path, names)}
        write_atomically(self.path / CHECKSUMS, with_checksum(facts, json_text))

    def append(self, record: Mapping[str, Any], rows: Sequence[ClientRow]) -> None:
        """Add one round's line and its clients' rows; they are with the operating system when this returns."""
        with clear_disk_errors(self.path):
            if rows:
                table = io.StringIO()
                values = [["" if v is None else v for v in row] for row in rows]
                csv.writer(table, lineterminator="\n").writerows(values)
                self._add("clients.csv", table.getvalue())
            self._add("metrics.jsonl", json_line(record))

    def _add(self, name: str, text: str) -> None:
        file = self._open.get(name)
        if file is None:
            file = self._open[name] = FileIO(self.path / name, "a")
        digest, length = self._written_so_far(name)
        written = text.encode()
        left = memoryview(written)
        while left:  # a disk that is nearly full takes a part, and says what is wrong at the next
            left = left[file.write(left) :]
        digest.update(written)
        self._written[name] = (digest, length + len(written))

    def _written_so_far(self, name: str) -> tuple[Any, int]:
        if name not in self._written:
            raw = (self.path / name).read_bytes()
            self._written[name] = (hashlib.sha256(raw), len(raw))
        return self._written[name]

    def lengths(self) -> dict[str, list[Any]]:
        """Return length and checksum of each file of lines, as far as it is written."""
        return {name: [n, digest.hexdigest()] for name in LINE_FILES for digest, n in [self._written_so_far(name)]}

    def close(self) -> None:
        """Close what lines were added to; the next line opens it again."""
        self._written.clear()
        while self._open:
            self._open.popitem()[1].close()

    def settle(self) -> None:
        """Return when every line is on the disk itself: a checkpoint must never know more than the lines before it."""
        with clear_disk_errors(self.path):
            for name in ("clients.csv", "metrics.jsonl"):
                with (self.path / name).open("rb") as file:
                    os.fsync(file.fileno())

    def cut_back(self, n_rounds: int) -> None:
        """Go back to the first rounds: forget later lines, any half-written one, and that the run had ended."""
        self.close()
        with clear_disk_errors(self.path):
            self.write_checksums(FIXED_FILES)
            (self.path / "summary.json").unlink(missing_ok=True)
            for name, first in (("metrics.jsonl", 0), ("clients.csv", 1)):
                path = self.path / name
                lines = path.read_bytes().splitlines(keepends=True)
                kept = lines[:first] + [line for line in lines[first:] if _round_in(line) < n_rounds]
                with _replacement(path) as file:
                    file.write(b"".join(kept))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write the summary, then the checksums of all files: their presence says that the run is over."""
        self.close()
        with clear_disk_errors(self.path):
            write_atomically(self.path / "summary.json", json_text(summary))
            self.write_checksums(FINAL_FILES)

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
        try:
            return tomllib.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:  # neither TOML nor text
            raise ValueError(f"damaged: {path} is not the TOML that a run writes ({error}).") from error

    def metrics(self) -> list[dict[str, Any]]:
        """Return the complete lines of metrics.jsonl."""
        lines = self._lines("metrics.jsonl")
        return [json.loads(line) for line in lines if _round_of(line) < UNFINISHED]

    def client_table(self) -> tuple[tuple[str, ...], list[ClientRow]]:
        """Return the columns and the complete rows of clients.csv; None where nothing was measured."""
        lines = self._lines("clients.csv")
        rows = csv.reader(line for line in lines[1:] if _round_of(line) < UNFINISHED)
        try:
            return tuple(lines[0].strip().split(",")), [tuple(_number(cell) for cell in row) for row in rows]
        except (ValueError, IndexError, csv.Error) as error:
            raise ValueError(f"damaged: {self.path / 'clients.csv'} is not what a run writes ({error}).") from error

    def _lines(self, name: str) -> list[str]:
        """Return a file's lines, after checking that each says which round it is of."""
        path = self.path / name
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except UnicodeDecodeError as error:
            raise ValueError(f"damaged: {path} is not text ({error}).") from error
        first = 0 if name == "metrics.jsonl" else 1
        for number, line in enumerate(lines[first:], start=first + 1):
            is_record = line.startswith("{") or name != "metrics.jsonl"
            if line.endswith("\n") and (not is_record or _round_in(line.encode()) == UNFINISHED):
                raise ValueError(f"damaged: {path}, line {number} is not one that a run writes: {line[:60]!r}.")
        return lines

    def summary(self) -> dict[str, Any] | None:
        """Return the summary, or None while the run is not over."""
        if not (self.path / "summary.json").is_file():
            return None
        found = self.read_json("summary.json")
        if not isinstance(found, dict) or "status" not in found:
            raise ValueError(f"damaged: {self.path / 'summary.json'} has no status; it is not what a run writes.")
        return found

    def read_json(self, name: str) -> Any:
        """Return what a file of JSON holds."""
        try:
            return json.loads((self.path / name).read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"damaged: {self.path / name} is not the JSON that a run writes ({error}).") from error

    def is_over(self) -> bool:
        """Return whether the run came to its end and everything of it was written; it may not go on then.

        A summary that the list of checksums does not name was written just before a kill: the files after it are not.
        """
        try:
            summary = self.summary()
        except ValueError:
            return False
        if summary is None or summary.get("status") == "interrupted":
            return False
        listed = listed_checksums(self.path)
        return "summary.json" in listed if listed is not None else not (self.path / CHECKSUMS).is_file()


def write_atomically(path: Path, text: str) -> None:
    """Replace the file as a whole: a reader sees the old text or the new one, never half of it."""
    with _replacement(path) as file:
        file.write(text.encode())


def save_tensors(path: Path, named: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> str:
    """Replace the file by one that holds the tensors and the metadata, as a whole; return its SHA-256.

    The format is safetensors. Its own writer takes a second copy of all tensors in memory, leaves files behind when it
    is killed and hides the disk's error; tensors are written one by one here, the wide types first so that all align.
    """
    order = sorted(named, key=lambda name: (-named[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"dqnfed": json.dumps(metadata)}}
    end = 0
    for name in order:
        start, end = end, end + named[name].numel() * named[name].element_size()
        facts = {"dtype": SAFETENSORS_TYPES[named[name].dtype], "shape": list(named[name].shape)}
        header[name] = {**facts, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text
    digest = hashlib.sha256(text)
    with _replacement(path) as file:
        file.write(text)
        for name in order:
            flat = named[name].detach().to("cpu").contiguous().reshape(-1)
            flat = flat.as_strided(flat.shape, (1,))  # a single element may come with any stride
            data = flat.view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
    return digest.hexdigest()


@contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    """Give a scratch file that takes the path's place once it is whole and on the disk, or vanishes on an error."""
    scratch = path.with_name(path.name + ".new")
    try:
        with scratch.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def load_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the metadata of a file that `save_tensors` wrote."""
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()
            metadata = json.loads((file.metadata() or {}).get("dqnfed", "{}"))
            # copied out of the file: where a tensor lies there may be odd, and some sums then end in other bits
            return {name: file.get_tensor(name).clone() for name in names}, metadata
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"damaged: {path} is not a whole safetensors file ({error}).") from error


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to the folder; the claim ends with the process, however that ends."""
    with clear_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a+")
    with lock:
        try:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise RuntimeError(
                f"process {lock.read().strip() or '(unknown)'} is still running in {folder}; wait until it is done, "
                "stop it, or choose another folder."
            ) from None
        except OSError:  # a file system without locks
            pass
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        yield


@contextmanager
def clear_disk_errors(folder: Path) -> Iterator[None]:
    """Turn a full or missing disk into an error that says what is safe and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
            raise
        raise OSError(
            error.errno,
            f"cannot write to {folder} ({error.strerror}). The last checkpoint in it is intact: make room, then "
            f"continue with `dqnfed resume {folder}`.",
        ) from error


def json_text(value: Any) -> str:
    """Return the value as JSON that every reader accepts: numbers that are not finite become null."""
    return json.dumps(_strict(value), indent=2, allow_nan=False) + "\n"


def json_line(record: Mapping[str, Any]) -> str:
    """Return the record as one line of such JSON."""
    try:
        return json.dumps(record, allow_nan=False) + "\n"
    except ValueError:  # some number is not finite
        return json.dumps(_strict(record), allow_nan=False) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def toml_text(config: Mapping[str, Any]) -> str:
    """Return the config as TOML; None is left out, which reads back as the default."""
    blocks = [_toml_block(_toml_key(key), v) for key, v in config.items() if isinstance(v, Mapping)]
    return "\n".join([*_toml_lines(config), *(block for block in blocks if block)]) + "\n"


def _toml_lines(block: Mapping[str, Any]) -> list[str]:
    plain = {key: value for key, value in block.items() if value is not None and not isinstance(value, Mapping)}
    return [f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items()]


def _toml_block(path: str, block: Mapping[str, Any]) -> str:
    plain = _toml_lines(block)
    nested = [_toml_block(f"{path}.{_toml_key(k)}", v) for k, v in block.items() if isinstance(v, Mapping)]
    head = [f"\n[{path}]", *plain] if plain or not nested else []
    return "\n".join([*head, *(part for part in nested if part)])


def _toml_key(key: str) -> str:
    is_bare = key.isascii() and key.replace("-", "").replace("_", "").isalnum()
    return key if is_bare else _toml_value(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(float(value))  # NumPy's own repr names its type
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # JSON may leave DEL as it is
    if isinstance(value, Sequence):
        return "[" + ", ".join(_toml_value(v) for v in value) + "]"
    raise TypeError(f"a config value must be a number, text, truth value or list, but is {value!r}.")


def _round_of(line: str) -> int:
    """Return the round of a metrics or clients line, which ends when its newline is written."""
    if not line.endswith("\n"):
        return UNFINISHED
    return int(json.loads(line)["round"]) if line.startswith("{") else int(line.split(",", 1)[0])


def _round_in(line: bytes) -> int:
    """Return the round of a line, or `UNFINISHED` where it is none that a run writes."""
    try:
        return _round_of(line.decode())
    except (ValueError, KeyError, TypeError, AttributeError):
        return UNFINISHED


def _number(text: str) -> float | int | None:
    if text == "":
        return None
    return int(text) if text.lstrip("-").isdigit() else float(text)


def command_line(words: Sequence[str]) -> str:
    """Return the command as it is kept: without its folder, and with *** in place of passwords and keys."""
    shown: list[str] = [Path(words[0]).name] if words else []
    hides_next = False
    for word in words[1:]:
        name, equals, _ = word.partition("=")
        if hides_next:
            shown.append(HIDDEN)
        elif equals and SECRET.search(name):
            shown.append(f"{name}={HIDDEN}")
        else:
            shown.append(SECRET_PARAMETER.sub(rf"\g<1>{HIDDEN}", URL_LOGIN.sub(rf"\g<1>{HIDDEN}@", word)))
        hides_next = word.startswith("-") and not equals and bool(SECRET.search(word))
    return " ".join(shown)


def environment(command: str, device: str) -> dict[str, Any]:
    """Return the versions and machine facts that a result depends on."""
    import platform
    import time

    import numpy

    from dqnfed import __version__

    return {
        "dqnfed": __version__,
        "numerics": NUMERICS,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "device": device,
        "threads": torch.get_num_threads(),
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }

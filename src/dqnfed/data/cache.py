"""One safetensors file per dataset, so that the second start takes a moment: bytes stay bytes and are mapped, not
read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dqnfed.data.catalogue import Dataset
from dqnfed.data.raw import Column, RawData

FORMAT = "dqnfed-data-2"
COLUMNS = ("inputs", "targets", "clients", "is_test", "is_validation")

log = logging.getLogger(__name__)


def default_data_dir() -> Path:
    """Return where datasets are looked for: $DQNFED_DATA, else the folder `data` here."""
    return Path(os.environ.get("DQNFED_DATA") or "data").expanduser()


def cache_dir() -> Path:
    """Return where parsed datasets are kept: $DQNFED_CACHE, else dqnfed under the user's cache folder."""
    if given := os.environ.get("DQNFED_CACHE"):
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "dqnfed"


def stamp(dataset: Dataset, folder: Path) -> str:
    """Return what identifies the source files: names, sizes and times of everything the catalogue says to watch."""
    found = sorted({path for pattern in dataset.watched for path in folder.glob(pattern)})
    facts = [(str(p.relative_to(folder)), p.stat().st_size if p.is_file() else 0, p.stat().st_mtime_ns) for p in found]
    return json.dumps([str(folder.resolve()), facts])


def read_cached(path: Path, stamped: str) -> RawData | None:
    """Return the cached dataset, or None where there is none, it is damaged, or the source files have changed since."""
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or metadata.get("stamp") != stamped:
                return None
            columns = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
        about = json.loads(metadata["about"])
        return _raw_data(about, columns)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):  # damaged: the files are read again
        return None


def _raw_data(about: dict[str, Any], columns: dict[str, Tensor]) -> RawData:
    return RawData(
        name=about["name"],
        inputs=columns["inputs"],
        targets=columns["targets"],
        n_classes=about["n_classes"],
        clients=columns.get("clients"),
        client_names=tuple(about["client_names"]),
        class_names=tuple(about["class_names"]),
        is_test=columns.get("is_test"),
        is_validation=columns.get("is_validation"),
        columns=tuple(Column(name, tuple(codes)) for name, codes in about.get("columns", ())),
    )


def write_cached(raw: RawData, path: Path, stamped: str) -> None:
    """Write the dataset at `path` at once or not at all; a full or read-only disk costs the cache, not the run."""
    about = {"name": raw.name, "n_classes": raw.n_classes, "client_names": list(raw.client_names)}
    about["class_names"] = list(raw.class_names)
    about["columns"] = [[column.name, list(column.codes)] for column in raw.columns]
    columns = {key: getattr(raw, key).contiguous() for key in COLUMNS if getattr(raw, key) is not None}
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(columns, partial, metadata={"format": FORMAT, "stamp": stamped, "about": json.dumps(about)})
        partial.replace(path)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        log.warning("%s could not be cached at %s (%s); the next start reads its files again.", raw.name, path, error)

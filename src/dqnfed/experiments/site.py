"""One site of a federation of tables: its folder, its table, what leaves it, and its side of the training."""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dqnfed.core.federation import Examples, Federation, Part, split_rows
from dqnfed.core.run_folder import toml_text, write_atomically
from dqnfed.data.raw import DataError
from dqnfed.data.schema import Schema, fitting_table, read_schema
from dqnfed.data.statistics import FEWEST_ROWS, site_statistics
from dqnfed.data.table import Table, read_table
from dqnfed.experiments.own_data import Columns

SITE_FILE, SCHEMA_FILE, KEY_FILE = "site.toml", "schema.toml", "key"
KEYS = ("name", "number", "data")


@dataclass(frozen=True)
class Site:
    """A site's folder: who it is, where its table lies, and the schema that it agreed to."""

    folder: Path
    name: str
    number: int  # of the client, counted from 0
    data: Path
    schema: Schema

    def table(self) -> Table:
        """Return the rows with a label, checked against the schema; errors name rows, so they stay here."""
        return fitting_table(read_table(self.data), self.schema)


def init_site(folder: Path, *, data: Path, schema: Path, name: str, number: int) -> list[Path]:
    """Write a site's folder: who it is, the agreed schema, and a new key; return the files."""
    if (folder / SITE_FILE).exists():
        raise FileExistsError(f"{folder} is a site already; change its {SITE_FILE}, or choose another folder.")
    if number < 0 or not name.strip():
        raise ValueError(f"a site needs a name and a number from 0, but has {name!r} and {number}.")
    read_schema(schema)  # refused here if it is wrong
    if not data.is_file():
        raise FileNotFoundError(f"there is no table {data}; give the path of this site's CSV file.")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / SCHEMA_FILE, schema.read_text(encoding="utf-8"))
    content = {"name": name, "number": number, "data": str(data.absolute())}
    write_atomically(folder / SITE_FILE, toml_text(content))
    return [folder / SITE_FILE, folder / SCHEMA_FILE, *write_key(folder / KEY_FILE)]


def write_key(path: Path) -> list[Path]:
    """Write a key pair in OpenSSH's format: the private key for its owner alone, the public one for the server."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    path.with_name(f"{path.name}.pub").write_bytes(public + b"\n")
    return [path, path.with_name(f"{path.name}.pub")]


def load_site(folder: Path) -> Site:
    """Return the site that a folder describes."""
    path = folder / SITE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is no site: it has no {SITE_FILE}; make one with `dqnfed site init`.")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        name, number, data = (content[key] for key in KEYS)
        return Site(folder, str(name), int(number), Path(data), read_schema(folder / SCHEMA_FILE))
    except (KeyError, TypeError) as error:
        raise DataError(f"{path} must have {', '.join(KEYS)} ({error!r}).") from error


def split_site(site: Site, table: Table) -> dict[Part, np.ndarray]:
    """Return the rows that train, validate and test: drawn from the schema's seed and the site's number."""
    labels, schema = torch.from_numpy(table.columns[site.schema.label]), site.schema
    shares: dict[Part, float] = {"test": schema.test, "validation": schema.validation}
    targets = labels.long() if schema.classes else labels
    parts = split_rows(len(table), targets, shares, seed=schema.seed, client=site.number)
    return {part: rows.numpy() for part, rows in parts.items()}


def statistics_of(site: Site) -> dict[str, Any]:
    """Return what this site says before the training."""
    table = site.table()
    return site_statistics(table, split_site(site, table)["train"], site.schema)


def site_federation(site: Site, columns: Columns) -> Federation:
    """Return this one client's examples, as the agreed preprocessing makes them."""
    table = site.table()
    inputs = torch.from_numpy(columns.preprocessing.apply(table))
    labels = torch.from_numpy(table.columns[site.schema.label])
    scaled = ((labels - columns.target_mean) / columns.target_std).float()
    targets = labels.long() if site.schema.classes else scaled
    rows = split_site(site, table)

    def examples(part: Part) -> Examples:
        return Examples(inputs[rows[part]], targets[rows[part]], torch.tensor([0, len(rows[part])]))

    validation = examples("validation") if site.schema.validation else None
    n_classes = len(site.schema.classes) or None
    return Federation(examples("train"), examples("test"), validation, (site.name,), None, n_classes)


def leaving_lines(site: Site, statistics: dict[str, Any]) -> list[str]:
    """Return everything that leaves the site, the statistics with their values."""
    lines = [
        f"What leaves site {site.number} ({site.name}), and nothing else:",
        "1. Once, before the training:",
        "   its name, its number, the schema's checksum",
        f"   {statistics['rows']} rows with a label, {statistics['training']} of them for training",
    ]
    for name, (count, mean, squares, missing) in statistics["numbers"].items():
        lines.append(
            f"   {name}: {count} known values in training, mean {mean:.6g}, sum of squared deviations {squares:.6g}; "
            f"{missing} missing in all rows"
        )
    for name, texts in statistics["categories"].items():
        shown = ", ".join(repr(text) for text in texts) or "none"
        lines.append(f"   {name}: categories of {FEWEST_ROWS} training rows or more: {shown}")
    if "label" in statistics:
        count, mean, squares = statistics["label"]
        lines.append(
            f"   {site.schema.label} (label): {count} values, mean {mean:.6g}, squared deviations {squares:.6g}"
        )
    return [
        *lines,
        "2. In every round: the method's reply, computed from its training rows (`dqnfed list algorithms NAME`)",
        "3. At evaluations: training loss, loss and score on the test or validation rows, how many rows each part has",
        "4. If something fails: that it failed, without a value of the table; the reason stays in errors.log here",
        "What these reveal: see 'What the server sees' in the documentation.",
    ]

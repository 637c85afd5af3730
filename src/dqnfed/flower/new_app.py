"""A ready Flower app in a new folder: `dqnfed new-app DIR`."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from dqnfed.data.schema import read_schema

FILES = {  # template -> path in the app
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "experiment.toml": "{package}/experiment.toml",
    "task.py": "{package}/task.py",
    "client_app.py": "{package}/client_app.py",
    "server_app.py": "{package}/server_app.py",
    "__main__.py": "{package}/__main__.py",
    "__init__.py": "{package}/__init__.py",
}

TABLE_FILES = {  # of an app that trains on the sites' tables, which has no task.py
    "pyproject.toml": "pyproject.toml",
    "gitignore": ".gitignore",
    "table_README.md": "README.md",
    "table_experiment.toml": "{package}/experiment.toml",
    "table_client_app.py": "{package}/client_app.py",
    "table_server_app.py": "{package}/server_app.py",
    "table_main.py": "{package}/__main__.py",
    "__init__.py": "{package}/__init__.py",
}


def new_app(
    folder: Path, *, clients: int = 3, algorithm: str = "dqn-fed", rounds: int = 10, table: Path | None = None
) -> list[Path]:
    """Return the files of a new Flower app, written to a folder that is new or empty.

    `table` is the schema of the sites' tables; such an app needs no code.
    """
    if table is not None:
        read_schema(table)  # refused here if it is wrong
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} already exists and is not an empty folder; choose another name.")
    if clients < 1:
        raise ValueError(f"an app needs at least one client, but {clients} were asked for.")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    if not name or not name[0].isalpha():
        raise ValueError(f"'{folder.name}' cannot name a Python package; use letters first, as in `my-federation`.")
    words = {
        "name": name,
        "package": name.replace("-", "_"),
        "clients": str(clients),
        "algorithm": algorithm,
        "rounds": str(rounds),
        "out": (folder.resolve() / "run").as_posix(),
    }
    written = []
    for template, place in FILES.items() if table is None else TABLE_FILES.items():
        text = (resources.files("dqnfed.flower") / "app_template" / f"{template}.txt").read_text(encoding="utf-8")
        path = folder / place.format(package=words["package"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_filled(text, words), encoding="utf-8")
        written.append(path)
    if table is not None:
        written.append(folder / words["package"] / "schema.toml")
        written[-1].write_text(table.read_text(encoding="utf-8"), encoding="utf-8")
    return written


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"@{word}@", value)
    return text

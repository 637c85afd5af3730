"""The package's sources, and copies of them that can be changed."""

from __future__ import annotations

import compileall
import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "dqnfed"
ROOMS = ("algorithms", "core", "maths")  # whose files are changed


def digest(text: str) -> str:
    """Return a short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def package_sources(package: Path = PACKAGE) -> dict[str, str]:
    """Return the text of every file that may be changed, by its path in the package."""
    files = [path for room in ROOMS for path in sorted((package / room).rglob("*.py"))]
    return {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in files}


def copied_package(scratch: Path) -> dict[str, str]:
    """Copy the package into a folder of its own, where it can be changed, and return the texts that may be."""
    shutil.copytree(PACKAGE, scratch / "src" / "dqnfed", ignore=shutil.ignore_patterns("__pycache__"))
    compileall.compile_dir(scratch / "src", quiet=2)  # the tests must not write them: a change may be seen too late
    return package_sources(scratch / "src" / "dqnfed")


def environment(scratch: Path, **more: str) -> dict[str, str]:
    """Return the variables under which the tests see the copied package."""
    paths = [str(scratch / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **more}


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step: whoever reads it finds the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def replace_module(path: Path, source: str) -> None:
    """Write a module; what Python has compiled of it before is removed."""
    path.write_text(source, encoding="utf-8")
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

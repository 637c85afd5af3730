"""Where the repository's files are, for tests about the repository itself."""

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "dqnfed"


def tracked_files() -> list[Path]:
    """Return every file that git tracks and that still exists; skips the test where there is no git checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: nothing says which files belong to the repository")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]


def copy_of(names: Iterable[str], folder: Path) -> Path:
    """Return the folder with copies of these files and folders of the repository, without caches."""
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder

"""The real datasets in their official on-disk formats, for the tests that read them."""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT

NAMES = ("cifar10", "fashion_mnist", "libsvm", "mnist", "mnist_by_writer", "shakespeare")
CACHE = Path(tempfile.gettempdir()) / "dqnfed-test-data"
STORE = ROOT.parent / "shared"  # a folder beside the checkout: packed data, and the tool that lays it out


def real_data(name: str) -> Path:
    """Return the folder with the official files of dataset `name`; skips the test where they are not to be had.

    Looks in `$DQNFED_DATA/name`, else unpacks the store beside the checkout once into the temporary folder.
    """
    if name not in NAMES:
        raise ValueError(f"real_data knows {', '.join(NAMES)}, not {name!r}; add it to NAMES in {__file__}")
    if given := os.environ.get("DQNFED_DATA"):
        folder = Path(given).expanduser().resolve() / name
        if not folder.is_dir():
            pytest.skip(f"{name}: DQNFED_DATA is set, but there is no folder {folder}")
        return folder
    tool = STORE / "tools" / "unpack_data.py"
    if not (tool.is_file() and (STORE / "data").is_dir()):
        pytest.skip(f"{name}: set DQNFED_DATA to a folder that holds {name}/ with the official files")
    return unpacked(tool, name)


def unpacked(tool: Path, name: str) -> Path:
    """Return CACHE/name, made by `tool` on first use; whole or absent, however many workers ask at once."""
    folder = CACHE / name
    if folder.is_dir():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file closes, a killed worker's too
        if folder.is_dir():  # another worker was quicker
            return folder
        partial = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=CACHE))
        try:
            subprocess.run([sys.executable, str(tool), str(partial), name], check=True, stdout=subprocess.DEVNULL)
            (partial / name).rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder

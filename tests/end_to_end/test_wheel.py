"""The wheel holds what it should, imports from where it was installed, and runs in a bare environment."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT, SOURCE


def output_of(command: Sequence[object], folder: Path, **variables: str) -> str:
    """Return what the command prints; fails with everything it said."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    done = subprocess.run([str(word) for word in command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    output_of([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT], out)
    (built,) = out.glob("dqnfed-*.whl")
    return built


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        information = {name.split("/", 1)[1] for name in archive.namelist() if ".dist-info/" in name}
    package = {
        path.relative_to(SOURCE.parent).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == package
    assert "dqnfed/py.typed" in packed
    assert "dqnfed/experiments/presets/digits.toml" in packed
    assert "dqnfed/data/files/heart/processed.va.data" in packed
    assert "dqnfed/data/files/heart/LICENCE.md" in packed
    assert {"entry_points.txt", "licenses/LICENSE"} <= information


def test_the_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    output_of(pip, tmp_path)
    where = output_of([sys.executable, "-c", "import dqnfed; print(dqnfed.__file__)"], tmp_path, PYTHONPATH=str(site))
    assert Path(where.strip()) == site / "dqnfed" / "__init__.py"


@pytest.mark.slow
def test_a_bare_environment_runs_the_wheel(wheel: Path, tmp_path: Path) -> None:
    output_of([sys.executable, "-m", "venv", tmp_path / "bare"], tmp_path)
    binaries = tmp_path / "bare" / "bin"
    pip = [binaries / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel]
    output_of(pip, tmp_path)
    assert "compare" in output_of([binaries / "dqnfed", "--help"], tmp_path)
    output_of([binaries / "dqnfed", "run", "digits", "--rounds", "2", "--out", "out"], tmp_path)
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.toml", "metrics.jsonl", "clients.csv", "summary.json", "env.json"} <= made

"""What `make` installs: for the demo what running needs, for everything else everything; and it can be watched."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests.helpers.repository import ROOT


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder as after a clone: no .venv yet."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def planned(clone: Path, *words: str) -> str:
    return subprocess.run(["make", "-n", *words], cwd=clone, capture_output=True, text=True, check=True).stdout


def test_the_demo_installs_what_running_needs_and_shows_progress(clone: Path) -> None:
    said = planned(clone, "demo")
    assert "-c constraints.txt -e .\n" in said
    assert "[dev]" not in said
    assert "--quiet" not in said
    assert said.index("installing dqnfed") < said.index("pip install") < said.index("dqnfed compare digits")


def test_torch_comes_from_the_index_of_its_cpu_builds_unless_one_is_there(clone: Path) -> None:
    said = planned(clone, "demo")
    assert "import torch' 2>/dev/null ||" in said
    assert "--index-url https://download.pytorch.org/whl/cpu torch" in said
    assert "--index-url https://pypi.org/simple torch" in planned(clone, "demo", "TORCH_INDEX=https://pypi.org/simple")


def test_setup_installs_everything_that_the_command_can_do() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    everything = extras["dev"][0]
    assert {"flower", "images", "onnx", "ray", "sweep", "tables", "torchjd", "track"} <= set(
        everything.removeprefix("dqnfed[").removesuffix("]").split(",")
    )


def test_setup_needs_the_developers_tools(clone: Path) -> None:
    assert "-e '.[dev]'" in planned(clone, "setup")


def test_every_direct_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.split("==")[0] for line in lines if "==" in line and not line.startswith("#")}
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    names = {line.split("[")[0].split(">")[0].split("<")[0].split("=")[0].strip() for line in wanted} - {"dqnfed"}
    assert names <= pinned

"""The benchmarks that need no other framework run as documented, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import made_up_cifar10
from dqnfed.data.load import load

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("server_step.py", ["--clients", "4", "--parameters", "20000", "--repeat", "1"]),
        ("scaling.py", ["--overhead-only", "--rounds", "3"]),
        ("secure_cost.py", ["--model", "mlp", "--clients", "4"]),
    ],
)
def test_a_benchmark_runs_and_writes_its_numbers(script: str, options: list[str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    printed(script, [*options, "--json", str(found)], tmp_path)
    assert json.loads(found.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_whole_runs_are_timed(tmp_path: Path) -> None:
    options = ["digits", "fedavg", "--rounds", "3", "--repeat", "2", "--set", "eval.every=2"]
    *runs, last = printed("whole_runs.py", options, tmp_path).splitlines()
    assert len(runs) == 2
    assert all("of which start" in line for line in runs)
    assert last.startswith("median of 2: ")


def test_made_up_images_are_read_as_cifar10_and_real_ones_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DQNFED_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("DQNFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(made_up_cifar10, "N_IMAGES", 20)
    made_up_cifar10.main()
    raw = load("cifar10")
    assert raw.inputs.shape == (120, 3, 32, 32)
    assert raw.targets.bincount().tolist() == [12] * 10
    assert raw.is_test is not None
    assert int(raw.is_test.sum()) == 20
    with pytest.raises(SystemExit, match="exists and is left alone"):
        made_up_cifar10.main()


def printed(script: str, options: list[str], folder: Path) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

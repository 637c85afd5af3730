"""The benchmarks that need no other framework run as documented, at a small size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("server_step.py", ["--clients", "4", "--parameters", "20000", "--repeat", "1"]),
        ("scaling.py", ["--overhead-only", "--rounds", "3"]),
    ],
)
def test_a_benchmark_runs_and_writes_its_numbers(script: str, options: list[str], tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    printed(script, [*options, "--json", str(found)], tmp_path)
    assert json.loads(found.read_text(encoding="utf-8"))


def test_whole_runs_are_timed(tmp_path: Path) -> None:
    options = ["digits", "fedavg", "--rounds", "3", "--repeat", "2", "--set", "eval.every=2"]
    *runs, last = printed("whole_runs.py", options, tmp_path).splitlines()
    assert len(runs) == 2
    assert all("of which start" in line for line in runs)
    assert last.startswith("median of 2: ")


def printed(script: str, options: list[str], folder: Path) -> str:
    command = [sys.executable, str(BENCHMARKS / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout

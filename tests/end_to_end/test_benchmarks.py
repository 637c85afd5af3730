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
    command = [sys.executable, str(BENCHMARKS / script), *options, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(found.read_text(encoding="utf-8"))

"""One round stays small enough to read: how many functions of the package it enters, and in how many files."""

import json
import subprocess
import sys
from pathlib import Path

from tests.helpers.repository import ROOT

MOST_FUNCTIONS = {"dqn-fed": 133, "fedavg": 90}  # three of them write checksums and note refused evaluations
# Votes, examples that may be lazy, who is drawn, and the guard of a run's end have files of their own.
MOST_FILES = {"dqn-fed": 29, "fedavg": 23}


def test_a_round_enters_few_functions_in_few_files(tmp_path: Path) -> None:
    """Counted in the second round of each method, in processes of their own."""
    found = tmp_path / "functions.json"
    script = ROOT / "benchmarks" / "round_functions.py"
    command = [sys.executable, str(script), "--algorithm", *MOST_FUNCTIONS, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    entered = json.loads(found.read_text(encoding="utf-8"))
    assert entered.keys() == MOST_FUNCTIONS.keys()
    for method, functions in entered.items():
        files = sorted({function["file"] for function in functions})
        assert len(functions) <= MOST_FUNCTIONS[method], [f"{f['file']} {f['name']}" for f in functions]
        assert len(files) <= MOST_FILES[method], files
        names = {function["name"].rpartition(".")[2] for function in functions}
        assert {"client_step", "server_step"} <= names  # the count sees the method's own steps
        assert not any(name.startswith("<") for name in names)

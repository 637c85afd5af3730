"""One round stays small enough to read: how many functions of the package it enters, and in how many files."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.helpers.repository import ROOT

MOST_FUNCTIONS = {"dqn-fed": 133, "fedavg": 90}  # three of them write checksums and note refused evaluations
# Votes, examples that may be lazy, who is drawn, and the guard of a run's end have files of their own.
MOST_FILES = {"dqn-fed": 29, "fedavg": 23}


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The functions that the second round of each method enters."""
    found = tmp_path_factory.mktemp("entered") / "functions.json"
    script = ROOT / "benchmarks" / "round_functions.py"
    command = [sys.executable, str(script), "--algorithm", *MOST_FUNCTIONS, "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=found.parent, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(found.read_text(encoding="utf-8")))


@pytest.mark.parametrize("method", MOST_FUNCTIONS)
def test_a_round_enters_few_functions_in_few_files(entered: dict[str, list[dict[str, Any]]], method: str) -> None:
    files = sorted({function["file"] for function in entered[method]})
    assert len(entered[method]) <= MOST_FUNCTIONS[method], [f"{f['file']} {f['name']}" for f in entered[method]]
    assert len(files) <= MOST_FILES[method], files


@pytest.mark.parametrize("method", MOST_FUNCTIONS)
def test_the_count_sees_the_methods_own_steps(entered: dict[str, list[dict[str, Any]]], method: str) -> None:
    names = {function["name"].rpartition(".")[2] for function in entered[method]}
    assert {"client_step", "server_step"} <= names
    assert not any(name.startswith("<") for name in names)

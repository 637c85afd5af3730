"""A method in a package of somebody else: found by its entry point, and on the leaderboard by one command."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from dqnfed.algorithms import REGISTRY, register
from dqnfed.algorithms.fedavg import FedAvg
from tests.helpers.pages import blocks_of
from tests.helpers.repository import ROOT, copy_of

GUIDE = ROOT / "docs" / "how-to" / "add-a-method.md"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Return a folder with a package as pip leaves it behind: the guide's method, and its entry point."""
    package, info = tmp_path / "site" / "my_package", tmp_path / "site" / "my_package-0.1.dist-info"
    package.mkdir(parents=True)
    info.mkdir()
    (package / "__init__.py").touch()
    code = next(block.code for block in blocks_of(GUIDE) if "class FedMedian" in block.code)
    (package / "fed_median.py").write_text(code, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 0.1\n", encoding="utf-8")
    entry = "[dqnfed.algorithms]\nfed-median = my_package.fed_median:FedMedian\n"
    (info / "entry_points.txt").write_text(entry, encoding="utf-8")
    return tmp_path / "site"


@pytest.mark.slow
def test_it_appears_on_the_leaderboard_by_one_command(site: Path, tmp_path: Path) -> None:
    """What `make leaderboard METHODS=fed-median PROBLEMS=heart` runs, with one seed, in a copy of the page's folder."""
    clone = copy_of(["docs/results/leaderboard.md", "docs/results/tables.toml"], tmp_path / "clone")
    shutil.copytree(ROOT / "benchmarks", clone / "benchmarks", ignore=shutil.ignore_patterns("peers", "results"))
    path = os.pathsep.join([str(site), str(ROOT / "src")])

    def command(*words: str) -> None:
        given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *words], cwd=clone, env=given, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    chosen = ["--methods", "fed-median", "--problems", "heart", "--seeds", "1"]
    command("benchmarks/leaderboard.py", "--out", "lines.jsonl", *chosen)
    command("-m", "dqnfed.report.results", "leaderboard", "--from", "lines.jsonl", "--commit", "abc")
    lines = [json.loads(line) for line in (clone / "lines.jsonl").read_text().splitlines()]
    mine = [line for line in lines if line["method"] == "fed-median"]
    assert [line["kind"] for line in mine] == ["tune"] * 4 + ["test"]
    page = (clone / "docs" / "results" / "leaderboard.md").read_text()
    row = next(row for row in page.splitlines() if row.startswith("| `fed-median` |") and " of 4" in row)
    assert f"| {mine[-1]['accuracy']['mean']:.1f} |" in row
    assert "Mean ranks: heart" in page
    assert "fed-median" in (clone / "docs" / "results" / "figures" / "leaderboard-ranks-1.svg").read_text()


def test_an_entry_point_registers_a_method() -> None:
    entry, registry = EntryPoint("mine", "dqnfed.algorithms.fedavg:FedAvg", "dqnfed.algorithms"), dict(REGISTRY)
    register(entry, registry)
    assert registry == {**REGISTRY, "mine": FedAvg}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mine", "no_such_package:Method", "cannot be imported"),
        ("mine", "dqnfed.algorithms.fedavg:NoMethod", "cannot be imported"),
        ("mine", "dqnfed.algorithms.fedavg:client_weights", "is no class of methods"),
        ("fedavg", "dqnfed.algorithms.fedprox:FedProx", "there is a method of this name"),
    ],
)
def test_a_false_entry_point_is_left_out_with_the_reason(
    name: str, value: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = dict(REGISTRY)
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        register(EntryPoint(name, value, "dqnfed.algorithms"), registry)
    assert registry == REGISTRY
    assert words in caplog.text

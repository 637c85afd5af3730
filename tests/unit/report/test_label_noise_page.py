"""The page about wrong labels has no number but those that were measured."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "label-noise.md"


def test_the_tables_are_those_of_the_stored_runs() -> None:
    spec = importlib.util.spec_from_file_location("label_noise", ROOT / "benchmarks" / "label_noise.py")
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    rows = json.loads(PAGE.with_suffix(".json").read_text())
    page = PAGE.read_text()
    assert {row["partition"] for row in rows} == {"iid", "dirichlet"}
    assert benchmark.with_tables(page, rows) == page
    assert benchmark.with_tables(page.replace("| 5 |", "| 6 |"), rows) == page

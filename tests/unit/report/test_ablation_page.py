"""The page about the parts of DQN-Fed: every table that says that it is stored has the numbers of the stored runs."""

from __future__ import annotations

import json
import sys
from importlib import import_module

import numpy as np

from tests.helpers.repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))
ablation = import_module("ablation")
PAGE = ROOT / "docs" / "results" / "ablation.md"


def test_the_tables_are_those_of_the_stored_runs() -> None:
    rows, page = json.loads(PAGE.with_suffix(".json").read_text()), PAGE.read_text(encoding="utf-8")
    assert page.count("\nStored: ") == len({row["problem"] for row in rows})
    assert ablation.with_tables(page, rows) == page
    assert ablation.with_tables(page.replace("| no metric | ", "| no metric | 1"), rows) == page


def test_a_difference_is_paired_by_seed_and_has_its_standard_error() -> None:
    def runs(means: list[float]) -> list[dict[str, object]]:
        return [{"seed": seed, "scores": [mean, 1.0, mean]} for seed, mean in enumerate(means)]

    about = {"problem": "heart", "hardware": "a desk", "commit": "1a", "numerics": 2}
    rows = [{"method": "default", "runs": runs([80.0, 90.0]), **about}]
    rows += [{"method": "no votes", "runs": runs([79.0, 86.0]), **about}, {"method": "lost", "runs": [], **about}]
    gaps = np.array([-1.0, -4.0])
    text = ablation.section("heart", rows)
    error = gaps.std(ddof=1) / np.sqrt(2)
    assert f"| no votes | 82.5 | 1.0 | 82.5 | {gaps.mean():+.1f} ({error:.1f}) | " in text
    assert "| lost | - | - | - | - | - |" in text
    assert "heart eval.every=5`, 2 seeds" in text

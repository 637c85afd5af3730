"""The leaderboard: ranks, intervals and gains of lines whose answers are known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dqnfed.report.leaderboard import (
    block,
    by_problem,
    collected,
    comparable,
    critical_difference,
    mean_ranks,
    rank_groups,
    ranks,
    write_ranks,
)


def line(problem: str, method: str, seed: int, mean: float | None, **more: Any) -> dict[str, Any]:
    accuracy = {"mean": mean, "std": 1.0, "worst10": mean, "min": mean}
    clients = [mean, None if mean is None else mean + 2]
    common = {"kind": "test", "settings": {"lr": 0.1}, "status": "finished", "rounds": 4, "passes": 1.0}
    cost = {
        "bytes_up": 2048,
        "train_seconds": 1.5,
        "curve": [] if mean is None else [[2, mean - 1, 100], [4, mean, 2**20]],
    }
    place = {"problem": problem, "method": method, "seed": seed, "accuracy": accuracy, "clients": clients}
    return {**common, **cost, **place, **more}


LINES = [
    *(line(p, "fedavg", s, 80.0 + s) for p in "ab" for s in range(3)),
    *(line(p, "good", s, 90.0 + s) for p in "ab" for s in range(3)),
    *(line(p, "local-only", s, 70.0) for p in "ab" for s in range(3)),
    *(line(p, "lost", s, None if s else 85.0) for p in "ab" for s in range(3)),
    line("a", "half", 0, 99.0, status="diverged"),
    {"kind": "tune", "problem": "a", "method": "good", "settings": {"lr": 0.1}, "accuracy": {"mean": 1.0}},
    {"kind": "tune", "problem": "a", "method": "good", "settings": {"lr": 0.2}, "accuracy": {"mean": 0.5}},
    {"kind": "test", "problem": "b", "method": "broken", "seed": 0, "error": "ValueError: too large"},
]


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")
    return collected([path], command="make leaderboard", hardware="a machine", commit="abc")


def test_ranks_share_places_and_put_the_diverged_last() -> None:
    found = ranks(np.array([[3.0, 5.0, 5.0, np.nan], [np.nan, np.nan, 1.0, 2.0]]))
    assert found.tolist() == [[3.0, 1.5, 1.5, 4.0], [3.5, 3.5, 2.0, 1.0]]


def test_mean_ranks_are_over_problems_and_their_ends_over_seeds(data: dict[str, Any]) -> None:
    ranked = {problem: comparable(methods) for problem, methods in by_problem(data["runs"]).items()}
    assert "half" not in ranked["a"]  # it has one seed of three
    names, found = mean_ranks(ranked, "mean")
    assert names == ["fedavg", "good", "lost"]  # references are not ranked
    np.testing.assert_allclose(found[0], [(3 + 2 + 2) / 3, 1.0, (2 + 3 + 3) / 3])
    assert found[1, 1] == found[2, 1] == 1.0
    assert found[1, 0] < found[0, 0] < found[2, 0]


def test_the_critical_difference_is_that_of_the_tables() -> None:
    """Demsar (2006), Table 5: q = 2.343 for three methods and 2.728 for five at 5 %."""
    assert critical_difference(3, 10) == pytest.approx(2.343 * np.sqrt(3 * 4 / 60), rel=1e-3)
    assert critical_difference(5, 20) == pytest.approx(2.728 * np.sqrt(5 * 6 / 120), rel=1e-3)


def test_the_page_says_what_the_lines_say(data: dict[str, Any], tmp_path: Path) -> None:
    text = block(data)
    row = next(row for row in text.split("## a\n")[1].splitlines() if row.startswith("| `good`"))
    assert "| 91.0 ± 1.0 |" in row
    assert "| +21.0 ± 1.0 | 100 % |" in row
    assert "| 2 | 0.00 |" in row  # rounds and MiB to FedAvg's mean, with the same seed
    assert "| lr 0.1 of 2, the lowest |" in row
    assert "| `lost` | diverged |" in text
    assert "`broken` could not run: ValueError: too large" in text
    assert "| `half` (1 of 1 runs diverged) | 99.0 |" in text
    write_ranks(data, tmp_path)
    assert (tmp_path / "leaderboard-ranks-1.svg").read_text().count("lost") >= 1
    assert "Not ranked, for want of a problem or of a seed: `half`." in text


def test_a_problem_with_few_methods_has_ranks_of_its_own(tmp_path: Path) -> None:
    few = [line("c", method, seed, mean) for method, mean in (("lost", 90.0), ("literal", 20.0)) for seed in range(3)]
    more = [line(p, f"other{k}", s, 50.0 + k) for p in "ab" for s in range(3) for k in range(3)]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, [*LINES, *more, *few])), encoding="utf-8")
    data = collected([path], command="make leaderboard", hardware="a machine", commit="abc")
    wide, narrow = rank_groups(by_problem(data["runs"]))
    assert list(wide) == ["a", "b"]
    assert list(narrow) == ["c"]
    assert len(mean_ranks(wide, "mean")[0]) == 6
    names, found = mean_ranks(narrow, "mean")
    assert dict(zip(names, found[0], strict=True)) == {"lost": 1.0, "literal": 2.0}
    text = block(data)
    assert "## Mean ranks: a, b\n" in text
    assert "## Mean ranks: c\n" in text
    write_ranks(data, tmp_path)
    assert "literal" in (tmp_path / "leaderboard-ranks-2.svg").read_text()


def test_runs_are_added_to_a_stored_summary(data: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "stored.json").write_text(json.dumps(data), encoding="utf-8")
    mine = [line(p, "mine", s, 95.0 + s) for p in "ab" for s in range(3)]
    mine.append({"kind": "tune", "problem": "a", "method": "mine", "settings": {"lr": 0.1}, "accuracy": {"mean": 1.0}})
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, mine)), encoding="utf-8")
    about = {"command": "make leaderboard", "hardware": "another machine", "commit": "def"}
    found = collected([tmp_path / "stored.json", tmp_path / "mine.jsonl"], **about)
    assert len(found["runs"]) == len(data["runs"]) + 6
    assert [run for run in found["runs"] if run["method"] != "mine"] == data["runs"]
    assert found["tuned"]["a"] == {**data["tuned"]["a"], "mine": {"lr 0.1": 1.0}}
    assert found["refused"] == data["refused"]
    assert found["commit"] == "abc, runs added since: def"
    ranks = next(row for row in block(found).splitlines() if row.startswith("| `mine` | 1.0 [1.0, 1.0]"))
    assert ranks
    again = collected([tmp_path / "stored.json"], command="make leaderboard", hardware="a machine", commit="abc")
    assert again == data

"""The leaderboard's runs: which methods, in which order; what is begun in a slice of time."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.repository import ROOT

sys.path.append(str(ROOT / "benchmarks"))
leaderboard = import_module("leaderboard")
many_runs = import_module("many_runs")


def line(problem: str, method: str, mean: float, seed: int = 0, seconds: float = 1.0) -> dict[str, Any]:
    place = {"kind": "test", "problem": problem, "method": method, "seed": seed, "device": "cpu", "settings": {}}
    return {**place, "seconds": seconds, "accuracy": {"mean": mean, "worst10": mean}}


def test_the_best_are_those_of_the_small_problems_and_all_forms_of_dqn_fed() -> None:
    scores = {"fedavg": 1.0, "term": 5.0, "dqn-fed": 3.0, "qffl": 4.0, "local-only": 9.0}
    lines = [line(p, method, mean) for p in leaderboard.ON_CPU for method, mean in scores.items()]
    lines += [line("cifar10-mlp", "fedavg", 99.0)]  # another problem's ranks do not count
    found = leaderboard.methods_of("best:2", lines)
    forms = ["dqn-fed", "dqn-fed-literal", "server-lbfgs"]
    assert found == ["local-only", "pooled", "fedavg", "term", "qffl", *forms]


def test_the_best_are_refused_before_the_small_problems_were_run() -> None:
    with pytest.raises(ValueError, match=r"no run of digits, fashion-mnist; run these problems first"):
        leaderboard.methods_of("best:10", [line("heart", "fedavg", 1.0)])


def test_the_longest_runs_come_first_and_a_federation_stays_together() -> None:
    lines = [line("heart", "fedavg", 1.0, seconds=1.0), line("heart", "term", 1.0, seconds=5.0)]
    lines += [line("digits", "fedavg", 1.0, seconds=10.0)]  # TERM's five are 5/3 of the median on heart
    todo = [line(p, m, 0.0, seed) for p in ("heart", "digits") for m in ("fedavg", "term") for seed in (0, 1)]
    found = [(task["problem"], task["seed"], task["method"]) for task in leaderboard.longest_first(todo, lines)]
    each = [(seed, method) for seed in (0, 1) for method in ("term", "fedavg")]
    assert found == [(problem, *rest) for problem in ("digits", "heart") for rest in each]
    expected = leaderboard.expected_durations({("digits", "term")}, leaderboard.durations(lines))
    assert expected == {("digits", "term"): pytest.approx(10.0 * 5.0 / 3.0)}


def test_what_took_longer_than_is_left_is_not_begun() -> None:
    clock = many_runs.Clock(100.0, {("heart", "slow"): 1000.0})
    assert not clock.leaves_time_for(("heart", "slow"))
    assert clock.leaves_time_for(("heart", "new"))
    clock.add(("heart", "new"), 2000.0)
    assert not clock.leaves_time_for(("heart", "new"))


def test_a_stored_summary_is_gone_on_from(tmp_path: Path) -> None:
    from dqnfed.report.leaderboard import KEPT, collected

    trial = {
        **line("heart", "term", 60.0, seed=leaderboard.TUNING_SEED),
        "kind": "tune",
        "settings": {"lr": 0.025, "t": 1.0},
    }
    test = {**dict.fromkeys(KEPT), **line("heart", "term", 62.0, seed=3)}
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps(one) + "\n" for one in (trial, test)))
    stored = tmp_path / "stored.json"
    first = collected([lines], command="c", hardware="h", commit="x")
    stored.write_text(json.dumps(first))
    known = leaderboard.known_lines(SimpleNamespace(stored=stored, out=tmp_path / "none.jsonl"))
    assert {leaderboard.key(one) for one in known} == {leaderboard.key(one) for one in (trial, test)}
    assert leaderboard.best_of(known, "heart", "term") == {"lr": 0.025, "t": 1.0}
    assert collected([stored], command="c", hardware="h", commit="x") == first

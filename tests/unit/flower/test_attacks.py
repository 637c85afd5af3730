"""One client in ten lies in a hundred ways: no run dies, and the others hardly lose."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dqnfed import Policy, RunResult
from tests.helpers.attacks import AS_LISTED, ATTACKS, FURTHER
from tests.helpers.hostile_runs import (
    COLLUDING,
    LIAR,
    METHODS,
    N,
    app_policy,
    applies,
    attacked,
    honest_loss,
    loss_without,
    setting,
)

WORSE = {"dqn-fed": 1.25, "dqn-fed, local SGD": 1.25, "fedavg": 1.5, "qffl": 1.25}
COLLUSION = 2.0
CASES = [(method, attack) for method in METHODS for attack in ATTACKS if applies(attack, method)]
# Replies that cannot be read are refused whatever the policy: to count them once is enough.
READABLE = [
    (method, attack)
    for method, attack in CASES
    if attack.startswith(
        ("row", "scalars", "loss", "rate", "curvature", "probed", "replays", "everything", "n-train x")
    )
]
QUICK = [
    ("dqn-fed", "row x -1"),
    ("dqn-fed", "curvature x 1e6"),
    ("fedavg", "n-train 1e15"),
    ("fedavg", "row x -3"),
    ("qffl", "loss x 1e6"),
    ("dqn-fed, local SGD", "row x -1"),
]


def believable(result: RunResult) -> bool:
    """Return whether every number that the run reports is possible."""
    scores = [record["accuracy"]["mean"] for record in result.history if record["accuracy"]]
    losses = [record["train_loss"]["mean"] for record in result.history if record["train_loss"]]
    return all(0.0 <= score <= 100.0 for score in scores) and all(0.0 <= loss < math.inf for loss in losses)


def assert_harmless(method: str, attack: str) -> None:
    result = attacked(method, attack, LIAR, app_policy())
    assert result.summary["status"] == "finished"
    assert believable(result)
    without = loss_without(method, LIAR, app_policy())
    assert honest_loss(method, result.theta, LIAR) <= WORSE[method] * without


def test_there_are_a_hundred_attacks() -> None:
    assert len(AS_LISTED) >= 60
    assert len(FURTHER) >= 40
    assert not AS_LISTED.keys() & FURTHER.keys()


@pytest.mark.parametrize(("method", "attack"), QUICK)
def test_a_liar_costs_the_others_little(method: str, attack: str) -> None:
    assert_harmless(method, attack)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "attack"), CASES)
def test_no_lie_costs_the_others_much(method: str, attack: str) -> None:
    assert_harmless(method, attack)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "attack"), READABLE)
def test_two_that_collude_cost_at_most_twice(method: str, attack: str) -> None:
    result = attacked(method, attack, COLLUDING, app_policy())
    assert believable(result)
    without = loss_without(method, COLLUDING, app_policy())
    assert honest_loss(method, result.theta, COLLUDING) <= COLLUSION * without


@pytest.mark.slow
@pytest.mark.parametrize(("method", "attack"), READABLE)
def test_with_the_default_policies_no_run_ends_above_its_start(method: str, attack: str) -> None:
    result = attacked(method, attack, LIAR, Policy())
    start = setting(method)[1].problem.theta0
    assert honest_loss(method, result.theta, LIAR) <= honest_loss(method, start, LIAR)


@pytest.mark.parametrize(
    "attack", ["no scores", "score 50000", "score NaN", "evaluated loss -1e9", "models of its own"]
)
def test_no_evaluation_kills_or_falsifies_a_run(attack: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is left out of the means, and the log and metrics.jsonl say so; columns are the server's own."""
    result = attacked("fedavg", attack, LIAR, app_policy(), rounds=2, out=tmp_path / "run")
    assert believable(result)
    assert (tmp_path / "run" / "clients.csv").read_text().splitlines()[0].count(",") == len(result.columns) - 1
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3
    for record in map(json.loads, lines):
        assert {each["client"] for each in record["refused"]} == set(LIAR)
        assert all(each["why"] in caplog.text for each in record["refused"])
        assert record["silent"] == list(LIAR)


@pytest.mark.parametrize("attack", ["n-train -5", "n-train 0", "n-train 3.7", "client -1", "client 0", "no evaluation"])
def test_a_client_without_a_believable_first_report_does_not_take_part(attack: str) -> None:
    result = attacked("fedavg", attack, LIAR, app_policy(), rounds=2)
    assert result.history[0]["refused"][0]["node"] == 100 + LIAR[0]
    assert [fault["client"] for fault in result.history[1]["dropped"]] == list(LIAR)
    assert len(result.clients) == N


def test_every_refused_update_is_in_the_metrics_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for attack, why in {
        "an array more": "has the fields 'delta, zzz', but the server expects 'delta'",
        "float64": "is of type float64, but the server expects float32",
        "another kind": "there is no message kind 'Nope' here",
        "every number inf": "update is not finite",
    }.items():
        attacked("fedavg", attack, LIAR, app_policy(), rounds=1, out=tmp_path / attack)
        record = json.loads((tmp_path / attack / "metrics.jsonl").read_text().splitlines()[1])
        assert [fault["client"] for fault in record["dropped"]] == list(LIAR)
        assert why in record["dropped"][0]["why"]
        assert why in caplog.text

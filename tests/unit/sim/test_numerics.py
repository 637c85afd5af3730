"""`NUMERICS` is raised when results change: stored results of every method, and of everything that is drawn by seeds.

Results are float64 of the plain computation. Another machine, and the accelerated form, differ from them by at most
1e-10 (measured); a changed formula, seed or default by far more than the tolerance.
"""

from __future__ import annotations

import json
import logging

import pytest

from dqnfed.core.numerics import NUMERICS
from tests.contract.cases import METHODS
from tests.helpers.numerics import STORED, difference, draws, results

TOLERANCE = 1e-8
WAY_OUT = (
    "if that is meant, raise NUMERICS in src/dqnfed/core/numerics.py (a run that was begun before then refuses to go "
    "on), and store the new results with `python -m tests.helpers.numerics`"
)
QUICK = ("dqn-fed", "fedavg", "scaffold", "ditto", "qffl", "term", "fedadam", "server-lbfgs", "fedmgda-plus", "fednl")


def compare(names: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    stored = json.loads(STORED.read_text())["results"]
    with caplog.at_level(logging.ERROR):
        found = results(names=names)
    changed = {key: difference(found[key], stored[key]) for key in found if key in stored}
    worst = {key: gap for key, gap in changed.items() if not gap <= TOLERANCE}
    assert not worst, f"results have changed: {worst}; {WAY_OUT}"
    assert not found.keys() - stored.keys(), f"new methods have no stored results; {WAY_OUT.partition(', and ')[2]}"


def test_the_stored_results_are_of_this_number() -> None:
    stored = json.loads(STORED.read_text())
    assert stored["NUMERICS"] == NUMERICS, f"store the results of the new number: {WAY_OUT}"


def test_what_is_drawn_by_seeds_has_not_changed() -> None:
    assert draws() == json.loads(STORED.read_text())["draws"], f"other draws; {WAY_OUT}"


def test_results_have_not_changed(caplog: pytest.LogCaptureFixture) -> None:
    compare(QUICK, caplog)


@pytest.mark.slow
def test_no_result_of_any_method_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    compare(tuple(name for name in METHODS if name not in QUICK), caplog)
    assert {key.partition(",")[0] for key in json.loads(STORED.read_text())["results"]} == set(METHODS)


@pytest.mark.parametrize("factor", [1 + 1e-6, 1 - 1e-6])
def test_a_small_change_is_noticed(factor: float) -> None:
    stored = json.loads(STORED.read_text())["results"]["fedavg, as it comes"]
    assert difference(stored, [factor * value for value in stored]) > TOLERANCE

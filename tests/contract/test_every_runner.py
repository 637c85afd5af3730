"""Every way to run a method gives the same model: the plain form, one client after the other, is the reference."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache, partial
from itertools import product

import pytest

from dqnfed import RunResult, looped, run, threads, vectorised
from dqnfed.accel.graph_runner import graphed
from dqnfed.flower import run_in_process
from tests.contract.cases import LOCAL_WORK, METHODS, five_rounds
from tests.helpers.turns import relative_distance

AGREE = 1e-10  # relative, float64: some 10^5 roundings, far below anything a different formula would give
ACCELERATED: dict[str, Callable[..., RunResult]] = {
    "default": run,
    "chunked": partial(run, cohort=vectorised(chunk=4)),
    "threads": partial(run, cohort=threads(3)),
    "graphs": partial(run, cohort=graphed(emulate=True)),
    "flower": run_in_process,
}


def runner_of(name: str) -> str:
    """Return the one runner with which the method is tested in `make test`; the others are slow tests."""
    drawn = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return sorted(ACCELERATED)[drawn % len(ACCELERATED)]


@cache
def reference(name: str, work: str) -> RunResult:
    return five_rounds(name, work, partial(run, cohort=looped(), accelerate=False))


def work_of(name: str) -> str:
    """Return the local work of that test."""
    return list(LOCAL_WORK)[METHODS.index(name) % len(LOCAL_WORK)]


TRIED = [
    pytest.param(*tried, marks=[] if tried[1:] == (runner_of(tried[0]), work_of(tried[0])) else pytest.mark.slow)
    for tried in product(METHODS, ACCELERATED, LOCAL_WORK)
]


@pytest.mark.parametrize(("name", "runner", "work"), TRIED)
def test_every_runner_agrees_with_the_plain_form(name: str, runner: str, work: str) -> None:
    expected, found = reference(name, work), five_rounds(name, work, ACCELERATED[runner])
    assert relative_distance(found.theta, expected.theta) <= AGREE
    assert found.summary["accuracy"] == pytest.approx(expected.summary["accuracy"])


def test_every_runner_is_drawn_for_some_methods_with_either_work() -> None:
    drawn = {(runner_of(name), work_of(name)) for name in METHODS}
    assert drawn == set(product(ACCELERATED, LOCAL_WORK))

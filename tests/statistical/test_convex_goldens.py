"""Rounds to a gap on a1a, against measurements made once with an independent NumPy script (and on the synthetic set).

Deterministic methods must agree within one round down to a gap of 1e-10, randomised ones within a quarter.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from dqnfed.algorithms import REGISTRY
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.experiments.convex import TOLERANCES, Entry, Trace, largest_curvature, traced
from dqnfed.experiments.convex_problems import SYNTHETIC, ConvexProblem, client_losses, convex_problem
from tests.helpers.convex import gradients, numpy_clients, played
from tests.helpers.data import real_data
from tests.helpers.numpy_twins import fednl_cr_losses, q_fednew_losses

Rounds = list[int | None]
NEVER: Rounds = [None] * 6
OPTION2: dict[str, Any] = {"step": "regularisation", "start": "zero"}


def make(name: str, **settings: Any) -> AnyAlgorithm:
    return REGISTRY[name](**settings)


FAST: dict[str, tuple[Callable[[], Entry], Rounds]] = {
    "newton": (lambda: Entry(make("newton")), [2, 4, 5, 6, 6, 6]),
    "fednl identity, option 2, from zero": (
        lambda: Entry(make("fednl", compressor="identity", **OPTION2)),
        [10, 19, 22, 23, 24, 24],
    ),
    "fednl identity, option 2": (
        lambda: Entry(make("fednl", compressor="identity", step="regularisation")),
        [5, 14, 17, 18, 19, 20],
    ),
    "fednl rank 1, option 1": (lambda: Entry(make("fednl")), [4, 12, 18, 24, 29, 33]),
    "fednl top 8n, option 2, from zero": (
        lambda: Entry(make("fednl", compressor="top", size=984, **OPTION2)),
        [10, 19, 22, 23, 24, 25],
    ),
    "fednl-pp identity, all": (
        lambda: Entry(make("fednl-pp", compressor="identity", start="zero")),
        [3, 5, 6, 6, 7, 7],
    ),
    "giant": (lambda: Entry(make("giant")), [3, 7, 12, 16, 20, 25]),
    "shed 10": (lambda: Entry(make("shed", pairs=10)), [4, 12, 16, 18, 19, 19]),
    "shed 3": (lambda: Entry(make("shed", pairs=3)), [7, 29, 41, 47, 50, 51]),
    "disco": (lambda: Entry(make("disco")), [4, 6, 7, 7, 7, 8]),
}
LONG: dict[str, tuple[Callable[[], Entry], Rounds]] = {
    "newton-zero": (lambda: Entry(make("newton", renew="once")), [5, 33, 70, 109, 148, 187]),
    "fednl rank 1, option 2, from zero": (lambda: Entry(make("fednl", **OPTION2)), [18, 56, 76, 93, 107, 120]),
    "fednl-ls": (lambda: Entry(make("fednl-ls")), [15, 23, 29, 35, 38, 40]),
    "fednl-pp rank 1, all": (lambda: Entry(make("fednl-pp")), [7, 43, 61, 70, 76, 80]),
    "fednew": (lambda: Entry(make("fednew")), [9, 41, 80, 122, 161, 203]),
    "fednew, every 10": (lambda: Entry(make("fednew", refresh=10)), [7, 40, 79, 122, 161, 203]),
    "fednew, once": (lambda: Entry(make("fednew", refresh=0)), [7, 40, 78, 120, 161, 201]),
    "fednew, less damped": (
        lambda: Entry(make("fednew", rho=0.01, alpha=0.001), max_rounds=570),
        [3, 30, 195, 377, 565, None],
    ),
    "fednew, in sums": (  # rho 3 and alpha 0.05 on sums over 100 examples
        lambda: Entry(make("fednew", rho=0.03, alpha=0.0005), max_rounds=400),
        [3, 62, 139, 219, 312, 399],
    ),
    "fednew, too damped": (
        lambda: Entry(make("fednew", alpha=0.25), max_rounds=345),
        [28, 338, None, None, None, None],
    ),
}
RANDOM: dict[str, tuple[Callable[[], Entry], Rounds]] = {
    "fedns 20": (lambda: Entry(make("fedns", rows=20)), [3, 5, 8, 11, 14, 17]),
    "fedns 60": (lambda: Entry(make("fedns", rows=60)), [2, 4, 6, 8, 9, 11]),
    "fednl-pp identity, half": (
        lambda: Entry(make("fednl-pp", compressor="identity", start="zero"), participation=0.5),
        [9, 17, 21, 23, 26, 26],
    ),
    "fednl random 8n, option 2, from zero": (
        lambda: Entry(make("fednl", compressor="random", size=984, **OPTION2)),
        [34, 73, 86, 93, 99, 103],
    ),
}
KILOBITS = {  # up, per client, to a gap of 1e-10, 32 bits a float
    "newton": 1488,
    "fednl rank 1, option 1": 473,
    "fednl identity, option 2, from zero": 5952,
    "fednl top 8n, option 2, from zero": 851 + 307,
    "giant": 164,
    "shed 10": 829,
    "newton-zero": 827,
    "fednew": 634,
    "fednl rank 1, option 2, from zero": 849,
}


@lru_cache(maxsize=1)
def a1a() -> ConvexProblem:
    return convex_problem("a1a", real_data("libsvm").parent)


@lru_cache(maxsize=64)
def trace_of(name: str) -> Trace:
    entry = {**FAST, **LONG, **RANDOM}[name][0]()
    return traced(a1a(), name, entry)


def differences(found: Trace, expected: Rounds) -> list[int]:
    """Return by how many rounds each gap down to 1e-10 was missed; gaps that neither reached count as 0."""
    missed = []
    for tolerance, t in list(zip(TOLERANCES, expected, strict=True))[:5]:
        here = found.rounds_to(tolerance)
        missed.append(0 if here is None and t is None else 10**6 if here is None or t is None else abs(here - t))
    return missed


def test_the_optimum_of_a1a() -> None:
    convex = a1a()
    assert (convex.federation.n_clients, convex.problem.n_parameters) == (16, 123)
    assert convex.best_loss == pytest.approx(0.327923193298709, abs=2e-15)
    assert float(convex.theta_best.norm()) == pytest.approx(4.96718164953605, abs=1e-13)
    start = float(client_losses(convex.problem, convex.federation, convex.problem.theta0).mean())
    assert start - convex.best_loss == pytest.approx(0.365223987261236, abs=2e-15)


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_deterministic_methods_need_the_known_number_of_rounds(name: str) -> None:
    expected = {**FAST, **LONG}[name][1]
    assert max(differences(trace_of(name), expected)) <= 1


@pytest.mark.parametrize("name", [*list(RANDOM)[:3], pytest.param(list(RANDOM)[3], marks=pytest.mark.slow)])
def test_randomised_methods_need_about_the_known_number_of_rounds(name: str) -> None:
    expected = [t for t in RANDOM[name][1] if t is not None]
    missed = differences(trace_of(name), RANDOM[name][1])
    assert all(off <= max(1, 0.25 * t) for off, t in zip(missed, expected, strict=False))


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in KILOBITS]
)
def test_uplink_bits_to_a_small_gap(name: str) -> None:
    trace = trace_of(name)
    t = trace.rounds_to(1e-10)
    assert t is not None
    assert trace.bits[t] / 1000 == pytest.approx(KILOBITS[name], rel=0.01)  # line searches add a few scalars


def test_disco_gap_by_gap_and_phase_by_phase() -> None:
    trace = trace_of("disco")
    known = [0.37, 0.13, 0.046, 0.013, 2.1e-3, 1.4e-4, 1.0e-6, 7.7e-11]
    assert trace.gaps[:8] == pytest.approx(known, rel=0.06)  # printed to two digits
    assert abs(trace.phases[8] - 221) <= 4


@pytest.mark.parametrize(
    ("name", "settings", "floor"),
    [
        ("distributed-newton", {}, 1.4e-2),
        ("local-newton", {}, 1.4e-2),
        pytest.param("local-newton", {"local_steps": 3}, 4.1e-2, marks=pytest.mark.slow),
    ],
)
def test_methods_with_a_bias_stall_at_it(name: str, settings: dict[str, Any], floor: float) -> None:
    trace = traced(a1a(), name, Entry(make(name, **settings), max_rounds=60))
    assert trace.gaps[-1] == pytest.approx(floor, rel=0.05)


@pytest.mark.slow
def test_gradient_descent_is_slow() -> None:
    convex = a1a()
    trace = traced(
        convex, "gd", Entry(make("fedavg", lr=1 / largest_curvature(convex), weighting="uniform"), max_rounds=2120)
    )
    assert max(differences(trace, [167, 2115, None, None, None, None])) <= 1


@pytest.mark.slow
def test_fednew_ends_with_duals_that_are_the_gradients_at_the_optimum() -> None:
    """After 600 rounds, to the last digits: they sum to zero, and lambda_k is client k's gradient at the optimum."""
    convex = a1a()
    duals = played(make("fednew", rho=0.1, alpha=0.01), convex, 600).memories[-1].dual
    assert float(duals.sum(0).abs().max()) <= 1e-14  # sixteen sums of numbers below 0.1, 600 times
    assert float((duals - gradients(convex, convex.theta_best)).abs().max()) <= 1e-13  # theta_best has 13 digits


def test_fednl_top_n_with_projection_diverges_from_zero() -> None:
    """The theory is local: this start is not near enough."""
    trace = traced(a1a(), "top", Entry(make("fednl", compressor="top", size=123), max_rounds=30))
    assert min(trace.gaps) > 1e-2
    assert trace.gaps[-1] > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", [SYNTHETIC, "a1a"])
def test_fednl_cr_equals_an_independent_script(name: str) -> None:
    convex = a1a() if name == "a1a" else convex_problem(SYNTHETIC)
    rounds = 60
    losses = fednl_cr_losses(numpy_clients(convex), rounds)
    run = played(make("fednl-cr"), convex, rounds)
    found = [float(client_losses(convex.problem, convex.federation, theta).mean()) for theta in run.thetas]
    assert found == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("name", [SYNTHETIC, pytest.param("a1a", marks=pytest.mark.slow)])
def test_q_fednew_agrees_with_an_independent_script(name: str) -> None:
    convex = a1a() if name == "a1a" else convex_problem(SYNTHETIC)
    losses = np.array(q_fednew_losses(numpy_clients(convex), 140))
    trace = traced(convex, "q-fednew", Entry(make("q-fednew"), max_rounds=140))
    for tolerance in (1e-2, 1e-4, 1e-6, 1e-8):
        known = int(np.flatnonzero(losses - convex.best_loss <= tolerance)[0])
        here = trace.rounds_to(tolerance)
        assert here is not None
        assert abs(here - known) <= max(1, 0.25 * known)

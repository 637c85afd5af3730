"""The length of a step by curvatures: what limits it, and by how much it may grow."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dqnfed.algorithms.parts.length import Length, Limits

STRICT = Length("curvature", allowance=0.0)


def limits(slopes: list[float], curvature: list[float], lengths: list[float] | None = None) -> Limits:
    given = [1.0] * len(slopes) if lengths is None else lengths
    return Limits(np.array(slopes), np.array(curvature), np.array(given))


def test_the_first_parabola_that_turns_sets_the_length() -> None:
    """At 1 / (4 * 2^2) and 1 / (16 * 2^2) of u, whose length is 2."""
    assert STRICT.by_curvature(limits([1.0, 1.0], [4.0, 16.0]), 2.0, None, 0.0) == pytest.approx(1 / 64)
    assert STRICT.by_curvature(limits([1.0, 1.0], [1e-6, 1e-6]), 2.0, None, 0.0) == 1.0


@pytest.mark.parametrize("growth", [1.0, 1.5, 4.0])
def test_steps_and_alphas_grow_by_a_factor_at_most(growth: float) -> None:
    flat, rule = limits([1.0, 1.0], [1e-6, 1e-6]), Length("curvature", growth=growth, allowance=0.0)
    assert rule.by_curvature(flat, 2.0, 0.1, 0.0) == pytest.approx(growth * 0.1 / 2.0)
    assert rule.by_curvature(flat, 2.0, 0.1, 0.001) == pytest.approx(growth * 0.001)
    assert rule.by_curvature(flat, 2.0, None, 0.001) == pytest.approx(growth * 0.001)
    assert rule.by_curvature(flat, 2.0, 0.0, 0.0) == 1.0  # a step of no length is no limit


def test_where_no_curvature_is_known_a_step_is_as_long_as_the_last_one() -> None:
    assert STRICT.by_curvature(limits([1.0, 1.0], [math.nan] * 2), 2.0, 0.1, 0.0) == pytest.approx(0.05)


def test_a_client_that_would_lose_stops_the_step_without_an_allowance() -> None:
    mixed = limits([4.0, -0.01], [1.0, 1.0])
    assert STRICT.by_curvature(mixed, 1.0, None, 0.0) == 0.0
    allowed = Length("curvature", allowance=0.03).by_curvature(mixed, 1.0, None, 0.0)
    assert allowed == pytest.approx(0.03 * 2.0 - 0.01)  # of the mean slope of those who gain


@pytest.mark.parametrize("seed", range(10))
def test_the_allowance_costs_a_client_half_its_share_of_the_mean_gain_at_most(seed: int) -> None:
    """On parabolas whose curvatures are known: f falls by alpha g'u - alpha^2 c ||u||^2 / 2; without it by half."""
    draw = np.random.default_rng(seed)
    slopes, curvature = draw.uniform(-0.02, 1.0, 6), draw.uniform(0.5, 3.0, 6)
    given = Limits(slopes, curvature, np.ones(6))
    alpha = Length("curvature", allowance=0.03).by_curvature(given, 1.0, None, 0.0)
    gains = alpha * slopes - alpha**2 * curvature / 2
    assert (gains >= alpha * (slopes / 2 - 0.015 * np.maximum(slopes, 0.0).mean()) - 1e-15).all()


def test_a_line_search_starts_at_twice_the_length() -> None:
    rule = Length("line-search", growth=4.0, allowance=0.0)
    assert rule.by_curvature(limits([1.0, 1.0], [4.0, 16.0]), 2.0, None, 0.0) == pytest.approx(1 / 32)
    assert rule.by_curvature(limits([1.0, 1.0], [4.0, 16.0]), 2.0, 0.001, 0.0) == pytest.approx(4 * 0.001 / 2.0)


def test_a_fitted_client_does_not_hold_up_the_others() -> None:
    """It has neither gradient nor curvature; a tenth of the usual curvature would make the step ten thousand times
    shorter."""
    slopes, curvature, lengths = [1.0, 1.0, 1.0, 1e-6], [1.0, 1.0, 1.0, 1e-7], [1.0, 1.0, 1.0, 1e-6]
    alpha = STRICT.by_curvature(limits(slopes, curvature, lengths), 1.0, None, 0.0)
    assert alpha == pytest.approx(1.0)
    assert STRICT.by_curvature(limits(slopes, curvature), 1.0, None, 0.0) == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("rule", "expected"), [("paper", 1.0), ("fixed", 0.5 / 4.0), ("diminishing", 0.5 / 4.0 / 3), ("match", 0.5 * 7 / 2)]
)
def test_rules_without_curvature(rule: str, expected: float) -> None:
    """For a u of length 2 in round 2; the clients' mean step has length 7."""
    assert Length(rule, step_size=0.5).by_rule(2.0, 7.0, 2) == pytest.approx(expected)

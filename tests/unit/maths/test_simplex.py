"""Quadratic problems over the simplex against SciPy's general solver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.optimize import minimize

from dqnfed.maths.simplex import min_norm_in_half_space, quadratic_on_simplex
from tests.helpers.numpy_clients import Floats

SUM: dict[str, Any] = {"type": "eq", "fun": lambda p: p.sum() - 1}


@pytest.mark.parametrize("seed", range(5))
def test_the_quadratic_is_as_small_as_scipys(seed: int) -> None:
    generator = np.random.default_rng(seed)
    root, slope = generator.normal(size=(5, 5)), 3.0 * generator.normal(size=5)
    Q = root @ root.T + 0.5 * np.eye(5)

    def value(p: Floats) -> float:
        return float(slope @ p + p @ Q @ p / 2)

    found = quadratic_on_simplex(slope, Q)
    best = minimize(value, np.full(5, 0.2), bounds=[(0, 1)] * 5, constraints=SUM, tol=1e-14)
    assert found.min() >= -1e-12
    assert found.sum() == pytest.approx(1.0, abs=1e-12)
    assert value(found) <= best.fun + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_the_shortest_point_of_a_half_space_is_as_short_as_scipys(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows, a = generator.normal(size=(4, 6)) + 0.5, generator.normal(size=4)
    a[0] = abs(a[0])  # so that some point is inside
    M = rows @ rows.T

    def value(p: Floats) -> float:
        return float(p @ M @ p)

    found = min_norm_in_half_space(M, a)
    inside = {"type": "ineq", "fun": lambda p: a @ p}
    best = minimize(value, np.eye(4)[a.argmax()], bounds=[(0, 1)] * 4, constraints=[SUM, inside], tol=1e-14)
    assert found is not None
    assert found.min() >= -1e-12
    assert found.sum() == pytest.approx(1.0, abs=1e-12)
    assert a @ found >= -1e-9
    assert value(found) <= best.fun + 1e-7


def test_no_point_may_be_in_the_half_space() -> None:
    assert min_norm_in_half_space(np.eye(3), -np.ones(3)) is None


def test_a_point_that_is_inside_anyway_is_the_shortest_of_all() -> None:
    found = min_norm_in_half_space(np.eye(4), np.ones(4))
    assert found is not None
    np.testing.assert_allclose(found, 0.25, atol=1e-12)

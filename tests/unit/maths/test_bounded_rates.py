"""No single row makes the "at least" step far longer than it is without this row."""

from __future__ import annotations

import numpy as np
import pytest

from dqnfed.maths.directions import bounded_by_others
from dqnfed.maths.solvers import at_least_weights

STRETCH = 1.5


def length(G: np.ndarray, d: np.ndarray) -> float:
    found = at_least_weights(G @ G.T, d)
    assert found.feasible
    return float(np.linalg.norm(found.weights @ G))


def clients(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Six rows that have something in common; each asks for its square."""
    generator = np.random.default_rng(seed)
    G = generator.normal(size=(6, 40)) + 2.0 * generator.normal(size=40)
    return G, (G * G).sum(1)


@pytest.mark.parametrize("factor", [-1.0, -3.0, 10.0, 1000.0])
@pytest.mark.parametrize("seed", range(4))
def test_no_row_makes_the_step_far_longer_than_the_others_alone(seed: int, factor: float) -> None:
    G, d = clients(seed)
    G[2] *= factor
    d[2] *= factor**2
    rates = bounded_by_others(G @ G.T, d, np.ones(6, dtype=np.bool_), n_most=1, stretch=STRETCH)
    others = np.arange(6) != 2
    assert rates[others].tolist() == d[others].tolist()
    assert length(G, rates) <= STRETCH * length(G[others], d[others]) * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(4))
def test_rates_of_alike_clients_are_not_changed(seed: int) -> None:
    G, d = clients(seed)
    assert bounded_by_others(G @ G.T, d, np.ones(6, dtype=np.bool_), n_most=1, stretch=STRETCH).tolist() == d.tolist()


def test_of_three_rows_none_is_usual() -> None:
    G, d = clients(0)
    G, d = G[:3], d[:3] * np.array([1.0, 1.0, 100.0])
    assert bounded_by_others(G @ G.T, d, np.ones(3, dtype=np.bool_), n_most=1, stretch=STRETCH).tolist() == d.tolist()

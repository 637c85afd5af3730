"""The local intrinsic dimension against its closed form, on manifolds whose dimension is known."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.neighbors import NearestNeighbors

from dqnfed.maths.lid import local_dimensions

K = 20
N_POINTS, N_ASKED = 20_000, 1000


def distances(points: NDArray[np.float64], asked: NDArray[np.float64]) -> NDArray[np.float64]:
    found, _ = NearestNeighbors(n_neighbors=K + 1).fit(points).kneighbors(asked)
    return np.asarray(found[:, 1:])


def ball(m: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return points that are uniform in the m-dimensional unit ball."""
    directions = rng.normal(size=(N_POINTS, m))
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    return np.asarray(directions * rng.random((N_POINTS, 1)) ** (1 / m))


def inner_points(points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the points nearest to the centre: their neighbourhoods do not reach the ball's edge."""
    return points[np.argsort(np.linalg.norm(points, axis=1))[:N_ASKED]]


@pytest.mark.parametrize("m", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_mean_on_a_ball_is_the_closed_form(m: int, seed: int) -> None:
    """The sum of logs is Gamma(k - 1) / m, so the estimate has mean m k / (k - 2) and variance mean^2 / (k - 3)."""
    points = ball(m, np.random.default_rng(seed))
    found = local_dimensions(distances(points, inner_points(points)))
    mean = m * K / (K - 2)
    n_independent = N_ASKED / K  # neighbourhoods overlap: about k of them share their points
    assert abs(found.mean() - mean) < 4 * mean / np.sqrt((K - 3) * n_independent)


def test_distribution_on_exact_gamma_sums() -> None:
    """Radii drawn as on a manifold of dimension m: no boundary, no curvature, mean and spread as derived."""
    rng, m, n = np.random.default_rng(3), 5.0, 40_000
    radii = np.sort(rng.random((n, K - 1)) ** (1 / m), axis=1)
    found = local_dimensions(np.column_stack([radii, np.ones(n)]))
    mean = m * K / (K - 2)
    std = mean / np.sqrt(K - 3)
    assert abs(found.mean() - mean) < 4 * std / np.sqrt(n)
    assert found.std() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("m", [1, 2])
def test_a_manifold_in_a_larger_space_keeps_its_dimension(m: int) -> None:
    """Rotated and bent into ten dimensions: distances close by are those of the manifold."""
    rng = np.random.default_rng(0)
    flat = ball(m, rng)
    bent = np.column_stack([flat, 0.1 * np.sin(flat), np.zeros((N_POINTS, 10 - 2 * m))])
    rotation, _ = np.linalg.qr(rng.normal(size=(10, 10)))
    order = np.argsort(np.linalg.norm(flat, axis=1))[:N_ASKED]
    found = local_dimensions(distances(bent @ rotation, (bent @ rotation)[order])).mean()
    mean = m * K / (K - 2)
    assert abs(found - mean) < 4 * mean / np.sqrt((K - 3) * N_ASKED / K)


def test_points_on_each_other_have_no_dimension_and_nothing_is_infinite() -> None:
    found = local_dimensions(np.zeros((3, K)))
    assert np.all(np.isfinite(found))
    assert np.all(found < 0.1)  # 1 / log(FLOOR / CLOSEST)
    with_duplicates = np.column_stack([np.zeros((2, 5)), np.full((2, K - 5), 0.3)])
    assert np.all(np.isfinite(local_dimensions(with_duplicates)))


def test_units_do_not_matter_far_above_the_floor() -> None:
    radii = np.sort(np.random.default_rng(1).random((50, K)), axis=1) + 0.1
    np.testing.assert_allclose(local_dimensions(1000 * radii), local_dimensions(radii), rtol=1e-4)

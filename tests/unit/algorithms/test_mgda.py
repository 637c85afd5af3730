"""MGDA: golden weights, the laws of the shortest vector, and what happens where it vanishes."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from dqnfed.algorithms.mgda import MGDA, MGDAServer, MGDAUpdate
from dqnfed.core.algorithm import Status
from dqnfed.core.replies import Replies
from dqnfed.maths.solvers import min_norm_weights
from tests.helpers.baselines import GRADIENTS, LR, bowls, cohort_of
from tests.helpers.linear_clients import linear_clients
from tests.helpers.oracles_fair import FloatArray, frank_wolfe_weights
from tests.helpers.play import play
from tests.helpers.rows import agreeing_rows, gaussian_rows


def direction_of(delta: Tensor) -> tuple[Tensor, Status]:
    """Return what theta loses and the status of the step."""
    server = MGDAServer(delta.new_zeros(delta.shape[1]))
    step = MGDA().server_step(server, Replies(MGDAUpdate(delta)), cohort_of([1] * len(delta)))
    return -step.server.theta, step.status


def test_known_step() -> None:
    problem, federation, _ = linear_clients()
    theta = play(MGDA(lr=LR), problem, federation, rounds=1).thetas[-1]
    d = -theta / LR
    torch.testing.assert_close(d, d.new_tensor((0.75324675, 0.51948052, 0.49350649, 0.48051948)), rtol=0, atol=5e-9)
    assert float(d @ d) == pytest.approx(1.31168831, abs=5e-9)
    rates = GRADIENTS @ d
    torch.testing.assert_close(rates, d.new_tensor((1.31168831, 1.31168831, 2.24025974)), rtol=0, atol=5e-9)


def test_the_server_rate_scales_the_step() -> None:
    problem, federation, _ = linear_clients()
    one = play(MGDA(), problem, federation, rounds=1).thetas[-1]
    third = play(MGDA(server_lr=1 / 3), problem, federation, rounds=1).thetas[-1]
    torch.testing.assert_close(third, one / 3, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("K", "n"), [(2, 3), (5, 40), (20, 10), (50, 200)])
@pytest.mark.parametrize("seed", range(3))
def test_every_client_descends_at_least_by_the_squared_length(K: int, n: int, seed: int) -> None:
    G = agreeing_rows(K, n, seed=seed)
    d, _ = direction_of(G)
    squared = float(d @ d)
    scale = float(G.square().sum(1).max())
    assert float((G @ d).min()) >= squared - 1e-12 * scale
    assert float(d.norm()) <= float(G.norm(dim=1).min()) * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_two_clients_have_a_closed_form(seed: int) -> None:
    g1, g2 = gaussian_rows(2, 4, seed=seed)
    share = ((g2 - g1) @ g2 / (g1 - g2).square().sum()).clamp(0, 1)
    d, _ = direction_of(torch.stack([g1, g2]))
    torch.testing.assert_close(d, share * g1 + (1 - share) * g2, rtol=1e-12, atol=1e-14)


def test_orthogonal_updates_weigh_by_their_inverse_squares() -> None:
    lengths = torch.tensor([1.0, 2.0, 0.1], dtype=torch.float64)
    d, _ = direction_of(torch.diag(lengths))
    weights = lengths**-2 / (lengths**-2).sum()
    torch.testing.assert_close(d, weights * lengths, rtol=1e-13, atol=0)
    assert float(weights[2]) > 0.98  # short updates dominate: what FedMGDA+ is for


def test_duplicates_and_units_do_not_matter() -> None:
    G = agreeing_rows(6, 20, seed=1)
    d, _ = direction_of(G)
    torch.testing.assert_close(direction_of(torch.cat([G, G[:3], G[2:]]))[0], d, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(direction_of(1e-9 * G)[0], 1e-9 * d, rtol=1e-12, atol=0)


def test_one_client_alone_and_identical_clients() -> None:
    g = gaussian_rows(1, 5, seed=3)
    assert torch.equal(direction_of(g)[0], g[0])
    torch.testing.assert_close(direction_of(g.expand(7, 5))[0], g[0], rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "rows",
    [[[1.0, 2.0], [-2.0, -4.0]], [[1.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]]],
    ids=["opposite", "one at its optimum", "all at their optima"],
)
def test_a_stationary_cohort_holds(rows: list[list[float]]) -> None:
    d, status = direction_of(torch.tensor(rows, dtype=torch.float64))
    assert not d.any()
    assert status is Status.HOLD


def test_unlike_paper_a_client_at_its_optimum_does_not_end_the_training() -> None:
    gradients = torch.tensor([[0.0, 0.0], [1.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    problem, federation, _ = linear_clients(gradients, torch.ones(3, dtype=torch.float64), [5, 5, 5])
    played = play(MGDA(lr=LR), problem, federation, rounds=1)
    assert [drop["client"] for drop in played.records[0]["dropped"]] == [0]
    torch.testing.assert_close(played.thetas[-1], torch.full((2,), -0.75 * LR, dtype=torch.float64), rtol=1e-13, atol=0)


def test_ends_at_a_pareto_stationary_point_and_no_loss_ever_rises() -> None:
    """The Pareto set of bowls is the hull of their centres."""
    problem, federation, centres = bowls(3, 4, spread=0.0, seed=2, start=3.0)
    played = play(MGDA(lr=0.4), problem, federation, rounds=60)
    losses = torch.stack([(theta - centres).square().sum(1) for theta in played.thetas])
    assert bool((losses.diff(dim=0) <= 1e-12).all())
    # theta is a convex combination of the centres: weights >= 0 that sum to one and give it
    system, wanted = (torch.cat([t, t.new_ones(1, t.shape[1])]) for t in (centres.T, played.thetas[-1][:, None]))
    _, missed = scipy.optimize.nnls(system.numpy(), wanted[:, 0].numpy())
    assert missed < 1e-6
    _, missed_at_start = scipy.optimize.nnls(system.numpy(), [*played.thetas[0].tolist(), 1.0])
    assert missed_at_start > 1.0


def quadratic_program_weights(M: FloatArray) -> FloatArray:
    K = len(M)
    found = scipy.optimize.minimize(
        lambda w: w @ M @ w / 2,
        np.full(K, 1 / K),
        jac=lambda w: M @ w,
        bounds=[(0, 1)] * K,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(K)},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 200},
    )
    return np.asarray(found.x)


def test_three_independent_solvers_agree_on_two_hundred_gramians() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        K, n = int(rng.integers(2, 9)), int(rng.integers(2, 20))
        G = rng.normal(size=(K, n)) + rng.normal(size=n)
        M = G @ G.T / np.max(np.sum(G * G, axis=1))
        ours = min_norm_weights(M) @ G
        for other in (frank_wolfe_weights(M), quadratic_program_weights(M)):
            # the value is flat at its minimum: a gap of 1e-9 leaves the direction within its root times the scale
            assert np.linalg.norm(other @ G - ours) <= 1e-4 * np.linalg.norm(G, axis=1).max()
            assert ours @ ours <= (other @ G) @ (other @ G) * (1 + 1e-9)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"MGDA: `server_lr` must be in \(0, inf\), but is 0"):
        MGDA(server_lr=0.0)

"""FedFV against the paper's loops, written again in NumPy; its projections, its memory and its length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedfv import FedFV, FedFVServer, FedFVUpdate, ascending_losses, internal_projection, kept_clients
from dqnfed.core.algorithm import Cohort, Status
from dqnfed.core.replies import Replies
from tests.helpers.baselines import GRADIENTS, LOSSES, LR, classes
from tests.helpers.linear_clients import linear_clients
from tests.helpers.oracles_fair import FedFVOracle
from tests.helpers.play import play
from tests.helpers.rows import gaussian_rows


def fresh(n: int, n_clients: int) -> FedFVServer:
    zeros = torch.zeros(n_clients, n, dtype=torch.float64)
    return FedFVServer(torch.zeros(n, dtype=torch.float64), zeros, torch.full((n_clients,), -1))


def cohort(clients: list[int], n_clients: int, round: int) -> Cohort:
    return Cohort(torch.tensor(clients), torch.ones(len(clients)), n_clients, round)


def step_of(algorithm: FedFV, delta: Tensor, losses: list[float]) -> Tensor:
    K, n = delta.shape
    replies = Replies(FedFVUpdate(delta, torch.tensor(losses, dtype=torch.float64)))
    return -algorithm.server_step(fresh(n, K), replies, cohort(list(range(K)), K, 0)).server.theta


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("tau", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_oracle_over_rounds_of_changing_cohorts(alpha: float, tau: int, seed: int) -> None:
    """Few dimensions, so that there are many conflicts, inside the cohort and with absent clients."""
    n_clients, n, rng = 9, 4, np.random.default_rng(seed)
    algorithm, server = FedFV(alpha=alpha, tau=tau), fresh(n, n_clients)
    oracle = FedFVOracle(np.zeros(n), alpha, tau)
    n_external = 0.0
    for t in range(8):
        clients = sorted(rng.choice(n_clients, size=4, replace=False).tolist())
        deltas, losses = rng.normal(size=(4, n)) + 0.3, rng.uniform(0.1, 3.0, size=4)
        replies = Replies(FedFVUpdate(torch.from_numpy(deltas), torch.from_numpy(losses)))
        step = algorithm.server_step(server, replies, cohort(clients, n_clients, t))
        server, n_external = step.server, n_external + step.diagnostics["n_external"]
        oracle.step(t, clients, deltas, losses)
        np.testing.assert_allclose(server.theta.numpy(), oracle.theta, rtol=0, atol=1e-12)
    assert (n_external > 0) == (tau > 0)


def test_known_step_of_three_clients() -> None:
    """Client 2 conflicts with client 1 (g_1 . g_2 = -3.5) and has the largest loss; client 3 conflicts with nobody.

    Client 1 loses g_1 . g_2 / ||g_2||^2 = -3.5 / 6.25 of g_2, client 2 keeps its gradient, and the mean of
    (1.28, 1.44, 0.56, 0.12), g_2 and g_3 gets the length of the plain mean.
    """
    problem, federation, _ = linear_clients()
    theta = play(FedFV(lr=LR), problem, federation, rounds=1).thetas[-1]
    mean = (torch.tensor([1.28, 1.44, 0.56, 0.12], dtype=torch.float64) + GRADIENTS[1] + GRADIENTS[2]) / 3
    expected = -LR * mean / mean.norm() * GRADIENTS.mean(0).norm()
    torch.testing.assert_close(theta, expected, rtol=1e-12, atol=0)
    oracle = FedFVOracle(np.zeros(4), 0.1, 1)
    oracle.step(0, [0, 1, 2], LR * GRADIENTS.numpy(), LOSSES.numpy())
    np.testing.assert_allclose(theta.numpy(), oracle.theta, rtol=1e-12)


def test_without_conflicts_or_with_everybody_kept_it_is_uniform_fedavg() -> None:
    agreeing = gaussian_rows(4, 6, seed=1).abs()
    torch.testing.assert_close(step_of(FedFV(), agreeing, [1, 2, 3, 4]), agreeing.mean(0), rtol=1e-14, atol=0)
    problem, federation = classes(6)
    settings: dict[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 4}
    plain = play(FedAvg(weighting="uniform", **settings), problem, federation, rounds=4, participation=0.5)
    kept = play(FedFV(alpha=1.0, tau=0, **settings), problem, federation, rounds=4, participation=0.5)
    for mine, theirs in zip(kept.thetas, plain.thetas, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("seed", range(10))
def test_two_clients_are_left_without_conflict(seed: int) -> None:
    g = gaussian_rows(1, 5, seed=seed)[0]
    rows = torch.stack([g, -0.5 * g + 0.3 * gaussian_rows(1, 5, seed=seed + 100)[0]])
    step = step_of(FedFV(alpha=0.0, tau=0), rows, [1.0, 2.0])
    assert float((rows @ step).min()) >= -1e-14
    assert float(step.norm()) == pytest.approx(float(rows.mean(0).norm()), rel=1e-12)


def test_projections_use_the_original_updates_in_the_order_of_the_losses() -> None:
    """Client 0 conflicts with both others; what is left of it depends on which of them is taken first."""
    G = np.array([[1.0, 0.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, 0.0, 2.0]])
    M, kept = G @ G.T, np.array([False, True, True])

    def left(order: list[int]) -> list[float]:
        result: list[float] = (internal_projection(M, kept, np.array(order)) @ G)[0].tolist()
        return result

    # off (-1, 1, 0): (0.5, 0.5, 0), then off (-1, 0, 2): minus 0.1 of it back
    assert left([0, 1, 2]) == pytest.approx([0.4, 0.5, 0.2])
    # off (-1, 0, 2): (0.8, 0, 0.4), then off (-1, 1, 0)
    assert left([0, 2, 1]) == pytest.approx([0.4, 0.4, 0.4])


@pytest.mark.parametrize(
    ("K", "alpha", "n_kept"), [(10, 0.1, 1), (10, 0.3, 3), (100, 0.1, 10), (10, 0.0, 0), (10, 1.0, 10), (1, 0.1, 1)]
)
def test_the_share_with_the_largest_losses_is_kept(K: int, alpha: float, n_kept: int) -> None:
    order = np.random.default_rng(0).permutation(K)
    kept = kept_clients(order, alpha)
    assert set(np.flatnonzero(kept)) == set(order[K - n_kept :])


def test_equal_losses_are_ordered_by_client_even_if_rounding_differs() -> None:
    losses = np.array([2.0, 1.0 + 1e-15, 1.0, 0.5])
    assert ascending_losses(losses, torch.tensor([3, 1, 7, 9])).tolist() == [3, 1, 2, 0]


def one_reply(*delta: float) -> Replies[FedFVUpdate]:
    return Replies(FedFVUpdate(torch.tensor([delta], dtype=torch.float64), torch.ones(1, dtype=torch.float64)))


def test_absent_clients_count_for_tau_rounds_only() -> None:
    """Client 0 sends (1, 0) and vanishes; later clients pull the other way."""
    first, against = one_reply(1.0, 0.0), one_reply(-1.0, 1.0)
    for tau, age, counts in [(1, 1, True), (1, 2, False), (3, 3, True), (3, 4, False), (0, 1, False)]:
        algorithm = FedFV(tau=tau)
        server = fresh(2, 2 if tau else 0)
        server = algorithm.server_step(server, first, cohort([0], 2, 0)).server._replace(theta=torch.zeros(2).double())
        # before round tau there are not tau rounds to look back on
        step = -algorithm.server_step(server, against, cohort([1], 2, age)).server.theta
        expected = [0.0, 2**0.5] if counts else [-1.0, 1.0]
        assert step.tolist() == pytest.approx(expected, abs=1e-14), (tau, age)


def test_a_returning_client_is_not_its_own_conflict() -> None:
    algorithm = FedFV(tau=1)
    server = algorithm.server_step(fresh(2, 1), one_reply(1.0, 0.0), cohort([0], 1, 0)).server
    after = algorithm.server_step(server, one_reply(-1.0, 0.0), cohort([0], 1, 1)).server
    assert torch.equal(after.theta, torch.zeros(2, dtype=torch.float64))


def test_if_nothing_is_left_the_model_stays() -> None:
    opposite = torch.tensor([[1.0, 1.0], [-2.0, -2.0]], dtype=torch.float64)
    replies = Replies(FedFVUpdate(opposite, torch.ones(2, dtype=torch.float64)))
    step = FedFV(alpha=0.0, tau=0).server_step(fresh(2, 0), replies, cohort([0, 1], 2, 0))
    assert step.status is Status.HOLD
    assert not step.server.theta.any()


def test_only_the_history_needs_rows() -> None:
    """Without it products and sums are enough; a server that refuses anything else gives the same step."""

    class NoRows(Replies[FedFVUpdate]):
        def rows(self, field: str) -> Tensor:
            raise AssertionError("rows are not needed")

    assert (FedFV().needs, FedFV(tau=0).needs) == ("rows", "gram")
    update = FedFVUpdate(GRADIENTS, LOSSES)
    found = FedFV(tau=0).server_step(fresh(4, 0), NoRows(update), cohort([0, 1, 2], 3, 0)).server.theta
    assert torch.equal(-found, step_of(FedFV(tau=1), GRADIENTS, LOSSES.tolist()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 1.2}, r"FedFV: `alpha` must be in \[0, 1\], but is 1.2"),
        ({"tau": -1}, r"`tau` must be in \[0, inf\), but is -1"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedFV(**settings)

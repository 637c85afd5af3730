"""FedMDFG and FairMOO: their formulas in NumPy on small numbers, and what their directions promise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.func import grad_and_value

from dqnfed.algorithms.fairmoo import FairMOO, fair_weights
from dqnfed.algorithms.fedmdfg import FedMDFG, angle_from_equal, guide, guided_weights, is_accepted
from dqnfed.core.algorithm import Theta
from tests.helpers.baselines import GRADIENTS, LOSSES, LR, bowls
from tests.helpers.bowls import labelled_clients, network_bowl, task_of
from tests.helpers.linear_clients import linear_clients
from tests.helpers.numpy_clients import Floats
from tests.helpers.play import play

G, F = GRADIENTS.numpy(), LOSSES.numpy()


def shortest_in_hull(rows: Floats) -> Floats:
    """Return the shortest convex combination, by a general solver."""
    K = len(rows)
    found = minimize(
        lambda z: float(np.sum((z @ rows) ** 2)),
        np.full(K, 1 / K),
        bounds=[(0, 1)] * K,
        constraints={"type": "eq", "fun": lambda z: z.sum() - 1},
        tol=1e-16,
    )
    return np.asarray(found.x @ rows)


@pytest.mark.parametrize("is_guided", [False, True])
def test_the_direction_of_fedmdfg_is_the_papers(is_guided: bool) -> None:
    lengths = np.linalg.norm(G, axis=1)
    rows = G * (lengths.mean() / lengths)[:, None]
    V = rows
    if is_guided:
        unit, equal = F / np.linalg.norm(F), np.ones(3) / np.sqrt(3)
        h = (equal @ unit) * unit - equal
        V = np.vstack([rows, h / np.linalg.norm(h) @ rows])
    d = shortest_in_hull(V)
    d *= np.linalg.norm(rows.mean(0)) / np.linalg.norm(d)
    found = guided_weights(G @ G.T, F, is_guided=is_guided) @ G
    np.testing.assert_allclose(found, d, atol=1e-5)
    assert (V @ found >= -1e-9).all(), "no row is opposed"


def test_the_guide_leads_the_losses_towards_equal_ones() -> None:
    """To first order the losses move by -h where the gradients are orthonormal: the angle falls."""
    assert angle_from_equal(F - 1e-3 * guide(F)) < angle_from_equal(F)
    assert abs(guide(F) @ F) < 1e-12, "it turns the losses and leaves their size"


def test_one_round_of_fedmdfg_takes_the_first_length_that_is_accepted() -> None:
    """The losses are linear, so that every length lowers all of them; the start is lr, not above it."""
    problem, federation, _ = linear_clients()
    played = play(FedMDFG(lr=LR, angle=90.0), problem, federation, rounds=2)
    weights = guided_weights(G @ G.T, F, is_guided=False)
    np.testing.assert_allclose(played.thetas[1], -LR * weights @ G, rtol=1e-10)
    assert played.records[0]["diagnostics"]["rate"] == LR
    assert played.records[1]["diagnostics"]["rate"] == 2**5 * LR, "the same cohort again: longer ones are tried"


def test_a_line_search_of_fedmdfg_never_raises_a_loss_that_it_can_lower() -> None:
    problem, federation, centres = bowls(4, 3, start=3.0)
    played = play(FedMDFG(lr=LR), problem, federation, rounds=10)
    start = float((played.thetas[0] - centres).square().sum() / 2)  # at a Pareto point the least bad length is taken
    for before, after, record in zip(played.thetas, played.thetas[1:], played.records, strict=False):
        old, new = ((theta - centres).square().sum(1) / 2 for theta in (before, after))
        assert record["diagnostics"]["rate"] > 0
        assert float(new.sum()) < float(old.sum()) + 1e-12 * start


def test_the_authors_condition_lets_losses_rise_a_little() -> None:
    losses, slopes = np.array([1.0, 1.0]), np.array([1.0, 1.0])
    risen = losses + 5e-5
    assert is_accepted(risen, losses, -slopes, is_guided=False)
    assert not is_accepted(risen, losses, slopes, is_guided=False)
    assert not is_accepted(np.array([0.5, np.nan]), losses, slopes, is_guided=False)
    assert not is_accepted(np.array([0.1, 0.9]), losses, slopes, is_guided=True)


def test_fairmoo_lowers_the_variance_where_it_is_large() -> None:
    problem, federation, _ = linear_clients()
    theta = play(FairMOO(lr=LR, prefer=0.1), problem, federation, rounds=1).thetas[-1].numpy()
    d = 2 / 3 * (F - F.mean()) @ G
    np.testing.assert_allclose(theta, -LR * d / np.linalg.norm(d), rtol=1e-10)
    assert (F + G @ theta).var() < F.var()


@pytest.mark.parametrize("seed", range(5))
def test_fairmoo_takes_a_common_direction_that_does_not_raise_the_variance(seed: int) -> None:
    generator = np.random.default_rng(seed)
    rows, losses = generator.normal(size=(4, 6)) + 0.4, generator.uniform(0.5, 1.5, size=4)
    weights = fair_weights(rows @ rows.T, losses, is_unfair=False)
    slope = (losses - losses.mean()) @ rows
    assert weights.min() >= -1e-12
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    if (rows @ slope).max() >= 0:
        assert weights @ rows @ slope >= -1e-9


def test_steps_of_fairmoo_have_the_length_of_the_rate() -> None:
    problem, federation, _ = bowls(4, 3, start=5.0)
    played = play(FairMOO(lr=0.1, lr_decay=0.9), problem, federation, rounds=4)
    lengths = [float(torch.dist(a, b)) for a, b in zip(played.thetas, played.thetas[1:], strict=False)]
    np.testing.assert_allclose(lengths, 0.1 * 0.9 ** np.arange(4), rtol=1e-6)


def test_local_losses_of_fairmoo_are_means_over_the_batches_and_the_steps_are_the_same() -> None:
    case = network_bowl(1)
    client = labelled_clients(1, 4)[0]
    rows = torch.tensor([[0, 3, 5], [1, 2, 7], [4, 6, -1]])
    task = task_of(client, case.problem, batches=rows, lr=0.3)
    sent, theta, losses = Theta(case.problem.theta0), case.problem.theta0, []
    for batch in ([0, 3, 5], [1, 2, 7], [4, 6]):
        part = task_of((client[0][batch], client[1][batch]), case.problem)
        slope, loss = grad_and_value(case.problem.loss)(theta, part)
        losses += [float(loss)] * len(batch)
        theta = theta - 0.3 * slope
    at, local = (FairMOO(batch_size=3, losses=name) for name in ("sent", "local"))
    update, _ = local.client_step(case.problem, task, sent, None)  # type: ignore[arg-type]
    assert float(update.loss) == pytest.approx(np.mean(losses), rel=1e-12)
    torch.testing.assert_close(sent.theta - update.delta, theta, rtol=1e-12, atol=1e-14)
    other, _ = at.client_step(case.problem, task, sent, None)  # type: ignore[arg-type]
    torch.testing.assert_close(update.delta, other.delta, rtol=1e-12, atol=1e-14)
    assert float(other.loss) == pytest.approx(float(case.problem.loss(sent.theta, task)), rel=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({}, "has no effect with one step a round"), ({"epochs": 2, "momentum": 0.5}, "plain SGD without momentum alone")],
)
def test_local_losses_of_fairmoo_are_refused_where_they_mean_nothing(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FairMOO(losses="local", **settings)

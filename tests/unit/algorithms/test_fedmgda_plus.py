"""FedMGDA+: golden weights, the box around the prior, updates of any length, and the length of the server's step."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedmgda_plus import FedMGDAPlus, FedMGDAPlusServer, FedMGDAPlusUpdate
from dqnfed.core.algorithm import Status
from dqnfed.core.replies import Replies
from tests.helpers.baselines import EXAMPLES, GRADIENTS, LR, bowls, classes, cohort_of
from tests.helpers.linear_clients import linear_clients
from tests.helpers.play import play
from tests.helpers.rows import agreeing_rows, gaussian_rows


def direction_of(algorithm: FedMGDAPlus, delta: Tensor, sizes: list[int] | None = None) -> Tensor:
    """Return the step of server rate 1."""
    server = FedMGDAPlusServer(delta.new_zeros(delta.shape[1]))
    cohort = cohort_of(sizes or [1] * len(delta))
    theta: Tensor = algorithm.server_step(server, Replies(FedMGDAPlusUpdate(delta)), cohort).server.theta
    return -theta


def unit(G: Tensor) -> Tensor:
    lengths: Tensor = G.norm(dim=1, keepdim=True)
    return G / lengths


def weights_of(direction: Tensor, G: Tensor) -> Tensor:
    """Return the weights of independent unit rows that give the direction."""
    solution: Tensor = torch.linalg.lstsq(unit(G).T, direction[:, None]).solution
    return solution[:, 0]


@pytest.mark.parametrize(
    ("eps", "expected"),
    [
        (0.05, (0.38145199, 0.33521467, 0.28333333)),
        (0.1, (0.40237223, 0.36429444, 0.23333333)),
        (0.5, (0.5, 0.5, 0.0)),
        (1.0, (0.5, 0.5, 0.0)),
    ],
)
def test_known_weights(eps: float, expected: tuple[float, ...]) -> None:
    found = weights_of(direction_of(FedMGDAPlus(eps=eps, server_lr=1.0), GRADIENTS), GRADIENTS)
    torch.testing.assert_close(found, found.new_tensor(expected), rtol=0, atol=5e-9)


def test_known_weights_with_a_prior_by_examples() -> None:
    found = weights_of(direction_of(FedMGDAPlus(eps=0.1, server_lr=1.0), GRADIENTS, list(EXAMPLES)), GRADIENTS)
    torch.testing.assert_close(found, found.new_tensor((0.2, 0.3, 0.5)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("eps", "weighting", "expected"),
    [
        (0.0, "uniform", (0.49370662, 0.13883219, 0.27881193, 0.20332320)),
        (1.0, "examples", (0.30412415, 0.20824829, 0.20, 0.19587585)),
    ],
)
def test_known_directions(eps: float, weighting: str, expected: tuple[float, ...]) -> None:
    problem, federation, _ = linear_clients()
    algorithm = FedMGDAPlus(eps=eps, weighting=weighting, server_lr=1.0, lr=LR)
    theta = play(algorithm, problem, federation, rounds=1).thetas[-1]
    torch.testing.assert_close(-theta, theta.new_tensor(expected), rtol=0, atol=5e-9)


@pytest.mark.parametrize("seed", range(5))
def test_no_room_keeps_the_prior(seed: int) -> None:
    G, sizes = gaussian_rows(4, 9, seed=seed), [1, 2, 3, 4]
    found = direction_of(FedMGDAPlus(eps=0.0, server_lr=1.0), G, sizes)
    expected = torch.tensor(sizes, dtype=torch.float64) / 10 @ unit(G)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("eps", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("seed", range(5))
def test_weights_satisfy_the_conditions_of_the_box(eps: float, seed: int) -> None:
    """M w is one value inside the box, not below it at lower bounds and not above it at upper ones."""
    G = agreeing_rows(6, 30, seed=seed)
    w = weights_of(direction_of(FedMGDAPlus(eps=eps, server_lr=1.0), G), G).numpy()
    U = unit(G).numpy()
    slope = U @ U.T @ w
    lower, upper = np.maximum(1 / 6 - eps, 0), np.minimum(1 / 6 + eps, 1)
    assert w.sum() == pytest.approx(1, abs=1e-10)
    assert w.min() >= lower - 1e-10
    assert w.max() <= upper + 1e-10
    inside = (w > lower + 1e-9) & (w < upper - 1e-9)
    value = slope[inside].mean() if inside.any() else slope[w > lower + 1e-9].max()
    assert np.abs(slope[inside] - value).max(initial=0) <= 1e-9
    assert (slope[w <= lower + 1e-9] >= value - 1e-9).all()
    assert (slope[w >= upper - 1e-9] <= value + 1e-9).all()


@pytest.mark.parametrize("eps", [0.0, 0.1, 1.0])
def test_lengths_of_updates_do_not_matter(eps: float) -> None:
    G = agreeing_rows(5, 12, seed=4)
    scales = torch.tensor([1e-6, 1.0, 30.0, 1e5, 0.2], dtype=torch.float64)
    algorithm = FedMGDAPlus(eps=eps, server_lr=1.0)
    found, expected = direction_of(algorithm, scales[:, None] * G), direction_of(algorithm, G)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert float(found.norm()) <= 1 + 1e-14


def test_more_room_means_a_shorter_direction_and_full_room_common_descent() -> None:
    G = gaussian_rows(6, 30, seed=7)
    lengths = [
        float(direction_of(FedMGDAPlus(eps=eps, server_lr=1.0), G).norm()) for eps in (0, 0.02, 0.05, 0.1, 0.5, 1)
    ]
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in pairwise(lengths))
    d = direction_of(FedMGDAPlus(eps=1.0, server_lr=1.0), G)
    assert float((unit(G) @ d).min()) >= float(d @ d) - 1e-12


def test_identical_directions_and_one_client_alone() -> None:
    g = gaussian_rows(1, 5, seed=3)
    scales = torch.tensor([[1.0], [2.0], [5.0]], dtype=torch.float64)
    for rows in (g, scales * g):
        torch.testing.assert_close(direction_of(FedMGDAPlus(server_lr=1.0), rows), unit(g)[0], rtol=1e-13, atol=0)


def test_a_client_without_an_update_gets_no_weight() -> None:
    G = torch.cat([gaussian_rows(3, 5, seed=1), torch.zeros(1, 5, dtype=torch.float64)])
    algorithm = FedMGDAPlus(eps=0.1, server_lr=1.0)
    found = direction_of(algorithm, G, [2, 2, 2, 9])
    torch.testing.assert_close(found, direction_of(algorithm, G[:3]), rtol=1e-13, atol=0)
    server = FedMGDAPlusServer(torch.zeros(5, dtype=torch.float64))
    held = algorithm.server_step(server, Replies(FedMGDAPlusUpdate(G[3:])), cohort_of([1]))
    assert held.status is Status.HOLD
    opposite = torch.tensor([[1.0, 0.0], [-3.0, 0.0]], dtype=torch.float64)
    server = FedMGDAPlusServer(torch.ones(2, dtype=torch.float64))
    held = algorithm.server_step(server, Replies(FedMGDAPlusUpdate(opposite)), cohort_of([1, 1]))
    assert held.status is Status.HOLD
    assert torch.equal(held.server.theta, server.theta)


# -- how far the server steps ------------------------------------------------------------------------------------------


def moved(algorithm: FedMGDAPlus, rounds: int = 1) -> list[float]:
    problem, federation, _ = linear_clients()
    thetas = play(algorithm, problem, federation, rounds=rounds).thetas
    return [float((later - earlier).norm()) for earlier, later in pairwise(thetas)]


def test_the_default_step_is_the_local_rate_times_the_direction() -> None:
    (one,) = moved(FedMGDAPlus(server_lr=1.0))
    assert moved(FedMGDAPlus(lr=0.03)) == [pytest.approx(0.03 * one, rel=1e-12)]
    assert moved(FedMGDAPlus(lr=0.03, lr_decay=0.5), 3)[2] == pytest.approx(0.03 * 0.25 * one, rel=1e-12)
    assert moved(FedMGDAPlus(server_lr=2.0, server_lr_decay=0.9), 3)[2] == pytest.approx(2 * 0.81 * one, rel=1e-12)


def test_rescaling_gives_the_length_of_fedavg() -> None:
    """eps = 0 and updates of equal length: then even the direction is FedAvg's."""
    gradients = unit(GRADIENTS)
    problem, federation, _ = linear_clients(gradients)
    found = play(FedMGDAPlus(eps=0.0, rescale="mean", lr=LR), problem, federation, rounds=1).thetas[-1]
    plain = play(FedAvg(lr=LR), problem, federation, rounds=1).thetas[-1]
    length = float(found.norm() / plain.norm())
    direction = (
        float((EXAMPLES[0] * gradients[0] + EXAMPLES[1] * gradients[1] + EXAMPLES[2] * gradients[2]).norm()) / 100
    )
    assert length == pytest.approx(direction, rel=1e-12)  # ||d|| of the unit rows, which is below 1
    torch.testing.assert_close(found / length, plain, rtol=1e-12, atol=0)


def test_the_server_rate_scales_the_rescaled_step_too() -> None:
    (one,), (third,) = (moved(FedMGDAPlus(rescale="mean", server_lr=rate)) for rate in (None, 1 / 3))
    assert third == pytest.approx(one / 3, rel=1e-14)
    assert moved(FedMGDAPlus(rescale="mean", server_lr_decay=0.5), 3)[2] == pytest.approx(one / 4, rel=1e-12)


@pytest.mark.parametrize("rescale", ["none", "mean"])
@pytest.mark.parametrize("server_lr", [None, 0.5])
@pytest.mark.parametrize("work", [{}, {"epochs": 2}, {"batch_size": 4}], ids=["one step", "epochs", "batches"])
def test_the_local_rate_is_unused_where_it_is_a_factor_that_cancels(
    rescale: str, server_lr: float | None, work: dict[str, Any]
) -> None:
    """Unit updates do not know it after one full-batch step; the server's step may."""
    problem, federation = classes(4)
    one, other = (FedMGDAPlus(rescale=rescale, server_lr=server_lr, lr_decay=0.9, **work, lr=lr) for lr in (0.1, 0.3))
    mine, theirs = (play(algorithm, problem, federation, rounds=3).thetas[-1] for algorithm in (one, other))
    is_unused = "lr" in one.unused()
    assert is_unused == (rescale == "none" and server_lr is not None and work == {})
    assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-14) == is_unused
    assert ({"lr_decay", "lr_decay_every"} <= one.unused()) == is_unused


def test_the_prior_is_refused_where_it_is_not_used() -> None:
    with pytest.raises(ValueError, match="FedMGDAPlus: `weighting` is 'uniform', but has no effect with eps = 1"):
        FedMGDAPlus(eps=1.0, weighting="uniform")
    (examples,), (uniform,) = (
        moved(FedMGDAPlus(eps=1.0, rescale="mean", weighting=weighting)) for weighting in ("examples", "uniform")
    )
    assert examples != pytest.approx(uniform, rel=1e-3)  # the lengths of two different means


def test_the_losses_fall_on_bowls_and_on_classes() -> None:
    problem, federation, centres = bowls(4, 3, spread=0.0, seed=2, start=3.0)
    thetas = play(FedMGDAPlus(eps=1.0, lr=0.1), problem, federation, rounds=20).thetas
    losses = torch.stack([(theta - centres).square().sum(1) for theta in thetas])
    assert bool((losses.diff(dim=0) < 0).all())  # far from the centres every client gains every round
    problem, federation = classes(5)
    records = play(FedMGDAPlus(batch_size=5), problem, federation, rounds=5, participation=0.4).records
    assert all(0 <= record["diagnostics"]["norm"] <= 1 for record in records)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": 1.5}, r"FedMGDAPlus: `eps` must be in \[0, 1\], but is 1.5"),
        ({"eps": -0.1}, r"`eps` must be in \[0, 1\]"),
        ({"server_lr": 0.0}, r"`server_lr` must be in \(0, inf\)"),
        ({"server_lr_decay": 0.0}, r"`server_lr_decay` must be in \(0, 1\]"),
        ({"rescale": "median"}, "`rescale` must be one of none, mean"),
        ({"weighting": "size"}, "`weighting` must be one of examples, uniform"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedMGDAPlus(**settings)

"""FedHEAL: three golden rounds, masks, weights that grow with the updates, and counters that belong to the client."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedheal import FedHEAL, FedHEALServer, FedHEALUpdate, elementwise_mean, tensor_lengths
from dqnfed.core.algorithm import Cohort, ServerStep
from dqnfed.core.replies import Replies
from tests.helpers.baselines import classes
from tests.helpers.linear_clients import linear_clients
from tests.helpers.play import play
from tests.helpers.rows import gaussian_rows


def fresh(n: int, n_clients: int) -> FedHEALServer:
    problem = linear_clients(gaussian_rows(1, n), torch.ones(1), [1]).problem
    return FedHEAL().init_server(problem, n_clients)


def stepped(
    algorithm: FedHEAL, server: FedHEALServer, delta: Tensor, clients: list[int] | None = None
) -> ServerStep[FedHEALServer]:
    who = torch.tensor(clients) if clients is not None else torch.arange(len(delta))
    cohort = Cohort(who, torch.ones(len(delta)), len(server.n_rounds), 0)
    return algorithm.server_step(server, Replies(FedHEALUpdate(delta)), cohort)


def test_three_known_rounds() -> None:
    rounds = [
        ([[0.1, -0.2, 0.3], [-0.1, -0.1, 0.2]], (0.52981602, 0.47018398), (-0.00596320, 0.15298160, -0.25298160)),
        ([[0.2, 0.1, 0.1], [-0.2, -0.1, -0.3]], (0.53273916, 0.46726084), (-0.01905887, 0.25298160, -0.35298160)),
        ([[0.1, 0.2, -0.1], [-0.1, 0.2, -0.2]], (0.52897138, 0.47102862), (-0.02485314, 0.05298160, -0.15298160)),
    ]
    server = fresh(3, 2)
    for delta, shares, theta in rounds:
        server = stepped(FedHEAL(tau=0.3, beta=0.4), server, torch.tensor(delta, dtype=torch.float64)).server
        assert (server.weights / server.weights.sum()).tolist() == pytest.approx(shares, abs=5e-9)
        assert server.theta.tolist() == pytest.approx(theta, abs=5e-9)


def test_no_mask_and_no_growth_is_uniform_fedavg_to_the_bit() -> None:
    problem, federation = classes(6)
    settings: dict[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 4}
    plain = play(FedAvg(weighting="uniform", **settings), problem, federation, rounds=4, participation=0.5)
    found = play(FedHEAL(tau=-1.0, beta=0.0, **settings), problem, federation, rounds=4, participation=0.5)
    for mine, theirs in zip(found.thetas, plain.thetas, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("tau", [0.0, 0.5, 0.99])
def test_constant_signs_are_never_masked(tau: float) -> None:
    server = fresh(4, 3)
    signs = gaussian_rows(3, 4, seed=1).sign()
    for t in range(6):
        step = stepped(FedHEAL(tau=tau), server, signs * gaussian_rows(3, 4, seed=t + 2).abs())
        assert step.diagnostics["kept_share"] == 1.0
        server = step.server


@pytest.mark.parametrize(("tau", "kept_at_last"), [(0.3, True), (0.45, True), (0.5, False), (0.7, False)])
def test_an_alternating_sign_is_kept_below_one_half_only(tau: float, kept_at_last: bool) -> None:
    server, kept = fresh(1, 1), []
    for t in range(24):
        step = stepped(FedHEAL(tau=tau), server, torch.tensor([[(-1.0) ** t]], dtype=torch.float64))
        kept.append(step.diagnostics["kept_share"] == 1.0)
        server = step.server
    assert kept[0]  # the first round has nothing to compare with
    assert not kept[1]
    assert all(k == kept_at_last for k in kept[12:])


def test_zero_counts_as_positive() -> None:
    server = stepped(FedHEAL(), fresh(1, 1), torch.zeros(1, 1, dtype=torch.float64)).server
    assert server.n_positive.tolist() == [[1]]
    assert stepped(FedHEAL(), server, torch.ones(1, 1, dtype=torch.float64)).diagnostics["kept_share"] == 1.0
    assert stepped(FedHEAL(), server, -torch.ones(1, 1, dtype=torch.float64)).diagnostics["kept_share"] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_of_every_entry_sum_to_one(dtype: torch.dtype) -> None:
    """The elementwise mean of rows of ones is one wherever somebody kept the entry, and zero elsewhere."""
    kept = torch.rand(5, 200, generator=torch.Generator().manual_seed(0)) < 0.4
    kept[:, 0], kept[:, 1] = False, True
    weights = torch.tensor([0.1, 3.0, 0.5, 0.01, 1.0], dtype=torch.float64)
    found = elementwise_mean(kept.to(dtype), kept, weights)
    torch.testing.assert_close(found, kept.any(0).to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=0)


def test_length_is_summed_over_named_tensors() -> None:
    rows = torch.tensor([[3.0, 4.0, 5.0, 12.0, 2.0]], dtype=torch.float64)
    assert tensor_lengths(rows, [2, 2, 1]).tolist() == [5.0 + 13.0 + 2.0]
    problem = linear_clients(gaussian_rows(1, 5), torch.ones(1), [1], layers=[2, 2, 1]).problem
    assert FedHEAL().init_server(problem, 1).sizes.tolist() == [2, 2, 1]


def test_longer_updates_gain_weight_round_after_round() -> None:
    delta, server, shares = torch.tensor([[3.0, 0.0], [0.0, 1.0]], dtype=torch.float64), fresh(2, 2), [0.5]
    for _ in range(5):
        server = stepped(FedHEAL(beta=0.5), server, delta).server
        shares.append(float(server.weights[0] / server.weights.sum()))
    assert shares == sorted(shares)
    assert 0.5 < shares[1] < shares[-1] < 0.75  # D / sum D is the limit
    equal = stepped(FedHEAL(beta=0.0), fresh(2, 2), delta).server.weights
    assert equal.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("tau", [-1.0, 0.3, 0.9])
@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_identical_clients_are_fedavg(tau: float, beta: float) -> None:
    """As long as no sign flips, which a constant gradient never does."""
    g = gaussian_rows(1, 6, seed=3)
    problem, federation, _ = linear_clients(g.expand(4, 6), torch.ones(4, dtype=torch.float64), [3, 3, 3, 3])
    plain = play(FedAvg(), problem, federation, rounds=4).thetas
    found = play(FedHEAL(tau=tau, beta=beta), problem, federation, rounds=4).thetas
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=0)


def test_every_client_counts_its_own_rounds() -> None:
    server = fresh(2, 4)
    one = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    for clients in ([0], [0, 2], [2], [0]):
        server = stepped(FedHEAL(), server, one.expand(len(clients), 2), clients).server
    assert server.n_rounds.tolist() == [3, 0, 2, 0]
    assert server.n_positive.tolist() == [[3, 0], [0, 0], [2, 0], [0, 0]]
    assert server.weights[[1, 3]].tolist() == [0.0, 0.0]
    late = stepped(FedHEAL(beta=0.0), server, -one.expand(2, 2), [0, 3])
    assert late.diagnostics["kept_share"] == 0.5  # client 0 has always moved the other way, client 3 is new
    assert float(late.server.weights[3]) == 0.5
    # only the newcomer kept anything, so it decides alone
    torch.testing.assert_close(late.server.theta - server.theta, one[0], rtol=1e-14, atol=0)


def test_if_everything_is_masked_model_and_weights_stay() -> None:
    up = torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=torch.float64)
    server = stepped(FedHEAL(), fresh(2, 2), up).server
    after = stepped(FedHEAL(), server, -up)
    assert torch.equal(after.server.theta, server.theta)
    assert torch.equal(after.server.weights, server.weights)
    assert after.server.n_rounds.tolist() == [2, 2]


def test_shares_are_exact_after_many_rounds() -> None:
    """3 of 10 is not more than 0.3: a running mean in floating point would come out on either side."""
    server = fresh(1, 1)
    for sign in [1, 1, 1, -1, -1, -1, -1, -1, -1, -1]:
        server = stepped(FedHEAL(), server, torch.tensor([[float(sign)]], dtype=torch.float64)).server
    assert server.n_positive.tolist() == [[3]]
    assert stepped(FedHEAL(tau=0.3), server, torch.ones(1, 1, dtype=torch.float64)).diagnostics["kept_share"] == 0.0
    assert stepped(FedHEAL(tau=0.29), server, torch.ones(1, 1, dtype=torch.float64)).diagnostics["kept_share"] == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tau": 1.1}, r"FedHEAL: `tau` must be in \[-1, 1\], but is 1.1"),
        ({"beta": -0.2}, r"`beta` must be in \[0, 1\], but is -0.2"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedHEAL(**settings)

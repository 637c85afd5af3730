"""FedLF: the golden step, layer-wise descent, the fair weights, the history, and every 0/0 of the official code."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Size, Tensor

from dqnfed.algorithms.fedlf import FedLF, FedLFServer, FedLFUpdate, fair_weights, layer_direction, layer_sizes
from dqnfed.core.algorithm import Cohort, ServerStep, Status
from dqnfed.core.replies import Replies
from tests.helpers.baselines import LOSSES, bowls, classes
from tests.helpers.linear_clients import linear_clients
from tests.helpers.oracles_fair import FedLFOracle, FloatArray
from tests.helpers.play import play
from tests.helpers.rows import agreeing_rows, gaussian_rows
from tests.unit.maths.oracles import enumerated_box_weights

GOLDEN = torch.tensor([[1.0, 2.0, 0.0, -1.0, 0.5, 1.0], [2.0, -1.0, 1.0, 2.0, 1.0, 0.0]], dtype=torch.float64)
NONE = torch.zeros(0, 3, dtype=torch.float64)


def fresh(sizes: list[int], n_clients: int) -> FedLFServer:
    n = sum(sizes)
    zeros = torch.zeros(n, dtype=torch.float64)
    return FedLFServer(zeros, zeros.expand(n_clients, n).clone(), torch.full((n_clients,), -1), torch.tensor(sizes))


def stepped(
    server: FedLFServer, delta: Tensor, losses: list[float], *, clients: list[int] | None = None, round: int = 0
) -> ServerStep[FedLFServer]:
    who = torch.tensor(clients) if clients is not None else torch.arange(len(delta))
    cohort = Cohort(who, torch.ones(len(delta)), len(server.last_round), round)
    replies = Replies(FedLFUpdate(delta, torch.tensor(losses, dtype=torch.float64)))
    return FedLF().server_step(server, replies, cohort)


# -- fair weights ------------------------------------------------------------------------------------------------------


def test_known_fair_weights() -> None:
    found = fair_weights(LOSSES.numpy())
    np.testing.assert_allclose(found, [-0.16798421, 0.08399211, -0.08399211], atol=5e-9)
    np.testing.assert_allclose(fair_weights(np.array([1.0, 3.0])), [-0.13416408, 0.04472136], atol=5e-9)


@pytest.mark.parametrize("seed", range(5))
def test_fair_weights_are_minus_the_gradient_of_the_cosine(seed: int) -> None:
    losses = np.random.default_rng(seed).uniform(0.2, 3.0, size=6)
    found, h = fair_weights(losses), 1e-6

    def cosine(F: FloatArray) -> float:
        return float(F.sum() / (np.sqrt(6) * np.linalg.norm(F)))

    slopes = [(cosine(losses + h * e) - cosine(losses - h * e)) / (2 * h) for e in np.eye(6)]
    np.testing.assert_allclose(found, -np.array(slopes), atol=1e-9)
    assert found @ losses == pytest.approx(0.0, abs=1e-14)
    contraharmonic = (losses**2).sum() / losses.sum()
    np.testing.assert_array_equal(found > 0, losses > contraharmonic)


@pytest.mark.parametrize("losses", [[0.7], [2.5, 2.5, 2.5], [0.0, 0.0], [np.log(3)] * 7, [1.0, 1.0 + 1e-16, 1.0]])
def test_equal_losses_have_no_fair_weights(losses: list[float]) -> None:
    assert not fair_weights(np.array(losses)).any()


# -- one step ----------------------------------------------------------------------------------------------------------


def test_known_step_of_two_clients_and_two_layers() -> None:
    h = fair_weights(np.array([1.0, 3.0]))
    first, second = (layer_direction(part, NONE, h) for part in GOLDEN.split(3, dim=1))
    np.testing.assert_allclose(first.numpy(), [0.32933428, -0.09746006, 0.15122573], atol=5e-9)
    np.testing.assert_allclose(second.numpy(), [0.13642655, 0.16636293, 0.09814966], atol=5e-9)
    np.testing.assert_allclose((GOLDEN[:, :3] @ first).numpy(), [0.13441417, 0.90735435], atol=5e-9)
    np.testing.assert_allclose((GOLDEN[:, 3:] @ second).numpy(), [0.04490458, 0.43921602], atol=5e-9)
    problem, federation, _ = linear_clients(GOLDEN, torch.tensor([1.0, 3.0]).double(), [4, 9], layers=[3, 3])
    theta = play(FedLF(lr=0.1), problem, federation, rounds=1).thetas[-1]
    expected = [1.44971778, -0.42901571, 0.66569025, 0.60054480, 0.73232369, 0.43205129]
    np.testing.assert_allclose(-theta.numpy() / 0.1, expected, atol=5e-8)


@pytest.mark.parametrize("seed", range(5))
def test_no_layer_conflicts_with_any_client_and_the_length_is_the_means(seed: int) -> None:
    sizes = [40, 7, 60]
    delta = agreeing_rows(5, sum(sizes), seed=seed, agreement=0.5)
    losses = np.random.default_rng(seed).uniform(0.5, 2.0, size=5)
    step = stepped(fresh(sizes, 5), delta, losses.tolist())
    d = -step.server.theta
    for part, piece in zip(delta.split(sizes, dim=1), d.split(sizes), strict=True):
        assert float((part @ piece).min()) >= -1e-12
    assert float(d.norm()) == pytest.approx(float(delta.mean(0).norm()), rel=1e-12)
    assert step.diagnostics["least_product"] >= -1e-12


@pytest.mark.parametrize("seed", range(3))
def test_equals_the_oracle_over_rounds_of_changing_cohorts(seed: int) -> None:
    """Two of five clients a round; a min-norm solver that tries every pattern of bounds."""
    sizes, n_clients, rng = [9, 12], 5, np.random.default_rng(seed)

    def min_norm(M: FloatArray) -> FloatArray:
        return enumerated_box_weights(M, np.zeros(len(M)), np.ones(len(M)))

    server, oracle, n_past = fresh(sizes, n_clients), FedLFOracle(np.zeros(21), sizes, min_norm), 0.0
    for t in range(7):
        clients = sorted(rng.choice(n_clients, size=2, replace=False).tolist())
        deltas, losses = rng.normal(size=(2, 21)) + 0.4, rng.uniform(0.2, 2.0, size=2)
        step = stepped(server, torch.from_numpy(deltas), losses.tolist(), clients=clients, round=t)
        server, n_past = step.server, n_past + step.diagnostics["n_past"]
        oracle.step(t, clients, deltas, losses)
        np.testing.assert_allclose(server.theta.numpy(), oracle.theta, rtol=0, atol=1e-9)
    assert n_past > 0


def test_one_layer_with_equal_losses_and_lengths_is_mgda() -> None:
    delta = agreeing_rows(4, 10, seed=2)
    delta = delta / delta.norm(dim=1, keepdim=True)
    shortest = torch.from_numpy(enumerated_box_weights((delta @ delta.T).numpy(), np.zeros(4), np.ones(4))) @ delta
    expected = shortest / shortest.norm() * delta.mean(0).norm()
    found = -stepped(fresh([10], 4), delta, [1.3] * 4).server.theta
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


def test_the_length_of_a_clients_slice_only_changes_the_common_length() -> None:
    delta, losses = agreeing_rows(4, 12, seed=5), [0.4, 1.0, 2.0, 0.7]
    longer = delta.clone()
    longer[2] *= 50
    one = stepped(fresh([12], 4), delta, losses).server.theta
    other = stepped(fresh([12], 4), longer, losses).server.theta
    torch.testing.assert_close(one / one.norm(), other / other.norm(), rtol=1e-10, atol=1e-12)


def test_the_fair_row_favours_the_client_with_the_larger_loss() -> None:
    rates = []
    for losses in ([1.0, 1.0], [1.0, 3.0], [3.0, 1.0]):
        d = -stepped(fresh([6], 2), GOLDEN, losses).server.theta
        rates.append((GOLDEN / GOLDEN.norm(dim=1, keepdim=True)) @ d)
    assert float(rates[1][1] - rates[1][0]) > float(rates[0][1] - rates[0][0]) > float(rates[2][1] - rates[2][0])


# -- guards ------------------------------------------------------------------------------------------------------------


def test_one_client_alone_takes_its_own_step() -> None:
    g = gaussian_rows(1, 6, seed=1)
    found = stepped(fresh([2, 4], 3), g, [1.0], clients=[1])
    torch.testing.assert_close(-found.server.theta, g[0], rtol=1e-14, atol=0)


def test_identical_clients_take_their_common_step() -> None:
    g = gaussian_rows(1, 6, seed=1)
    found = stepped(fresh([2, 4], 5), g.expand(5, 6), [0.8] * 5)
    torch.testing.assert_close(-found.server.theta, g[0], rtol=1e-13, atol=0)


def test_a_layer_without_gradient_for_one_client_or_for_all() -> None:
    delta = agreeing_rows(3, 9, seed=4)
    delta[1, :3] = 0.0  # client 1 does not use the first layer
    delta[:, 6:] = 0.0  # nobody uses the last one
    d = -stepped(fresh([3, 3, 3], 3), delta, [0.5, 1.0, 2.0]).server.theta
    assert bool(torch.isfinite(d).all())
    assert not d[6:].any()
    assert float(d[:3].norm()) > 0
    assert float((delta[:, :3] @ d[:3]).min()) >= -1e-12


def test_stationary_in_every_layer_holds() -> None:
    opposite = torch.tensor([[1.0, 0.0, 2.0], [-1.0, 0.0, -2.0]], dtype=torch.float64)
    step = stepped(fresh([3], 2), opposite, [1.0, 1.0])
    assert step.status is Status.HOLD
    assert not step.server.theta.any()
    silent = stepped(fresh([3], 2), torch.zeros(2, 3, dtype=torch.float64), [1.0, 2.0])
    assert silent.status is Status.HOLD
    assert step.server.last_round.tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_rounding_is_not_scaled_up_to_a_step(dtype: torch.dtype, seed: int) -> None:
    """Rows that cancel exactly in real numbers only; their mean, whose length the step would get, does not vanish."""
    a, b = gaussian_rows(2, 30, seed=seed)
    delta = torch.stack([a, b, -0.3 * a - 0.7 * b]).to(dtype)
    server = fresh([30], 3)
    server = server._replace(theta=server.theta.to(dtype), history=server.history.to(dtype))
    replies = Replies(FedLFUpdate(delta, torch.ones(3, dtype=dtype)))
    step = FedLF().server_step(server, replies, Cohort(torch.arange(3), torch.ones(3), 3, 0))
    assert float(delta.mean(0).norm()) > 0.1
    assert step.status is Status.HOLD


def test_small_tensors_freeze_and_joining_modules_frees_them() -> None:
    """Six clients whose three biases cannot agree while their weights can."""
    layout = (("a.weight", Size([4, 3])), ("a.bias", Size([3])), ("b.c.weight", Size([2])), ("b.c.bias", Size([1])))
    assert layer_sizes(layout, join_modules=False) == [12, 3, 2, 1]
    assert layer_sizes(layout, join_modules=True) == [15, 3]
    biases = torch.cat([torch.eye(3), -torch.eye(3)]).double()
    delta = torch.cat([agreeing_rows(6, 12, seed=0, agreement=3.0), biases], 1)
    losses = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    apart, joined = (stepped(fresh(sizes, 6), delta, losses).server.theta for sizes in ([12, 3], [15]))
    assert float(apart[12:].norm()) < 1e-12 * float(apart.norm())
    assert float(joined[12:].norm()) > 1e-3 * float(joined.norm())


# -- history -----------------------------------------------------------------------------------------------------------


def test_there_is_no_history_when_everybody_takes_part() -> None:
    problem, federation = classes(4)
    played = play(FedLF(), problem, federation, rounds=3)
    assert [record["diagnostics"]["n_past"] for record in played.records] == [0, 0, 0]


def test_clients_are_remembered_for_as_many_rounds_as_a_sweep_takes() -> None:
    """One of three clients a round, in turn: floor(A / m) grows to 3, and the two absent ones always count."""
    server, n_past = fresh([4], 3), []
    for t in range(6):
        step = stepped(server, agreeing_rows(1, 4, seed=t), [1.0], clients=[t % 3], round=t)
        server = step.server
        n_past.append(step.diagnostics["n_past"])
    assert n_past == [0, 0, 2, 2, 2, 2]  # in round 1 one client has been seen, which is not more than take part
    assert server.last_round.tolist() == [3, 4, 5]
    late = stepped(server, agreeing_rows(1, 4, seed=9), [1.0], clients=[0], round=8)
    assert late.diagnostics["n_past"] == 1  # client 1 was seen four rounds ago, client 2 three
    assert float(server.history[2] @ (server.theta - late.server.theta)) >= -1e-12


def test_history_can_be_switched_off() -> None:
    problem, federation = classes(5)
    played = play(FedLF(history=False), problem, federation, rounds=5, participation=0.4)
    assert played.servers[-1].history.shape == (0, problem.n_parameters)
    assert all(record["diagnostics"].get("n_past", 0) == 0 for record in played.records)
    kept = play(FedLF(), problem, federation, rounds=5, participation=0.4)
    assert not torch.equal(kept.thetas[-1], played.thetas[-1])


def test_layers_that_are_the_same_either_way_are_refused() -> None:
    problem, _, _ = bowls(3)
    with pytest.raises(ValueError, match="`layers` is 'module', but has no effect on a model whose modules have one"):
        FedLF(layers="module").prepare(problem, 3, 3)
    with_bias, _ = classes(3)
    assert FedLF(layers="module").prepare(with_bias, 3, 3).init_server(with_bias, 3).sizes.tolist() == [18]


def test_no_clients_loss_rises_on_bowls() -> None:
    problem, federation, centres = bowls(3, 6, spread=0.0, seed=2, start=3.0)
    thetas = play(FedLF(lr=0.1), problem, federation, rounds=10).thetas
    losses = torch.stack([(theta - centres).square().sum(1) for theta in thetas])
    assert bool((losses.diff(dim=0) < 0).all())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": "block"}, "FedLF: `layers` must be one of tensor, module, but is 'block'"),
        ({"server_lr": 0.0}, r"`server_lr` must be in \(0, inf\)"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedLF(**settings)

"""What the server of a common descent keeps of clients who are absent, and what the step owes them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.absentees import Absentees, nobody, rows_of_absent, settled, with_present
from dqnfed.algorithms.common_descent_messages import DescentServer, DescentUpdate
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.core.algorithm import Cohort, Status
from dqnfed.core.tensors import map_tensors
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import run_experiment
from dqnfed.maths.gramian import cross_products
from dqnfed.sim.engine import run
from tests.helpers.quadratic_clients import consistent_quadratics

N_CLIENTS, MOST = 8, 4


def gradients(n: int, seed: int, *, width: int = 5) -> Tensor:
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def server_and_method(kept: int | None = None) -> tuple[DQNFed, DescentServer]:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    method = DQNFed(metric="identity", ridge=0.0, absentees=kept).prepare(problem, N_CLIENTS, 2)
    server = method.init_server(problem, N_CLIENTS)
    return method, server._replace(n_steps=torch.tensor(1), step_norm=torch.tensor(1.0, dtype=torch.float64))


def answers(G: Tensor, rates: list[float]) -> DescentUpdate:
    numbers = torch.tensor(rates, dtype=G.dtype)
    return DescentUpdate(G, numbers, torch.ones_like(numbers), torch.ones_like(numbers), G.new_zeros(len(G), 0))


def cohort(*clients: int, when: int = 1) -> Cohort:
    return Cohort(torch.tensor(clients), torch.full((len(clients),), 10), N_CLIENTS, when)


def remembered(
    kept: Absentees, G: Tensor, *clients: int, when: int, most: int = MOST, n_clients: int = N_CLIENTS
) -> Absentees:
    crossed, squares = cross_products(G, kept.gradient).numpy(), (G @ G.T).numpy()
    numbers = np.ones(len(G))
    present = Cohort(torch.tensor(clients), torch.ones(len(clients)), n_clients, when)
    now, rows = with_present(kept, present, G, numbers, numbers, squares, crossed, most=most)
    now = settled(now)
    assert torch.equal(now.gradient[rows[rows >= 0]], G[rows >= 0])
    assert now.client[rows[rows >= 0]].tolist() == [c for c, r in zip(clients, rows, strict=True) if r >= 0]
    return now


def test_the_products_kept_are_those_of_the_rows_kept() -> None:
    """Whoever comes and goes: brute force on the rows against what was put together from each round's products."""
    kept, rng = nobody(torch.zeros(5, dtype=torch.float64)), np.random.default_rng(0)
    for when in range(12):
        present, G = rng.permutation(N_CLIENTS)[:3].tolist(), gradients(3, when)
        before, copies = kept, map_tensors(torch.clone, kept)
        kept = remembered(kept, G, *present, when=when)
        counted = (before.client >= 0).nonzero().flatten()
        assert torch.equal(before.client, copies.client)
        assert torch.equal(before.gradient[counted], copies.gradient[counted])  # a server that goes back finds them
        assert torch.equal(before.products, copies.products)
        held = (kept.client >= 0).nonzero().flatten()
        rows = kept.gradient[held]
        torch.testing.assert_close(kept.products[held][:, held], rows @ rows.T)
        assert len(set(kept.client[held].tolist())) == len(held) == min(MOST, len(held))  # nobody twice
        for client, row in zip(present, G, strict=True):
            assert torch.equal(rows[kept.client[held].tolist().index(client)], row)


def test_who_was_asked_longest_ago_makes_room() -> None:
    kept = nobody(torch.zeros(5, dtype=torch.float64))
    for when, client in enumerate([0, 1, 2, 3, 0, 4]):
        kept = remembered(kept, gradients(1, when), client, when=when)
    assert sorted(kept.client[kept.client >= 0].tolist()) == [0, 2, 3, 4]
    assert sorted(kept.client[rows_of_absent(kept, cohort(3, 5))].tolist()) == [0, 2, 4]


def test_nobody_is_lost_while_there_is_room() -> None:
    """Two of eight clients a round, room for all: whoever has been here once is kept, with what it said last."""
    kept, rng = nobody(torch.zeros(5, dtype=torch.float64)), np.random.default_rng(0)
    said: dict[int, Tensor] = {}
    for when in range(60):
        present, G = rng.permutation(3 if when else N_CLIENTS)[: 2 if when else N_CLIENTS].tolist(), gradients(8, when)
        said |= dict(zip(present, G, strict=False))
        kept = remembered(kept, G[: len(present)], *present, when=when, most=N_CLIENTS, n_clients=2000)
    held = np.flatnonzero(kept.client.numpy() >= 0)
    assert sorted(kept.client[held].tolist()) == list(range(N_CLIENTS))
    for client, row in zip(kept.client[held].tolist(), kept.gradient[held], strict=True):
        assert torch.equal(row, said[client])


def test_who_stays_away_is_forgotten() -> None:
    """After four times the rounds in which everybody could have been asked."""
    kept = remembered(nobody(torch.zeros(5, dtype=torch.float64)), gradients(2, 0), 6, 7, when=0, most=8)
    for when in range(1, 17):
        assert {6, 7} <= set(kept.client.tolist())
        kept = remembered(kept, gradients(2, when), when % 6, (when + 1) % 6, when=when, most=8)
    assert not {6, 7} & set(kept.client.tolist())


@pytest.mark.parametrize(("n_here", "most"), [(10, 4), (10, 24), (100, 50)])
def test_a_cohort_kept_in_part_favours_no_numbers(n_here: int, most: int) -> None:
    """Cohorts come in ascending order; the lower half of the numbers has half of the places. Nor are rows hoarded."""
    kept, rng, low, n_clients = nobody(torch.zeros(5, dtype=torch.float64)), np.random.default_rng(0), [], 10 * n_here
    for when in range(100):
        present = np.sort(rng.permutation(n_clients)[:n_here]).tolist()
        kept = remembered(kept, gradients(n_here, when), *present, when=when, most=most, n_clients=n_clients)
        held = kept.client[kept.client >= 0]
        low.append(float((held < n_clients // 2).float().mean()))
        assert len(held) <= most
        assert len(kept.client) == len(kept.gradient) <= most + min(n_here, most)
    assert 0.4 < np.mean(low) < 0.6


@dataclass(frozen=True, kw_only=True)
class WithOneThatLeaves(DQNFed):
    """The last client takes part in the first round and never again."""

    def cohort(self, server: DescentServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        last = n_clients - 1
        if round == 0:
            return torch.tensor([0, 1, last])
        return sampled[sampled < last] if len(sampled[sampled < last]) else torch.tensor([0])


@pytest.mark.parametrize("metric", ["identity", "lbfgs"])
def test_a_client_that_leaves_does_not_hold_up_the_others(metric: str) -> None:
    """All have one minimiser, to which the others come all the same."""
    case = consistent_quadratics(N_CLIENTS, 20)
    result = run(WithOneThatLeaves(metric=metric), case.problem, case.federation, rounds=80, participation=0.375)
    assert float(result.theta.norm()) < 1e-3 * float(case.problem.theta0.norm())


def test_fifty_clients_are_kept_without_copying_them() -> None:
    """Ten of a hundred clients a round: the rows for sixty stay where they are."""
    kept, rng, places = nobody(torch.zeros(5, dtype=torch.float64)), np.random.default_rng(0), set()
    for when in range(60):
        present = rng.permutation(100)[:10].tolist()
        kept = remembered(kept, gradients(10, when), *present, when=when, most=50, n_clients=100)
        places.add(kept.gradient.data_ptr())
    assert len(kept.client) == 60
    assert int((kept.client >= 0).sum()) == 50
    assert len(places) <= 2


def test_the_step_gives_the_absent_what_they_were_promised() -> None:
    """g_k'u >= d_k for those who are here and for those who were here in the round before."""
    method, server = server_and_method()
    first, second = gradients(2, 1) + 1.0, gradients(2, 2) + 1.0
    server = method.server_step(server, answers(first, [1.0, 2.0]), cohort(0, 1)).server
    step = method.server_step(server, answers(second, [0.5, 3.0]), cohort(2, 3, when=2))
    assert step.status is Status.NEXT
    u = (server.theta - step.server.theta) / step.diagnostics["alpha"]
    promised = method.wanted_rates(answers(first, [1.0, 2.0]), first.square().sum(1).numpy(), None)
    now = method.wanted_rates(answers(second, [0.5, 3.0]), second.square().sum(1).numpy(), None)
    assert np.all((first @ u).numpy() >= promised * (1 - 1e-9))
    assert np.all((second @ u).numpy() >= now * (1 - 1e-9))
    forgetful, there = server_and_method(kept=0)
    there = forgetful.server_step(there, answers(first, [1.0, 2.0]), cohort(0, 1)).server
    shorter = forgetful.server_step(there, answers(second, [0.5, 3.0]), cohort(2, 3, when=2))
    u = (there.theta - shorter.server.theta) / shorter.diagnostics["alpha"]
    assert not np.all((first @ u).numpy() >= promised * (1 - 1e-9))  # the example would show nothing otherwise


def test_who_comes_again_is_served_by_what_it_says_now() -> None:
    method, server = server_and_method()
    before, now = gradients(2, 1) + 1.0, gradients(2, 2) + 1.0
    server = method.server_step(server, answers(before, [1.0, 1.0]), cohort(0, 1)).server
    again = method.server_step(server, answers(now, [1.0, 1.0]), cohort(0, 1, when=2))
    alone, fresh = server_and_method(kept=0)
    fresh = fresh._replace(theta=server.theta, theta_before=server.theta_before, step_norm=server.step_norm)
    expected = alone.server_step(fresh, answers(now, [1.0, 1.0]), cohort(0, 1, when=2))
    torch.testing.assert_close(again.server.theta, expected.server.theta)


def test_where_nothing_serves_everybody_the_present_are_served() -> None:
    method, server = server_and_method()
    G = torch.eye(5, dtype=torch.float64)[:2]
    server = method.server_step(server, answers(-G, [1.0, 1.0]), cohort(0, 1)).server
    step = method.server_step(server, answers(G, [1.0, 1.0]), cohort(2, 3, when=2))
    assert step.status is Status.NEXT
    assert bool((G @ (server.theta - step.server.theta) > 0).all())


@pytest.mark.parametrize(
    ("settings", "cohort_size", "kept"),
    [
        ({}, N_CLIENTS, 0),  # everybody is here
        ({}, 2, N_CLIENTS),
        ({"absentees": 3}, 2, 3),
        ({"absentees": 0}, 2, 0),
        ({"epochs": 2}, 2, 0),  # updates of local SGD
        ({"epochs": 2, "absentees": 3}, 2, 3),
        ({"constraint": "exactly"}, 2, 0),
        ({"drop_share": 0.3}, 2, 0),
    ],
)
def test_how_many_are_kept(settings: dict[str, int], cohort_size: int, kept: int) -> None:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    method = DQNFed(**settings).prepare(problem, N_CLIENTS, cohort_size)  # type: ignore[arg-type]
    server = method.init_server(problem, N_CLIENTS)
    assert server.absentees.gradient.shape == (0, 5)
    assert method.absentees == kept
    assert method.prepare(problem, N_CLIENTS, cohort_size) == method


@pytest.mark.parametrize(("n_parameters", "most"), [(2**20, 50), (2**23, 22), (2**25, 4), (2**28, 0)])
def test_large_models_are_not_kept_beyond_a_gibibyte(n_parameters: int, most: int) -> None:
    problem = SimpleNamespace(n_parameters=n_parameters, theta0=torch.zeros(1))
    assert DQNFed()._n_absentees(problem, "gradient", 1000, 10) == most  # type: ignore[arg-type]


def test_exact_rates_cannot_be_owed_to_the_absent() -> None:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    with pytest.raises(ValueError, match=r"absentees=3 .* constraint='exactly' rules out; use constraint='at-l"):
        DQNFed(absentees=3, constraint="exactly").prepare(problem, N_CLIENTS, 2)


def test_what_may_be_a_lie_is_not_kept() -> None:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    with pytest.raises(ValueError, match=r"drop_share=0.3 and absentees=3; set one of them to 0"):
        DQNFed(absentees=3, drop_share=0.3).prepare(problem, N_CLIENTS, 2)


@pytest.mark.parametrize("metric", ["identity", "lbfgs"])
@pytest.mark.parametrize("step", ["curvature", "line-search"])
def test_a_run_is_a_function_of_its_settings(metric: str, step: str) -> None:
    case = consistent_quadratics(N_CLIENTS, 5)
    method = DQNFed(metric=metric, step=step)
    whole = run(method, case.problem, case.federation, rounds=12, participation=0.5)
    again = run(method, case.problem, case.federation, rounds=12, participation=0.5)
    assert torch.equal(whole.theta, again.theta)
    assert all(record["status"] in ("next", "again", "hold") for record in whole.history[1:])


def test_with_a_tenth_of_the_clients_the_worst_gain_most() -> None:
    """Two of twenty clients a round, two seeds: a claim of the documentation."""
    worst: dict[int, list[float]] = {0: [], 20: []}
    for kept, found in worst.items():
        for seed in range(2):
            sets = ["train.participation=0.1", f"run.seed={seed}", f"algorithms.dqn-fed.absentees={kept}"]
            config = read_config("digits", [*sets, "eval.every=100"]).with_algorithm("dqn-fed")
            found.append(run_experiment(config, None).accuracy["worst10"])
    assert sum(worst[20]) > sum(worst[0]) + 20


@pytest.mark.parametrize("most", [2, 4, 8])
def test_updates_of_local_sgd_are_kept_too(most: int) -> None:
    """With warnings as errors: what is kept may be written to."""
    case = consistent_quadratics(N_CLIENTS, 5)
    method = DQNFed(local="sgd", absentees=most, lr=0.01)
    result = run(method, case.problem, case.federation, rounds=6, participation=0.5)
    assert result.summary["rounds"] == 6

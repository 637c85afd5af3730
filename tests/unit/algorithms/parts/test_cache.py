"""The cache of absent clients' last replies, and what DQN-Fed's step owes them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.parts.cache import Cache, CacheState
from dqnfed.algorithms.parts.messages import DescentServer, DescentUpdate
from dqnfed.core.algorithm import Cohort, Status
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import map_tensors
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import run_experiment
from dqnfed.sim.engine import run
from tests.helpers.quadratic_clients import consistent_quadratics

N_CLIENTS, MOST = 8, 4


def gradients(n: int, seed: int, *, width: int = 5) -> Tensor:
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def server_and_method(kept: int | None = None) -> tuple[DQNFed, DescentServer]:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    method = DQNFed(metric="identity", ridge=0.0, cached_clients=kept).prepare(problem, N_CLIENTS, 2)
    server = method.init_server(problem, N_CLIENTS)
    return method, server._replace(n_steps=torch.tensor(1), step_norm=torch.tensor(1.0, dtype=torch.float64))


def replies(G: Tensor, rates: list[float]) -> Replies[DescentUpdate]:
    numbers = torch.tensor(rates, dtype=G.dtype)
    return Replies(
        DescentUpdate(G, numbers, torch.ones_like(numbers), torch.ones_like(numbers), G.new_zeros(len(G), 0))
    )


def cohort(*clients: int, when: int = 1) -> Cohort:
    return Cohort(torch.tensor(clients), torch.full((len(clients),), 10), N_CLIENTS, when)


def empty(size: int = MOST) -> CacheState:
    return Cache(size).init(torch.zeros(5, dtype=torch.float64))


def inserted(
    state: CacheState, G: Tensor, *clients: int, when: int, size: int = MOST, n_clients: int = N_CLIENTS
) -> CacheState:
    """Return the cache after a round; the rate of a reply is its client's number, its curvature the round."""
    products = (G @ torch.cat([G, state.rows]).T).numpy()
    rates, curvature = np.array(clients, dtype=np.float64), np.full(len(G), float(when))
    present = Cohort(torch.tensor(clients), torch.ones(len(clients)), n_clients, when)
    return Cache(size).insert(state, present, G, rates, curvature, products)


def test_the_products_kept_are_those_of_the_rows_kept() -> None:
    """Brute force on the rows against what was put together from each round's products."""
    state, rng = empty(), np.random.default_rng(0)
    for when in range(12):
        present, G = np.sort(rng.permutation(N_CLIENTS)[:3]).tolist(), gradients(3, when)
        state = inserted(state, G, *present, when=when)
        torch.testing.assert_close(state.products, state.rows @ state.rows.T)
        assert len(set(state.client.tolist())) == len(state.client) <= MOST  # nobody twice
        assert state.rate.tolist() == state.client.tolist()
        assert state.curvature.tolist() == state.round.tolist()
        for client, row in zip(present, G, strict=True):
            assert torch.equal(state.rows[state.client.tolist().index(client)], row)


def test_no_earlier_state_changes() -> None:
    """A server that goes back to any state before finds it as it was."""
    state, rng, before = empty(), np.random.default_rng(0), []
    for when in range(12):
        before.append((state, map_tensors(torch.clone, state)))
        state = inserted(state, gradients(3, when), *np.sort(rng.permutation(N_CLIENTS)[:3]).tolist(), when=when)
    for kept, copy in before:
        assert all(torch.equal(a, b) for a, b in zip(kept, copy, strict=True))


def test_the_oldest_reply_is_dropped_first() -> None:
    state = empty()
    for when, client in enumerate([0, 1, 2, 3, 0, 4]):
        state = inserted(state, gradients(1, when), client, when=when)
    assert sorted(state.client.tolist()) == [0, 2, 3, 4]
    assert sorted(state.client[Cache(MOST).absent(state, cohort(3, 5))].tolist()) == [0, 2, 4]


def test_nothing_is_dropped_while_there_is_room() -> None:
    """Two of eight clients a round, room for all: every client is kept, with its last reply."""
    state, rng = empty(N_CLIENTS), np.random.default_rng(0)
    last: dict[int, Tensor] = {}
    for when in range(60):
        n = 2 if when else N_CLIENTS
        present, G = np.sort(rng.permutation(3 if when else N_CLIENTS)[:n]).tolist(), gradients(8, when)
        last |= dict(zip(present, G, strict=False))
        state = inserted(state, G[:n], *present, when=when, size=N_CLIENTS, n_clients=2000)
    assert sorted(state.client.tolist()) == list(range(N_CLIENTS))
    for client, row in zip(state.client.tolist(), state.rows, strict=True):
        assert torch.equal(row, last[client])


def test_replies_older_than_four_sweeps_are_dropped() -> None:
    """Two of eight clients a round: a sweep takes four rounds."""
    state = inserted(empty(8), gradients(2, 0), 6, 7, when=0, size=8)
    for when in range(1, 17):
        assert {6, 7} <= set(state.client.tolist())
        present = sorted({when % 6, (when + 1) % 6})
        state = inserted(state, gradients(2, when), *present, when=when, size=8)
    assert not {6, 7} & set(state.client.tolist())


@pytest.mark.parametrize(("n_here", "size"), [(10, 4), (10, 24), (100, 50)])
def test_a_cohort_kept_in_part_favours_no_numbers(n_here: int, size: int) -> None:
    """Cohorts come in ascending order; the lower half of the numbers has half of the places."""
    state, rng, low, n_clients = empty(size), np.random.default_rng(0), [], 10 * n_here
    for when in range(100):
        present = np.sort(rng.permutation(n_clients)[:n_here]).tolist()
        state = inserted(state, gradients(n_here, when), *present, when=when, size=size, n_clients=n_clients)
        low.append(float((state.client < n_clients // 2).float().mean()))
        assert len(state.client) == len(state.rows) <= size
    assert len(state.client) == size
    assert 0.4 < np.mean(low) < 0.6


@dataclass(frozen=True, kw_only=True)
class WithOneThatLeaves(DQNFed):
    """The last client takes part in the first round and never again."""

    def select(self, server: DescentServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
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


def test_the_step_gives_the_absent_what_they_were_promised() -> None:
    """g_k'u >= d_k for those who are here and for those who were here in the round before."""
    method, server = server_and_method()
    first, second = gradients(2, 1) + 1.0, gradients(2, 2) + 1.0
    server = method.server_step(server, replies(first, [1.0, 2.0]), cohort(0, 1)).server
    step = method.server_step(server, replies(second, [0.5, 3.0]), cohort(2, 3, when=2))
    assert step.status is Status.NEXT
    u = (server.theta - step.server.theta) / step.diagnostics["alpha"]
    promised = method.wanted_rates(replies(first, [1.0, 2.0]), first.square().sum(1).numpy())
    now = method.wanted_rates(replies(second, [0.5, 3.0]), second.square().sum(1).numpy())
    assert np.all((first @ u).numpy() >= promised * (1 - 1e-9))
    assert np.all((second @ u).numpy() >= now * (1 - 1e-9))
    forgetful, there = server_and_method(kept=0)
    there = forgetful.server_step(there, replies(first, [1.0, 2.0]), cohort(0, 1)).server
    shorter = forgetful.server_step(there, replies(second, [0.5, 3.0]), cohort(2, 3, when=2))
    u = (there.theta - shorter.server.theta) / shorter.diagnostics["alpha"]
    assert not np.all((first @ u).numpy() >= promised * (1 - 1e-9))  # the example would show nothing otherwise


def test_who_comes_again_is_served_by_what_it_says_now() -> None:
    method, server = server_and_method()
    before, now = gradients(2, 1) + 1.0, gradients(2, 2) + 1.0
    server = method.server_step(server, replies(before, [1.0, 1.0]), cohort(0, 1)).server
    again = method.server_step(server, replies(now, [1.0, 1.0]), cohort(0, 1, when=2))
    alone, fresh = server_and_method(kept=0)
    fresh = fresh._replace(theta=server.theta, theta_before=server.theta_before, step_norm=server.step_norm)
    expected = alone.server_step(fresh, replies(now, [1.0, 1.0]), cohort(0, 1, when=2))
    torch.testing.assert_close(again.server.theta, expected.server.theta)


def test_where_nothing_serves_everybody_the_present_are_served() -> None:
    method, server = server_and_method()
    G = torch.eye(5, dtype=torch.float64)[:2]
    server = method.server_step(server, replies(-G, [1.0, 1.0]), cohort(0, 1)).server
    step = method.server_step(server, replies(G, [1.0, 1.0]), cohort(2, 3, when=2))
    assert step.status is Status.NEXT
    assert bool((G @ (server.theta - step.server.theta) > 0).all())


@pytest.mark.parametrize(
    ("settings", "cohort_size", "kept"),
    [
        ({}, N_CLIENTS, 0),  # everybody is here
        ({}, 2, N_CLIENTS),
        ({"cached_clients": 3}, 2, 3),
        ({"absentees": 0}, 2, 0),
        ({"epochs": 2}, 2, 0),  # updates of local SGD
        ({"epochs": 2, "cached_clients": 3}, 2, 3),
        ({"constraint": "exactly"}, 2, 0),
        ({"drop_share": 0.3}, 2, 0),
    ],
)
def test_how_many_are_kept(settings: dict[str, int], cohort_size: int, kept: int) -> None:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    method = DQNFed(**settings).prepare(problem, N_CLIENTS, cohort_size)  # type: ignore[arg-type]
    server = method.init_server(problem, N_CLIENTS)
    assert server.cache.rows.shape == (0, 5)
    assert method.cached_clients == kept
    assert method.prepare(problem, N_CLIENTS, cohort_size) == method


@pytest.mark.parametrize(("n_parameters", "most"), [(2**20, 50), (2**23, 22), (2**25, 4), (2**28, 0)])
def test_large_models_are_not_kept_beyond_a_gibibyte(n_parameters: int, most: int) -> None:
    problem = SimpleNamespace(n_parameters=n_parameters, theta0=torch.zeros(1))
    assert DQNFed().prepare(problem, 1000, 10).cached_clients == most  # type: ignore[arg-type]


def test_exact_rates_cannot_be_owed_to_the_absent() -> None:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    with pytest.raises(ValueError, match=r"`cached_clients` is 3, but constraint='exactly' .*; set it to 0"):
        DQNFed(cached_clients=3, constraint="exactly").prepare(problem, N_CLIENTS, 2)


def test_replies_that_cannot_be_checked_are_not_cached() -> None:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    with pytest.raises(ValueError, match=r"`cached_clients` is 3, but drop_share=0.3, .*; set it to 0"):
        DQNFed(cached_clients=3, drop_share=0.3).prepare(problem, N_CLIENTS, 2)


def test_a_cache_without_absent_clients_is_refused() -> None:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    with pytest.raises(ValueError, match=r"`cached_clients` is 3, but all 8 clients take part"):
        DQNFed(cached_clients=3).prepare(problem, N_CLIENTS, N_CLIENTS)


def test_the_old_name_of_the_setting_is_accepted() -> None:
    assert DQNFed(absentees=7) == DQNFed(cached_clients=7)


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
            sets = ["train.participation=0.1", f"run.seed={seed}", f"algorithms.dqn-fed.cached_clients={kept}"]
            config = read_config("digits", [*sets, "eval.every=100"]).with_algorithm("dqn-fed")
            found.append(run_experiment(config, None).accuracy["worst10"])
    assert sum(worst[20]) > sum(worst[0]) + 20


@pytest.mark.parametrize("most", [2, 4, 8])
def test_updates_of_local_sgd_are_kept_too(most: int) -> None:
    """Warnings are errors: what is cached may be written to."""
    case = consistent_quadratics(N_CLIENTS, 5)
    method = DQNFed(local="sgd", cached_clients=most, lr=0.01)
    result = run(method, case.problem, case.federation, rounds=6, participation=0.5)
    assert result.summary["rounds"] == 6

"""The cache of absent clients' last replies: what is kept, what is credited, and what DQN-Fed's step owes them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.accel.replies import FastReplies
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.parts.cache import FREE, Cache, CacheState, Cut
from dqnfed.algorithms.parts.messages import DescentServer, GradientUpdate
from dqnfed.core.algorithm import Cohort, Status
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.core.screening import Policy
from dqnfed.core.tensors import map_tensors
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import run_experiment
from dqnfed.sim.engine import run
from tests.helpers.baselines import classes
from tests.helpers.play import Played, play
from tests.helpers.quadratic_clients import consistent_quadratics

N_CLIENTS, MOST = 8, 4


def gradients(n: int, seed: int, *, width: int = 5) -> Tensor:
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def server_and_method(kept: int | None = None) -> tuple[DQNFed, DescentServer]:
    """Return the server after one step, and the method without slack and ridge, so that rates are kept exactly."""
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    method = DQNFed(beyond="stop", ridge=0.0, cached_clients=kept).prepare(problem, N_CLIENTS, 2)
    server = method.init_server(problem, N_CLIENTS)
    return method, server._replace(n_steps=torch.tensor(1), step_norm=torch.tensor(1.0, dtype=torch.float64))


def replies(G: Tensor, rates: list[float]) -> Replies[GradientUpdate]:
    """Return gradients and rates of clients whose losses are so large that no rate is capped."""
    numbers = torch.tensor(rates, dtype=G.dtype)
    return Replies(GradientUpdate(G, numbers, torch.full_like(numbers, 100.0)))


def cohort(*clients: int, when: int = 1) -> Cohort:
    return Cohort(torch.tensor(clients), torch.full((len(clients),), 10), N_CLIENTS, when)


def entries(state: CacheState) -> CacheState:
    """Return what is in the slots that are not free."""
    taken = state.client != FREE
    kept = map_tensors(lambda t: t[taken], state)
    return kept._replace(products=kept.products[:, taken])


def empty(size: int = MOST) -> CacheState:
    return Cache(size).init(torch.zeros(5, dtype=torch.float64))


def inserted(
    state: CacheState, G: Tensor, *clients: int, when: int, size: int = MOST, n_clients: int = N_CLIENTS
) -> CacheState:
    """Return the cache after a round; a reply's rate is its client's number, its loss the round, its credit a half."""
    products = (G @ torch.cat([G, state.rows]).T).numpy()
    rates, round = np.array(clients, dtype=np.float64), np.full(len(G), float(when))
    present = Cohort(torch.tensor(clients), torch.ones(len(clients)), n_clients, when)
    return Cache(size).insert(state, present, replies(G, rates.tolist()), Cut(rates, rates / 2, round), products)


# ------------------------------------------------------------------------------------------ what is kept


def test_the_products_kept_are_those_of_the_rows_kept() -> None:
    """Brute force on the rows against what was put together from each round's products."""
    state, rng = empty(), np.random.default_rng(0)
    for when in range(12):
        present, G = np.sort(rng.permutation(N_CLIENTS)[:3]).tolist(), gradients(3, when)
        state = inserted(state, G, *present, when=when)
        kept = entries(state)
        torch.testing.assert_close(kept.products, kept.rows @ kept.rows.T)
        assert len(set(kept.client.tolist())) == len(kept.client) <= MOST  # nobody twice
        assert kept.rate.tolist() == kept.client.tolist()
        assert kept.reached.tolist() == [client / 2 for client in kept.client.tolist()]
        assert kept.loss.tolist() == kept.round.tolist()
        for client, row in zip(present, G, strict=True):
            assert torch.equal(kept.rows[kept.client.tolist().index(client)], row)


def test_no_earlier_state_changes() -> None:
    """A server that goes back to any state before finds it as it was."""
    state, rng, before = empty(), np.random.default_rng(0), []
    for when in range(12):
        before.append((state, map_tensors(torch.clone, state)))
        state = inserted(state, gradients(3, when), *np.sort(rng.permutation(N_CLIENTS)[:3]).tolist(), when=when)
    for kept, copy in before:
        assert all(torch.equal(a, b) for a, b in zip(kept, copy, strict=True))


def test_replies_are_copied() -> None:
    """A runner may write the next round's replies where this round's are."""
    G = gradients(2, 0)
    state, there = inserted(empty(), G, 0, 1, when=0), G.clone()
    G.zero_()
    assert torch.equal(entries(state).rows, there)


def test_a_run_may_write_the_rows_where_the_old_ones_are() -> None:
    """What only the accelerated form does: the same rows, without a copy of all the others."""
    plain, fast, rng = empty(), empty(), np.random.default_rng(0)
    for when in range(12):
        present, G = np.sort(rng.permutation(N_CLIENTS)[:3]).tolist(), gradients(3, when)
        plain, store = inserted(plain, G, *present, when=when), fast.rows
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Replies, "put", FastReplies.put)
            fast = inserted(fast, G, *present, when=when)
        assert fast.rows.data_ptr() == store.data_ptr()
        assert all(torch.equal(a, b) for a, b in zip(plain, fast, strict=True))


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
        assert len(state.client) == size
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


@pytest.mark.parametrize("work", [{}, {"epochs": 2, "lr": 0.3}], ids=["gradients", "local SGD"])
def test_a_client_that_leaves_does_not_hold_up_the_others(work: dict[str, Any]) -> None:
    """All have one minimiser, to which the others come all the same."""
    case = consistent_quadratics(N_CLIENTS, 20)
    result = run(WithOneThatLeaves(**work), case.problem, case.federation, rounds=80, participation=0.375)
    assert result.summary["train_loss"]["mean"] < 1e-3 * result.history[0]["train_loss"]["mean"]


# ------------------------------------------------------------------------------------------ credit


def with_credit(*credit: float) -> CacheState:
    """Return a cache of rows whose rates are 2, with these amounts reached."""
    G = gradients(len(credit), 0)
    whole = inserted(empty(8), G, *range(len(credit)), when=0, size=8)
    rates = torch.full((len(credit),), 2.0, dtype=torch.float64)
    return whole._replace(rate=rates, reached=torch.tensor(credit, dtype=torch.float64))


def test_what_was_reached_is_not_asked_for_again() -> None:
    """All of a rate where nothing or less was reached, what is left of it, and three tenths at least."""
    state = with_credit(0.0, -1.0, 0.5, 1.0, 1.4, 2.0, 50.0)
    rates = Cache(8).rates(state, np.arange(7))
    np.testing.assert_allclose(rates, [2.0, 2.0, 1.5, 1.0, 0.6, 0.6, 0.6], rtol=1e-12)
    np.testing.assert_allclose(Cache(8).rates(state, np.array([5, 2])), [0.6, 1.5], rtol=1e-12)


def test_a_row_that_asks_for_nothing_has_no_credit() -> None:
    state = with_credit(0.0, 3.0)._replace(rate=torch.zeros(2, dtype=torch.float64))
    assert Cache(8).rates(state, np.arange(2)).tolist() == [0.0, 0.0]


def test_credit_follows_the_model() -> None:
    state = Cache(8).moved(with_credit(0.5, 1.0, 1.5), np.array([1.0, 0.0, -2.0]))
    assert state.reached.tolist() == [1.5, 1.0, -0.5]


CREDITED = {
    "gradients": {"step_size": 60.0},
    "local SGD": {"epochs": 2, "lr": 3.0, "step_size": 6.0},
    "local SGD, no step beyond": {"epochs": 2, "lr": 3.0, "step_size": 6.0, "beyond": "stop"},
}


def check_credit(played: Played) -> None:
    """Every cached row's credit is its product with the way from the model it was computed at to the model now."""
    for server in played.servers[1:]:
        kept = entries(server.cache)
        for row, round, reached in zip(kept.rows, kept.round.tolist(), kept.reached.tolist(), strict=True):
            way = played.thetas[round] - server.theta
            expected, size = float(row @ way), float(row.norm() * way.norm())
            assert reached == pytest.approx(expected, abs=1e-12 + 1e-9 * size)


@pytest.mark.parametrize("name", CREDITED)
def test_the_credit_is_the_product_with_the_way_since_the_reply(name: str) -> None:
    """Also after steps that were taken back: these runs start with steps that are too long."""
    problem, federation = classes(12)
    n_back = 0
    for seed in range(4):
        unclipped = Policy(max_update_norm=float("inf"))
        played = play(
            DQNFed(**CREDITED[name]),  # type: ignore[arg-type]
            problem,
            federation,
            rounds=12,
            participation=0.75,  # so that enough clients are known for a step back instead of a return to the start
            seed=seed,
            policy=unclipped,
        )
        check_credit(played)
        n_back += sum("retreat" in record["diagnostics"] for record in played.records)
    assert n_back > 0


def test_a_step_taken_back_takes_its_credit_back() -> None:
    """After it the credits are those before the step, and so is the model."""
    problem, federation = classes(12)
    method = DQNFed(epochs=2, lr=3.0, step_size=20.0)
    played = play(method, problem, federation, rounds=12, participation=0.75, seed=2)
    back = [t for t, record in enumerate(played.records) if "retreat" in record["diagnostics"]]
    assert back
    for t in back:
        before, step_back = played.servers[t - 1], played.servers[t + 1]
        assert torch.equal(step_back.theta, before.theta)
        known = {c: float(r) for c, r in zip(before.cache.client.tolist(), before.cache.reached, strict=True)}
        fresh = set(played.records[t - 1]["clients"])  # these replied in the round of the step: nothing was reached yet
        for client, reached in zip(step_back.cache.client.tolist(), step_back.cache.reached.tolist(), strict=True):
            assert reached == pytest.approx(0.0 if client in fresh else known[client], abs=1e-10)


# ------------------------------------------------------------------------------------------ what the step owes


def wanted(method: DQNFed, G: Tensor, rates: list[float], others: FloatArray | None = None) -> FloatArray:
    losses = np.full(len(G), 100.0)
    none = np.zeros(0)
    return method.wanted_rates(replies(G, rates), G.square().sum(1).numpy(), none if others is None else others, losses)


def test_the_step_gives_the_absent_what_is_left_of_their_rates() -> None:
    """g_k'u >= d_k for those who are here, and what the first step did not reach for those of the round before."""
    method, server = server_and_method()
    first, second = gradients(2, 1) + 1.0, gradients(2, 2) + 1.0
    before = server.theta
    server = method.server_step(server, replies(first, [1.0, 2.0]), cohort(0, 1)).server
    step = method.server_step(server, replies(second, [0.5, 3.0]), cohort(2, 3, when=2))
    assert step.status is Status.NEXT
    u = (server.theta - step.server.theta) / step.diagnostics["alpha"]
    promised, squares = wanted(method, first, [1.0, 2.0]), first.square().sum(1).numpy()
    reached = (first @ (before - server.theta)).numpy()
    left = np.maximum(promised - reached, 0.3 * promised)
    assert 0.0 < reached.max() < promised.max()  # the example would show nothing otherwise
    now = wanted(method, second, [0.5, 3.0], promised / squares)
    assert np.all((first @ u).numpy() >= left * (1 - 1e-9))
    assert np.all((second @ u).numpy() >= now * (1 - 1e-9))
    forgetful, there = server_and_method(kept=0)
    there = forgetful.server_step(there, replies(first, [1.0, 2.0]), cohort(0, 1)).server
    shorter = forgetful.server_step(there, replies(second, [0.5, 3.0]), cohort(2, 3, when=2))
    u = (there.theta - shorter.server.theta) / shorter.diagnostics["alpha"]
    assert not np.all((first @ u).numpy() >= left * (1 - 1e-9))


def test_who_comes_again_is_served_by_its_reply_now() -> None:
    method, server = server_and_method()
    before, now = gradients(2, 1) + 1.0, gradients(2, 2) + 1.0
    server = method.server_step(server, replies(before, [1.0, 1.0]), cohort(0, 1)).server
    again = method.server_step(server, replies(now, [1.0, 1.0]), cohort(0, 1, when=2))
    alone, fresh = server_and_method(kept=0)
    fresh = server._replace(cache=fresh.cache)
    expected = alone.server_step(fresh, replies(now, [1.0, 1.0]), cohort(0, 1, when=2))
    torch.testing.assert_close(again.server.theta, expected.server.theta)


def test_where_nothing_serves_everybody_the_present_are_served() -> None:
    method, server = server_and_method()
    G = torch.eye(5, dtype=torch.float64)[:2]
    server = method.server_step(server, replies(-G, [1.0, 1.0]), cohort(0, 1)).server
    step = method.server_step(server, replies(G, [1.0, 1.0]), cohort(2, 3, when=2))
    assert step.status is Status.NEXT
    assert bool((G @ (server.theta - step.server.theta) > 0).all())


def test_a_client_without_a_rate_gets_the_usual_one_of_all_clients_that_are_known() -> None:
    """Rates per squared row 1, 2 and 6 (two of them cached): NaN becomes 2, of the cohort alone it would be 6."""
    method, server = server_and_method()
    G = torch.eye(5, dtype=torch.float64)
    server = method.server_step(server, replies(G[:2], [1.0, 2.0]), cohort(0, 1)).server
    after = method.server_step(server, replies(G[2:4], [6.0, torch.nan]), cohort(2, 3, when=2)).server
    kept = entries(after.cache)
    assert dict(zip(kept.client.tolist(), kept.rate.tolist(), strict=True)) == {
        0: 1.0, 1: 2.0, 2: 6.0, 3: 2.0,
    }  # fmt: skip
    assert wanted(method, G[2:4], [6.0, torch.nan]).tolist() == [6.0, 6.0]


# ------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("settings", "cohort_size", "kept"),
    [
        ({}, N_CLIENTS, 0),  # everybody is here
        ({}, 2, N_CLIENTS),
        ({"cached_clients": 3}, 2, 3),
        ({"absentees": 0}, 2, 0),
        ({"epochs": 2}, 2, N_CLIENTS),
        ({"epochs": 2}, N_CLIENTS, 0),
        ({"epochs": 2, "cached_clients": 3}, 2, 3),
        ({"constraint": "exactly"}, 2, 0),
        ({"drop_share": 0.3}, 2, 0),
    ],
)
def test_how_many_are_kept(settings: dict[str, int], cohort_size: int, kept: int) -> None:
    problem = consistent_quadratics(N_CLIENTS, 5).problem
    method = DQNFed(**settings).prepare(problem, N_CLIENTS, cohort_size)  # type: ignore[arg-type]
    server = method.init_server(problem, N_CLIENTS)
    assert server.cache.rows.shape == (kept, 5)
    assert bool((server.cache.client == FREE).all())
    assert method.cached_clients == kept
    assert method.prepare(problem, N_CLIENTS, cohort_size) == method


@pytest.mark.parametrize(("n_parameters", "most"), [(2**20, 100), (2**23, 22), (2**25, 4), (2**28, 0)])
def test_large_models_are_not_kept_beyond_a_gibibyte(n_parameters: int, most: int) -> None:
    problem = SimpleNamespace(n_parameters=n_parameters, theta0=torch.zeros(1))
    assert DQNFed().prepare(problem, 1000, 10).cached_clients == most  # type: ignore[arg-type]


def test_clients_may_have_larger_numbers_than_a_cohort_that_counts_as_everybody() -> None:
    """Client 0 is left out and the other three count as all clients (`Trust.believed`): numbers 1 to 3 of three."""
    state = Cache(MOST).init(torch.zeros(5))._replace(client=torch.tensor([0, 3, 2, *[FREE] * (MOST - 3)]))
    three = Cohort(torch.tensor([1, 2, 3]), torch.full((3,), 10), 3, 1)
    assert Cache(MOST).absent(state, three).tolist() == [0]


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


def test_the_old_name_of_the_setting_is_accepted_alone() -> None:
    assert DQNFed(absentees=7) == DQNFed(cached_clients=7) == DQNFed(absentees=7, cached_clients=7)
    assert DQNFed(absentees=7).absentees is None
    with pytest.raises(ValueError, match=r"`absentees` is the old name of `cached_clients`, but they are 7 and 3; set"):
        DQNFed(absentees=7, cached_clients=3)
    with pytest.raises(ValueError, match=r"`absentees` must be in \[0, inf\), but is -1"):
        DQNFed(absentees=-1)


@pytest.mark.parametrize("step", ["votes", "match", "fixed"])
@pytest.mark.parametrize("work", [{}, {"epochs": 2}], ids=["gradients", "local SGD"])
def test_a_run_is_a_function_of_its_settings(step: str, work: dict[str, Any]) -> None:
    case = consistent_quadratics(N_CLIENTS, 5)
    method = DQNFed(step=step, step_size=0.5, **work)
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

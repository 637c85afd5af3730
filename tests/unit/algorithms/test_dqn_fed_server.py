"""DQN-Fed's server on replies made by hand: steps that follow from geometry alone."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.parts.cache import FREE
from dqnfed.algorithms.parts.messages import DescentUpdate, LocalUpdate, Trial, TrialUpdate
from dqnfed.core.algorithm import Cohort, Status
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from tests.helpers.baselines import classes
from tests.helpers.play import SometimesAway, play
from tests.helpers.quadratic_clients import consistent_quadratics
from tests.helpers.rows import agreeing_rows, gaussian_rows

ORTHOGONAL = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.2, 0.0, -0.1]], dtype=torch.float64)


def problem_of(n: int = 4) -> Problem:
    return consistent_quadratics(3, n).problem


def everybody(K: int) -> Cohort:
    return Cohort(torch.arange(K), torch.full((K,), 10), K, 0)


def gradients(rows: Tensor, *, rates: Tensor | None = None) -> Replies[DescentUpdate]:
    """Return the replies of clients whose rates are their gradients' squares and whose losses are large."""
    wanted = rows.square().sum(1) if rates is None else rates
    numbers = torch.ones_like(wanted)
    return Replies(DescentUpdate(rows, wanted, loss=100.0 * numbers, curvature=numbers))


def local_updates(rows: Tensor, losses: Tensor | None = None) -> Replies[LocalUpdate]:
    return Replies(LocalUpdate(rows, torch.ones(len(rows), dtype=torch.float64) if losses is None else losses))


def test_orthogonal_updates_of_local_sgd_give_fedavgs_step() -> None:
    """With g_k'u = ||g_k||^2 for orthogonal g_k, u is their sum: the direction of their mean, whose length it gets."""
    problem, rows = problem_of(), 0.1 * ORTHOGONAL  # none is longer than the model
    method = DQNFed(epochs=2, ridge=0.0, beyond="stop").prepare(problem, 3, 3)
    server: Any = method.init_server(problem, 3)
    moved: Any = method.server_step(server, local_updates(rows), everybody(3)).server
    torch.testing.assert_close(server.theta - moved.theta, rows.mean(0))


@pytest.mark.parametrize("constraint", ["at-least", "exactly"])
@pytest.mark.parametrize("ridge", [0.0, 0.25, 1.0])
def test_a_ridge_shortens_the_step_for_orthogonal_gradients(constraint: str, ridge: float) -> None:
    """The Gramian of the unit rows is the identity, so that the ridge divides every weight by 1 + ridge."""
    problem = problem_of()
    settings: dict[str, Any] = {"constraint": constraint, **({"beyond": "stop"} if constraint == "at-least" else {})}
    method = DQNFed(**settings, ridge=ridge, metric="identity", step="paper").prepare(problem, 3, 3)
    server: Any = method.init_server(problem, 3)
    moved: Any = method.server_step(server, gradients(ORTHOGONAL), everybody(3)).server
    torch.testing.assert_close(server.theta - moved.theta, ORTHOGONAL.sum(0) / (1.0 + ridge))


def test_a_client_that_is_left_out_has_no_part_in_the_metric() -> None:
    """Client 3 opposes the other three; the mean gradient that the next secant pair starts from is theirs alone."""
    agreeing = torch.tensor([[1.0, 0.1, 0.0, 0.0], [1.0, 0.0, 0.1, 0.0], [1.0, 0.0, 0.0, 0.1]], dtype=torch.float64)
    rows = torch.cat([agreeing, -agreeing.mean(0, keepdim=True)])
    problem = problem_of()
    method = DQNFed(drop_share=0.25).prepare(problem, 4, 4)
    step: Any = method.server_step(method.init_server(problem, 4), gradients(rows), everybody(4))
    kept = step.server.search.mean
    assert kept.members.tolist() == [True, True, True, False]
    torch.testing.assert_close(kept.gradient, rows[:3].mean(0))


def test_a_refused_trial_is_followed_by_one_of_half_the_length() -> None:
    problem = problem_of()
    method = DQNFed(step="line-search", metric="identity").prepare(problem, 3, 3)
    fresh: Any = method.init_server(problem, 3)
    later = fresh._replace(n_steps=torch.tensor(1), step_norm=torch.tensor(1.0, dtype=torch.float64))
    server: Any = method.server_step(later, gradients(ORTHOGONAL), everybody(3)).server
    lengths = []
    for _ in range(4):
        sent = method.send(server)
        assert isinstance(sent, Trial)
        lengths.append(float((server.theta - sent.theta).norm()))
        refused = Replies(TrialUpdate(torch.full((3,), 1e6, dtype=torch.float64)))
        server = method.server_step(server, refused, everybody(3)).server
    assert lengths[1:] == pytest.approx([lengths[0] / 2, lengths[0] / 4, lengths[0] / 8])


def test_batches_alone_make_the_local_work_sgd() -> None:
    problem = problem_of()
    assert DQNFed(batch_size=8).prepare(problem, 3, 3).local == "sgd"
    assert DQNFed(epochs=2).prepare(problem, 3, 3).local == "sgd"
    assert DQNFed().prepare(problem, 3, 3).local == "gradient"
    assert replace(DQNFed(), local="gradient", epochs=2).prepare(problem, 3, 3).local == "gradient"


# ------------------------------------------------------------------------------------------ training that explodes


def of_clients(*clients: int, n_clients: int, round: int) -> Cohort:
    return Cohort(torch.tensor(clients), torch.full((len(clients),), 10), n_clients, round)


def drawn(size: int, n_clients: int, round: int) -> Cohort:
    """Return a cohort that changes from round to round."""
    return of_clients(*sorted((round + j) % n_clients for j in range(size)), n_clients=n_clients, round=round)


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize("blow_up", [1.0, 1e3, 1e12])
@pytest.mark.parametrize("step_size", [0.5, 4.0])
def test_no_reply_moves_the_model_by_more_than_m_times_its_length(size: int, blow_up: float, step_size: float) -> None:
    problem = problem_of(8)
    method = DQNFed(epochs=2, step_size=step_size).prepare(problem, 6, size)
    server: Any = method.init_server(problem, 6)
    for round in range(12):
        rows = agreeing_rows(size, 8, seed=round)
        rows[round % size] *= blow_up
        losses = torch.full((size,), 0.9**round, dtype=torch.float64)  # nothing is wrong with these: no step goes back
        step: Any = method.server_step(server, local_updates(rows, losses), drawn(size, 6, round))
        longest = step.diagnostics["m"] * float(server.theta.norm())
        assert float((step.server.theta - server.theta).norm()) <= longest * (1 + 1e-12)
        server = step.server


def test_a_model_change_longer_than_the_model_counts_at_the_models_length() -> None:
    """As if the client had sent it so; others are as they are, and a model of zeros has no length to compare with."""
    problem = problem_of()
    method = DQNFed(epochs=2).prepare(problem, 3, 3)
    server: Any = method.init_server(problem, 3)
    length = float(server.theta.norm())
    rows = torch.stack([1e6 * ORTHOGONAL[0], 0.9 * length * ORTHOGONAL[1], ORTHOGONAL[2]])
    shortened = rows.clone()
    shortened[0] *= length / rows[0].norm()
    found, expected = (
        method.server_step(server, local_updates(r), everybody(3)).server.theta for r in (rows, shortened)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    nowhere = server._replace(theta=0.0 * server.theta, theta_before=0.0 * server.theta)
    step: Any = method.server_step(nowhere, local_updates(rows), everybody(3))
    assert step.diagnostics["step_norm"] == pytest.approx(float(rows.mean(0).norm()))


def test_gradients_are_no_model_changes_and_have_any_length() -> None:
    """Theta is 0.001 long, the gradients are 1000 times as long, and so are the rates."""
    problem = replace(problem_of(), theta0=1e-3 * problem_of().theta0)
    method = DQNFed(step="votes", ridge=0.0, beyond="stop").prepare(problem, 3, 3)
    server: Any = method.init_server(problem, 3)
    step: Any = method.server_step(server, gradients(ORTHOGONAL), everybody(3))
    assert step.diagnostics["step_norm"] == pytest.approx(float(ORTHOGONAL.mean(0).norm()))


def test_a_run_whose_clients_overshoot_keeps_the_bound() -> None:
    """Large features and a learning rate of 10: most local trainings end farther from the model than its own length."""
    problem, federation = classes(6)
    wild = replace(federation, train=federation.train._replace(inputs=30.0 * federation.train.inputs))
    played = play(DQNFed(epochs=2, lr=10.0), problem, wild, rounds=12, participation=0.5)
    shares = []
    for t, record in enumerate(played.records):
        found = record["diagnostics"]
        if not {"retreat", "restart"} & found.keys():
            moved = float((played.thetas[t + 1] - played.thetas[t]).norm())
            shares.append(moved / (found["m"] * float(played.thetas[t].norm())))
    assert 0.2 < max(shares) <= 1 + 1e-12


# ------------------------------------------------------------------------------------------ back to the start


def stepped(method: DQNFed, server: Any, losses: list[float], *clients: int, n_clients: int, round: int) -> Any:
    """Return the server's step after replies that agree, with these losses."""
    replies = local_updates(0.05 * agreeing_rows(len(losses), 8, seed=round), torch.tensor(losses, dtype=torch.float64))
    return method.server_step(server, replies, of_clients(*clients, n_clients=n_clients, round=round))


def known_run(*levels: float, n_clients: int = 4) -> tuple[DQNFed, list[Any]]:
    """Return the steps of rounds in which clients 0 to 3 have these losses; with four clients everybody is here."""
    problem = problem_of(8)
    method = DQNFed(epochs=2).prepare(problem, n_clients, 4)
    server: Any = method.init_server(problem, n_clients)
    steps = []
    for round, level in enumerate(levels):
        steps.append(stepped(method, server, [level] * 4, 0, 1, 2, 3, n_clients=n_clients, round=round))
        server = steps[-1].server
    return method, steps


# From round to round no jump, but all in all too much, in two rounds; one would be taken back.
RISES = {4: (1.0, 1.15, 1.25, 1.3), 12: (1.0, 1.7, 2.05, 2.2)}


@pytest.mark.parametrize("n_clients", RISES)
def test_a_run_that_is_above_its_start_returns_there(n_clients: int) -> None:
    """To the bit, with nothing cached and no losses known; m is a quarter, and the next step no longer than that."""
    start = problem_of(8).theta0
    method, steps = known_run(*RISES[n_clients], n_clients=n_clients)
    before, back = steps[-2], steps[-1]
    assert ["restart" in step.diagnostics for step in steps] == [False, False, False, True]
    assert not any("retreat" in step.diagnostics for step in steps)
    assert back.status is Status.NEXT
    assert torch.equal(back.server.theta, start)
    assert not torch.equal(before.server.theta, start)
    assert bool((back.server.cache.client == FREE).all())
    assert bool(back.server.votes.losses.isnan().all())
    last = before.server
    assert float(back.server.votes.log_m) == pytest.approx(float(last.votes.log_m) - math.log(4.0))
    again: Any = stepped(method, back.server, [1.0] * 4, 0, 1, 2, 3, n_clients=n_clients, round=9)
    assert again.diagnostics["m"] == pytest.approx(before.diagnostics["m"] / 4.0)
    assert again.diagnostics["step_norm"] <= float(last.step_norm) / 4.0 * (1 + 1e-12)


@pytest.mark.parametrize("n_clients", RISES)
def test_after_a_return_nothing_is_taken_back_but_a_later_rise_is(n_clients: int) -> None:
    method, steps = known_run(*RISES[n_clients], n_clients=n_clients)
    first: Any = stepped(method, steps[-1].server, [1e6] * 4, 0, 1, 2, 3, n_clients=n_clients, round=9)
    assert not {"restart", "retreat"} & first.diagnostics.keys()  # this is the start itself, whatever is said of it
    fine: Any = stepped(method, steps[-1].server, [1.0] * 4, 0, 1, 2, 3, n_clients=n_clients, round=9)
    server, levels = fine.server, RISES[n_clients][1:]
    for round, level in enumerate(levels):
        later: Any = stepped(method, server, [level] * 4, 0, 1, 2, 3, n_clients=n_clients, round=10 + round)
        assert ("restart" in later.diagnostics) is (level == levels[-1])
        server = later.server
    assert torch.equal(server.theta, problem_of(8).theta0)


@pytest.mark.parametrize("n_clients", RISES)
def test_one_step_after_which_losses_are_above_the_start_is_taken_back_alone(n_clients: int) -> None:
    """The run was fine until then, and goes on from where it was."""
    _, steps = known_run(1.0, 0.8, 0.6, 50.0, n_clients=n_clients)
    assert "retreat" in steps[-1].diagnostics
    assert torch.equal(steps[-1].server.theta, steps[-3].server.theta)


def test_a_step_taken_back_is_followed_by_no_return() -> None:
    """Losses jump, the step goes back, and the same high losses there are no reason to go further."""
    method, steps = known_run(1.0, 0.5, n_clients=12)
    jumped: Any = stepped(method, steps[-1].server, [1.9] * 4, 0, 1, 2, 3, n_clients=12, round=2)
    assert "retreat" in jumped.diagnostics
    assert torch.equal(jumped.server.theta, steps[0].server.theta)
    after: Any = stepped(method, jumped.server, [50.0] * 4, 0, 1, 2, 3, n_clients=12, round=3)
    assert not {"restart", "retreat"} & after.diagnostics.keys()


def test_nobody_whose_loss_at_the_start_is_not_known_sends_the_run_back_there() -> None:
    """Clients 4 to 7 come later, and slowly get far above everything that was seen at the start."""
    method, steps = known_run(1.0, n_clients=12)
    server, n_rounds = steps[-1].server, 12
    for round in range(1, n_rounds):
        losses = [1.8**round] * 4
        step: Any = stepped(method, server, losses, 4, 5, 6, 7, n_clients=12, round=round)
        assert "restart" not in step.diagnostics
        server = step.server
    with_one_that_is_fine = stepped(method, server, [1.0, *[1e9] * 3], 0, 4, 5, 6, n_clients=12, round=n_rounds)
    assert "restart" not in with_one_that_is_fine.diagnostics


# ------------------------------------------------------------------------------------------ lengths that are limited


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("step_size", [0.25, 1.0, 6.0])
def test_a_step_beyond_a_pareto_point_is_at_most_the_mean_step_long(seed: int, step_size: float) -> None:
    """The last row opposes the sum of the others: no step is for everybody; one of m times the mean step is shorter."""
    problem = problem_of(2)
    method = DQNFed(epochs=2, step_size=step_size).prepare(problem, 6, 6)
    others = 0.01 * gaussian_rows(5, 2, seed=seed)
    rows = torch.cat([others, -0.8 * others.sum(0, keepdim=True)])
    step: Any = method.server_step(method.init_server(problem, 6), local_updates(rows), everybody(6))
    assert step.diagnostics["beyond"] == 1.0
    expected = min(step_size, 1.0) * float(rows.mean(0).norm())
    assert step.diagnostics["step_norm"] == pytest.approx(expected)


@pytest.mark.parametrize("n_for", range(5))
@pytest.mark.parametrize("n_clients", [4, 12])
def test_with_local_training_the_next_step_is_as_long_as_m_says(n_for: int, n_clients: int) -> None:
    """In the second round all rows are ten times as long, and n_for of four still point along the last step."""
    problem = replace(problem_of(8), theta0=10.0 * problem_of(8).theta0)
    method = DQNFed(epochs=2).prepare(problem, n_clients, 4)
    present = of_clients(0, 1, 2, 3, n_clients=n_clients, round=1)
    first: Any = method.server_step(
        method.init_server(problem, n_clients),
        local_updates(0.1 * torch.eye(8, dtype=torch.float64)[:4]),
        of_clients(0, 1, 2, 3, n_clients=n_clients, round=0),
    )
    signs = torch.where(torch.arange(4) < n_for, 1.0, -1.0).double()
    rows = torch.eye(8, dtype=torch.float64)[:4] * signs[:, None]
    second: Any = method.server_step(first.server, local_updates(rows), present)
    assert second.diagnostics["votes"] == n_for / 4
    assert second.diagnostics["beyond"] == 0.0
    before, after = first.diagnostics["step_norm"], second.diagnostics["step_norm"]
    free = second.diagnostics["m"] * float(rows.mean(0).norm())
    assert free > 3.0 * before
    assert after == pytest.approx(free)


# ------------------------------------------------------------------------------------------ clients that are missing


@pytest.mark.parametrize("settings", [{}, {"epochs": 2}])
@pytest.mark.parametrize(("n_clients", "participation"), [(6, 0.5), (8, 0.25), (12, 0.5)])
def test_one_client_that_never_replies_does_not_hold_m_at_its_start(
    settings: dict[str, Any], n_clients: int, participation: float
) -> None:
    """m is learnt in spite of it, since three quarters of the clients are known."""
    rounds, (problem, federation) = 25, classes(n_clients)
    clients = SometimesAway(away=frozenset((t, 1) for t in range(rounds)))
    options: dict[str, Any] = {"rounds": rounds, "participation": participation, "clients": clients}
    played = play(DQNFed(**settings), problem, federation, **options)
    assert math.isnan(played.servers[-1].votes.losses[1])
    assert max(record["diagnostics"].get("m", 0.0) for record in played.records) > 1.2


def ahead(method: DQNFed, cohorts: list[list[int]], rows: Tensor) -> list[Any]:
    """Return the steps of rounds in which these clients reply, all with the same small curvature."""
    problem = replace(problem_of(8), theta0=10.0 * problem_of(8).theta0)
    prepared = method.prepare(problem, len(rows), len(rows))
    server: Any = prepared.init_server(problem, len(rows))
    server = server._replace(n_steps=torch.tensor(1), step_norm=torch.tensor(1e-3, dtype=torch.float64))
    steps = []
    for round, clients in enumerate(cohorts):
        given, moved = rows[clients], server.theta - problem.theta0
        numbers = torch.ones(len(clients), dtype=torch.float64)
        flat = DescentUpdate(given, given.square().sum(1), loss=100.0 + given @ moved, curvature=0.01 * numbers)
        cohort = of_clients(*clients, n_clients=len(rows), round=round)
        steps.append(prepared.server_step(server, Replies(flat), cohort))
        server = steps[-1].server
    return steps


def growths_of(steps: list[Any]) -> list[float]:
    """Return how many times the last step each one is; the larger of alpha and the length, both are limited."""
    sizes = [(step.diagnostics["step_norm"], step.diagnostics["alpha"]) for step in steps]
    return [max(b[0] / a[0], b[1] / a[1]) for a, b in pairwise(sizes)]


@pytest.mark.parametrize(
    ("metric", "cohorts", "growths"),
    [
        ("lbfgs", [[0, 1, 2, 3]] * 3, [3.0, 3.0]),
        ("lbfgs", [[0, 1, 2, 3], [0, 1, 2], [0, 1, 2]], [1.0, 3.0]),
        ("lbfgs", [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3]], [1.0, 3.0]),
        ("lbfgs", [[0, 1, 2], [1, 2, 3], [0, 1, 3]], [1.0, 1.0]),
        ("identity", [[0, 1, 2], [1, 2, 3], [0, 1, 3]], [3.0, 3.0]),  # it keeps no mean gradient, nor whose it is
    ],
)
def test_a_step_after_one_of_other_clients_is_not_longer(
    metric: str, cohorts: list[list[int]], growths: list[float]
) -> None:
    """Their curvatures allow for far more."""
    steps = ahead(DQNFed(metric=metric), cohorts, agreeing_rows(4, 8, agreement=3.0))
    assert growths_of(steps) == pytest.approx(growths)


def test_a_client_that_is_left_out_of_every_step_holds_back_none() -> None:
    """Client 3 opposes the others; whether it replies or not, the steps are for these three."""
    rows = agreeing_rows(4, 8, agreement=3.0)
    rows[3] = -rows[:3].mean(0)
    steps = ahead(DQNFed(drop_share=0.25), [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3]], rows)
    assert all(step.server.metric.before.members.tolist() == [True, True, True, False] for step in steps)
    assert growths_of(steps) == pytest.approx([3.0, 3.0, 3.0])


@pytest.mark.parametrize("present", [range(9), range(1, 10)])
def test_a_cohort_that_counts_as_everybody_does_not_end_the_run(present: range) -> None:
    """One of ten is missing, as many as may be left out, and the mean of the nine vanishes: the tenth may gain."""
    pairs, problem = torch.eye(8, dtype=torch.float64)[:4], problem_of(8)
    rows = torch.cat([pairs, -pairs, 1e-9 * torch.ones(1, 8, dtype=torch.float64)])
    method = DQNFed(epochs=2, drop_share=0.2, cached_clients=0).prepare(problem, 10, 9)
    cohort = of_clients(*present, n_clients=10, round=0)
    step: Any = method.server_step(method.init_server(problem, 10), local_updates(rows), cohort)
    assert step.status is Status.HOLD

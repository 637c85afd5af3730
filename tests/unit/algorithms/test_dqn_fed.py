"""DQN-Fed's claims on whole runs, and what the literal method does without its safeguards."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.dqn_fed_literal import DQNFedLiteral
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.parts.messages import First, Probe, Trial
from dqnfed.algorithms.server_lbfgs import ServerLBFGS
from dqnfed.core.algorithm import AnyAlgorithm, Cohort, Status, Theta
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from dqnfed.core.result import RunResult
from dqnfed.core.tensors import row, stack
from dqnfed.experiments.synthetic import bowls, distance_to_pareto_set
from dqnfed.sim.engine import run
from dqnfed.sim.state import Evaluation
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.baselines import classes
from tests.helpers.bowls import Case, Client, federation_of, labelled_clients, linear_model, network_bowl, softmax_bowl
from tests.helpers.play import play
from tests.helpers.quadratic_clients import consistent_quadratics, narrow_valley, quadratic_clients, two_cycle
from tests.helpers.quick import every, in_turn

WORK: dict[str, dict[str, Any]] = {"gradients": {}, "local SGD": {"epochs": 2, "lr": 0.5}}


def train(algorithm: AnyAlgorithm, case: Case, rounds: int, *, participation: float | None = None) -> RunResult:
    share = case.participation if participation is None else participation
    return run(algorithm, case.problem, case.federation, rounds=rounds, participation=share)


def mean_losses(result: RunResult) -> list[float]:
    return [record["train_loss"]["mean"] for record in result.history]


def notes(result: RunResult, key: str) -> list[float]:
    return [record["diagnostics"][key] for record in result.history[1:] if key in record["diagnostics"]]


# ------------------------------------------------------------------------------------------ the literal method fails


def test_literal_one_client_with_its_exact_hessian_raises_its_own_loss() -> None:
    losses = mean_losses(train(DQNFedLiteral(form="hessian"), narrow_valley(), 1))
    assert losses[0] == pytest.approx(0.505)
    assert losses[1] == pytest.approx(12.374, abs=1e-3)


def test_literal_two_clients_jump_to_and_fro_for_ever() -> None:
    case = two_cycle()
    once = train(DQNFedLiteral(form="hessian"), case, 1).theta
    torch.testing.assert_close(once, torch.tensor([-0.695652, -0.395652], dtype=torch.float64), rtol=0, atol=1e-6)
    for rounds in (2, 4):
        back = train(DQNFedLiteral(form="hessian"), case, rounds).theta
        torch.testing.assert_close(back, case.problem.theta0, rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", ["direct", "inverse"])
def test_literal_keeps_every_pair_of_its_local_epochs(form: str) -> None:
    """E epochs make E pairs a round, the one from theta^{t-1} (zero at the start) included."""
    case = consistent_quadratics(2, 5)
    algorithm = DQNFedLiteral(form=form, epochs=3, lr=0.1)
    result = train(algorithm, case, 1)
    assert len(result.history) == 2
    losses = mean_losses(result)
    assert losses[1] != losses[0]


# ------------------------------------------------------------------------------------------ everybody, and no further


@pytest.mark.parametrize("case", [narrow_valley(), two_cycle()], ids=["narrow valley", "two-cycle"])
@pytest.mark.parametrize("beyond", ["mean", "stop"])
def test_the_default_converges_where_the_literal_method_fails(case: Case, beyond: str) -> None:
    losses = mean_losses(train(DQNFed(beyond=beyond), case, 60))
    assert losses[-1] < 0.9 * losses[0]
    assert max(losses) <= losses[0] * (1 + 1e-12)


@pytest.mark.parametrize("case", [narrow_valley(), two_cycle()], ids=["narrow valley", "two-cycle"])
def test_a_line_search_never_raises_a_loss_where_the_literal_method_fails(case: Case) -> None:
    result = train(DQNFed(step="line-search", beyond="stop"), case, 60)
    assert result.summary["rho_mean"] == 1.0
    assert result.summary["train_loss"]["mean"] < 0.9 * mean_losses(result)[0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("step", ["curvature", "line-search"])
def test_without_steps_beyond_no_loss_rises_and_it_ends_at_the_pareto_set(step: str, seed: int) -> None:
    """Eight bowls in double precision, on which secant curvatures of the last step are good enough as well."""
    problem, federation = bowls(seed=seed)
    exact, start = replace(problem, theta0=problem.theta0.double()), distance_to_pareto_set(problem.theta0, federation)
    result = run(DQNFed(beyond="stop", step=step), exact, federation, rounds=100)
    assert distance_to_pareto_set(result.theta, federation) < 1e-4 * start
    assert all(record["rho"] == 1.0 for record in result.history[1:])
    assert result.summary["status"] == "stopped"
    assert "Pareto-stationary" in result.summary["reason"]


@pytest.mark.parametrize("seed", range(3))
def test_past_the_pareto_set_the_mean_goes_on_falling(seed: int) -> None:
    """The default's mean loss ends below that of the run which stops where no step serves everybody."""
    problem, federation = bowls(seed=seed)
    ends = run(DQNFed(beyond="stop"), problem, federation, rounds=100)
    goes_on = run(DQNFed(), problem, federation, rounds=100)
    assert goes_on.summary["train_loss"]["mean"] < 0.99 * ends.summary["train_loss"]["mean"]
    assert sum(notes(goes_on, "beyond")) > 0
    assert not any(notes(ends, "beyond"))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [softmax_bowl, network_bowl])
def test_a_line_search_without_steps_beyond_never_raises_any_loss(make: Any, seed: int) -> None:
    result = train(DQNFed(step="line-search", beyond="stop"), make(seed=seed), 30)
    assert all(record["rho"] == 1.0 for record in result.history[1:])
    assert result.summary["train_loss"]["mean"] < 0.7 * mean_losses(result)[0]


@pytest.mark.parametrize("seed", range(3))
def test_a_line_search_never_raises_a_loss_of_consistent_clients(seed: int) -> None:
    case = consistent_quadratics(5, 8, condition=1000.0, seed=seed)
    result = train(DQNFed(step="line-search", beyond="stop"), case, 40)
    assert all(r["rho"] == 1.0 for r in result.history[1:])


@pytest.mark.parametrize("beyond", ["mean", "stop"])
@pytest.mark.parametrize("step", ["curvature", "line-search"])
def test_opposed_clients_stop_the_run_where_it_is(step: str, beyond: str) -> None:
    """Two clients on either side of theta: nothing helps both, nor the mean, so theta stays and the run says why."""
    hessians = torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    minimisers = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    case = quadratic_clients(hessians, minimisers, torch.zeros(2, dtype=torch.float64))
    result = train(DQNFed(step=step, beyond=beyond), case, 5)
    assert result.summary["rounds"] == 1
    assert result.summary["status"] == "stopped"
    why = "mean gradient vanishes" if beyond == "mean" else "no step lowers every client's loss"
    assert why in result.summary["reason"]
    torch.testing.assert_close(result.theta, case.problem.theta0, rtol=0, atol=0)


@pytest.mark.parametrize("beyond", ["mean", "stop"])
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_opposed_cohort_holds_when_others_may_still_move(work: dict[str, Any], beyond: str) -> None:
    hessians = torch.eye(2, dtype=torch.float64).expand(4, 2, 2)
    minimisers = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    case = quadratic_clients(hessians, minimisers, torch.zeros(2, dtype=torch.float64))
    method = DQNFed(beyond=beyond, cached_clients=0, **work)
    opposed, mixed = (
        run(method, case.problem, case.federation, rounds=8, participation=0.5, seed=seed) for seed in (0, 1)
    )
    assert {r["status"] for r in opposed.history[1:]} == {"hold"}  # one client of either side in every round
    assert opposed.summary["rounds"] == 8
    assert torch.equal(opposed.theta, case.problem.theta0)
    assert "next" in {r["status"] for r in mixed.history[1:]}


@pytest.mark.parametrize("growth", [1.5, 2.0, 4.0])
def test_steps_grow_by_a_factor_at_most(growth: float) -> None:
    """In length, and in the share of u that is taken."""
    result = train(DQNFed(growth=growth), consistent_quadratics(4, 10, condition=100.0), 30)
    for key in ("step_norm", "alpha"):
        assert all(after <= growth * before * (1 + 1e-12) for before, after in pairwise(notes(result, key)))


@pytest.mark.parametrize("seed", range(3))
def test_the_metric_saves_rounds_on_consistent_quadratics(seed: int) -> None:
    """To 1e-10 of the start in 20 rounds with the metric and the line search; the identity metric needs more."""
    case, searched = consistent_quadratics(3, 10, condition=100.0, seed=seed), {"step": "line-search", "memory": 20}
    with_metric = mean_losses(train(DQNFed(beyond="stop", metric_memory=20, **searched), case, 20))  # type: ignore[arg-type]
    without = mean_losses(train(DQNFed(beyond="stop", metric="identity", **searched), case, 20))  # type: ignore[arg-type]
    assert min(with_metric) <= 1e-10 * with_metric[0]
    assert min(without) > 1e-10 * without[0]


def test_one_client_with_the_metric_is_lbfgs_on_its_loss() -> None:
    """K = 1: u = (d / g'W^-1 g) W^-1 g, so both methods walk along the same line in every round."""
    case = consistent_quadratics(1, 6)
    fair, plain = train(DQNFed(), case, 2), train(ServerLBFGS(), case, 2)
    a, b = fair.theta - case.problem.theta0, plain.theta - case.problem.theta0
    assert float(a @ b / (a.norm() * b.norm())) > 1 - 1e-6


@pytest.mark.parametrize("rates", ["bfgs", "cauchy", "identity", "loss", "hessian"])
@pytest.mark.parametrize(("constraint", "participation"), in_turn(["at-least", "exactly"], [1.0, 0.5]))
def test_every_choice_of_rates_lowers_the_loss(rates: str, constraint: str, participation: float) -> None:
    rounds = 25 if participation == 1.0 else 80
    method = DQNFed(rates=rates, constraint=constraint)
    result = train(method, consistent_quadratics(4, 10), rounds, participation=participation)
    assert result.summary["train_loss"]["mean"] < (0.05 if participation == 1.0 else 0.3) * mean_losses(result)[0]


def test_unlike_paper_rates_are_capped_by_twice_the_loss() -> None:
    case = consistent_quadratics(3, 6)
    for cap, at_most in ((True, 1.0), (False, float("inf"))):
        algorithm = DQNFed(cap=cap, rates="identity").prepare(case.problem, 3, 3)
        tasks = _tasks(algorithm, case)
        memory = algorithm.init_memory(case.problem, tasks[0])
        scaled = replace(case.problem, losses=lambda o, t: 1e-3 * case.problem.losses(o, t))
        big = replace(case.problem, losses=lambda o, t: 1e3 * case.problem.losses(o, t))
        for problem in (scaled, big):
            update, _ = algorithm.client_step(problem, tasks[0], First(problem.theta0), memory)
            assert float(update.rate) <= at_most * 2.0 * float(update.loss) * (1 + 1e-12)
        if not cap:
            assert float(update.rate) > 2.0 * float(update.loss)


# ------------------------------------------------------------------------------------------ invariance


@pytest.mark.parametrize("participation", [1.0, 0.5, 1 / 6])
def test_with_gradients_there_is_no_learning_rate(participation: float) -> None:
    """Nor any other setting of the local work: the bits are the same."""
    case = softmax_bowl()
    plain = train(DQNFed(), case, 12, participation=participation)
    for changes in ({"lr": 1e-6}, {"lr": 1e6}, {"weight_decay": 0.5, "lr_decay": 0.5, "momentum": 0.9}):
        other = train(DQNFed(**changes), case, 12, participation=participation)  # type: ignore[arg-type]
        assert torch.equal(other.theta, plain.theta)
        assert set(changes) <= set(other.summary["unused"])


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("unit", [1e-4, 1e4])
def test_with_gradients_the_unit_of_the_losses_does_not_matter(unit: float, participation: float) -> None:
    """Losses, gradients and rates grow with it, inverse Hessians shrink, and the step is the same."""
    problem, federation = classes(6)
    scaled = replace(problem, losses=lambda outputs, targets: unit * problem.losses(outputs, targets))
    found, expected = (play(DQNFed(), p, federation, rounds=8, participation=participation) for p in (scaled, problem))
    for theta, other in zip(found.thetas, expected.thetas, strict=True):
        torch.testing.assert_close(theta, other, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
def test_the_model_s_coordinates_do_not_matter(work: dict[str, Any], participation: float) -> None:
    """A rotated problem has the rotated run: only products of rows decide."""
    case, n = consistent_quadratics(6, 5, seed=1), 5
    turn, _ = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    hessians = case.federation.train.targets.view(6, n, n)
    turned = quadratic_clients(turn @ hessians @ turn.T, torch.zeros(6, n).double(), turn @ case.problem.theta0)
    found, expected = (
        play(DQNFed(**work), c.problem, c.federation, rounds=8, participation=participation).thetas
        for c in (turned, case)
    )
    for theta, other in zip(found, expected, strict=True):
        torch.testing.assert_close(turn.T @ theta, other, rtol=1e-6, atol=1e-9)


# ------------------------------------------------------------------------------------------ local epochs


def test_the_first_step_is_as_long_as_fedavgs() -> None:
    case = consistent_quadratics(5, 8)
    plain = train(FedAvg(epochs=3, lr=0.3, weighting="uniform"), case, 1).theta - case.problem.theta0
    for step_size in (1.0, 0.25, 3.0):
        fair = train(DQNFed(epochs=3, lr=0.3, step_size=step_size), case, 1).theta - case.problem.theta0
        torch.testing.assert_close(fair.norm(), step_size * plain.norm())
        assert float(fair @ plain) < float(fair.norm() * plain.norm()) * (1 - 1e-6)


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_every_step_is_m_times_as_long_as_fedavgs_there(participation: float) -> None:
    """But for rounds where it may be shorter: after one that was taken back, past a Pareto point, or if everybody is
    here and most of them vote against longer steps; a model change longer than the model counts at its length."""
    problem, federation = classes(6)
    method = DQNFed(epochs=2, lr=0.5)
    played = play(method, problem, federation, rounds=12, participation=participation)
    n_checked, factors = 0, set[float]()
    for t, record in enumerate(played.records):
        found = record["diagnostics"]
        is_outvoted = participation == 1.0 and found.get("votes", 1.0) < 0.5
        if {"retreat", "restart"} & found.keys() or found["beyond"] or is_outvoted:
            continue
        there = replace(problem, theta0=played.thetas[t])
        updates = torch.stack([_local_update(there, federation, k) for k in record["clients"]])
        updates *= (there.theta0.norm() / updates.norm(dim=1, keepdim=True)).clamp(max=1.0)
        moved = played.thetas[t] - played.thetas[t + 1]
        assert float(moved.norm()) == pytest.approx(found["m"] * float(updates.mean(0).norm()), rel=1e-9)
        n_checked, factors = n_checked + 1, factors | {round(found["m"], 6)}
    assert n_checked >= 8
    assert len(factors) >= 6  # m is learnt


def _local_update(problem: Problem, federation: Any, client: int) -> Tensor:
    """Return what two full-batch steps of SGD change in the model of one client, with the sign turned."""
    train = federation.train
    rows = slice(int(train.starts[client]), int(train.starts[client + 1]))
    theta = problem.theta0
    for _ in range(2):
        theta = theta.detach().requires_grad_()
        loss = problem.losses(problem.predict(theta, train.inputs[rows]), train.targets[rows]).mean()
        theta = theta - 0.5 * torch.autograd.grad(loss, theta)[0]
    return (problem.theta0 - theta).detach()


def test_identical_updates_have_fedavgs_direction() -> None:
    one = consistent_quadratics(1, 8)
    hessian, minimiser = one.federation.train.targets, one.federation.train.inputs
    case = quadratic_clients(hessian.expand(4, -1).view(4, 8, 8), minimiser.expand(4, -1), one.problem.theta0)
    fair = train(DQNFed(epochs=2, lr=0.3), case, 1).theta
    plain = train(FedAvg(epochs=2, lr=0.3), case, 1).theta
    torch.testing.assert_close(fair, plain, rtol=1e-5, atol=1e-8)  # the ridge of 1e-6 is all that differs
    later = mean_losses(train(DQNFed(epochs=2, lr=0.3), case, 10))
    assert later[-1] < mean_losses(train(FedAvg(epochs=2, lr=0.3), case, 10))[-1]  # all vote for longer steps


# ------------------------------------------------------------------------------------------ part of the clients


def test_missed_rounds_leave_the_memory_alone() -> None:
    """A client's pairs grow with its own replies only, along its own moves."""
    case = consistent_quadratics(4, 6)
    algorithm = DQNFed(memory=5).prepare(case.problem, 4, 2)
    tasks = _tasks(algorithm, case)
    memory = algorithm.init_memory(case.problem, tasks[0])
    theta, hessian = case.problem.theta0, case.federation.train.targets[0].view(6, 6)
    sizes = []
    for turn in range(3):
        sent = First(theta) if turn == 0 else Theta(0.5**turn * theta)
        _, memory = algorithm.client_step(case.problem, tasks[0], sent, memory)
        sizes.append(int(memory.rates.pairs.n_pairs))
    assert sizes == [0, 1, 2]
    torch.testing.assert_close(memory.rates.pairs.s[-2:], torch.stack([-0.5 * theta, -0.25 * theta]))
    torch.testing.assert_close(memory.rates.pairs.y[-2:], memory.rates.pairs.s[-2:] @ hessian)
    torch.testing.assert_close(memory.theta, 0.25 * theta)
    torch.testing.assert_close(memory.gradient, 0.25 * hessian @ theta)


def test_a_rate_is_that_of_the_client_s_own_secant_pair() -> None:
    """d = g'Hg, H the inverse BFGS matrix of the pair started at s'y / y'y: on a quadratic, from the formulas."""
    case = consistent_quadratics(2, 5)
    algorithm = DQNFed(cap=False).prepare(case.problem, 4, 2)
    task, hessian = _tasks(algorithm, case)[1], case.federation.train.targets[1].view(5, 5)
    memory = algorithm.init_memory(case.problem, task)
    before, now = case.problem.theta0, 0.3 * case.problem.theta0.flip(0)
    _, memory = algorithm.client_step(case.problem, task, First(before), memory)
    reply, _ = algorithm.client_step(case.problem, task, Theta(now), memory)
    s = now - before
    y, g = hessian @ s, hessian @ now
    V = torch.eye(5, dtype=torch.float64) - torch.outer(y, s) / (s @ y)
    H = V.T @ (s @ y / (y @ y) * V) + torch.outer(s, s) / (s @ y)
    torch.testing.assert_close(reply.rate, g @ H @ g)


def test_newcomer_in_a_full_cohort_has_no_secant_and_takes_the_median_rate() -> None:
    """A client that keeps nothing (a restarted one) sends no curvature and no rate, and the step is finite."""
    case = consistent_quadratics(3, 6)
    algorithm = DQNFed().prepare(case.problem, 3, 3)
    tasks = _tasks(algorithm, case)
    fresh = algorithm.init_memory(case.problem, tasks[0])
    moved = Theta(0.9 * case.problem.theta0)
    replies = []
    for k, task in enumerate(tasks):
        memory = fresh
        if k > 0:
            _, memory = algorithm.client_step(case.problem, task, First(case.problem.theta0), fresh)
        replies.append(algorithm.client_step(case.problem, task, moved, memory)[0])
    assert torch.isnan(replies[0].rate)
    assert torch.isnan(replies[0].curvature)
    server = algorithm.init_server(case.problem, 3)
    server = server._replace(
        theta=moved.theta, n_steps=torch.tensor(1), step_norm=(0.1 * case.problem.theta0).norm().double()
    )
    step = algorithm.server_step(server, Replies(stack(replies)), Cohort(torch.arange(3), torch.ones(3), 3, 1))
    assert step.status is Status.NEXT
    assert bool(torch.isfinite(step.server.theta).all())


def test_messages_and_traffic_follow_the_mode() -> None:
    """n down; n + 3 up where curvatures set the length, n + 2 with part of the clients, n + 1 with local SGD."""
    case, n = consistent_quadratics(4, 6), 6
    full = train(DQNFed(), case, 3).history[-1]
    assert (full["bytes_down"], full["bytes_up"], full["passes"]) == (4 * 8 * n, 4 * 8 * (n + 3), 4.0)
    part = train(DQNFed(), case, 3, participation=0.5).history[-1]
    assert (part["bytes_down"], part["bytes_up"], part["passes"]) == (2 * 8 * n, 2 * 8 * (n + 2), 2.0)
    local = train(DQNFed(epochs=3), case, 3, participation=0.5).history[-1]
    assert (local["bytes_down"], local["bytes_up"], local["passes"]) == (2 * 8 * n, 2 * 8 * (n + 1), 2 * 3.0)


HARD_CLIENTS: dict[str, list[Client]] = {
    "duplicates": [labelled_clients(3, 4)[k] for k in (0, 1, 0, 2, 1, 0)],
    "identical": labelled_clients(1, 4) * 6,
    "one class each": [
        (inputs + 2.0 * torch.eye(4, dtype=torch.float64)[k % 3], torch.full_like(labels, k % 3))
        for k, (inputs, labels) in enumerate(labelled_clients(6, 4))
    ],
    "one of two examples": [*labelled_clients(5, 4), tuple(t[:2] for t in labelled_clients(1, 4)[0])],  # type: ignore[list-item]
}


@pytest.mark.parametrize(
    ("name", "size", "work"),
    every(5, [(name, size, work) for name in HARD_CLIENTS for size in (1, 6, 2) for work in WORK]),
)
def test_hard_federations_end_below_their_start(name: str, size: int, work: str) -> None:
    """Also with cohorts of one and two clients, over three orders of sampling."""
    federation = federation_of(HARD_CLIENTS[name])
    problem = Problem.from_module(linear_model(4, 3), loss="cross-entropy", ridge=1e-2)
    for seed in range(3):
        result = run(DQNFed(**WORK[work]), problem, federation, rounds=40, participation=size / 6, seed=seed)
        losses = mean_losses(result)
        assert losses[-1] < 0.9 * losses[0]
        assert max(losses) <= 1.5 * losses[0]


# ------------------------------------------------------------------------------------------ fitted clients


def with_a_fitted_client(margin: float) -> Case:
    """Return four clients with rules of their own, and one whose examples the first model classifies by the margin."""
    draw = torch.Generator().manual_seed(5)
    model = nn.Linear(4, 2, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    clients = []
    for k in range(4):
        inputs = torch.randn(50, 4, generator=draw, dtype=torch.float64)
        clients.append((inputs, (inputs[:, k] > 0).long()))
    across = (model.weight[0] - model.weight[1]).detach()
    fitted = (margin / (across @ across) * across).repeat(50, 1)
    return Case(Problem.from_module(model), federation_of([*clients, (fitted, torch.zeros(50, dtype=torch.long))]))


@pytest.mark.parametrize(("margin", "participation"), in_turn([5.0, 15.0, 30.0, 45.0], [1.0, 0.6]))
@pytest.mark.parametrize("work", [{}, {"epochs": 2, "lr": 1.0}], ids=WORK)
def test_a_client_that_is_fitted_at_the_start_does_not_stop_the_others(
    margin: float, participation: float, work: dict[str, Any]
) -> None:
    """Its loss is between 1e-2 and 1e-20; the mean ends within a twentieth of tuned FedAvg's loss."""
    case = with_a_fitted_client(margin)
    tuned = min(mean_losses(train(FedAvg(lr=lr), case, 30))[-1] for lr in (0.3, 1.0, 3.0))
    found = train(DQNFed(**work), case, 30, participation=participation)
    assert found.summary["rounds"] == 30
    assert mean_losses(found)[-1] <= 1.05 * tuned


# ------------------------------------------------------------------------------------------ bad clients


@pytest.mark.parametrize("step", ["curvature", "line-search"])
def test_a_client_with_a_steep_loss_is_clipped_without_harm(step: str) -> None:
    """Its loss 1000 times the others': clipped, yet losses and curvatures are compared in its own units."""
    case = consistent_quadratics(5, 6, seed=2)
    scaled = case.federation.train.targets.clone()
    scaled[3] *= 1000.0
    steep = quadratic_clients(scaled.view(5, 6, 6), case.federation.train.inputs, case.problem.theta0)
    result = train(DQNFed(step=step, beyond="stop"), steep, 20)
    assert result.summary["n_clipped"] > 0
    assert result.summary["rho_mean"] == 1.0
    assert result.summary["train_loss"]["mean"] < 1e-8 * mean_losses(result)[0]


def test_a_sign_flipped_client_is_left_out_when_that_is_allowed() -> None:
    """Four clients agree, one pulls the other way: with drop_share the four go on without it."""
    hessians = torch.eye(3, dtype=torch.float64).expand(5, 3, 3)
    minimisers = torch.tensor([[1.0, 0, 0], [1, 0.1, 0], [1, -0.1, 0], [1, 0, 0.1], [-1, 0, 0]], dtype=torch.float64)
    case = quadratic_clients(hessians, minimisers, torch.zeros(3, dtype=torch.float64))
    strict = train(DQNFed(beyond="stop"), case, 10)
    lenient = train(DQNFed(beyond="stop", drop_share=0.2), case, 10)
    assert float(strict.theta[0]) == pytest.approx(0.0, abs=1e-9)
    assert float(lenient.theta[0]) > 0.3
    for beyond in (DQNFed(), DQNFed(drop_share=0.2)):
        assert float(train(beyond, case, 20).theta[0]) > 0.3  # of the mean's minimum at 0.6


# ------------------------------------------------------------------------------------------ phases


def test_first_round_probes_and_later_rounds_do_not() -> None:
    case = consistent_quadratics(3, 6)
    algorithm = DQNFed(step="line-search").prepare(case.problem, 3, 3)
    assert isinstance(algorithm.send(algorithm.init_server(case.problem, 3)), First)
    assert algorithm.passes(First(case.problem.theta0)) == 2.0
    assert algorithm.passes(Probe(case.problem.theta0, case.problem.theta0)) == 2.0
    assert algorithm.passes(Trial(case.problem.theta0)) == 0.5
    assert algorithm.passes(Theta(case.problem.theta0)) == 1.0
    local = DQNFed(epochs=3).prepare(case.problem, 3, 3)
    assert isinstance(local.send(local.init_server(case.problem, 3)), Theta)
    assert local.passes(Theta(case.problem.theta0)) == 3.0  # and a forward pass for the loss


def test_server_lbfgs_keeps_no_gradient_of_a_changing_cohort() -> None:
    case = consistent_quadratics(4, 6)
    with pytest.raises(ValueError, match="only 2 of 4 clients"):
        train(ServerLBFGS(previous="kept"), case, 1, participation=0.5)


def test_evaluation_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="every"):
        Evaluation(every=0)


def _tasks(algorithm: AnyAlgorithm, case: Case) -> list[Any]:
    stacked = TaskBuilder(case.federation, case.problem, algorithm, 0).stacked(
        torch.arange(case.federation.n_clients), 0
    )
    return [row(stacked, k) for k in range(case.federation.n_clients)]

"""DQN-Fed: what its safeguards promise, and what the literal method does without them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.dqn_fed_literal import DQNFedLiteral
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.parts.messages import DescentUpdate, First, Models, Probe, Trial
from dqnfed.algorithms.server_lbfgs import ServerLBFGS
from dqnfed.core.algorithm import AnyAlgorithm, Cohort, Status, Theta
from dqnfed.core.replies import Replies
from dqnfed.core.result import RunResult
from dqnfed.core.tensors import stack
from dqnfed.experiments.synthetic import bowls, distance_to_pareto_set
from dqnfed.sim.engine import run
from dqnfed.sim.state import Evaluation
from tests.helpers.bowls import Case
from tests.helpers.quadratic_clients import consistent_quadratics, narrow_valley, quadratic_clients, two_cycle


def train(algorithm: AnyAlgorithm, case: Case, rounds: int, *, participation: float | None = None) -> RunResult:
    share = case.participation if participation is None else participation
    return run(algorithm, case.problem, case.federation, rounds=rounds, participation=share)


def mean_losses(result: RunResult) -> list[float]:
    return [record["train_loss"]["mean"] for record in result.history]


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


# ------------------------------------------------------------------------------------------ the default does not


@pytest.mark.parametrize("case", [narrow_valley(), two_cycle()], ids=["narrow valley", "two-cycle"])
def test_default_never_raises_a_loss_where_the_literal_method_fails(case: Case) -> None:
    result = train(DQNFed(), case, 60)
    assert result.summary["rho_mean"] == 1.0
    assert result.summary["train_loss"]["mean"] < 0.9 * mean_losses(result)[0]


def test_default_approaches_the_pareto_set() -> None:
    problem, federation = bowls(seed=3)
    start = distance_to_pareto_set(problem.theta0, federation)
    result = run(DQNFed(), problem, federation, rounds=100)
    assert distance_to_pareto_set(result.theta, federation) < 0.02 * start
    assert result.summary["status"] == "stopped"
    assert "Pareto-stationary" in result.summary["reason"]


def test_opposed_clients_stop_the_run_where_it_is() -> None:
    """Two clients on either side of theta: nothing helps both, so theta stays and the run says why."""
    hessians = torch.eye(2, dtype=torch.float64).expand(2, 2, 2)
    minimisers = torch.tensor([[-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    case = quadratic_clients(hessians, minimisers, torch.zeros(2, dtype=torch.float64))
    for step in ("curvature", "line-search"):
        result = train(DQNFed(step=step), case, 5)
        assert result.summary["rounds"] == 1
        assert result.summary["status"] == "stopped"
        torch.testing.assert_close(result.theta, case.problem.theta0, rtol=0, atol=0)


def test_opposed_cohort_holds_when_others_may_still_move() -> None:
    hessians = torch.eye(2, dtype=torch.float64).expand(4, 2, 2)
    minimisers = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    case = quadratic_clients(hessians, minimisers, torch.zeros(2, dtype=torch.float64))
    result = train(DQNFed(metric="identity"), case, 8, participation=0.5)
    assert result.summary["rounds"] == 8
    assert {r["status"] for r in result.history[1:]} <= {"hold", "next"}
    opposed = [r for r in result.history[1:] if r["status"] == "hold"]
    assert all(r["loss_before"] == r["loss_after"] for r in opposed)


def test_steps_at_most_double() -> None:
    result = train(DQNFed(), consistent_quadratics(4, 10, condition=100.0), 30)
    norms = [r["diagnostics"]["step_norm"] for r in result.history[1:] if "step_norm" in r["diagnostics"]]
    assert all(after <= 2.0 * before * (1 + 1e-12) for before, after in pairwise(norms))
    faster = train(DQNFed(growth=4.0), consistent_quadratics(4, 10, condition=100.0), 30)
    norms = [r["diagnostics"]["step_norm"] for r in faster.history[1:] if "step_norm" in r["diagnostics"]]
    assert all(after <= 4.0 * before * (1 + 1e-12) for before, after in pairwise(norms))


@pytest.mark.parametrize("seed", range(3))
def test_line_search_never_raises_any_loss(seed: int) -> None:
    case = consistent_quadratics(5, 8, condition=1000.0, seed=seed)
    result = train(DQNFed(step="line-search"), case, 40)
    assert all(r["rho"] == 1.0 for r in result.history[1:])


@pytest.mark.parametrize("seed", range(3))
def test_the_metric_saves_rounds_on_consistent_quadratics(seed: int) -> None:
    """To 1e-10 of the start in 20 rounds with the metric and the line search; the identity metric needs more."""
    case = consistent_quadratics(3, 10, condition=100.0, seed=seed)
    with_metric = mean_losses(train(DQNFed(step="line-search", metric_memory=20, memory=20), case, 20))
    without = mean_losses(train(DQNFed(step="line-search", metric="identity", memory=20), case, 20))
    assert min(with_metric) <= 1e-10 * with_metric[0]
    assert min(without) > 1e-10 * without[0]


def test_one_client_with_the_metric_is_lbfgs_on_its_loss() -> None:
    """K = 1: u = (d / g'W^-1 g) W^-1 g, so both methods walk along the same line in every round."""
    case = consistent_quadratics(1, 6)
    fair, plain = train(DQNFed(), case, 2), train(ServerLBFGS(), case, 2)
    a, b = fair.theta - case.problem.theta0, plain.theta - case.problem.theta0
    assert float(a @ b / (a.norm() * b.norm())) > 1 - 1e-6


@pytest.mark.parametrize("rates", ["bfgs", "cauchy", "identity", "loss", "hessian"])
@pytest.mark.parametrize("constraint", ["at-least", "exactly"])
def test_every_choice_of_rates_lowers_the_loss(rates: str, constraint: str) -> None:
    result = train(DQNFed(rates=rates, constraint=constraint), consistent_quadratics(4, 10), 25)
    assert result.summary["train_loss"]["mean"] < 0.05 * mean_losses(result)[0]


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


# ------------------------------------------------------------------------------------------ local epochs


def test_match_step_is_as_long_as_fedavgs() -> None:
    case = consistent_quadratics(5, 8)
    fair = train(DQNFed(epochs=3, lr=0.3), case, 1).theta - case.problem.theta0
    plain = train(FedAvg(epochs=3, lr=0.3, weighting="uniform"), case, 1).theta - case.problem.theta0
    torch.testing.assert_close(fair.norm(), plain.norm())
    assert float(fair @ plain) < float(plain @ plain) * (1 - 1e-6)


def test_identical_updates_give_exactly_fedavg() -> None:
    one = consistent_quadratics(1, 8)
    hessian, minimiser = one.federation.train.targets, one.federation.train.inputs
    case = quadratic_clients(hessian.expand(4, -1).view(4, 8, 8), minimiser.expand(4, -1), one.problem.theta0)
    fair = train(DQNFed(epochs=2, lr=0.3), case, 3).theta
    plain = train(FedAvg(epochs=2, lr=0.3), case, 3).theta
    torch.testing.assert_close(fair, plain, rtol=1e-5, atol=1e-8)  # the ridge of 1e-6 is all that differs


def test_local_sgd_refuses_rules_for_gradients() -> None:
    case = consistent_quadratics(2, 4)
    with pytest.raises(ValueError, match="local SGD is no gradient"):
        train(DQNFed(epochs=2, step="curvature"), case, 1)
    with pytest.raises(ValueError, match="needs local='sgd'"):
        train(DQNFed(step="match"), case, 1)


# ------------------------------------------------------------------------------------------ partial participation


def test_missed_rounds_leave_the_memory_alone() -> None:
    """A client's pairs grow with its own replies only."""
    case = consistent_quadratics(4, 6)
    algorithm = DQNFed(memory=5).prepare(case.problem, 4, 2)
    tasks = _tasks(algorithm, case)
    memory = algorithm.init_memory(case.problem, tasks[0])
    theta = case.problem.theta0
    sizes = []
    for turn in range(3):
        sent = First(theta) if turn == 0 else Models(0.5**turn * theta, 0.5 ** (turn - 1) * theta)
        _, memory = algorithm.client_step(case.problem, tasks[0], sent, memory)
        sizes.append(int(memory.rates.pairs.n_pairs))
    assert sizes == [0, 1, 2]


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


def test_messages_and_traffic_follow_the_participation() -> None:
    """Everybody: n down, n + 3 up, one pass. A changing cohort with the metric: 2n down, 2n + 3 up, two passes."""
    case, n = consistent_quadratics(4, 6), 6
    full = train(DQNFed(), case, 3).history[-1]
    assert (full["bytes_down"], full["bytes_up"], full["passes"]) == (4 * 8 * n, 4 * 8 * (n + 3), 4.0)
    part = train(DQNFed(), case, 3, participation=0.5).history[-1]
    assert (part["bytes_down"], part["bytes_up"], part["passes"]) == (2 * 8 * 2 * n, 2 * 8 * (2 * n + 3), 4.0)
    lite = train(DQNFed(metric="identity"), case, 3, participation=0.5).history[-1]
    assert lite["bytes_up"] == 2 * 8 * (n + 3)


def test_auto_metric_needs_a_quarter_of_the_clients() -> None:
    problem = consistent_quadratics(2, 4).problem
    assert DQNFed().prepare(problem, 100, 25).metric == "lbfgs"
    assert DQNFed().prepare(problem, 100, 24).metric == "identity"
    assert DQNFed(epochs=5).prepare(problem, 100, 100).metric == "identity"


# ------------------------------------------------------------------------------------------ bad clients


def test_a_client_that_lies_about_its_rate_is_held_to_the_cohort() -> None:
    case = consistent_quadratics(6, 10)
    algorithm = DQNFed(rate_bounds=10.0).prepare(case.problem, 6, 6)
    rates = torch.ones(6, dtype=torch.float64)
    rates[2] = 1e6
    reply = DescentUpdate(torch.eye(6, dtype=torch.float64), rates, rates, rates, rates)
    assert algorithm.wanted_rates(Replies(reply), torch.ones(6, dtype=torch.float64).numpy()).max() == 10.0


@pytest.mark.parametrize("step", ["curvature", "line-search"])
def test_a_client_with_a_steep_loss_is_clipped_without_harm(step: str) -> None:
    """Its loss 1000 times the others': clipped, yet losses and curvatures are compared in its own units."""
    case = consistent_quadratics(5, 6, seed=2)
    scaled = case.federation.train.targets.clone()
    scaled[3] *= 1000.0
    steep = quadratic_clients(scaled.view(5, 6, 6), case.federation.train.inputs, case.problem.theta0)
    result = train(DQNFed(step=step), steep, 20)
    assert result.summary["n_clipped"] > 0
    assert result.summary["rho_mean"] == 1.0
    assert result.summary["train_loss"]["mean"] < 1e-8 * mean_losses(result)[0]


def test_a_sign_flipped_client_is_left_out_when_that_is_allowed() -> None:
    """Four clients agree, one pulls the other way: with drop_share the four go on without it."""
    hessians = torch.eye(3, dtype=torch.float64).expand(5, 3, 3)
    minimisers = torch.tensor([[1.0, 0, 0], [1, 0.1, 0], [1, -0.1, 0], [1, 0, 0.1], [-1, 0, 0]], dtype=torch.float64)
    case = quadratic_clients(hessians, minimisers, torch.zeros(3, dtype=torch.float64))
    strict = train(DQNFed(), case, 10)
    lenient = train(DQNFed(drop_share=0.2), case, 10)
    assert float(strict.theta[0]) == pytest.approx(0.0, abs=1e-9)
    assert float(lenient.theta[0]) > 0.3


# ------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"rates": "newton"}, "rates"),
        ({"constraint": "at-most"}, "constraint"),
        ({"metric": "diag"}, "metric"),
        ({"step": "long"}, "step"),
        ({"memory": 0}, "memory"),
        ({"growth": 0.5}, "growth"),
        ({"ridge": -1.0}, "ridge"),
        ({"rate_bounds": 0.5}, "rate_bounds"),
        ({"drop_share": 1.0}, "drop_share"),
        ({"lr": 0.0}, "lr"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(bad: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=f"`{named}` must be"):
        DQNFed(**bad)  # type: ignore[arg-type]


def test_exact_hessians_are_refused_for_large_models() -> None:
    problem = replace(consistent_quadratics(1, 4).problem, theta0=torch.zeros(10_000))
    with pytest.raises(ValueError, match="n <= 5000"):
        DQNFed(rates="hessian").prepare(problem, 1, 1)


def test_first_round_probes_and_later_rounds_do_not() -> None:
    case = consistent_quadratics(3, 6)
    algorithm = DQNFed(step="line-search").prepare(case.problem, 3, 3)
    assert isinstance(algorithm.send(algorithm.init_server(case.problem, 3)), First)
    assert algorithm.passes(First(case.problem.theta0)) == 2.0
    assert algorithm.passes(Probe(case.problem.theta0, case.problem.theta0)) == 2.0
    assert algorithm.passes(Trial(case.problem.theta0)) == 0.5
    assert algorithm.passes(Theta(case.problem.theta0)) == 1.0


def test_server_lbfgs_keeps_no_gradient_of_a_changing_cohort() -> None:
    case = consistent_quadratics(4, 6)
    with pytest.raises(ValueError, match="only 2 of 4 clients"):
        train(ServerLBFGS(previous="kept"), case, 1, participation=0.5)


def _tasks(algorithm: AnyAlgorithm, case: Case) -> list:  # type: ignore[type-arg]
    from dqnfed.core.tensors import row
    from dqnfed.sim.tasks import TaskBuilder

    stacked = TaskBuilder(case.federation, case.problem, algorithm, 0).stacked(
        torch.arange(case.federation.n_clients), 0
    )
    return [row(stacked, k) for k in range(case.federation.n_clients)]


def test_evaluation_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="every"):
        Evaluation(every=0)

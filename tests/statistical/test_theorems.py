"""The paper's theorems for its own algorithm: where they hold, where they fail, and by which numbers."""

from __future__ import annotations

import pytest
import torch

from dqnfed.algorithms.dqn_fed_literal import DQNFedLiteral
from dqnfed.experiments.convex_problems import client_losses, convex_problem
from dqnfed.experiments.theory import (
    Finding,
    Quadratic,
    check_theorems,
    contraction,
    paper_step,
    random_quadratics,
    rows_and_rates,
    text_table,
    two_bowls,
)
from dqnfed.maths.directions import rate_matching_step
from tests.helpers.convex import played
from tests.helpers.data import real_data


@pytest.fixture(scope="module")
def findings() -> list[Finding]:
    return check_theorems()


def test_everything_behaves_as_documented(findings: list[Finding]) -> None:
    assert [finding.theorem for finding in findings if not finding.as_documented] == []


@pytest.mark.parametrize("number", ["4.1", "4.2", "4.3", "4.4", "4.5", "4.6", "Lemma B.3"])
def test_every_theorem_is_checked(findings: list[Finding], number: str) -> None:
    rows = [finding for finding in findings if number in finding.theorem]
    assert any(finding.holds for finding in rows)
    assert all(finding.assumption and finding.measured for finding in rows)
    if number != "4.4":
        assert any(not finding.holds for finding in rows)  # each of the others has a counter-example


def test_the_table_says_what_is_not_as_documented() -> None:
    row = Finding("Theorem 0", "nothing", "everything", holds=True, is_expected_to_hold=False)
    assert "NOT as documented" in text_table([row])
    assert "fails" in text_table([Finding("Theorem 0", "a", "b", holds=False, is_expected_to_hold=False)])


def test_one_quadratic_client_gets_the_error_minimising_gradient_step() -> None:
    """Not Newton's: one client's step is along its gradient, twice Polyak's length, even with exact curvature."""
    client = random_quadratics(1, 6, condition=50.0, spread=0.0, seed=0)[0]
    theta = torch.ones(6, dtype=torch.float64)
    g, step = client.gradient(theta), paper_step([client], theta)
    torch.testing.assert_close(step, g * client.rate(theta) / (g @ g), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(step, g * 2 * client.loss(theta) / (g @ g), rtol=1e-10, atol=1e-12)
    lengths = torch.linspace(0.5, 1.5, 101, dtype=torch.float64)
    distances = torch.stack([(theta - length * step).norm() for length in lengths])
    assert float(lengths[distances.argmin()]) == pytest.approx(1.0)


def test_the_valley_where_the_loss_of_a_single_client_rises() -> None:
    valley = Quadratic(torch.diag(torch.tensor([1.0, 100.0], dtype=torch.float64)), torch.zeros(2, dtype=torch.float64))
    theta = torch.tensor([1.0, 0.01], dtype=torch.float64)
    after = theta - paper_step([valley], theta)
    assert float(valley.loss(theta)) == pytest.approx(0.505)
    assert float(valley.loss(after)) == pytest.approx(12.374, abs=5e-4)
    assert float(theta.norm()) == pytest.approx(1.00005, abs=1e-5)
    assert float(after.norm()) == pytest.approx(0.70004, abs=1e-4)


@pytest.mark.parametrize(("condition", "may_rise"), [(5.5, False), (100.0, True)])
def test_a_single_loss_is_monotone_only_up_to_a_condition_number(condition: float, may_rise: bool) -> None:
    """(g'Hg)(g'H^-1 g) <= 2 (g'g)^2 is guaranteed up to 3 + 2 sqrt 2 = 5.83, by Kantorovich's inequality."""
    rises = 0
    for seed in range(200):
        client = random_quadratics(1, 2, condition=condition, spread=0.0, seed=seed)[0]
        theta = torch.randn(2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        rises += float(client.loss(theta - paper_step([client], theta))) > float(client.loss(theta))
    assert (rises > 0) is may_rise


def test_shared_minimiser_the_step_is_a_projection_and_exact_with_as_many_clients_as_dimensions() -> None:
    clients = random_quadratics(4, 4, condition=10.0, spread=0.0, seed=1)
    theta = torch.ones(4, dtype=torch.float64)
    torch.testing.assert_close(paper_step(clients, theta), theta, rtol=1e-6, atol=1e-7)
    few = clients[:2]
    G, _ = rows_and_rates(few, theta)
    projection = torch.linalg.pinv(G) @ G @ theta
    torch.testing.assert_close(paper_step(few, theta), projection, rtol=1e-8, atol=1e-9)
    assert contraction(few, rounds=20) > 0.05


def test_different_minimisers_make_an_exact_cycle_of_two() -> None:
    start = torch.tensor([0.3, 1.0], dtype=torch.float64)
    second = start - paper_step(two_bowls(), start)
    torch.testing.assert_close(second, torch.tensor([-0.695652, -0.395652], dtype=torch.float64), rtol=0, atol=1e-6)
    theta = start
    for _ in range(20):
        theta = theta - paper_step(two_bowls(), theta)
    torch.testing.assert_close(theta, start, rtol=0, atol=1e-9)


def test_steps_grow_without_bound_towards_a_pareto_stationary_point() -> None:
    """Rates stay positive where a combination of the gradients vanishes: ||u|| >= sum l_k d_k / ||sum l_k g_k||."""
    clients = two_bowls()
    lengths = []
    for height in (1e-1, 1e-2, 1e-3):
        theta = torch.tensor([0.0, height], dtype=torch.float64)
        G, d = rows_and_rates(clients, theta)
        step = rate_matching_step(G, d).step
        weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
        assert float(step.norm()) >= float(weights @ d / (weights @ G).norm()) * (1 - 1e-9)
        lengths.append(float(step.norm()))
    assert lengths[0] < lengths[1] / 5 < lengths[2] / 25


def test_the_literal_algorithm_diverges_on_a1a_with_exact_hessians() -> None:
    convex = convex_problem("a1a", real_data("libsvm").parent)
    run = played(DQNFedLiteral(form="hessian"), convex, 4)
    losses = [float(client_losses(convex.problem, convex.federation, theta).mean()) for theta in run.thetas]
    assert losses == pytest.approx([0.693, 0.438, 1.51, 29.6, 1592.0], rel=5e-3)

"""FedNew and Q-FedNew: ADMM identities, limits and fixed points."""

from typing import Any

import pytest
import torch
from torch.func import vmap

from dqnfed.algorithms.distributed_newton import DistributedNewton
from dqnfed.algorithms.fednew import FedNew, FedNewMemory, FedNewUpdate, Fresh
from dqnfed.algorithms.q_fednew import QFedNew
from dqnfed.core.problem import Task
from tests.helpers.convex import SumsOnly, gradients, hessians, least_squares, logistic, played


def test_duals_sum_to_zero() -> None:
    for memory in played(FedNew(), logistic(), 10).memories[1:]:
        assert float(memory.dual.sum(0).abs().max()) <= 1e-12


def test_many_passes_at_one_point_give_the_damped_newton_step() -> None:
    """The outer rounds move theta; with theta held, the ADMM passes alone converge to Newton's direction."""
    convex = least_squares()
    theta = convex.problem.theta0
    algorithm = FedNew(rho=0.5, alpha=0.2)
    tasks = convex.tasks
    memory = vmap(lambda task: algorithm.init_memory(convex.problem, task))(tasks)
    common = torch.zeros_like(theta)
    for _ in range(300):
        sent = Fresh(theta, common)

        def one_pass(task: Task, kept: FedNewMemory, sent: Fresh = sent) -> tuple[FedNewUpdate, FedNewMemory]:
            return algorithm.client_step(convex.problem, task, sent, kept)

        updates, memory = vmap(one_pass)(tasks, memory)
        common = updates.step.mean(0)
    damped = hessians(convex, theta).mean(0) + 0.2 * torch.eye(len(theta), dtype=torch.float64)
    expected = torch.linalg.solve(damped, gradients(convex, theta).mean(0))
    torch.testing.assert_close(common, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("refresh", [1, 3, 0])
def test_rounds_follow_the_admm_recursion(refresh: int) -> None:
    convex = logistic()
    run = played(FedNew(rho=0.3, alpha=0.05, refresh=refresh), convex, 7)
    eye = torch.eye(convex.problem.n_parameters, dtype=torch.float64)
    theta, y = convex.problem.theta0, torch.zeros_like(convex.problem.theta0)
    dual = torch.zeros(4, len(theta), dtype=torch.float64)
    for t in range(7):
        g = gradients(convex, theta)
        if t == 0 or (refresh and t % refresh == 0):
            H = hessians(convex, theta)
        own = torch.linalg.solve(H + 0.35 * eye, g - dual + 0.3 * y)
        y = own.mean(0)
        theta, dual = theta - y, dual + 0.3 * (own - y)
        torch.testing.assert_close(run.thetas[t + 1], theta, rtol=1e-9, atol=1e-10)


def test_the_server_needs_sums_alone() -> None:
    convex = logistic()
    found = played(FedNew(), convex, 3, replies=SumsOnly).thetas[-1]
    torch.testing.assert_close(found, played(FedNew(), convex, 3).thetas[-1], rtol=0, atol=0)


def test_one_client_has_no_dual() -> None:
    convex = logistic(n_clients=1)
    run = played(FedNew(), convex, 5)
    assert float(run.memories[-1].dual.abs().max()) == 0.0


def test_small_rho_starts_with_the_biased_distributed_newton_step() -> None:
    convex = logistic()
    step = played(FedNew(rho=1e-9, alpha=0.0), convex, 1).thetas[1]
    torch.testing.assert_close(step, played(DistributedNewton(), convex, 1).thetas[1], rtol=1e-6, atol=1e-7)


def test_large_rho_is_a_gradient_step_on_the_inner_quadratic() -> None:
    convex, rho = logistic(), 1e4
    step = -played(FedNew(rho=rho, alpha=0.0), convex, 1).thetas[1]
    expected = gradients(convex, convex.problem.theta0).mean(0) / rho
    assert float((step - expected).norm()) <= 1e-2 * float(expected.norm())  # the rest is of order 1 / rho^2


def test_fixed_point_is_the_optimum_with_duals_equal_to_gradients() -> None:
    convex = logistic()
    run = played(FedNew(rho=0.1, alpha=0.01), convex, 400)
    torch.testing.assert_close(run.thetas[-1], convex.theta_best, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(run.memories[-1].dual, gradients(convex, convex.theta_best), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("refresh", "renewals"), [(1, 6), (3, 2), (0, 1)])
def test_hessians_are_renewed_as_often_as_set(refresh: int, renewals: int) -> None:
    algorithm = FedNew(refresh=refresh)
    run = played(algorithm, logistic(), 6)
    kinds = [type(algorithm.send(server)).__name__ for server in run.servers[:6]]
    assert kinds.count("Fresh") == renewals


@pytest.mark.parametrize("settings", [{}, {"rho": 0.3, "alpha": 0.05, "refresh": 3}, {"refresh": 0}])
def test_quantised_with_many_bits_is_fednew(settings: dict[str, Any]) -> None:
    convex = logistic()
    exact, rounded = (
        played(FedNew(**settings), convex, 30).thetas,
        played(QFedNew(bits=24, **settings), convex, 30).thetas,
    )
    for t in (5, 30):
        assert float((exact[t] - rounded[t]).norm()) <= 1e-5 * float(exact[t].norm())


def test_quantised_reaches_the_optimum_and_counts_its_bits() -> None:
    convex = logistic()
    run = played(QFedNew(), convex, 400)
    torch.testing.assert_close(run.thetas[-1], convex.theta_best, rtol=1e-6, atol=1e-7)
    bits_of_four_clients = 4 * (3 * convex.problem.n_parameters + 64)
    assert run.records[0]["bytes_up"] == bits_of_four_clients // 8
    server, memory = run.servers[-1], run.memories[-1]
    torch.testing.assert_close(server.sent_steps, memory.sent_step)  # both ends know the same vector


@pytest.mark.parametrize("kind", [FedNew, QFedNew])
@pytest.mark.parametrize(("name", "bad"), [("alpha", -1e-9), ("rho", 0.0), ("refresh", -1)])
def test_settings_out_of_range_are_refused_by_name(kind: type[FedNew | QFedNew], name: str, bad: float) -> None:
    settings: dict[str, Any] = {name: bad}
    with pytest.raises(ValueError, match=f"`{name}`"):
        kind(**settings)

"""Derivatives by formula against autograd; refusals of what does not fit in memory."""

import logging

import pytest
import torch
from torch import nn
from torch.func import grad, hessian

from dqnfed.core.curvature import (
    LinearProblem,
    client_gradient,
    client_hessian,
    gauss_newton_product,
    gauss_newton_rows,
    hessian_product,
    hessian_root,
    least_squares_problem,
    log_full_participation,
    logistic_problem,
    refuse_if_too_large,
)
from dqnfed.core.problem import Problem, Task
from dqnfed.maths.sketches import draw_keys, sketch
from tests.helpers.bowls import normal


def padded_task(n: int, targets: torch.Tensor, *, seed: int = 0) -> Task:
    """Return a task of which only the first rows are real; padding repeats the first row, as the engine does."""
    inputs = normal(len(targets), n, seed=seed)
    mask = torch.ones(len(targets), dtype=torch.float64)
    mask[-3:] = 0.0
    inputs[-3:] = inputs[0]
    return Task(inputs, targets, mask, torch.zeros(1, 0).long(), torch.zeros(0), torch.tensor(1.0))


def linear_case(kind: str) -> tuple[LinearProblem, Task]:
    if kind == "logistic":
        return logistic_problem(5, ridge=0.01), padded_task(5, torch.where(normal(12, seed=4) > 0, 1.0, -1.0).double())
    return least_squares_problem(5, ridge=0.01), padded_task(5, normal(12, seed=4))


def network_case(loss: str) -> tuple[Problem, Task]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    targets = torch.arange(12) % 3 if loss == "cross-entropy" else normal(12, 3, seed=9)
    return Problem.from_module(module, loss=loss, ridge=0.02), padded_task(4, targets)


@pytest.mark.parametrize("kind", ["logistic", "least squares"])
def test_formulas_of_linear_models_agree_with_autograd(kind: str) -> None:
    problem, task = linear_case(kind)
    theta, v = normal(5, seed=1), normal(5, seed=2)
    H = hessian(problem.loss)(theta, task)
    torch.testing.assert_close(client_gradient(problem, task, theta), grad(problem.loss)(theta, task))
    torch.testing.assert_close(client_hessian(problem, task, theta), H)
    torch.testing.assert_close(hessian_product(problem, task, theta, v), H @ v)
    torch.testing.assert_close(gauss_newton_product(problem, task, theta, v), H @ v)
    root = hessian_root(problem, task, theta)
    torch.testing.assert_close(root.T @ root + 0.01 * torch.eye(5, dtype=torch.float64), H)


def test_logistic_loss_is_exact_where_exponentials_overflow() -> None:
    problem = logistic_problem(1, ridge=0.0)
    task = Task(
        torch.tensor([[1.0], [-1.0]], dtype=torch.float64),
        torch.ones(2, dtype=torch.float64),
        torch.ones(2, dtype=torch.float64),
        torch.zeros(1, 0).long(),
        torch.zeros(0),
        torch.tensor(1.0),
    )
    theta = torch.tensor([1000.0], dtype=torch.float64)
    assert float(problem.loss(theta, task)) == 500.0  # log(1 + e^-1000) + log(1 + e^1000), halved
    assert bool(torch.isfinite(client_hessian(problem, task, theta)).all())
    assert float(client_gradient(problem, task, theta)) == pytest.approx(0.5)
    small = torch.tensor([-25.0], dtype=torch.float64)  # where a softplus with a threshold loses e^-25
    exact = 0.5 * (25.0 + 2 * torch.log1p(torch.exp(small)).item())
    assert float(problem.loss(small, task)) == pytest.approx(exact, rel=1e-15)


@pytest.mark.parametrize("loss", ["cross-entropy", "squared-error"])
def test_gauss_newton_product_root_and_rows_are_of_one_matrix(loss: str) -> None:
    problem, task = network_case(loss)
    theta = problem.theta0 + 0.3 * normal(problem.n_parameters, seed=3)
    n = len(theta)
    columns = [gauss_newton_product(problem, task, theta, e) for e in torch.eye(n, dtype=torch.float64)]
    G = torch.stack(columns)
    root = hessian_root(problem, task, theta)
    torch.testing.assert_close(root.T @ root + 0.02 * torch.eye(n, dtype=torch.float64), G, rtol=1e-9, atol=1e-11)
    assert float(torch.linalg.eigvalsh(G)[0]) >= 0.02 - 1e-12
    signs = sketch(draw_keys(torch.Generator().manual_seed(0)), 4000, 36, kind="rademacher", dtype=torch.float64)
    rows = gauss_newton_rows(problem, task, theta, signs)
    estimate = rows.T @ rows
    deviation = float(torch.linalg.matrix_norm(root.T @ root)) * (2 / 4000) ** 0.5
    assert float((estimate - root.T @ root).abs().max()) <= 5 * deviation


def test_gauss_newton_is_the_hessian_of_a_linear_model() -> None:
    module = nn.Linear(4, 3).double()
    problem, task = Problem.from_module(module), padded_task(4, torch.arange(12) % 3)
    v = normal(problem.n_parameters, seed=5)
    expected = client_hessian(problem, task, problem.theta0) @ v
    torch.testing.assert_close(gauss_newton_product(problem, task, problem.theta0, v), expected)
    torch.testing.assert_close(hessian_product(problem, task, problem.theta0, v), expected)


def test_an_unknown_loss_is_bent_by_autograd() -> None:
    module = nn.Linear(4, 3).double()
    known = Problem.from_module(module)
    own = Problem.from_module(module, losses=lambda z, y: torch.nn.functional.cross_entropy(z, y, reduction="none"))
    task = padded_task(4, torch.arange(12) % 3)
    roots = [hessian_root(problem, task, known.theta0) for problem in (known, own)]
    torch.testing.assert_close(roots[0].T @ roots[0], roots[1].T @ roots[1], rtol=1e-10, atol=1e-12)


def test_a_hessian_that_does_not_fit_is_refused_with_a_way_out() -> None:
    module = nn.Sequential(nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    problem = Problem.from_module(module)
    assert problem.n_parameters == 656_810
    with pytest.raises(ValueError, match=r"FedNL.*656,810 parameters.*863 GB a client.*fednl-diag or fednl-head"):
        refuse_if_too_large(problem, 10, "FedNL", "fednl-diag or fednl-head")


def test_methods_that_need_everybody_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        log_full_participation("fednl", 10, 10)
        assert caplog.text == ""
        log_full_participation("fednl", 10, 3)
    assert "all 10 take part, not a sample of 3" in caplog.text


def test_a_linear_problem_moves_to_a_device_as_itself() -> None:
    problem = logistic_problem(3).to("cpu")
    assert isinstance(problem, LinearProblem)
    assert problem.ridge == 1e-3

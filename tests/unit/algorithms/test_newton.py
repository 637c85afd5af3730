"""Newton's method and Newton-Zero."""

from itertools import pairwise

import pytest
import torch

from dqnfed.algorithms.newton import Newton
from tests.helpers.convex import SumsOnly, gradients, hessians, least_squares, logistic, newton_step, played


def test_every_step_is_newtons() -> None:
    convex = logistic()
    thetas = played(Newton(), convex, 4).thetas
    for before, after in pairwise(thetas):
        torch.testing.assert_close(after, before - newton_step(convex, before), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("renew", ["every-round", "once"])
def test_the_server_needs_sums_alone(renew: str) -> None:
    convex = logistic()
    found = played(Newton(renew=renew), convex, 3, replies=SumsOnly).thetas[-1]
    torch.testing.assert_close(found, played(Newton(renew=renew), convex, 3).thetas[-1], rtol=0, atol=0)


def test_a_quadratic_takes_one_round() -> None:
    convex = least_squares()
    torch.testing.assert_close(played(Newton(), convex, 1).thetas[1], convex.theta_best, rtol=1e-12, atol=1e-12)


def test_newton_zero_keeps_the_first_hessian_and_sends_it_once() -> None:
    convex = logistic()
    run = played(Newton(renew="once"), convex, 3)
    H0 = hessians(convex, convex.problem.theta0).mean(0)
    for before, after in pairwise(run.thetas):
        expected = before - torch.linalg.solve(H0, gradients(convex, before).mean(0))
        torch.testing.assert_close(after, expected, rtol=1e-12, atol=1e-12)
    n, n_clients = convex.problem.n_parameters, convex.federation.n_clients
    floats = [record["bytes_up"] / 8 / n_clients for record in run.records]
    assert floats == [n + n * (n + 1) // 2, n, n]

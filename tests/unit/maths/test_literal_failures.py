"""The paper's step with exact Hessians fails on two tiny problems; the safeguarded one solves them."""

from itertools import pairwise

import pytest
import torch

from dqnfed.maths.directions import at_least_step, gram_schmidt_step, rate_matching_step
from dqnfed.maths.solvers import min_norm_weights
from dqnfed.maths.step_length import curvature_length
from tests.helpers.problems import Quadratics, one_narrow_valley, random_quadratics, two_cycle
from tests.helpers.rows import gaussian_rows


def paper_move(problem: Quadratics, theta: torch.Tensor) -> torch.Tensor:
    return theta - gram_schmidt_step(problem.gradients(theta), problem.newton_rates(theta)).step


def safeguarded_move(problem: Quadratics, theta: torch.Tensor) -> torch.Tensor:
    G = problem.gradients(theta)
    step = at_least_step(G, problem.newton_rates(theta), ridge=1e-6).step
    if float(step @ step) == 0.0:
        return theta
    alpha = curvature_length((G @ step).numpy(), problem.curvatures(step).numpy(), float(step @ step))
    return theta - alpha * step


def pareto_gap(problem: Quadratics, theta: torch.Tensor) -> float:
    """Return the length of the shortest convex combination of the gradients; zero at Pareto-stationary points."""
    G = problem.gradients(theta)
    return float(torch.linalg.vector_norm(torch.from_numpy(min_norm_weights((G @ G.T).numpy())) @ G))


def test_one_client_with_its_exact_hessian_raises_its_own_loss() -> None:
    """The step is gradient descent at twice Polyak's length: nearer to the minimiser, 24 times higher."""
    problem, theta = one_narrow_valley()
    after = paper_move(problem, theta)
    g, f = problem.gradients(theta)[0], problem.losses(theta)[0]
    torch.testing.assert_close(theta - after, 2 * f / (g @ g) * g)
    assert problem.losses(theta).item() == pytest.approx(0.505)
    assert problem.losses(after).item() == pytest.approx(12.374, abs=5e-4)
    assert torch.linalg.vector_norm(after).item() == pytest.approx(0.70004, abs=5e-6)


def test_the_safeguarded_step_descends_in_the_same_valley() -> None:
    problem, theta = one_narrow_valley()
    losses = [problem.losses(theta).item()]
    for _ in range(500):
        theta = safeguarded_move(problem, theta)
        losses.append(problem.losses(theta).item())
    assert all(later <= earlier for earlier, later in pairwise(losses))
    assert losses[-1] < 1e-6 * losses[0]


def test_one_client_comes_nearer_in_every_round_all_the_same() -> None:
    problem = random_quadratics(1, 10, 4)
    theta = gaussian_rows(1, 10, seed=1)[0]
    eigenvalues = torch.linalg.eigvalsh(problem.hessians[0])
    kappa = float(eigenvalues[-1] / eigenvalues[0])
    for _ in range(20):
        after = paper_move(problem, theta)
        ratio = torch.linalg.vector_norm(after - problem.minimisers[0]) / torch.linalg.vector_norm(
            theta - problem.minimisers[0]
        )
        assert ratio <= (kappa - 1) / (kappa + 1) * (1 + 1e-12)
        theta = after


def test_two_clients_cycle_for_ever() -> None:
    problem, theta = two_cycle()
    other = torch.tensor([-0.695652, -0.395652], dtype=torch.float64)
    visited = [theta]
    for _ in range(20):
        visited.append(paper_move(problem, visited[-1]))
    for start, back in zip(visited, visited[2:], strict=False):
        torch.testing.assert_close(back, start, rtol=0.0, atol=1e-9)
    torch.testing.assert_close(visited[1], other, rtol=0.0, atol=5e-7)
    assert torch.linalg.vector_norm(visited[20] - visited[19]) > 1.0


def test_the_safeguarded_step_finds_a_pareto_point_instead() -> None:
    problem, theta = two_cycle()
    start = pareto_gap(problem, theta)
    losses = problem.losses(theta)
    for _ in range(100):
        theta = safeguarded_move(problem, theta)
        now = problem.losses(theta)
        assert (now <= losses * (1 + 1e-12)).all()
        losses = now
    assert pareto_gap(problem, theta) <= 1e-3 * start


@pytest.mark.parametrize(("K", "n"), [(3, 10), (10, 10)])
def test_a_common_minimiser_is_approached_by_projection(K: int, n: int) -> None:
    """With exact rates the step is the projection of theta - theta* on the gradients' span, all of it once K = n."""
    problem = random_quadratics(K, n, 2, common_minimiser=True)
    theta = gaussian_rows(1, n, seed=77)[0]
    G = problem.gradients(theta)
    error = theta - problem.minimisers[0]
    step = rate_matching_step(G, problem.newton_rates(theta)).step
    projection = torch.linalg.pinv(G) @ (G @ error)
    torch.testing.assert_close(step, projection, rtol=1e-8, atol=1e-9)
    if n == K:
        torch.testing.assert_close(theta - step, problem.minimisers[0], rtol=1e-7, atol=1e-8)


def test_the_step_explodes_near_pareto_stationary_points() -> None:
    """||u|| >= sum l_k d_k / ||sum l_k g_k|| for every convex l: the closer to the solution, the longer the step."""
    problem, _ = two_cycle()
    lengths = []
    for distance in (1e-1, 1e-2, 1e-3):
        theta = torch.tensor(
            [0.0, distance], dtype=torch.float64
        )  # the Pareto set is the segment between the minimisers
        G, d = problem.gradients(theta), problem.newton_rates(theta)
        step = rate_matching_step(G, d).step
        weights = torch.from_numpy(min_norm_weights((G @ G.T).numpy()))
        bound = (weights @ d) / torch.linalg.vector_norm(weights @ G)
        assert torch.linalg.vector_norm(step) >= bound * (1 - 1e-9)
        lengths.append(float(torch.linalg.vector_norm(step)))
    assert lengths[1] > 5 * lengths[0]
    assert lengths[2] > 5 * lengths[1]

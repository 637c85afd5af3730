"""DistributedNewton, GIANT, LocalNewton, SHED, FedNS and DiSCO: what they are equal to, and where."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.algorithms.disco import DiSCO
from dqnfed.algorithms.distributed_newton import DistributedNewton, DistributedNewtonUpdate
from dqnfed.algorithms.fedns import FedNS, FedNSServer, FedNSUpdate
from dqnfed.algorithms.giant import GIANT, Along, Losses
from dqnfed.algorithms.local_newton import LocalNewton
from dqnfed.algorithms.newton import Newton
from dqnfed.algorithms.shed import SHED, is_renewal
from dqnfed.core.algorithm import AnyAlgorithm, Cohort, Empty, Theta
from dqnfed.core.curvature import hessian_root
from dqnfed.core.problem import Task
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import n_rows, row
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.convex import (
    SumsOnly,
    gradients,
    hessians,
    identical_logistic,
    least_squares,
    logistic,
    losses,
    newton_step,
    numpy_clients,
    played,
)
from tests.helpers.numpy_twins import giant_iterates


def krylov_solution(H: Tensor, g: Tensor, m: int) -> Tensor:
    """Return what m conjugate gradients reach: the minimiser of x'Hx / 2 - g'x in the span of g, Hg, ..., H^(m-1) g."""
    powers = [g]
    for _ in range(m - 1):
        powers.append(H @ powers[-1])
    V = torch.linalg.qr(torch.stack(powers, dim=1)).Q
    best: Tensor = V @ torch.linalg.solve(V.T @ H @ V, V.T @ g)
    return best


def rows_of(tasks: Task) -> list[Task]:
    return [row(tasks, k) for k in range(n_rows(tasks))]


@pytest.mark.parametrize("algorithm", [DistributedNewton(), LocalNewton(line_search=False)])
def test_identical_clients_make_it_newton(algorithm: DistributedNewton | LocalNewton) -> None:
    convex = identical_logistic()
    found, expected = played(algorithm, convex, 3).thetas[-1], played(Newton(), convex, 3).thetas[-1]
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_giant_with_identical_clients_takes_newtons_direction() -> None:
    convex = identical_logistic()
    start = convex.problem.theta0
    moved = start - played(GIANT(), convex, 1).thetas[1]
    step = newton_step(convex, start)
    torch.testing.assert_close(moved / moved.norm(), step / step.norm(), rtol=1e-8, atol=1e-9)


def test_giant_on_equal_quadratics_takes_one_round() -> None:
    convex = least_squares(identical=True)
    torch.testing.assert_close(played(GIANT(), convex, 1).thetas[1], convex.theta_best, rtol=1e-9, atol=1e-9)


def test_giant_by_conjugate_gradients_with_enough_steps_is_exact() -> None:
    convex = logistic()
    exact, inexact = played(GIANT(), convex, 3).thetas[-1], played(GIANT(cg_steps=20), convex, 3).thetas[-1]
    torch.testing.assert_close(exact, inexact, rtol=1e-7, atol=1e-8)


def test_giant_goes_down_and_is_as_near_newton_as_the_inverses_are() -> None:
    convex = logistic()
    theta = played(Newton(), convex, 1).thetas[1]
    g, H = gradients(convex, theta).mean(0), hessians(convex, theta)
    inverses, inverse = torch.linalg.inv(H), torch.linalg.inv(H.mean(0))
    p = inverses.mean(0) @ g
    assert float(p @ g) > 0
    worst = max(float(torch.linalg.matrix_norm(one - inverse, 2)) for one in inverses)
    assert float((p - inverse @ g).norm()) <= worst * float(g.norm())
    found = [float(losses(convex, t).mean()) for t in played(GIANT(), convex, 8).thetas]
    assert all(after <= before + 1e-14 for before, after in pairwise(found))


@pytest.mark.parametrize("sufficient", [0.1, 0.8])
def test_giant_follows_its_numpy_twin_in_every_model_and_every_length(sufficient: float) -> None:
    convex = logistic(n_each=8)  # few examples: the clients' Hessians differ, and the whole step is often too long
    run = played(GIANT(sufficient=sufficient), convex, 8)
    twin, lengths = giant_iterates(numpy_clients(convex), 8, sufficient=sufficient)
    assert min(lengths) < 1.0
    assert [record["diagnostics"]["length"] for record in run.records] == lengths
    for found, expected in zip(run.thetas, twin, strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-8, atol=1e-9)


def test_giants_clients_send_their_losses_at_the_lengths_of_which_the_server_takes_the_longest_good_one() -> None:
    """Lengths 1, 1/4, ..., 4^-9 in this order, on both sides."""
    convex = logistic()
    theta, step = convex.problem.theta0, gradients(convex, convex.problem.theta0).mean(0)
    algorithm, clients = GIANT(), numpy_clients(convex)
    for client, task in zip(clients, rows_of(convex.tasks), strict=True):
        found = algorithm.client_step(convex.problem, task, Along(theta, step), Empty(theta[:0]))[0]
        assert isinstance(found, Losses)
        expected = [client.loss((theta - length * step).numpy()) for length in 0.25 ** np.arange(10)]
        np.testing.assert_allclose(found.losses.numpy(), expected, rtol=1e-13)
    server = algorithm.init_server(convex.problem, 4)._replace(
        gradient=step, step=step, loss=theta.new_tensor(1.0), phase=torch.tensor(2)
    )
    cohort = Cohort(torch.arange(2), torch.ones(2), 4, 0)
    for good in range(10):
        means = torch.full((10,), torch.inf, dtype=torch.float64)
        means[good:] = -100.0
        reply = Losses(torch.stack([means - 1.0, means + 1.0]))
        chosen = algorithm.server_step(server, Replies(reply), cohort)
        assert chosen.diagnostics["length"] == 4.0**-good
        torch.testing.assert_close(chosen.server.theta, theta - 4.0**-good * step, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    "algorithm",
    [GIANT(), GIANT(cg_steps=3), DistributedNewton(), LocalNewton(), DiSCO()],
    ids=lambda a: type(a).__name__,
)
def test_the_server_needs_sums_alone(algorithm: AnyAlgorithm) -> None:
    convex = logistic()
    assert algorithm.needs == "sum"
    found = played(algorithm, convex, 3, replies=SumsOnly).thetas[-1]
    torch.testing.assert_close(found, played(algorithm, convex, 3).thetas[-1], rtol=0, atol=0)


def test_trimming_removes_the_longest_steps() -> None:
    steps = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1e6, 1e6], [-1.0, 1.0]], dtype=torch.float64)
    cohort = Cohort(torch.arange(4), torch.ones(4), 4, 0)
    server = DistributedNewton().init_server(logistic(n_features=2).problem, 4)
    replies = Replies(DistributedNewtonUpdate(steps))
    whole = DistributedNewton(trim=0.0).server_step(server, replies, cohort).server.theta
    torch.testing.assert_close(whole, -steps.mean(0))
    robust = DistributedNewton(trim=0.25).server_step(server, replies, cohort).server.theta
    torch.testing.assert_close(robust, -steps[[0, 1, 3]].mean(0))
    most = DistributedNewton(trim=0.49, server_lr=0.5).server_step(server, replies, cohort).server.theta
    torch.testing.assert_close(most, -0.5 * steps[[0, 1, 3]].mean(0))  # 1.96 clients are one


def test_settings_without_effect_are_refused() -> None:
    problem = logistic().problem
    with pytest.raises(ValueError, match=r"`trim` is 0.2, but has no effect with 4 clients a round"):
        DistributedNewton(trim=0.2).prepare(problem, 8, 4)
    assert DistributedNewton(trim=0.25).prepare(problem, 8, 4).needs == "gram"
    with pytest.raises(ValueError, match=r"`sufficient` is 0.2, but has no effect with `line_search = False`"):
        LocalNewton(line_search=False, sufficient=0.2)
    with pytest.raises(ValueError, match="`rest` is 'middle', but has no effect with all 6 eigenpairs"):
        SHED(pairs=6, rest="middle").prepare(problem, 4, 4)
    with pytest.raises(ValueError, match="`sketch` is 'rademacher', but has no effect with `rows = 0`"):
        FedNS(rows=0, sketch="rademacher")


def test_distributed_newton_stalls_away_from_the_optimum() -> None:
    convex = logistic()
    theta = played(DistributedNewton(), convex, 30).thetas[-1]
    own_steps = torch.linalg.solve(hessians(convex, theta), gradients(convex, theta))
    assert float(own_steps.mean(0).norm()) <= 1e-10  # its fixed point: the clients' own steps cancel
    assert float(losses(convex, theta).mean()) - convex.best_loss > 1e-4


def test_local_newton_of_one_unit_step_is_distributed_newton() -> None:
    convex = logistic()
    one = played(LocalNewton(line_search=False), convex, 4).thetas[-1]
    torch.testing.assert_close(one, played(DistributedNewton(), convex, 4).thetas[-1], rtol=1e-12, atol=1e-12)


def test_local_newton_steps_on_identical_clients_are_central_newton_steps() -> None:
    convex = identical_logistic()
    one = played(LocalNewton(local_steps=3, line_search=False), convex, 1).thetas[1]
    torch.testing.assert_close(one, played(Newton(), convex, 3).thetas[3], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("sufficient", "length"), [(0.1, 1.0), (0.4, 1.0), (0.6, 0.5), (0.8, 0.25), (0.9, 0.125)])
def test_local_newton_takes_the_longest_length_that_goes_down_enough(sufficient: float, length: float) -> None:
    """Of a Newton step on a quadratic, a share a gains a (1 - a / 2) of the slope: at least `sufficient` a for a <= 2 -
    2 `sufficient`.
    """
    convex = least_squares()
    start = convex.problem.theta0
    found = played(LocalNewton(sufficient=sufficient), convex, 1).thetas[1]
    own_steps = torch.linalg.solve(hessians(convex, start), gradients(convex, start))
    torch.testing.assert_close(found, start - length * own_steps.mean(0), rtol=1e-9, atol=1e-10)


def test_many_local_newton_steps_average_the_local_minimisers() -> None:
    convex = logistic()
    found = played(LocalNewton(local_steps=12), convex, 1).thetas[1]
    expected = np.mean([client.minimiser() for client in numpy_clients(convex)], axis=0)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-7)


def test_the_bias_of_local_newton_grows_with_its_local_steps() -> None:
    convex = logistic()
    gaps = []
    for steps in (1, 2, 4):
        theta = played(LocalNewton(local_steps=steps), convex, 30).thetas[-1]
        gaps.append(float(losses(convex, theta).mean()) - convex.best_loss)
    assert gaps[0] < gaps[1] < gaps[2]


def test_shed_renews_at_fibonacci_distances() -> None:
    assert [t for t in range(100) if is_renewal(t)] == [0, 1, 2, 4, 7, 12, 20, 33, 54, 88]


def test_shed_with_all_pairs_at_a_renewal_is_newton() -> None:
    convex = logistic()
    run = played(SHED(pairs=6), convex, 1)
    length = run.records[0]["diagnostics"]["length"]
    expected = run.thetas[0] - length * newton_step(convex, run.thetas[0])
    torch.testing.assert_close(run.thetas[1], expected, rtol=1e-9, atol=1e-10)


def test_shed_without_pairs_is_a_gradient_step() -> None:
    convex = logistic()
    run = played(SHED(pairs=0), convex, 1)
    largest = torch.linalg.eigvalsh(hessians(convex, run.thetas[0]))[:, -1]
    step = gradients(convex, run.thetas[0]).mean(0) / largest.mean()
    length = run.records[0]["diagnostics"]["length"]
    torch.testing.assert_close(run.thetas[1], run.thetas[0] - length * step, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rest_is", ["next", "middle"])
def test_shed_with_one_pair_uses_other_eigenvalues_for_the_rest(rest_is: str) -> None:
    """The second one, so that the model dominates the Hessian; or the mean of the second and the smallest."""
    convex = logistic()
    run = played(SHED(pairs=1, rest=rest_is), convex, 1)
    server = run.servers[1]
    H = hessians(convex, run.thetas[0])
    values, vectors = torch.linalg.eigh(H)
    torch.testing.assert_close(server.values[:, 0], values[:, -1])
    rest = values[:, -2] if rest_is == "next" else (values[:, -2] + values[:, 0]) / 2
    models = (values[:, -1] - rest)[:, None, None] * vectors[:, :, -1:] @ vectors[:, :, -1:].transpose(1, 2)
    models = models + rest[:, None, None] * torch.eye(6, dtype=torch.float64)
    assert (float(torch.linalg.eigvalsh(models - H).min()) >= -1e-12) == (rest_is == "next")
    step = torch.linalg.solve(models.mean(0), gradients(convex, run.thetas[0]).mean(0))
    length = run.records[0]["diagnostics"]["length"]
    torch.testing.assert_close(run.thetas[1], run.thetas[0] - length * step, rtol=1e-9, atol=1e-10)


def test_shed_sends_every_pair_once_in_a_cycle() -> None:
    convex = logistic()
    run = played(SHED(pairs=2), convex, 12)
    n, n_clients = convex.problem.n_parameters, convex.federation.n_clients
    cycle = run.records[7:12]  # a renewal at 7, the next at 12
    trials = [int(record["diagnostics"]["trials"]) for record in cycle]
    floats = [record["bytes_up"] / 8 / n_clients - (n + 2) - trial for record, trial in zip(cycle, trials, strict=True)]
    assert floats == [2 * (n + 1), 2 * (n + 1), 2 * (n + 1), 0, 0]


def test_shed_solves_least_squares_with_all_pairs_in_one_step() -> None:
    convex = least_squares()
    torch.testing.assert_close(played(SHED(pairs=6), convex, 1).thetas[1], convex.theta_best, rtol=1e-9, atol=1e-9)


def test_fedns_with_many_rows_is_newton_and_unbiased() -> None:
    convex = logistic()
    theta = played(FedNS(rows=20_000), convex, 1).thetas[1]
    step = newton_step(convex, convex.problem.theta0)
    assert float((theta + step).norm()) <= 0.1 * float(step.norm())  # relative error of order sqrt(n / rows)


@pytest.mark.parametrize("damping", [0.01, 0.5])
def test_fedns_adds_its_damping_in_place_of_the_ridge(damping: float) -> None:
    convex = logistic()
    theta, eye = convex.problem.theta0, torch.eye(6, dtype=torch.float64)
    bare = hessians(convex, theta) - convex.problem.ridge * eye
    roots = torch.linalg.cholesky(bare).mT  # R'R is the Hessian without its ridge
    algorithm, cohort = FedNS(damping=damping), Cohort(torch.arange(4), torch.ones(4), 4, 0)
    update = FedNSUpdate(gradients(convex, theta), losses(convex, theta), roots)
    found = algorithm.server_step(algorithm.init_server(convex.problem, 4), Replies(update), cohort).server.search.step
    expected = torch.linalg.solve(bare.mean(0) + damping * eye, gradients(convex, theta).mean(0))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", ["gaussian", "rademacher"])
def test_fedns_sketches_with_entries_of_its_kind(kind: str) -> None:
    """A row of the sketched root is a sum of the root's rows with signs over sqrt(rows), or with normal numbers."""
    convex = logistic(n_each=5)
    algorithm, everyone = FedNS(rows=4, sketch=kind), torch.arange(4)
    tasks = TaskBuilder(convex.federation, convex.problem, algorithm, 0).stacked(everyone, 0)
    factors = []
    for client, task in zip(numpy_clients(convex), rows_of(tasks), strict=True):
        sent = Theta(convex.problem.theta0)
        found = algorithm.client_step(convex.problem, task, sent, Empty(sent.theta[:0]))[0]
        assert isinstance(found, FedNSUpdate)
        root = 0.5 * client.A / np.sqrt(5)  # the curvature of the logistic loss at 0 is 1/4
        factors.append(found.root.numpy() @ np.linalg.pinv(root))  # 5 rows of 6 numbers: independent
        np.testing.assert_allclose(factors[-1] @ root, found.root.numpy(), rtol=1e-9, atol=1e-10)
    sizes = np.abs(np.stack(factors)) * 2.0  # sqrt of 4 rows
    assert np.allclose(sizes, 1.0) == (kind == "rademacher")
    assert 0.4 < np.square(sizes).mean() < 1.8  # 80 entries of variance 1


def test_fedns_with_the_whole_root_is_newton_and_without_rows_a_gradient_step() -> None:
    convex = logistic()
    algorithm = FedNS(damping=convex.problem.ridge)
    server, theta = algorithm.init_server(convex.problem, 4), convex.problem.theta0
    roots = vmap(lambda task: hessian_root(convex.problem, task, theta))(convex.tasks)
    cohort = Cohort(torch.arange(4), torch.ones(4), 4, 0)

    def after(roots: Tensor) -> FedNSServer:
        update = FedNSUpdate(gradients(convex, theta), losses(convex, theta), roots)
        return algorithm.server_step(server, Replies(update), cohort).server

    whole = after(roots)
    torch.testing.assert_close(whole.search.step, newton_step(convex, theta), rtol=1e-10, atol=1e-11)
    none = after(roots[:, :0])
    torch.testing.assert_close(none.search.step, gradients(convex, theta).mean(0) / convex.problem.ridge)
    run = played(FedNS(rows=0), convex, 1)
    moved = run.thetas[0] - run.thetas[1]
    expected = run.records[0]["diagnostics"]["length"] * none.search.step
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-12)


def test_one_client_makes_giant_newton_by_conjugate_gradients() -> None:
    convex = logistic(n_clients=1)
    start = convex.problem.theta0
    run = played(GIANT(cg_steps=3), convex, 1)
    H, g = hessians(convex, start)[0], gradients(convex, start)[0]
    step = run.records[0]["diagnostics"]["length"] * krylov_solution(H, g, 3)
    torch.testing.assert_close(run.thetas[1], start - step, rtol=1e-10, atol=1e-12)


def test_fedns_draws_a_fresh_sketch_each_round_and_counts_it() -> None:
    convex = logistic()
    run = played(FedNS(rows=3), convex, 2)
    n = convex.problem.n_parameters
    trials = int(run.records[0]["diagnostics"]["trials"])
    assert run.records[0]["bytes_up"] == 4 * 8 * (n + 1 + 3 * n + trials)
    assert FedNS(rows=3).prepare(convex.problem, 4, 4).damping == convex.problem.ridge


def test_disco_damps_far_away_and_not_near_the_optimum() -> None:
    convex = logistic()
    run = played(DiSCO(rtol=1e-10), convex, 8)
    step = newton_step(convex, run.thetas[0])
    decrement = float((step @ hessians(convex, run.thetas[0]).mean(0) @ step).sqrt())
    torch.testing.assert_close(run.thetas[1], run.thetas[0] - step / (1 + decrement), rtol=1e-8, atol=1e-9)
    assert run.records[0]["diagnostics"]["decrement"] == pytest.approx(decrement, rel=1e-8)
    assert run.records[-1]["diagnostics"]["decrement"] < 1e-4
    torch.testing.assert_close(run.thetas[-1], convex.theta_best, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("max_products", [1, 3])
def test_disco_stops_at_its_largest_number_of_products(max_products: int) -> None:
    convex = logistic()
    start = convex.problem.theta0
    run = played(DiSCO(rtol=1e-12, max_products=max_products), convex, 1)
    H, g = hessians(convex, start).mean(0), gradients(convex, start).mean(0)
    v = krylov_solution(H, g, max_products)
    assert run.records[0]["diagnostics"]["products"] == max_products
    torch.testing.assert_close(run.thetas[1], start - v / (1 + (v @ H @ v).sqrt()), rtol=1e-9, atol=1e-10)


def test_disco_needs_no_more_products_than_dimensions() -> None:
    convex = logistic()
    products = [r["diagnostics"]["products"] for r in played(DiSCO(rtol=1e-8), convex, 4).records]
    assert max(products) <= convex.problem.n_parameters

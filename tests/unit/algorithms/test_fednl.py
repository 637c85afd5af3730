"""FedNL and its three variants against what their paper says about them."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from dqnfed.algorithms import REGISTRY
from dqnfed.algorithms.fednl import FedNL
from dqnfed.algorithms.fednl_cr import FedNLCR
from dqnfed.algorithms.fednl_ls import FedNLLS
from dqnfed.algorithms.fednl_pp import FedNLPP
from dqnfed.core.algorithm import AnyAlgorithm, Cohort, ServerStep
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import gather
from dqnfed.experiments.convex_problems import ConvexProblem
from dqnfed.maths.symmetric import packed, unpacked
from tests.helpers.convex import (
    SumsOnly,
    gradients,
    hessians,
    least_squares,
    logistic,
    losses,
    newton_step,
    numpy_clients,
    played,
)
from tests.helpers.numpy_twins import fednl_cr_losses, fednl_iterates, fednl_ls_iterates, largest_eigenpair

IDENTITY: dict[str, Any] = {"compressor": "identity", "alpha": 1.0}
UNCOMPRESSED: dict[str, Any] = {"compressor": "identity"}
REGULARISED: dict[str, Any] = {"step": "regularisation", "start": "zero"}
COMPRESSORS: list[dict[str, Any]] = [
    {"compressor": "rank", "size": 1},
    {"compressor": "top", "size": 6},
    {"compressor": "random", "size": 6},
    {"compressor": "identity"},
]


@pytest.mark.parametrize("step", ["projection", "regularisation"])
def test_a_quadratic_with_exact_start_takes_one_round(step: str) -> None:
    convex = least_squares()
    theta = played(FedNL(**IDENTITY, step=step), convex, 1).thetas[1]
    torch.testing.assert_close(theta, convex.theta_best, rtol=1e-11, atol=1e-11)


def test_a_quadratic_from_zero_takes_two_rounds_and_the_first_is_a_gradient_step() -> None:
    convex = least_squares()
    thetas = played(FedNL(**IDENTITY, **REGULARISED), convex, 2).thetas
    start = convex.problem.theta0
    norms = torch.stack([torch.linalg.matrix_norm(H) for H in hessians(convex, start)])
    expected = start - gradients(convex, start).mean(0) / norms.mean()
    torch.testing.assert_close(thetas[1], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(thetas[2], convex.theta_best, rtol=1e-11, atol=1e-11)


def test_with_the_identity_the_estimate_is_the_hessian_of_the_round_before() -> None:
    convex = logistic()
    run = played(FedNL(**IDENTITY), convex, 5)
    for t in range(1, 6):
        expected = packed(hessians(convex, run.thetas[t - 1]).mean(0))
        torch.testing.assert_close(run.servers[t].known.mean(), expected, rtol=1e-12, atol=1e-13)
    for t in range(1, 5):
        lagged = hessians(convex, run.thetas[t - 1]).mean(0)
        step = torch.linalg.solve(lagged, gradients(convex, run.thetas[t]).mean(0))
        torch.testing.assert_close(run.thetas[t + 1], run.thetas[t] - step, rtol=1e-10, atol=1e-12)
    assert float((run.thetas[2] - (run.thetas[1] - newton_step(convex, run.thetas[1]))).norm()) > 1e-4


@pytest.mark.parametrize("alpha", [0.3, 1.0])
@pytest.mark.parametrize("top", [0, 6])
@pytest.mark.parametrize(("step", "start"), [("projection", "hessian"), ("regularisation", "zero")])
def test_rounds_follow_algorithm_1_in_numpy(step: str, start: str, top: int, alpha: float) -> None:
    convex = logistic()
    how: dict[str, Any] = {"compressor": "top", "size": top} if top else {"compressor": "rank"}
    run = played(FedNL(step=step, start=start, alpha=alpha, **how), convex, 8)
    ridge = convex.problem.ridge
    twin = fednl_iterates(numpy_clients(convex), 8, alpha=alpha, step=step, start=start, mu=ridge, top=top)
    for found, expected in zip(run.thetas, twin, strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("alpha", [0.25, 1.0])
@pytest.mark.parametrize("name", ["fednl", "fednl-pp", "fednl-ls", "fednl-cr"])
def test_estimates_move_by_alpha_of_what_is_sent_on_both_sides(name: str, alpha: float) -> None:
    """One round of learning from zero: alpha times the largest eigenpair of the Hessian at the model it was sent."""
    convex = logistic()
    settings: dict[str, Any] = {"start": "zero", "alpha": alpha}
    if name == "fednl":
        settings["step"] = "regularisation"
    run = played(REGISTRY[name](**settings), convex, 2)
    t = 1 if name == "fednl-pp" else 0  # its first round sends no code
    assert float(run.servers[t].known.total.abs().max()) == 0.0
    model = run.thetas[t].numpy()
    expected = np.stack([alpha * largest_eigenpair(client.hessian(model)) for client in numpy_clients(convex)])
    n = convex.problem.n_parameters
    for found, one in zip(run.memories[t + 1].estimate, expected, strict=True):
        np.testing.assert_allclose(unpacked(found, n).numpy(), one, rtol=1e-9, atol=1e-11)
    known = unpacked(run.servers[t + 1].known.mean(), n)
    np.testing.assert_allclose(known.numpy(), expected.mean(0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_the_random_compressor_moves_chosen_entries_by_alpha_over_their_chance(alpha: float | None) -> None:
    """5 of 21 entries are sent, scaled by 21 / 5 to be unbiased; by default alpha = 5 / 21 takes the scale back."""
    convex = logistic()
    run = played(FedNL(compressor="random", size=5, alpha=alpha, **REGULARISED), convex, 1)
    factor = 1.0 if alpha is None else alpha * 21 / 5
    true = np.stack([client.hessian(np.zeros(6))[np.triu_indices(6)] for client in numpy_clients(convex)])
    estimate = run.memories[1].estimate.numpy()
    is_moved = estimate != 0
    assert is_moved.sum(1).tolist() == [5] * 4
    np.testing.assert_allclose(estimate[is_moved], factor * true[is_moved], rtol=1e-12)
    assert not (is_moved[0] == is_moved[1:]).all()  # every client draws its own


@pytest.mark.parametrize(
    "kind",
    [FedNL(), FedNLPP(), FedNLPP(start="zero"), FedNLCR(start="hessian")],
    ids=["fednl", "fednl-pp", "fednl-pp from zero", "fednl-cr"],
)
def test_a_client_that_missed_the_first_phase_is_left_out_of_the_means(kind: AnyAlgorithm) -> None:
    """What it sends later are changes of what the server does not have."""
    convex = logistic()
    method = kind.prepare(convex.problem, 4, 4)
    server = method.init_server(convex.problem, 4)
    memory = vmap(lambda task: method.init_memory(convex.problem, task))(convex.tasks)

    def phase(server: Any, clients: list[int]) -> ServerStep[Any]:
        chosen = torch.tensor(clients)
        sent = method.send(server)
        tasks, kept = gather(convex.tasks, chosen), gather(memory, chosen)
        updates, _ = vmap(lambda task, one: method.client_step(convex.problem, task, sent, one))(tasks, kept)
        return method.server_step(server, Replies(updates), Cohort(chosen, torch.full((len(clients),), 25), 4, 0))

    first = phase(server, [0, 1, 3]).server
    moved = first._replace(theta=convex.theta_best)
    for_three, for_all = phase(moved, [0, 1, 3]).server, phase(moved, [0, 1, 2, 3]).server
    assert for_all.known.clients.tolist() == [True, True, False, True]
    torch.testing.assert_close(for_all.known.mean(), for_three.known.mean(), rtol=1e-12, atol=1e-13)
    if isinstance(method, FedNLPP):
        torch.testing.assert_close(for_all.theta, for_three.theta, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"compressor": "identity", "size": 3}, "size"),
        ({"step": "regularisation", "mu": 0.1}, "mu"),
    ],
)
def test_settings_without_effect_are_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=rf"FedNL: `{name}` is .* has no effect with"):
        FedNL(**settings)


def test_the_server_needs_sums_alone_where_nothing_is_compressed() -> None:
    convex = logistic()
    for name in ("fednl", "fednl-pp", "fednl-ls", "fednl-cr"):
        method = REGISTRY[name](**UNCOMPRESSED)
        assert (method.needs, REGISTRY[name]().needs) == ("sum", "rows")
        run = played(method, convex, 3, replies=SumsOnly)
        torch.testing.assert_close(run.thetas[-1], played(method, convex, 3).thetas[-1], rtol=0, atol=0)


@pytest.mark.parametrize("how", COMPRESSORS, ids=lambda how: str(how["compressor"]))
@pytest.mark.parametrize("name", ["fednl", "fednl-pp", "fednl-ls", "fednl-cr"])
def test_the_server_knows_the_mean_of_the_clients_estimates(name: str, how: dict[str, Any]) -> None:
    run = played(REGISTRY[name](**how), logistic(), 6)
    for server, memory in zip(run.servers[1:], run.memories[1:], strict=True):
        torch.testing.assert_close(server.known.mean(), memory.estimate.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", COMPRESSORS[:2] + COMPRESSORS[3:], ids=lambda how: str(how["compressor"]))
def test_regularisation_dominates_the_true_hessian(how: dict[str, Any]) -> None:
    convex = logistic()
    run = played(FedNL(**REGULARISED, **how), convex, 8)
    n = convex.problem.n_parameters
    for t in range(1, 8):
        errors = torch.stack(
            [
                torch.linalg.matrix_norm(H - unpacked(e, n))
                for H, e in zip(hessians(convex, run.thetas[t]), run.memories[t].estimate, strict=True)
            ]
        )
        used = unpacked(run.servers[t].known.mean(), n) + errors.mean() * torch.eye(n, dtype=torch.float64)
        true = hessians(convex, run.thetas[t]).mean(0)
        assert float(torch.linalg.eigvalsh(used - true)[0]) >= -1e-12
        assert run.records[t]["diagnostics"]["shift"] == pytest.approx(float(errors.mean()), rel=1e-10)


def test_order_of_clients_does_not_matter() -> None:
    convex = logistic()
    order = torch.tensor([2, 0, 3, 1])
    rows = torch.cat([torch.arange(25 * c, 25 * c + 25) for c in order.tolist()])
    train = convex.federation.train
    shuffled = Examples(train.inputs[rows], train.targets[rows], train.starts)
    other = ConvexProblem(
        "shuffled", convex.problem, Federation(shuffled, shuffled), convex.theta_best, convex.best_loss
    )
    one, two = (played(FedNL(compressor="rank"), problem, 5).thetas[-1] for problem in (convex, other))
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-11)


def test_projection_from_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"start = \"zero\".*fednl-ls"):
        FedNL(start="zero")


def test_a_network_is_refused_with_its_memory_and_the_approximations() -> None:
    module = nn.Sequential(nn.Linear(3072, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    with pytest.raises(ValueError, match=r"656,810 parameters.*863 GB a client.*86.3 TB.*fednl-diag or fednl-head"):
        FedNL().prepare(Problem.from_module(module), 100, 100)


@pytest.mark.parametrize(
    ("settings", "floats", "index_bits"),
    [
        ({"compressor": "rank", "size": 2, "step": "projection"}, 6 + 2 * 7, 0),
        ({"compressor": "rank", "size": 2, "step": "regularisation"}, 6 + 2 * 7 + 1, 0),
        ({"compressor": "top", "size": 5}, 6 + 5, 5 * 5),  # 21 places: 5 bits
        ({"compressor": "identity"}, 6 + 21, 0),
    ],
)
def test_uplink_counts_every_float_and_index(settings: dict[str, Any], floats: int, index_bits: int) -> None:
    run = played(FedNL(**settings), logistic(), 2)
    per_client = (64 * floats + index_bits) * 4 // 8
    assert run.records[1]["bytes_up"] == per_client
    assert run.records[0]["bytes_up"] == per_client + 21 * 8 * 4  # the first Hessians


def test_partial_participation_with_everybody_is_newton_from_the_second_update() -> None:
    convex = logistic()
    run = played(FedNLPP(**IDENTITY, start="zero"), convex, 5)
    for memory in run.memories[2:]:
        assert float(memory.error.abs().max()) <= 1e-12
    for t in range(2, 5):
        expected = run.thetas[t] - newton_step(convex, run.thetas[t])
        torch.testing.assert_close(run.thetas[t + 1], expected, rtol=1e-9, atol=1e-10)


def test_partial_participation_keeps_means_over_all_clients() -> None:
    convex = logistic(n_clients=6)
    run = played(FedNLPP(), convex, 12, participation=0.5)
    assert [len(record["clients"]) for record in run.records[:3]] == [6, 3, 3]
    server, memory = run.servers[-1], run.memories[-1]
    torch.testing.assert_close(server.target_total, memory.target.sum(0), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(server.error_total, memory.error.sum(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(run.thetas[-1], convex.theta_best, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("start", ["zero", "hessian"])
def test_line_search_never_goes_up(start: str) -> None:
    convex = logistic()
    run = played(FedNLLS(start=start), convex, 15)
    found = [float(losses(convex, theta).mean()) for theta in run.thetas]
    assert all(after <= before + 1e-14 for before, after in pairwise(found))
    assert found[-1] - convex.best_loss < 1e-10
    with pytest.raises(ValueError, match="sufficient"):
        FedNLLS(sufficient=0.5)  # at one half the unit step would be refused near the optimum


@pytest.mark.parametrize(("sufficient", "shrink"), [(0.49, 0.5), (0.2, 0.3)])
def test_line_search_follows_its_numpy_twin(sufficient: float, shrink: float) -> None:
    convex = logistic()
    run = played(FedNLLS(sufficient=sufficient, shrink=shrink, mu=0.05), convex, 10)
    twin, lengths = fednl_ls_iterates(numpy_clients(convex), 10, mu=0.05, sufficient=sufficient, shrink=shrink)
    assert len(set(lengths)) > 1
    assert [record["diagnostics"]["length"] for record in run.records] == pytest.approx(lengths, rel=1e-12)
    for found, expected in zip(run.thetas, twin, strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("lipschitz", [None, 5.0])
def test_cubic_regularisation_follows_its_numpy_twin(lipschitz: float | None) -> None:
    convex = logistic()
    run = played(FedNLCR(lipschitz=lipschitz), convex, 10)
    found = [float(losses(convex, theta).mean()) for theta in run.thetas]
    assert found == pytest.approx(fednl_cr_losses(numpy_clients(convex), 10, lipschitz=lipschitz), rel=1e-9)


def test_cubic_regularisation_never_goes_up_and_learns_every_estimate() -> None:
    convex = logistic()
    run = played(FedNLCR(), convex, 40)
    found = [float(losses(convex, theta).mean()) for theta in run.thetas]
    assert all(after <= before + 1e-14 for before, after in pairwise(found))
    cubes = convex.federation.train.inputs.norm(dim=1) ** 3
    assert float(run.servers[-1].lipschitz) == pytest.approx(float(cubes.mean()) / (6 * 3**0.5), rel=1e-12)
    errors = run.memories[-1].estimate - torch.stack([packed(H) for H in hessians(convex, run.thetas[-1])])
    assert float(errors.norm(dim=1).max()) < 0.1 * float(run.memories[-1].estimate.norm(dim=1).min())

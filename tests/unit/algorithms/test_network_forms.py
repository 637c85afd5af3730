"""The second-order forms for networks: what they are equal to where that is known, and that they always go down."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dqnfed import Evaluation, Federation, Problem, run
from dqnfed.algorithms import REGISTRY
from dqnfed.algorithms.fednew_cg import FedNewCG, FedNewCGUpdate
from dqnfed.algorithms.fednl_diag import FedNLDiag
from dqnfed.algorithms.fednl_head import FedNLHead
from dqnfed.algorithms.fedns_ggn import FedNSGGN
from dqnfed.core.algorithm import AnyAlgorithm, Cohort
from dqnfed.core.replies import Replies
from dqnfed.core.seeds import numpy_seed_for
from dqnfed.core.tensors import row
from dqnfed.maths.symmetric import unpacked
from tests.helpers.bowls import Case, federation_of, labelled_clients
from tests.helpers.convex import SumsOnly
from tests.helpers.turns import Turn, played_turns

NETWORK_FORMS = ("fednl-diag", "fednl-head", "fednew-cg", "fedns-ggn")


def softmax_case(n_clients: int = 5) -> Case:
    """Return softmax regression with bias: a network that is all head, and whose Gauss-Newton matrix is its Hessian."""
    torch.manual_seed(0)
    return Case(Problem.from_module(nn.Linear(4, 3).double()), federation_of(labelled_clients(n_clients, 4)))


def network_case(n_clients: int = 5) -> Case:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    return Case(Problem.from_module(module), federation_of(labelled_clients(n_clients, 4)))


def client_examples(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Return every client's inputs and labels."""
    train = case.federation.train
    return [(train.inputs[start:end], train.targets[start:end]) for start, end in pairwise(train.starts.tolist())]


def gauss_newton_matrices(case: Case, theta: Tensor) -> Tensor:
    """Return every client's Gauss-Newton matrix [K, n, n]: the mean of J'(diag p - pp')J over its examples."""
    found = []
    for inputs, _ in client_examples(case):
        J: Any = torch.autograd.functional.jacobian(lambda t, x=inputs: case.problem.predict(t, x), theta)  # [N, C, n]
        p = case.problem.predict(theta, inputs).softmax(1)
        bend = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        found.append(torch.einsum("nai,nab,nbj->ij", J, bend, J) / len(inputs))
    return torch.stack(found)


def mean_loss(case: Case, theta: Tensor) -> Tensor:
    """Return the mean of the clients' cross-entropies."""
    losses = [cross_entropy(case.problem.predict(theta, inputs), labels) for inputs, labels in client_examples(case)]
    return torch.stack(losses).mean()


def mean_gradient(case: Case, theta: Tensor) -> Tensor:
    """Return the gradient of the mean of the clients' cross-entropies."""
    at = theta.clone().requires_grad_()
    found: Tensor = torch.autograd.grad(mean_loss(case, at), at)[0]
    return found


def turns_of(
    algorithm: AnyAlgorithm,
    case: Case,
    rounds: int = 1,
    cohort_size: int | None = None,
    replies: Callable[[Any], Replies[Any]] = Replies,
) -> list[Turn]:
    size = cohort_size or case.federation.n_clients
    return played_turns(algorithm, case, rounds=rounds, cohort_size=size, replies=replies)


def test_diag_server_and_clients_make_the_same_of_every_message() -> None:
    """A NumPy twin of both sides, fed with the messages alone: a share of the clients, few coordinates, alpha below 1.

    Every estimate is what was sent so far: once its base, and alpha times every value at its place; the server's total
    is their sum, and its step is the mean gradient over their mean, the mean error and mu.
    """
    case = network_case()
    algorithm = FedNLDiag(keep=0.2, alpha=0.6, mu=0.05, max_step=1e6)
    turns = [turn for turn in turns_of(algorithm, case, rounds=6, cohort_size=3) if hasattr(turn.updates, "gradient")]
    estimates: dict[int, NDArray[np.float64]] = {}
    for turn in turns:
        sent = {name: field.numpy() for name, field in turn.updates._asdict().items()}
        for k, client in enumerate(turn.cohort.clients.tolist()):
            assert (sent["base"][k] != 0) == (client not in estimates)
            estimate = estimates.get(client, np.zeros(43)) + sent["base"][k]
            assert len(set(sent["places"][k].tolist())) == 9  # a fifth of 43, none twice
            estimate[sent["places"][k]] += 0.6 * sent["values"][k]
            estimates[client] = estimate
            np.testing.assert_allclose(turn.memory_after.estimate[k].numpy(), estimate, rtol=1e-12, atol=1e-14)
        server = turn.step.server
        np.testing.assert_allclose(server.total.numpy(), sum(estimates.values()), rtol=1e-12, atol=1e-14)
        assert set(server.is_known.nonzero().flatten().tolist()) == set(estimates)
        mean = np.mean(list(estimates.values()), axis=0)
        curvature = np.maximum(mean, 0.0) + sent["error"].mean() + 0.05
        expected = sent["gradient"].mean(0) / curvature
        np.testing.assert_allclose(server.search.step.numpy(), expected, rtol=1e-10, atol=1e-13)
    assert len(estimates) > 3  # some came late, some more than once
    assert len(turns) * 3 > len(estimates)


def test_diag_sends_the_largest_differences() -> None:
    case = network_case()
    everything, few = FedNLDiag(keep=1.0, alpha=1.0), FedNLDiag(keep=0.2, alpha=1.0)
    whole, part = (turns_of(algorithm, case)[0] for algorithm in (everything, few))
    for k in range(5):
        base = float(part.updates.base[k])
        differences = whole.memory_after.estimate[k] - base  # with everything sent, the estimate is the diagonal
        largest = differences.abs().argsort(descending=True)[:9]
        assert set(part.updates.places[k].tolist()) == set(largest.tolist())
        torch.testing.assert_close(part.updates.values[k], differences[part.updates.places[k].long()])
        assert float(part.updates.error[k]) == pytest.approx(float(differences.abs().mean()), rel=1e-12)


def test_diag_learns_the_diagonal_and_the_server_knows_the_mean_of_those_that_took_part() -> None:
    case = network_case()
    algorithm = FedNLDiag(probes=400, keep=1.0, alpha=1.0)
    turns = turns_of(algorithm, case, rounds=3, cohort_size=3)
    estimates: dict[int, Tensor] = {}
    for turn in turns:
        if hasattr(turn.updates, "gradient"):
            for client, row in zip(turn.cohort.clients.tolist(), turn.memory_after.estimate, strict=True):
                estimates[client] = row
            known = turn.step.server
            mean = known.total / known.is_known.sum()
            torch.testing.assert_close(mean, torch.stack(list(estimates.values())).mean(0), rtol=1e-10, atol=1e-12)
            assert set(known.is_known.nonzero().flatten().tolist()) == set(estimates)
    first = turns[0]
    exact = torch.diagonal(gauss_newton_matrices(case, case.problem.theta0), dim1=1, dim2=2)[first.cohort.clients]
    error = (first.memory_after.estimate - exact).abs()
    assert bool((error <= 6 * exact * (2 / 400) ** 0.5 + 1e-12).all())  # a squared row has relative deviation sqrt 2


def test_diag_step_is_the_gradient_over_the_curvature() -> None:
    case = network_case()
    turn = turns_of(FedNLDiag(max_step=1e6), case)[0]
    server, updates = turn.step.server, turn.updates
    curvature = server.total / 5 + updates.error.mean() + 1e-3
    torch.testing.assert_close(server.search.step, updates.gradient.mean(0) / curvature, rtol=1e-10, atol=1e-12)


def test_diag_counts_values_indices_and_scalars() -> None:
    case = network_case()
    n = case.problem.n_parameters  # 43: indices of 6 bits
    algorithm = FedNLDiag(keep=0.25)
    update = turns_of(algorithm, case)[0].updates
    k = algorithm.n_kept(n)
    assert algorithm.uplink_bits(row(update, 0)) == 64 * (n + 3 + k) + 6 * k


def test_head_with_all_eigenpairs_is_a_regularised_newton_step() -> None:
    case = softmax_case()
    n = case.problem.n_parameters
    turn = turns_of(FedNLHead(rank=n, blocks="full", max_step=1e6), case)[0]
    H = gauss_newton_matrices(case, case.problem.theta0).mean(0)
    shift = turn.updates.error.mean() + FedNLHead().mu
    eye = torch.eye(n, dtype=torch.float64)
    expected = case.problem.theta0 - torch.linalg.solve(H + shift * eye, mean_gradient(case, case.problem.theta0))
    torch.testing.assert_close(turn.step.server.theta, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("blocks", ["full", "class"])
def test_head_estimates_converge_to_the_heads_hessian_and_the_server_follows(blocks: str) -> None:
    case = network_case()
    turns = turns_of(FedNLHead(blocks=blocks, lr=1e-9, max_step=1e-9), case, rounds=25)  # theta hardly moves
    errors = [float(turn.updates.error.mean()) for turn in turns]
    assert errors[-1] < 0.05 * errors[0]
    server, memory = turns[-1].step.server, turns[-1].memory_after
    torch.testing.assert_close(server.total, memory.estimate.sum(0), rtol=1e-10, atol=1e-11)
    size = server.places.shape[1]
    block = unpacked(memory.estimate[0, 0], size)
    exact = gauss_newton_matrices(case, server.theta)[0][server.places[0]][:, server.places[0]]
    torch.testing.assert_close(block, exact, rtol=0.1, atol=2e-2)


def test_head_leaves_the_body_to_fedavg() -> None:
    case = network_case()
    turn = turns_of(FedNLHead(lr=0.3), case)[0]
    body = slice(0, 4 * 5 + 5)
    expected = case.problem.theta0[body] - 0.3 * mean_gradient(case, case.problem.theta0)[body]
    torch.testing.assert_close(turn.step.server.theta[body], expected, rtol=1e-10, atol=1e-12)


def test_head_refuses_a_server_lr_where_there_is_no_body() -> None:
    case = softmax_case()
    with pytest.raises(ValueError, match=r"`server_lr` is 0.5, but has no effect on a model that has no layers before"):
        FedNLHead(server_lr=0.5).prepare(case.problem, 5, 5)
    body = slice(0, 4 * 5 + 5)
    case = network_case()
    start = case.problem.theta0[body]
    halved, whole = (turns_of(FedNLHead(server_lr=lr), case)[0].step.server.theta[body] for lr in (0.5, 1.0))
    assert float((whole - start).norm()) > 1e-3
    torch.testing.assert_close(halved - start, 0.5 * (whole - start), rtol=1e-10, atol=1e-14)


def test_fednew_cg_with_enough_products_is_an_admm_pass() -> None:
    case = softmax_case()
    theta, n = case.problem.theta0, case.problem.n_parameters
    turn = turns_of(FedNewCG(cg_steps=30, rho=0.2, alpha=0.1), case)[0]
    G = gauss_newton_matrices(case, theta)
    expected = torch.linalg.solve(G + 0.3 * torch.eye(n, dtype=torch.float64), turn.updates.gradient)
    torch.testing.assert_close(turn.updates.step, expected, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(turn.step.server.step, expected.mean(0), rtol=1e-6, atol=1e-8)


def test_fednew_cg_moves_duals_with_the_step_of_their_own_round() -> None:
    case = softmax_case()
    turns = turns_of(FedNewCG(rho=0.2, dual_decay=0.5), case, rounds=3)
    solves = [k for k, turn in enumerate(turns) if hasattr(turn.updates, "gradient")]
    dual = torch.zeros(5, case.problem.n_parameters, dtype=torch.float64)
    for k in solves:
        solved, agreed = turns[k], turns[k + 1]
        torch.testing.assert_close(solved.memory_before.dual, dual)
        sent = solved.memory_after.own_step + dual / 0.2
        torch.testing.assert_close(solved.updates.step, sent)
        torch.testing.assert_close(solved.step.server.step, sent.mean(0))
        dual = 0.5 * dual + 0.2 * (solved.memory_after.own_step - sent.mean(0))
        torch.testing.assert_close(agreed.memory_after.dual, dual)
    later = turns_of(FedNewCG(dual_decay=0.0), case, rounds=2)
    assert all(float(turn.memory_after.dual.abs().max()) == 0.0 for turn in later)


@pytest.mark.parametrize("goes_down", [True, False])
def test_fednew_cg_falls_back_on_the_gradient_where_the_common_step_goes_up(goes_down: bool) -> None:
    problem = softmax_case().problem
    algorithm, g = FedNewCG(max_step=1e6), torch.arange(15, dtype=torch.float64) - 6.0
    step = (1.0 if goes_down else -1.0) * g.flip(0).cumsum(0) * torch.sign(g.flip(0).cumsum(0) @ g)
    update = FedNewCGUpdate(step.expand(3, -1), g.expand(3, -1), torch.ones(3, dtype=torch.float64))
    cohort = Cohort(torch.arange(3), torch.ones(3), 5, 0)
    found = algorithm.server_step(algorithm.init_server(problem, 5), Replies(update), cohort)
    assert found.diagnostics["goes_down"] == float(goes_down)
    torch.testing.assert_close(found.server.search.step, step if goes_down else g)
    torch.testing.assert_close(found.server.step, step)  # what the clients' duals move by


def test_fednew_cg_needs_sums_alone() -> None:
    case = softmax_case()
    assert FedNewCG().needs == "sum"
    turns = turns_of(FedNewCG(), case, rounds=2, replies=SumsOnly)
    expected = turns_of(FedNewCG(), case, rounds=2)[-1].step.server.theta
    torch.testing.assert_close(turns[-1].step.server.theta, expected, rtol=0, atol=0)


def test_fednew_cg_takes_shorter_steps_with_small_cohorts() -> None:
    case = softmax_case()
    assert FedNewCG().prepare(case.problem, 20, 5).max_step == 1.0
    assert FedNewCG().prepare(case.problem, 20, 2).max_step == 0.3
    assert FedNewCG(max_step=2.0).prepare(case.problem, 20, 2).max_step == 2.0


def test_fedns_ggn_with_many_rows_is_a_damped_newton_step() -> None:
    case = softmax_case()
    theta, n = case.problem.theta0, case.problem.n_parameters
    turn = turns_of(FedNSGGN(rows=200, max_step=1e6, damping=100.0), case)[0]
    mu = turn.step.diagnostics["mu"]
    H = gauss_newton_matrices(case, theta).mean(0) + mu * torch.eye(n, dtype=torch.float64)
    expected = torch.linalg.solve(H, mean_gradient(case, theta))
    relative = float((turn.step.server.search.step - expected).norm() / expected.norm())
    assert relative <= 5 * (n / (200 * 5)) ** 0.5  # 1000 rows of n coordinates
    assert relative > 0.0


@pytest.mark.parametrize("damping", [0.1, 2.0])
def test_fedns_ggn_is_damped_by_a_share_of_the_mean_curvature_of_its_rows(damping: float) -> None:
    """The mean eigenvalue of the 15 rows' Gram matrix over 5 clients; the solve is then the n x n one."""
    case = softmax_case()
    turn = turns_of(FedNSGGN(rows=3, damping=damping, max_step=1e6), case)[0]
    Y = turn.updates.rows.reshape(15, -1).numpy() / np.sqrt(5)
    mu = damping * np.square(Y).sum() / 15
    assert turn.step.diagnostics["mu"] == pytest.approx(mu, rel=1e-12)
    g = mean_gradient(case, case.problem.theta0).numpy()
    expected = np.linalg.solve(Y.T @ Y + mu * np.eye(len(g)), g)
    np.testing.assert_allclose(turn.step.server.search.step.numpy(), expected, rtol=1e-8, atol=1e-10)


def test_fedns_ggn_is_damped_more_with_small_cohorts() -> None:
    problem = softmax_case().problem
    assert FedNSGGN().prepare(problem, 20, 5).damping == 0.1
    assert FedNSGGN().prepare(problem, 20, 2).damping == 1.0
    assert FedNSGGN(damping=0.3).prepare(problem, 20, 2).damping == 0.3


def test_fedns_ggn_counts_every_row() -> None:
    case = softmax_case()
    algorithm, n = FedNSGGN(rows=3), case.problem.n_parameters
    assert algorithm.uplink_bits(row(turns_of(algorithm, case)[0].updates, 0)) == 64 * (4 * n + 1)


@pytest.mark.parametrize("name", ["fednl-diag", "fednew-cg", "fedns-ggn"])
def test_no_step_is_longer_than_the_longest(name: str) -> None:
    case, method = network_case(), dict[str, Any](REGISTRY)[name]
    free, bound, longer = (
        turns_of(method(max_step=length), case)[0].step.server.search.step for length in (1e6, 0.01, 0.02)
    )
    assert float(free.norm()) > 0.02
    for step, length in ((bound, 0.01), (longer, 0.02)):
        torch.testing.assert_close(step, length * free / free.norm(), rtol=1e-10, atol=1e-14)


def test_no_step_of_the_head_is_longer_than_the_longest() -> None:
    case = network_case()
    head = slice(4 * 5 + 5, None)
    for length in (0.01, 0.02):
        theta = turns_of(FedNLHead(max_step=length), case)[0].step.server.theta
        assert float((theta - case.problem.theta0)[head].norm()) == pytest.approx(length, rel=1e-10)


@pytest.mark.parametrize("name", ["fednl-diag", "fednew-cg", "fedns-ggn"])
@pytest.mark.parametrize(("sufficient", "shrink"), [(0.1, 0.5), (0.95, 0.7)])
def test_the_first_trial_that_goes_down_enough_is_taken(name: str, sufficient: float, shrink: float) -> None:
    """The lengths tried are 1, s, s^2, ...; the losses of the clients at the accepted model say why."""
    case = network_case()
    settings: dict[str, Any] = {"sufficient": sufficient, "shrink": shrink, "max_step": 3.0}
    turns = turns_of(REGISTRY[name](**settings), case)
    search, start = turns[0].step.server.search, case.problem.theta0
    trials = turns[1:]
    slope = mean_gradient(case, start) @ search.step
    for j, trial in enumerate(trials):
        length = shrink**j
        torch.testing.assert_close(trial.sent.theta, start - length * search.step, rtol=1e-10, atol=1e-12)
        decrease = mean_loss(case, start) - mean_loss(case, start - length * search.step)
        assert (decrease >= sufficient * length * float(slope)) == (j == len(trials) - 1)
    assert sufficient < 0.9 or len(trials) > 1


@pytest.mark.parametrize("name", ["fednl-diag", "fednew-cg", "fedns-ggn"])
def test_the_cohorts_mean_loss_never_rises(name: str) -> None:
    problem, federation, _ = network_case(8)
    result = run(REGISTRY[name](), problem, federation, rounds=10, participation=0.5)
    for record in result.history[1:]:
        assert record["loss_after"] <= record["loss_before"] + 1e-12


def digits(seed: int, n_clients: int = 20) -> tuple[Problem, Federation]:
    """Return the digits with two label shards a client, and a small network in float32."""
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    generator = numpy_seed_for(seed, purpose="digits")
    order = generator.permutation(len(labels))
    shards = np.array_split(order[np.argsort(labels[order], kind="stable")], 2 * n_clients)
    dealt = generator.permutation(2 * n_clients)
    owned = [np.concatenate([shards[dealt[2 * c]], shards[dealt[2 * c + 1]]]) for c in range(n_clients)]
    federation = Federation.from_clients(
        [((inputs[rows] / 16).astype(np.float32), labels[rows]) for rows in owned], seed=seed
    )
    torch.manual_seed(seed)
    return Problem.from_module(nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))), federation


LEARNS_BELOW = {"fednl-diag": 1.9, "fednl-head": 2.0, "fednew-cg": 1.2, "fedns-ggn": 1.4}  # mean loss after 8 rounds


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("name", NETWORK_FORMS)
def test_defaults_learn_digits_and_are_never_nan(name: str, seed: int) -> None:
    problem, federation = digits(seed)
    settings: dict[str, Any] = {"lr": 1.0} if name == "fednl-head" else {}
    evaluation = Evaluation(every=8, participants=False)
    result = run(REGISTRY[name](**settings), problem, federation, rounds=8, participation=0.3, evaluation=evaluation)
    assert result.summary["status"] == "finished"
    assert bool(torch.isfinite(result.theta).all())
    assert result.summary["train_loss"]["mean"] < LEARNS_BELOW[name]

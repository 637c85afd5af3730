"""FedExP: a run in NumPy, FedAvg where updates agree, and the paper's claims about the extrapolated step."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed import Evaluation, Policy, run
from dqnfed.algorithms.fedavg import FedAvg, FedAvgUpdate
from dqnfed.algorithms.fedexp import FedExP, FedExPServer
from dqnfed.core.algorithm import ServerStep
from dqnfed.core.replies import Replies
from tests.helpers.baselines import bowls, classes, cohort_of
from tests.helpers.numpy_clients import Floats
from tests.helpers.play import play
from tests.helpers.quadratic_clients import quadratic_clients
from tests.helpers.regressions import Regressions, local_update, regressions, shares_of
from tests.helpers.rows import gaussian_rows

EVERY_REPLY = Policy(max_update_norm=math.inf)


def oracle(case: Regressions, cohorts: list[list[int]], eps: float, weighting: str) -> tuple[list[Floats], list[float]]:
    """Return the models and the lengths of the steps."""
    theta, lengths = np.ones(4), []
    thetas = [theta]
    for cohort in cohorts:
        shares = shares_of(weighting, case.sizes[cohort])
        updates = np.stack([local_update(case.clients[k], theta, lr=0.05, steps=3) for k in cohort])
        mean = np.average(updates, axis=0, weights=shares)
        squares = np.average(np.sum(updates**2, axis=1), weights=shares)
        lengths.append(max(1.0, float(squares / (2 * (mean @ mean + eps)))))
        theta = theta - lengths[-1] * mean
        thetas.append(theta)
    return thetas, lengths


def stepped(algorithm: FedExP, deltas: Tensor) -> ServerStep[FedExPServer]:
    """Return one server step from zero, of clients with 3, 4, ... examples."""
    zero = deltas.new_zeros(deltas.shape[1])
    cohort = cohort_of(range(3, 3 + len(deltas)))
    return algorithm.server_step(FedExPServer(zero, zero), Replies(FedAvgUpdate(deltas)), cohort)


def length(deltas: Tensor, *, eps: float, weighting: str = "uniform") -> float:
    return stepped(FedExP(eps=eps, weighting=weighting), deltas).diagnostics["extrapolation"]


@pytest.mark.parametrize("participation", [1.0, 0.6])
@pytest.mark.parametrize(("weighting", "eps"), [("uniform", 1e-3), ("examples", 1e-5)])
def test_a_run_is_that_of_the_oracle(weighting: str, eps: float, participation: float) -> None:
    case = regressions()
    algorithm = FedExP(eps=eps, weighting=weighting, lr=0.05, epochs=3)
    played = play(algorithm, case.problem, case.federation, rounds=15, participation=participation, policy=EVERY_REPLY)
    cohorts = [record["clients"] for record in played.records]
    thetas, lengths = oracle(case, cohorts, eps, weighting)
    assert max(lengths) > 1.5  # the rule is at work
    found = [record["diagnostics"]["extrapolation"] for record in played.records]
    np.testing.assert_allclose(found, lengths, rtol=1e-9)
    np.testing.assert_allclose(torch.stack(played.thetas), thetas, rtol=1e-9, atol=1e-11)


def test_the_default_eps_is_the_authors() -> None:
    assert (FedExP().eps, FedExP().average_last_two, FedExP().weighting) == (1e-3, True, "uniform")


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_one_client_is_fedavg_to_the_bit(eps: float) -> None:
    problem, federation = classes(4)
    plain, mine = FedAvg(lr=0.3, epochs=2), FedExP(lr=0.3, epochs=2, eps=eps)
    for one, other in zip(
        play(mine, problem, federation, rounds=4, participation=0.25).thetas,
        play(plain, problem, federation, rounds=4, participation=0.25).thetas,
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_identical_updates_are_averaged_and_not_extrapolated(weighting: str) -> None:
    deltas = gaussian_rows(1, 6).expand(5, -1)
    step = stepped(FedExP(eps=0.0, weighting=weighting), deltas)
    assert step.diagnostics["extrapolation"] == 1.0
    torch.testing.assert_close(step.server.theta, -deltas[0], rtol=1e-15, atol=0)


@pytest.mark.parametrize("n_clients", [2, 3, 8])
def test_orthogonal_updates_of_one_length_are_taken_half_as_often_as_there_are_clients(n_clients: int) -> None:
    """mean ||d_k||^2 = L^2 and ||D||^2 = L^2 / K, so that eta = K / 2."""
    deltas = 0.3 * torch.linalg.qr(gaussian_rows(10, 10)).Q[:n_clients]
    assert length(deltas, eps=0.0) == pytest.approx(n_clients / 2, rel=1e-13)


@pytest.mark.parametrize("seed", range(5))
def test_the_step_is_never_shorter_than_fedavgs_and_eps_bounds_it(seed: int) -> None:
    deltas = gaussian_rows(6, 4, seed=seed)
    squares = float(deltas.square().sum(1).mean())
    lengths = [length(deltas, eps=eps) for eps in (0.0, 1e-3, 0.1, 1.0, 100.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 1.0
    for eps, found in zip((1e-3, 0.1, 1.0, 100.0), lengths[1:], strict=True):
        assert 1.0 <= found <= max(1.0, squares / (2 * eps))


def test_eps_has_the_unit_of_a_squared_update() -> None:
    deltas = gaussian_rows(6, 4)
    scaled = length(1e-2 * deltas, eps=1e-4 * 0.05)
    assert scaled == pytest.approx(length(deltas, eps=0.05), rel=1e-12)
    assert scaled > 1.0
    assert length(1e-2 * deltas, eps=0.05) == 1.0  # too large for these updates: FedAvg


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_updates_that_cancel_exactly_make_no_step(eps: float) -> None:
    one = gaussian_rows(1, 4)
    step = stepped(FedExP(eps=eps), torch.cat([one, -one]))
    assert torch.equal(step.server.theta, torch.zeros(4, dtype=torch.float64))
    assert math.isfinite(step.diagnostics["extrapolation"])


@pytest.mark.parametrize("seed", range(2))
def test_projections_on_sets_with_a_common_point_come_closer_to_it_in_every_step_and_faster_than_fedavg(
    seed: int,
) -> None:
    """One step of length 1 on (a_k . theta)^2 / 2, ||a_k|| = 1, is the projection on the plane a_k . theta = 0, the
    case that the paper derives its step from. With m = mean ||d_k||^2, a step of length eta shortens the squared
    distance to a common point by 2 eta m - eta^2 ||D||^2, which is 1.5 eta m where eta = m / (2 ||D||^2).
    """
    a = gaussian_rows(8, 12, seed=seed)
    a = a / a.norm(dim=1, keepdim=True)
    start = gaussian_rows(1, 12, seed=seed + 9)[0]
    case = quadratic_clients(torch.einsum("ki,kj->kij", a, a), torch.zeros_like(a), start)
    common = start - torch.linalg.pinv(a) @ (a @ start)  # the common point nearest to the start
    fast, plain = (
        play(algorithm, case.problem, case.federation, rounds=20, policy=EVERY_REPLY)
        for algorithm in (FedExP(eps=0.0, lr=1.0), FedAvg(lr=1.0))
    )
    squares = [float((theta - common).square().sum()) for theta in fast.thetas]
    for theta, record, (before, after) in zip(fast.thetas, fast.records, pairwise(squares), strict=False):
        eta = record["diagnostics"]["extrapolation"]
        assert eta > 1.0
        assert after == pytest.approx(before - 1.5 * eta * float((a @ theta).square().mean()), rel=1e-12, abs=1e-14)
    assert squares[-1] < 1e-2 * float((plain.thetas[-1] - common).square().sum())


def test_the_mean_of_the_last_two_iterates_is_evaluated_and_returned() -> None:
    problem, federation, _ = bowls(4, start=1.0)
    algorithm = FedExP(lr=0.2)
    server = algorithm.init_server(problem, 4)
    assert torch.equal(algorithm.models(server, None)["averaged"], problem.theta0)  # type: ignore[arg-type]
    thetas = play(algorithm, problem, federation, rounds=3).thetas
    for rounds in (1, 3):
        result = run(algorithm, problem, federation, rounds=rounds, evaluation=Evaluation(every=rounds))
        torch.testing.assert_close(result.theta, (thetas[rounds] + thetas[rounds - 1]) / 2, rtol=1e-14, atol=1e-15)
        assert list(result.summary["models"]) == ["global"]
    last = run(FedExP(lr=0.2, average_last_two=False), problem, federation, rounds=3)
    torch.testing.assert_close(last.theta, thetas[3], rtol=1e-14, atol=1e-15)
    assert last.summary["models"] == {}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": -1e-9}, r"`eps` must be in \[0, inf\), but is -1e-09"),
        ({"weighting": "size"}, "`weighting` must be one of uniform, examples, but is 'size'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"FedExP: {message}"):
        FedExP(**settings)  # type: ignore[arg-type]

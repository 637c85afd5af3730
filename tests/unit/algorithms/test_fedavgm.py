"""FedAvgM: a run in NumPy, torch's SGD with momentum on the mean updates, and FedAvg where there is no momentum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dqnfed.algorithms.fedavg import FedAvg, FedAvgUpdate
from dqnfed.algorithms.fedavgm import FedAvgM
from dqnfed.core.replies import Replies
from tests.helpers.baselines import GRADIENTS, bowl_problem, bowls, classes, cohort_of
from tests.helpers.numpy_clients import Floats
from tests.helpers.play import play
from tests.helpers.regressions import Regressions, local_update, regressions, shares_of


def oracle(case: Regressions, cohorts: list[list[int]], beta: float, server_lr: float, weighting: str) -> list[Floats]:
    """Return the models of v = beta v + mean update, theta = theta - server_lr v."""
    theta, v = np.ones(4), np.zeros(4)
    thetas = [theta]
    for cohort in cohorts:
        shares = shares_of(weighting, case.sizes[cohort])
        updates = [local_update(case.clients[k], theta, lr=0.05, steps=3) for k in cohort]
        v = beta * v + sum(share * update for share, update in zip(shares, updates, strict=True))
        theta = theta - server_lr * v
        thetas.append(theta)
    return thetas


@pytest.mark.parametrize("participation", [1.0, 0.4])
@pytest.mark.parametrize(("weighting", "beta", "server_lr"), [("examples", 0.9, 1.0), ("uniform", 0.5, 0.3)])
def test_a_run_is_that_of_the_oracle(weighting: str, beta: float, server_lr: float, participation: float) -> None:
    case = regressions()
    algorithm = FedAvgM(beta=beta, server_lr=server_lr, weighting=weighting, lr=0.05, epochs=3)
    played = play(algorithm, case.problem, case.federation, rounds=12, participation=participation)
    cohorts = [record["clients"] for record in played.records]
    expected = oracle(case, cohorts, beta, server_lr, weighting)
    np.testing.assert_allclose(torch.stack(played.thetas), expected, rtol=1e-12, atol=1e-13)


def test_the_defaults_are_the_papers() -> None:
    assert (FedAvgM().beta, FedAvgM().server_lr, FedAvgM().weighting) == (0.9, 1.0, "examples")


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_without_momentum_it_is_fedavg_to_the_bit(weighting: str) -> None:
    problem, federation = classes(5)
    plain = FedAvg(lr=0.3, epochs=2, batch_size=6, server_lr=0.7, weighting=weighting)
    mine = FedAvgM(lr=0.3, epochs=2, batch_size=6, server_lr=0.7, weighting=weighting, beta=0.0)
    for one, other in zip(
        play(mine, problem, federation, rounds=4, participation=0.6).thetas,
        play(plain, problem, federation, rounds=4, participation=0.6).thetas,
        strict=True,
    ):
        assert torch.equal(one, other)


def test_the_server_is_torchs_sgd_on_the_mean_updates() -> None:
    algorithm = FedAvgM(beta=0.8, server_lr=0.2, weighting="uniform")
    server = algorithm.init_server(bowl_problem(4), 3)
    theta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([theta], lr=0.2, momentum=0.8)
    for round in range(5):
        deltas = (0.1 + round) * GRADIENTS.roll(round, 0)
        server = algorithm.server_step(server, Replies(FedAvgUpdate(deltas)), cohort_of(round=round)).server
        theta.grad = deltas.mean(0)
        optimiser.step()
    torch.testing.assert_close(server.theta, theta.detach(), rtol=1e-14, atol=1e-15)


def test_a_constant_update_is_taken_ten_times_in_the_end() -> None:
    """v_t = (1 - beta^t) / (1 - beta) D, with beta = 0.9 nearly 10 D."""
    algorithm = FedAvgM(beta=0.9)
    server = algorithm.init_server(bowl_problem(4), 1)
    for round in range(100):
        replies = Replies(FedAvgUpdate(GRADIENTS[:1]))
        server = algorithm.server_step(server, replies, cohort_of((7,), round=round)).server
    torch.testing.assert_close(server.velocity, (1 - 0.9**100) / 0.1 * GRADIENTS[0], rtol=1e-13, atol=1e-15)


def test_it_finds_the_bottom_of_the_mean_bowl() -> None:
    """Heavy ball with beta = 0.5, step 0.2 on a unit bowl: the error falls by sqrt(0.5) a round at least."""
    problem, federation, centres = bowls(3, sizes=[4, 4, 4])
    theta = play(FedAvgM(beta=0.5, lr=0.2), problem, federation, rounds=100).thetas[-1]
    torch.testing.assert_close(theta, centres.mean(0), rtol=0, atol=1e-12)  # 0.5^50 = 1e-15


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 1.0}, r"`beta` must be in \[0, 1\), but is 1.0"),
        ({"beta": -0.1}, r"`beta` must be in \[0, 1\), but is -0.1"),
        ({"server_lr": 0.0}, r"`server_lr` must be in \(0, inf\), but is 0.0"),
        ({"weighting": "size"}, "`weighting` must be one of examples, uniform, but is 'size'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"FedAvgM: {message}"):
        FedAvgM(**settings)  # type: ignore[arg-type]

"""FedFa against the recipe in terms of models, written again in NumPy; who weighs more; the velocity's sign."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedfa import FedFa, FedFaServer, FedFaUpdate
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import named_parameters
from tests.helpers.baselines import LR, bowls, classes
from tests.helpers.oracles_fair import FedFaOracle
from tests.helpers.play import play


def weights_of(algorithm: FedFa, scores: list[float], counts: list[int]) -> Tensor:
    """Return the clients' weights; `counts` are the rounds before this one. With unit updates they are the velocity."""
    K = len(scores)
    zero = torch.zeros(K, dtype=torch.float64)
    cohort = Cohort(torch.arange(K), torch.ones(K), K, 0)
    replies = Replies(FedFaUpdate(torch.eye(K, dtype=torch.float64), torch.tensor(scores, dtype=torch.float64)))
    server = algorithm.server_step(FedFaServer(zero, zero, torch.tensor(counts)), replies, cohort).server
    weights: Tensor = server.velocity / (1 - algorithm.server_momentum)
    return weights


@pytest.mark.parametrize(("lookahead", "gamma"), [(None, 0.6), (0.0, 0.5), (-LR, 0.6), (0.7, 0.9)])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_oracle_over_rounds_of_changing_cohorts(lookahead: float | None, gamma: float, seed: int) -> None:
    n_clients, n, rng = 7, 5, np.random.default_rng(seed)
    algorithm = FedFa(beta=0.3, server_momentum=gamma, lookahead=lookahead, lr=LR)
    theta = torch.from_numpy(rng.normal(size=n))
    server = FedFaServer(theta, torch.zeros_like(theta), torch.zeros(n_clients, dtype=torch.long))
    oracle = FedFaOracle(theta.numpy(), 0.3, gamma, LR if lookahead is None else lookahead, n_clients)
    for t in range(6):
        clients = sorted(rng.choice(n_clients, size=3, replace=False).tolist())
        deltas, accuracies = rng.normal(size=(3, n)), rng.uniform(5.0, 95.0, size=3)
        replies = Replies(FedFaUpdate(torch.from_numpy(deltas), torch.from_numpy(accuracies)))
        cohort = Cohort(torch.tensor(clients), torch.ones(3), n_clients, t)
        models = oracle.theta - deltas
        server = algorithm.server_step(server, replies, cohort).server
        oracle.step(clients, models, accuracies.tolist())
        np.testing.assert_allclose(server.theta.numpy(), oracle.theta, rtol=0, atol=1e-12)
        assert server.n_rounds.tolist() == oracle.n_rounds


def test_known_weights() -> None:
    """Accuracies 80 and 20: -log2 of 0.8 and 0.2 are 0.32193 and 2.32193; equal counts weigh one half each."""
    found = weights_of(FedFa(beta=0.0), [80.0, 20.0], [4, 4])
    assert found.tolist() == pytest.approx([0.12176, 0.87824], abs=5e-6)
    found = weights_of(FedFa(beta=0.5), [80.0, 20.0], [4, 4])
    assert found.tolist() == pytest.approx([0.31088, 0.68912], abs=5e-6)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_equals_weigh_alike_and_everybody_counts(beta: float) -> None:
    for scores in ([50.0, 50.0, 50.0], [0.0, 0.0, 0.0], [-3.0, -1.0, -2.0]):
        found = weights_of(FedFa(beta=beta), scores, [2, 2, 2])
        torch.testing.assert_close(found, torch.full((3,), 1 / 3, dtype=torch.float64), rtol=1e-12, atol=0)
    assert weights_of(FedFa(beta=beta), [37.0], [5]).tolist() == pytest.approx([1.0])
    uneven = weights_of(FedFa(beta=beta), [100.0, 0.0, 3.0], [0, 9, 1])
    assert float(uneven.sum()) == pytest.approx(1.0, abs=1e-12)
    assert float(uneven.min()) >= 0


def test_low_accuracy_and_frequent_participation_weigh_more() -> None:
    assert bool((weights_of(FedFa(beta=0.0), [10.0, 30.0, 80.0], [0, 0, 0]).diff() < 0).all())
    assert bool((weights_of(FedFa(beta=1.0), [50.0, 50.0, 50.0], [0, 3, 9]).diff() > 0).all())


def test_without_lookahead_equal_clients_are_uniform_fedavg_with_momentum() -> None:
    """On a regression there are no accuracies, and with full participation no difference in counts."""
    problem, federation, _ = bowls(4, 3, seed=1)
    settings: dict[str, Any] = {"lr": 0.1, "epochs": 3, "momentum": 0.9}
    plain = play(FedAvg(weighting="uniform", **settings), problem, federation, rounds=4)
    found = play(FedFa(lookahead=0.0, **settings), problem, federation, rounds=4)
    for mine, theirs in zip(found.thetas, plain.thetas, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
    assert FedFa().momentum == 0.9


def test_unlike_records_code_the_velocity_accelerates() -> None:
    """One bowl, steps of 0.1: the records' sign makes rounds shorter than plain averaging, ours makes them longer."""
    problem, federation, centres = bowls(1, 3, spread=0.0, seed=2)
    distances = {
        lookahead: float(
            (play(FedFa(lr=LR, lookahead=lookahead), problem, federation, rounds=5).thetas[-1] - centres[0]).norm()
        )
        for lookahead in (LR, 0.0, -LR)
    }
    assert distances[LR] < distances[0.0] < distances[-LR]
    default = play(FedFa(lr=LR), problem, federation, rounds=5).thetas[-1]
    assert float((default - centres[0]).norm()) == distances[LR]


def test_clients_report_their_training_accuracy_after_the_local_work() -> None:
    problem, federation = classes(3)
    algorithm = FedFa(lr=0.5, epochs=4)
    played = play(algorithm, problem, federation, rounds=1)
    starts = federation.train.starts
    accuracies = []
    models = []
    for c in range(3):
        x, y = (part[starts[c] : starts[c + 1]] for part in (federation.train.inputs, federation.train.targets))
        theta, velocity = problem.theta0.clone().requires_grad_(), torch.zeros_like(problem.theta0)
        for _ in range(4):
            (slope,) = torch.autograd.grad(torch.nn.functional.cross_entropy(problem.predict(theta, x), y), theta)
            velocity = 0.9 * velocity + slope
            theta = (theta - 0.5 * velocity).detach().requires_grad_()
        named = named_parameters(theta.detach(), problem.layout)
        outputs = x @ named["weight"].T + named["bias"]
        accuracies.append(100 * float((outputs.argmax(1) == y).double().mean()))
        models.append(theta.detach().numpy())
    oracle = FedFaOracle(problem.theta0.numpy(), 0.5, 0.5, 0.5, 3)
    oracle.step([0, 1, 2], np.stack(models), accuracies)
    np.testing.assert_allclose(played.thetas[-1].numpy(), oracle.theta, rtol=0, atol=1e-12)


def test_the_default_lookahead_is_the_local_rate_of_the_round() -> None:
    """One bowl, one step a round: s = lr (theta - c), and theta loses s + lr v with the decayed lr of that round."""
    problem, federation, centres = bowls(1, 3, spread=0.0, seed=2)
    played = play(FedFa(lr=0.4, lr_decay=0.5, server_momentum=0.0), problem, federation, rounds=3)
    left = 1.0
    for rate, theta in zip((0.4, 0.2, 0.1), played.thetas[1:], strict=True):
        left *= 1 - rate * (1 + rate)
        torch.testing.assert_close(theta, (1 - left) * centres[0], rtol=1e-13, atol=0)


def test_without_lookahead_server_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"FedFa: `server_momentum` is 0.9, but has no effect with lookahead = 0"):
        FedFa(lookahead=0.0, server_momentum=0.9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 1.5}, r"FedFa: `beta` must be in \[0, 1\], but is 1.5"),
        ({"server_momentum": 1.0}, r"`server_momentum` must be in \[0, 1\)"),
        ({"momentum": 1.0}, r"`momentum` must be in \[0, 1\)"),
        ({"lookahead": float("inf")}, r"`lookahead` must be in \(-inf, inf\)"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FedFa(**settings)

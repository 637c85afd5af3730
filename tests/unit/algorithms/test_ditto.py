"""Ditto: FedAvg's global model to the bit, and personal models that obey their own objective."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dqnfed.algorithms.ditto import Ditto, DittoMemory
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.core.algorithm import Theta
from dqnfed.sim.engine import run
from dqnfed.sim.tasks import TaskBuilder, sampled_clients
from tests.helpers.baselines import bowl_problem, bowls, classes, task_of
from tests.helpers.play import play


@pytest.mark.parametrize("participation", [1.0, 0.5])
@pytest.mark.parametrize("server", [{}, {"server_lr": 0.6, "weighting": "uniform"}], ids=["default", "other server"])
def test_the_global_model_is_fedavg_to_the_bit(participation: float, server: dict[str, Any]) -> None:
    problem, federation = classes(6)
    settings: dict[str, Any] = {"lr": 0.3, "epochs": 1, "batch_size": 10, "momentum": 0.4, **server}
    plain = play(FedAvg(**settings), problem, federation, rounds=3, participation=participation)
    mine = play(Ditto(**settings, lam=0.7), problem, federation, rounds=3, participation=participation)
    for ours, theirs in zip(mine.thetas, plain.thetas, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("proximal", "expected"), [("explicit", 0.90037500), ("implicit", 0.86394558)])
def test_golden_scalar(proximal: str, expected: float) -> None:
    """F(v) = (v - 3)^2 / 2, anchor 1, lam 0.5, lr 0.1, three steps from 0."""
    algorithm = Ditto(lam=0.5, proximal=proximal, lr=0.1, epochs=3)
    task = task_of(torch.tensor([[3.0]], dtype=torch.float64), lr=0.1, steps=3)
    one = torch.ones(1, dtype=torch.float64)
    _, memory = algorithm.client_step(bowl_problem(1), task, Theta(one), DittoMemory(0 * one))
    assert float(memory.personal) == pytest.approx(expected, abs=5e-9)  # printed digits


@pytest.mark.parametrize("lam", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("proximal", ["explicit", "implicit"])
def test_fixed_point_on_a_bowl(lam: float, proximal: str) -> None:
    """Both forms rest at (c + lam w) / (1 + lam); 2.3333 for c = 3, w = 1, lam = 0.5."""
    algorithm = Ditto(lam=lam, proximal=proximal, lr=0.3)
    task = task_of(torch.tensor([[3.0]], dtype=torch.float64), lr=0.3, steps=100)
    one = torch.ones(1, dtype=torch.float64)
    _, memory = algorithm.client_step(bowl_problem(1), task, Theta(one), DittoMemory(0 * one))
    assert float(memory.personal) == pytest.approx(
        (3.0 + lam) / (1.0 + lam), rel=1e-10
    )  # (1 - 0.3)^100 = 3e-16 and less


def test_without_pull_personal_models_are_local_sgd() -> None:
    """lam = 0: v_k is torch's SGD over the batches of k's rounds, each of which starts without momentum."""
    problem, federation = classes(4)
    algorithm = Ditto(lam=0.0, lr=0.3, epochs=1, batch_size=8, momentum=0.6, weight_decay=0.02)
    played = play(algorithm, problem, federation, rounds=4, participation=0.5, seed=1)
    builder = TaskBuilder(federation, problem, algorithm, 1)
    sampled = {c: [r for r in range(4) if c in sampled_clients(1, r, 4, 2)] for c in range(4)}
    client = max(sampled, key=lambda c: len(sampled[c]))
    assert 2 <= len(sampled[client]) < 4
    v = problem.theta0.clone().requires_grad_()
    rows = slice(int(federation.train.starts[client]), int(federation.train.starts[client + 1]))
    inputs, targets = federation.train.inputs[rows], federation.train.targets[rows]
    for round in sampled[client]:
        optimiser = torch.optim.SGD([v], lr=0.3, momentum=0.6, weight_decay=0.02)
        for batch in builder.stacked(torch.tensor([client]), round).batches[0]:
            optimiser.zero_grad()
            problem.losses(problem.predict(v, inputs[batch[batch >= 0]]), targets[batch[batch >= 0]]).mean().backward()
            optimiser.step()
    torch.testing.assert_close(played.memory(client).personal, v.detach(), rtol=1e-12, atol=1e-14)


def test_a_strong_pull_gives_the_broadcast_model() -> None:
    """lam -> infinity, implicit: v_k = theta_t, the anchor of the last round; the explicit form diverges here."""
    problem, federation, _ = bowls(3)
    played = play(Ditto(lam=1e12, lr=0.1), problem, federation, rounds=4)
    torch.testing.assert_close(played.memory(0).personal, played.thetas[-2], rtol=1e-10, atol=1e-10)
    explicit = play(Ditto(lam=1e3, proximal="explicit", lr=0.1), problem, federation, rounds=8)
    assert float((explicit.memory(0).personal - explicit.thetas[-2]).norm()) > 1e3


def test_personal_models_change_in_their_clients_rounds_alone() -> None:
    problem, federation = classes(6)
    algorithm = Ditto(lr=0.3)
    before = play(algorithm, problem, federation, rounds=3, participation=0.5)
    after = play(algorithm, problem, federation, rounds=4, participation=0.5)
    present = set(sampled_clients(0, 3, 6, 3).tolist())
    seen = [c for c in range(6) if int(before.state.memory.row_of[c]) >= 0]
    assert any(c not in present for c in seen)
    for c in seen:
        same = torch.equal(before.memory(c).personal, after.memory(c).personal)
        assert same is (c not in present)


def test_personal_models_fit_their_own_clients_better() -> None:
    problem, federation, centres = bowls(4, spread=0.1)
    played = play(Ditto(lam=0.1, lr=0.5), problem, federation, rounds=15)
    for k in range(4):
        own = float((played.memory(k).personal - centres[k]).norm())
        assert own < float((played.thetas[-1] - centres[k]).norm())


def test_both_models_are_evaluated_the_personal_one_first() -> None:
    problem, federation = classes(5)
    result = run(Ditto(lam=0.1, lr=2.0), problem, federation, rounds=6, seed=0, accelerate=False)
    plain = run(FedAvg(lr=2.0), problem, federation, rounds=6, seed=0, accelerate=False)
    assert result.summary["models"]["global"] == plain.summary["accuracy"]
    assert result.columns[-1] == "accuracy_global"
    assert torch.equal(result.theta, plain.theta)
    assert result.summary["accuracy"]["mean"] != plain.summary["accuracy"]["mean"]


def test_a_learning_rate_of_its_own() -> None:
    """personal_lr = lr is the default; another one moves the personal models alone."""
    problem, federation, _ = bowls(2)
    default, same, other = (
        play(Ditto(lr=0.2, lr_decay=0.5, personal_lr=rate), problem, federation, rounds=3) for rate in (None, 0.2, 0.1)
    )
    assert torch.equal(default.memory(0).personal, same.memory(0).personal)
    assert not torch.equal(default.memory(0).personal, other.memory(0).personal)
    assert torch.equal(default.thetas[-1], other.thetas[-1])


def test_a_learning_rate_of_its_own_decays_with_the_shared_one() -> None:
    """Without pull every round shrinks the way to the client's centre by 1 - personal_lr decay^t."""
    problem, federation, centres = bowls(2, start=1.0)
    played = play(Ditto(lam=0.0, lr=0.2, lr_decay=0.5, personal_lr=0.4), problem, federation, rounds=3)
    left = (1 - 0.4) * (1 - 0.2) * (1 - 0.1)
    for k in range(2):
        expected = centres[k] + left * (problem.theta0 - centres[k])
        torch.testing.assert_close(played.memory(k).personal, expected, rtol=1e-13, atol=1e-14)


def test_without_pull_its_form_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Ditto: `proximal` is 'explicit', but has no effect with lam = 0"):
        Ditto(lam=0.0, proximal="explicit")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lam": -0.1}, r"`lam` must be in \[0, inf\), but is -0.1"),
        ({"personal_lr": 0.0}, r"`personal_lr` must be in \(0, inf\), but is 0.0"),
        ({"proximal": "exact"}, "`proximal` must be one of implicit, explicit, but is 'exact'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"Ditto: {message}"):
        Ditto(**settings)  # type: ignore[arg-type]

"""SCAFFOLD: what the control variates are, and that they take the drift out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.scaffold import (
    Scaffold,
    ScaffoldMemory,
    ScaffoldSent,
    ScaffoldServer,
    ScaffoldUpdate,
    n_local_steps,
)
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.replies import Replies
from tests.helpers.baselines import GRADIENTS, bowl_problem, bowls, classes, cohort_of, task_of
from tests.helpers.play import play


@pytest.mark.parametrize("participation", [1.0, 0.4])
def test_the_server_keeps_the_mean_of_all_clients_variates(participation: float) -> None:
    """c = mean_k c_k over ALL clients; those never sampled still have c_k = 0."""
    problem, federation = classes(5)
    algorithm = Scaffold(lr=0.2, epochs=1, batch_size=8)
    played = play(algorithm, problem, federation, rounds=4, participation=participation)
    store = played.state.memory
    total = store.rows.control.sum(0)
    torch.testing.assert_close(played.state.server.control, total / 5, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("weighting", "shares"), [("uniform", (1 / 3, 1 / 3, 1 / 3)), ("examples", (0.1, 0.3, 0.6))], ids=str
)
def test_known_server_step(weighting: str, shares: tuple[float, ...]) -> None:
    """Three of twelve clients: theta loses half of their mean update, c gains a quarter of their mean change."""
    theta, control = torch.ones(4, dtype=torch.float64), torch.full((4,), 2.0, dtype=torch.float64)
    replies = Replies(ScaffoldUpdate(GRADIENTS, GRADIENTS.flip(1)))
    algorithm = Scaffold(server_lr=0.5, weighting=weighting)
    found = algorithm.server_step(ScaffoldServer(theta, control), replies, cohort_of(n_clients=12)).server
    mean = sum(share * row for share, row in zip(shares, GRADIENTS, strict=True))
    assert isinstance(mean, torch.Tensor)
    torch.testing.assert_close(found.theta, theta - 0.5 * mean, rtol=1e-14, atol=0)
    torch.testing.assert_close(found.control, control + 0.25 * mean.flip(0), rtol=1e-14, atol=0)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_option_two_is_the_mean_gradient_along_the_way(decay: float) -> None:
    """c_k^+ telescopes to the average of the uncorrected gradients at the local iterates, replayed by hand.

    Weight decay is a part of the client's loss, and so of its gradients.
    """
    problem, federation, _ = bowls(1, sizes=[6])
    targets = federation.train.targets
    c = torch.tensor([0.3, -0.1, 0.2], dtype=torch.float64)
    mine = torch.tensor([-0.5, 0.4, 0.1], dtype=torch.float64)
    theta = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    task = task_of(targets, lr=0.2, steps=5)
    algorithm = Scaffold(lr=0.2, epochs=5, weight_decay=decay)
    update, memory = algorithm.client_step(problem, task, ScaffoldSent(theta, c), ScaffoldMemory(mine))
    v, gradients = theta, []
    for _ in range(5):
        gradients.append(v - targets.mean(0) + decay * v)
        v = v - 0.2 * (gradients[-1] + c - mine)
    torch.testing.assert_close(theta - update.delta, v, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(memory.control, torch.stack(gradients).mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(update.control_change, memory.control - mine, rtol=1e-12, atol=1e-12)


def test_after_one_full_batch_step_a_variate_is_the_clients_gradient_whatever_the_rate() -> None:
    problem, federation, centres = bowls(3)
    played = play(Scaffold(lr=0.2, lr_decay=0.5), problem, federation, rounds=3)
    for k in range(3):
        torch.testing.assert_close(played.memory(k).control, played.thetas[2] - centres[k], rtol=1e-12, atol=1e-13)


def test_steps_without_examples_are_not_counted() -> None:
    task = task_of(torch.zeros(3, 2, dtype=torch.float64))._replace(
        batches=torch.tensor([[0, 1], [2, -1], [-1, -1], [-1, -1]])
    )
    assert float(n_local_steps(task)) == 2.0


def test_the_first_round_is_fedavg() -> None:
    problem, federation = classes(4)
    first = play(Scaffold(lr=0.3, epochs=2, batch_size=10), problem, federation, rounds=1).thetas[-1]
    plain = FedAvg(lr=0.3, epochs=2, batch_size=10, weighting="uniform")
    torch.testing.assert_close(first, play(plain, problem, federation, rounds=1).thetas[-1], rtol=1e-13, atol=1e-14)


def test_no_drift_where_fedavg_drifts() -> None:
    """Two losses a (theta - c)^2 / 2 of different curvature, five local steps.

    A local step shrinks theta - c by r = 1 - lr a, so that FedAvg rests where sum_k (1 - r_k^5) (theta - c_k) = 0;
    SCAFFOLD rests at the optimum, where sum_k a_k (theta - c_k) = 0.
    """
    a, c = torch.tensor([1.0, 4.0], dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    inputs = a.sqrt()[:, None]  # one example each: (x theta - x c)^2 / 2
    starts = torch.tensor([0, 1, 2])
    data = Examples(inputs, inputs * c[:, None], starts)
    problem = replace(bowl_problem(1), predict=lambda theta, x: x * theta)
    federation = Federation(data, data)
    drift = 1 - (1 - 0.1 * a) ** 5
    fedavg = play(FedAvg(lr=0.1, epochs=5), problem, federation, rounds=40).thetas[-1]
    assert float(fedavg) == pytest.approx(float(drift @ c / drift.sum()), abs=1e-6)  # 0.69
    scaffold = play(Scaffold(lr=0.1, epochs=5), problem, federation, rounds=40).thetas[-1]
    assert float(scaffold) == pytest.approx(float(a @ c / a.sum()), abs=1e-6)  # 0.80


def test_momentum_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Scaffold: `momentum` must be 0, but is 0.9"):
        Scaffold(momentum=0.9)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Scaffold: `server_lr` must be in \(0, inf\), but is 0.0"):
        Scaffold(server_lr=0.0)
    with pytest.raises(ValueError, match="Scaffold: `weighting` must be one of uniform, examples, but is 'even'"):
        Scaffold(weighting="even")


def test_with_option_one_a_clients_variate_is_its_gradient_at_the_round_model() -> None:
    problem, federation, centres = bowls(3, 2)
    played = play(Scaffold(lr=0.1, epochs=4, control="gradient"), problem, federation, rounds=3)
    for k in range(3):
        torch.testing.assert_close(played.memory(k).control, played.thetas[-2] - centres[k], rtol=1e-12, atol=1e-14)
    assert played.records[0]["passes"] == 3 * 5


@pytest.mark.parametrize("control", ["update", "gradient"])
def test_local_work_that_goes_wild_on_one_client_does_not_become_everybodys_correction(control: str) -> None:
    """One of ten clients is so steep that its local steps diverge: its update and its change of c are both clipped."""
    problem = bowl_problem(2)
    steep = problem.losses
    targets = torch.randn(10, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs = torch.ones(10, 4, 1, dtype=torch.float64)
    inputs[7] = 10.0  # what theta and the targets are multiplied by
    starts = torch.arange(0, 41, 4)
    examples = Examples(inputs.flatten(0, 1), (inputs * targets).flatten(0, 1), starts)
    scaled = replace(problem, predict=lambda theta, given: given * theta, losses=steep)
    algorithm = Scaffold(lr=0.1, epochs=5, control=control)
    played = play(algorithm, scaled, Federation(examples, examples), rounds=30, participation=0.5)
    assert sum(len(record["clipped"]) for record in played.records) > 0, "the client's updates are wild"
    largest = max(float(server.control.norm()) for server in played.servers)
    assert largest < 100.0
    assert all(record["status"] == "next" for record in played.records)

"""AgnosticFair: AFL for groups of clients, FedAvg for one group, and a true minimax over classes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from dqnfed.algorithms.afl import AFL
from dqnfed.algorithms.agnostic_fair import AgnosticFair, GroupLosses
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from tests.helpers.baselines import LOSSES, bowl_problem, bowls, classes, cohort_of
from tests.helpers.play import play


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_client_indicators_are_afl_step_by_step(participation: float) -> None:
    problem, federation = classes(4)
    mine = play(
        AgnosticFair(groups="client", mixture_lr=0.3, lr=0.5),
        problem,
        federation,
        rounds=5,
        participation=participation,
    )
    theirs = play(AFL(lambda_lr=0.3, lr=0.5), problem, federation, rounds=5, participation=participation)
    for a, b in zip(mine.servers, theirs.servers, strict=True):
        torch.testing.assert_close(a.theta, b.theta, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(a.mixture, b.weights, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("rate", "expected"), [(0.1, [0.26666667, 0.41666667, 0.31666667]), (1.0, [0.0, 1.0, 0.0])])
def test_golden_mixture(rate: float, expected: list[float]) -> None:
    algorithm = AgnosticFair(groups="client", mixture_lr=rate)
    server = algorithm.init_server(bowl_problem(4), 3)
    counts = torch.tensor([10.0, 30.0, 60.0], dtype=torch.float64)
    raised = algorithm.server_step(server, Replies(GroupLosses(LOSSES * counts, counts)), cohort_of()).server
    torch.testing.assert_close(
        raised.next_mixture, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-9
    )  # printed digits


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_constant_kernel_is_fedavg(participation: float) -> None:
    problem, federation = classes(4)
    settings = {"lr": 0.3, "batch_size": 10}
    plain = play(FedAvg(**settings), problem, federation, rounds=3, participation=participation)  # type: ignore[arg-type]
    one = play(
        AgnosticFair(groups="constant", **settings),  # type: ignore[arg-type]
        problem,
        federation,
        rounds=3,
        participation=participation,
    )
    torch.testing.assert_close(one.thetas[-1], plain.thetas[-1], rtol=1e-13, atol=1e-15)


def test_the_reweighting_has_mean_one() -> None:
    """sum_b q_b alpha_b = 1 over the cohort's examples, also when a class is missing."""
    algorithm = AgnosticFair(groups="class", n_classes=4)
    server = algorithm.init_server(bowl_problem(2), 3)._replace(
        mixture=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    )
    counts = torch.tensor([[3.0, 1.0, 0.0, 0.0], [2.0, 0.0, 6.0, 0.0], [0.0, 8.0, 1.0, 0.0]], dtype=torch.float64)
    raised = algorithm.server_step(server, Replies(GroupLosses(2.0 * counts, counts)), cohort_of((4, 8, 9))).server
    shares = counts.sum(0) / counts.sum()
    assert float(shares @ raised.alpha) == pytest.approx(1.0, abs=1e-12)
    torch.testing.assert_close(
        shares * raised.alpha, torch.tensor([1.0, 2.0, 3.0, 0.0], dtype=torch.float64) / 6, rtol=1e-12, atol=0
    )


def test_one_step_follows_the_mixture_of_class_losses() -> None:
    """theta - lr * grad sum_b lambda_b L_b, with L_b the pooled mean loss of class b, by autograd."""
    problem, federation = classes(4)
    algorithm = AgnosticFair(groups="class", mixture_lr=0.1, lr=0.4)
    played = play(algorithm, problem, federation, rounds=1)
    theta = problem.theta0.clone().requires_grad_()
    data = federation.train
    losses = problem.losses(problem.predict(theta, data.inputs), data.targets)
    by_class = torch.stack([losses[data.targets == b].mean() for b in range(3)])
    by_class.mean().backward()
    assert theta.grad is not None
    torch.testing.assert_close(played.thetas[-1], problem.theta0 - 0.4 * theta.grad, rtol=1e-12, atol=1e-14)
    raised = 1 / 3 + 0.1 * by_class.detach()
    expected = raised - (raised.sum() - 1) / 3  # no entry reaches zero: the projection is a shift
    torch.testing.assert_close(played.servers[-1].mixture, expected, rtol=1e-12, atol=1e-14)


def test_equal_losses_keep_the_mixture() -> None:
    algorithm = AgnosticFair(groups="client", mixture_lr=0.7)
    server = algorithm.init_server(bowl_problem(2), 3)
    counts = torch.tensor([5.0, 2.0, 9.0], dtype=torch.float64)
    raised = algorithm.server_step(server, Replies(GroupLosses(1.3 * counts, counts)), cohort_of((5, 2, 9))).server
    torch.testing.assert_close(raised.next_mixture, server.mixture, rtol=1e-14, atol=1e-15)


def test_the_worst_class_gains() -> None:
    """Two overlapping classes, one rare: its loss is far smaller than after FedAvg, which nearly ignores it."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for n_rare in (1, 3):
        labels = torch.tensor([1] * n_rare + [0] * (20 - n_rare))
        clients.append((torch.randn(20, 1, generator=generator, dtype=torch.float64) + labels[:, None], labels))
    problem = Problem.from_module(nn.Linear(1, 2, dtype=torch.float64))
    problem = replace(problem, theta0=torch.zeros(4, dtype=torch.float64))
    federation = Federation.from_clients(clients, test=clients)
    data = federation.train

    def largest_class_loss(theta: torch.Tensor) -> float:
        losses = problem.losses(problem.predict(theta, data.inputs), data.targets)
        return max(float(losses[data.targets == b].mean()) for b in range(2))

    fair = play(AgnosticFair(mixture_lr=0.1, lr=0.5), problem, federation, rounds=25).thetas[-1]
    plain = play(FedAvg(lr=0.5), problem, federation, rounds=25).thetas[-1]
    assert largest_class_loss(fair) < 0.6 * largest_class_loss(plain)


def test_auto_takes_classes_where_there_are_some() -> None:
    softmax, _ = classes(2)
    bowl, _, _ = bowls(2)
    assert AgnosticFair().prepare(softmax, 2, 2).groups == "class"
    assert AgnosticFair().prepare(softmax, 2, 2).n_classes == 3
    assert AgnosticFair().prepare(bowl, 2, 2).groups == "client"
    with pytest.raises(ValueError, match="groups='class' needs targets that are class numbers"):
        AgnosticFair(groups="class").prepare(bowl, 2, 2)
    with pytest.raises(ValueError, match="`n_classes` is 3, but has no effect with groups='client'"):
        AgnosticFair(n_classes=3).prepare(bowl, 2, 2)


def test_fewer_groups_than_classes_are_refused() -> None:
    problem, federation = classes(2)
    with pytest.raises(ValueError, match="`n_classes` must be at least the number of the model's outputs, 3, but is 2"):
        play(AgnosticFair(n_classes=2), problem, federation, rounds=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": "writer"}, "`groups` must be one of auto, class, client, constant, but is 'writer'"),
        ({"mixture_lr": -1.0}, r"`mixture_lr` must be in \[0, inf\), but is -1.0"),
        ({"n_classes": 0}, r"`n_classes` must be in \[1, inf\), but is 0"),
        ({"groups": "client", "n_classes": 3}, "`n_classes` is 3, but has no effect with groups='client'"),
        (
            {"groups": "constant", "mixture_lr": 0.3},
            "`mixture_lr` is 0.3, but has no effect with groups='constant', which is one group",
        ),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"AgnosticFair: {message}"):
        AgnosticFair(**settings)  # type: ignore[arg-type]

"""DQN-Fed's server on replies made by hand: steps that follow from geometry alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.parts.messages import DescentUpdate, LocalUpdate, Trial, TrialUpdate
from dqnfed.core.algorithm import Cohort
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from tests.helpers.quadratic_clients import consistent_quadratics

ORTHOGONAL = torch.tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.2, 0.0, -0.1]], dtype=torch.float64)


def problem_of(n: int = 4) -> Problem:
    return consistent_quadratics(3, n).problem


def everybody(K: int) -> Cohort:
    return Cohort(torch.arange(K), torch.full((K,), 10), K, 0)


def gradients(rows: Tensor, *, rates: Tensor | None = None) -> Replies[DescentUpdate]:
    """Return the replies of clients whose rates are their gradients' squares and whose losses are large."""
    wanted = rows.square().sum(1) if rates is None else rates
    numbers = torch.ones_like(wanted)
    return Replies(DescentUpdate(rows, wanted, loss=100.0 * numbers, curvature=numbers))


def local_updates(rows: Tensor, losses: Tensor | None = None) -> Replies[LocalUpdate]:
    return Replies(LocalUpdate(rows, torch.ones(len(rows), dtype=torch.float64) if losses is None else losses))


def test_orthogonal_updates_of_local_sgd_give_fedavgs_step() -> None:
    """With g_k'u = ||g_k||^2 for orthogonal g_k, u is their sum: the direction of their mean, whose length it gets."""
    problem, rows = problem_of(), 0.1 * ORTHOGONAL  # none is longer than the model
    method = DQNFed(epochs=2, ridge=0.0, beyond="stop").prepare(problem, 3, 3)
    server: Any = method.init_server(problem, 3)
    moved: Any = method.server_step(server, local_updates(rows), everybody(3)).server
    torch.testing.assert_close(server.theta - moved.theta, rows.mean(0))


@pytest.mark.parametrize("constraint", ["at-least", "exactly"])
@pytest.mark.parametrize("ridge", [0.0, 0.25, 1.0])
def test_a_ridge_shortens_the_step_for_orthogonal_gradients(constraint: str, ridge: float) -> None:
    """The Gramian of the unit rows is the identity, so that the ridge divides every weight by 1 + ridge."""
    problem = problem_of()
    settings: dict[str, Any] = {"constraint": constraint, **({"beyond": "stop"} if constraint == "at-least" else {})}
    method = DQNFed(**settings, ridge=ridge, metric="identity", step="paper").prepare(problem, 3, 3)
    server: Any = method.init_server(problem, 3)
    moved: Any = method.server_step(server, gradients(ORTHOGONAL), everybody(3)).server
    torch.testing.assert_close(server.theta - moved.theta, ORTHOGONAL.sum(0) / (1.0 + ridge))


def test_a_client_that_is_left_out_has_no_part_in_the_metric() -> None:
    """Client 3 opposes the other three; the mean gradient that the next secant pair starts from is theirs alone."""
    agreeing = torch.tensor([[1.0, 0.1, 0.0, 0.0], [1.0, 0.0, 0.1, 0.0], [1.0, 0.0, 0.0, 0.1]], dtype=torch.float64)
    rows = torch.cat([agreeing, -agreeing.mean(0, keepdim=True)])
    problem = problem_of()
    method = DQNFed(drop_share=0.25).prepare(problem, 4, 4)
    step: Any = method.server_step(method.init_server(problem, 4), gradients(rows), everybody(4))
    kept = step.server.search.mean
    assert kept.members.tolist() == [True, True, True, False]
    torch.testing.assert_close(kept.gradient, rows[:3].mean(0))


def test_a_refused_trial_is_followed_by_one_of_half_the_length() -> None:
    problem = problem_of()
    method = DQNFed(step="line-search", metric="identity").prepare(problem, 3, 3)
    fresh: Any = method.init_server(problem, 3)
    later = fresh._replace(n_steps=torch.tensor(1), step_norm=torch.tensor(1.0, dtype=torch.float64))
    server: Any = method.server_step(later, gradients(ORTHOGONAL), everybody(3)).server
    lengths = []
    for _ in range(4):
        sent = method.send(server)
        assert isinstance(sent, Trial)
        lengths.append(float((server.theta - sent.theta).norm()))
        refused = Replies(TrialUpdate(torch.full((3,), 1e6, dtype=torch.float64)))
        server = method.server_step(server, refused, everybody(3)).server
    assert lengths[1:] == pytest.approx([lengths[0] / 2, lengths[0] / 4, lengths[0] / 8])


def test_batches_alone_make_the_local_work_sgd() -> None:
    problem = problem_of()
    assert DQNFed(batch_size=8).prepare(problem, 3, 3).local == "sgd"
    assert DQNFed(epochs=2).prepare(problem, 3, 3).local == "sgd"
    assert DQNFed().prepare(problem, 3, 3).local == "gradient"
    assert replace(DQNFed(), local="gradient", epochs=2).prepare(problem, 3, 3).local == "gradient"

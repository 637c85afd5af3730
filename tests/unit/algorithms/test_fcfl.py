"""FCFL: stage 1 is a tilted mean (under a constraint), stage 2 opposes no client."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

from dqnfed.algorithms.fcfl import (
    FCFL,
    ConstrainedUpdate,
    FCFLServer,
    FCFLUpdate,
    common_descent_weights,
    cooled,
    minmax_step,
    pareto_step,
)
from dqnfed.algorithms.term import TERM, TERMServer, TERMUpdate
from dqnfed.core.algorithm import Status
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import row
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.baselines import GRADIENTS, LOSSES, LR, bowl_problem, bowls, classes, cohort_of
from tests.helpers.play import play
from tests.helpers.rows import agreeing_rows, gaussian_rows


def start(temperature: float = 0.5, n: int = 4) -> FCFLServer:
    return FCFL(temperature=temperature).init_server(bowl_problem(n), 3)


@pytest.mark.parametrize("temperature", [10.0, 1.0, 0.5, 0.2])
def test_stage_one_is_term_with_the_inverse_temperature(temperature: float) -> None:
    deltas = LR * GRADIENTS
    mine = (
        FCFL(temperature=temperature)
        .server_step(start(temperature), Replies(FCFLUpdate(deltas, LOSSES)), cohort_of())
        .server.theta
    )
    term = TERM(t=1 / temperature, weighting="uniform")
    zeros = torch.zeros(4, dtype=torch.float64)
    before = TERMServer(zeros, torch.tensor(-np.inf, dtype=torch.float64))
    theirs = term.server_step(before, Replies(TERMUpdate(deltas, LOSSES)), cohort_of()).server.theta
    torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-15)
    if temperature == 1.0:  # the golden numbers of TERM with t = 1
        golden = torch.tensor([-0.09169580, 0.03480430, -0.08597556, -0.12324310], dtype=torch.float64)
        torch.testing.assert_close(mine, golden, rtol=0, atol=5e-9)


def test_nothing_overflows_at_the_lowest_temperature() -> None:
    replies: Replies[Any] = Replies(FCFLUpdate(LR * GRADIENTS, 1e4 * LOSSES))
    found = FCFL().server_step(start(5e-5), replies, cohort_of()).server.theta
    torch.testing.assert_close(found, -LR * GRADIENTS[1])  # all weight on the largest loss


def test_temperatures_only_fall_and_stop_falling() -> None:
    problem, federation, _ = bowls(4)
    played = play(FCFL(lr=0.3), problem, federation, rounds=15)
    temperatures = [float(server.loss_temperature) for server in played.servers]
    assert temperatures == sorted(temperatures, reverse=True)
    assert temperatures[0] == 0.5
    assert min(temperatures) >= 1e-6  # the last cooling starts above 1e-4
    warm, tiny = torch.tensor(0.5), torch.full((3,), 1e-3)
    assert float(cooled(warm, tiny)) == pytest.approx(0.005)
    assert float(cooled(warm, 1e3 * tiny * 10)) == 0.5  # a long gradient: not yet


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("K", [1, 2, 6, 15])
@pytest.mark.parametrize("is_constrained", [False, True])
def test_stage_two_opposes_no_row(seed: int, K: int, is_constrained: bool) -> None:
    """Neither a client's update nor, where there is one, the disparity's step."""
    rows = gaussian_rows(K + 1, 8, seed=seed)[: K + is_constrained]  # K > n too
    deltas, disparity_step = rows[:K], rows[K] if is_constrained else None
    step, worst = pareto_step(Replies(FCFLUpdate(deltas, torch.ones(K))), disparity_step)
    longest = float(rows.square().sum(1).max())
    assert worst >= -1e-8
    assert worst == pytest.approx(float((rows @ step).min()) / longest, abs=1e-12)
    assert float((rows @ step).min()) >= -1e-8 * longest


def test_stage_two_is_the_best_of_all_that_oppose_no_row() -> None:
    """The linear program against a general solver that knows nothing of vertices."""
    rows = agreeing_rows(4, 6, seed=3, agreement=0.3)
    M = (rows @ rows.T).numpy()
    M = M / M.diagonal().max()
    mean = np.full(4, 0.25)
    weights = common_descent_weights(M, mean)
    best = minimize(
        lambda a: -(a @ M @ mean),
        np.full(4, 0.25),
        jac=lambda a: -(M @ mean),
        bounds=[(0.0, 1.0)] * 4,
        constraints=[
            {"type": "eq", "fun": lambda a: a.sum() - 1.0},
            {"type": "ineq", "fun": lambda a: M @ a},
        ],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
    assert weights @ M @ mean == pytest.approx(-best.fun, rel=1e-6)


def test_at_a_pareto_point_the_model_is_held() -> None:
    opposed = torch.stack([GRADIENTS[0], -GRADIENTS[0]])
    algorithm = FCFL(minmax_rounds=0)
    step = algorithm.server_step(start(), Replies(FCFLUpdate(opposed, LOSSES[:2])), cohort_of((1, 1)))
    assert float(step.server.theta.norm()) < 1e-9
    zeros: Replies[Any] = Replies(FCFLUpdate(0 * opposed, LOSSES[:2]))
    assert algorithm.server_step(start(), zeros, cohort_of((1, 1))).status is Status.HOLD


def test_stage_one_ends_at_the_minmax_point() -> None:
    """The largest of two bowls' losses is smallest halfway between their centres."""
    problem, federation, centres = bowls(2, spread=0.01, start=2.0)
    played = play(FCFL(lr=0.2, minmax_rounds=40), problem, federation, rounds=40)
    losses = (played.thetas[-1] - centres).square().sum(1) / 2
    halfway = float((centres[0] - centres[1]).square().sum()) / 8
    assert halfway <= float(losses.max()) < 1.3 * halfway


def test_stage_two_raises_no_loss_to_first_order() -> None:
    """On a unit bowl F(theta - v) = F(theta) - g.v + ||v||^2 / 2, and g.v >= 0."""
    problem, federation, centres = bowls(2, spread=0.01, start=2.0)
    played = play(FCFL(lr=0.2, minmax_rounds=2), problem, federation, rounds=8)
    for before, after in pairwise(played.thetas[2:]):
        rise = ((after - centres).square().sum(1) - (before - centres).square().sum(1)) / 2
        assert float(rise.max()) <= float((after - before).square().sum()) / 2 + 1e-12
        assert float(rise.sum()) < 0  # the mean loss falls


def sensitive_problem() -> tuple[Problem, Federation]:
    """Return clients whose labels follow the sensitive column, so that accuracy and parity conflict."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for size in (40, 60):
        inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        inputs[:, 2] = inputs[:, 2].sign()
        labels = (inputs[:, 0] + 0.8 * inputs[:, 2] > 0).long()
        clients.append((inputs, labels))
    model = nn.Linear(3, 2, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[-0.1, 0.0, -0.2], [0.1, 0.0, 0.2]]))
        model.bias.zero_()
    return Problem.from_module(model), Federation.from_clients(clients, n_classes=2)


def first_task(problem: Problem, federation: Federation) -> Task:
    return row(TaskBuilder(federation, problem, FCFL(), 0).stacked(torch.arange(1), 0), 0)


@pytest.mark.parametrize("kind", ["parity", "opportunity"])
def test_the_disparity_is_the_gap_of_the_groups(kind: str) -> None:
    problem, federation = sensitive_problem()
    algorithm = FCFL(sensitive=2, disparity=kind)
    played_problem = play(algorithm, problem, federation, rounds=1)
    rows = slice(0, int(federation.train.starts[1]))
    inputs, targets = federation.train.inputs[rows], federation.train.targets[rows]
    outputs = problem.predict(problem.theta0, inputs)
    decisions = 1 / (1 + torch.exp(-10 * (outputs[:, 1] - outputs[:, 0])))
    counted = targets == 1 if kind == "opportunity" else torch.ones_like(targets, dtype=torch.bool)
    group = inputs[:, 2] > 0
    expected = float((decisions[counted & group].mean() - decisions[counted & ~group].mean()).abs())
    one = first_task(problem, federation)
    assert float(algorithm.smooth_disparity(problem, problem.theta0, one)) == pytest.approx(expected, rel=1e-12)
    assert played_problem.records[0]["diagnostics"]["largest_disparity"] >= expected - 1e-12


def test_an_empty_group_has_no_disparity() -> None:
    problem, federation = sensitive_problem()
    one = first_task(problem, federation)
    same = one._replace(inputs=torch.cat([one.inputs[:, :2], torch.ones_like(one.inputs[:, 2:])], dim=1))
    gap = torch.func.grad_and_value(FCFL(sensitive=2).smooth_disparity, argnums=1)(problem, problem.theta0, same)
    assert float(gap[1]) == 0.0
    assert float(gap[0].norm()) == 0.0


def test_the_constraint_lowers_the_disparity() -> None:
    problem, federation = sensitive_problem()

    def largest(algorithm: FCFL) -> float:
        played = play(algorithm, problem, federation, rounds=12)
        value: float = played.records[-1]["diagnostics"]["largest_disparity"]
        return value

    free = largest(FCFL(sensitive=2, max_disparity=1.0, lr=1.0))
    assert free > 0.5
    assert largest(FCFL(sensitive=2, max_disparity=0.05, lr=1.0)) < 0.5 * free


@pytest.mark.parametrize("seed", range(10))
def test_stage_one_under_the_constraint_is_the_best_point_of_its_segment(seed: int) -> None:
    """The closed form against a fine search over y in [0, 1]."""
    loss_step, disparity_step = gaussian_rows(2, 3, seed=seed)
    grid = torch.linspace(0, 1, 20001, dtype=torch.float64)
    candidates = (1 - grid)[:, None] * loss_step + grid[:, None] * disparity_step
    gains = candidates @ disparity_step
    allowed = candidates @ loss_step >= -1e-12
    found = minmax_step(loss_step, disparity_step, is_broken=True)
    assert float(found @ loss_step) >= -1e-12
    spacing = float((loss_step - disparity_step).norm() * disparity_step.norm()) / 20000
    assert float(found @ disparity_step) >= float(gains[allowed].max()) - 1e-12
    assert float(found @ disparity_step) <= float(gains[allowed].max()) + spacing
    kept = minmax_step(loss_step, disparity_step, is_broken=False)
    assert float(kept @ loss_step) == pytest.approx(float((candidates @ loss_step).max()), rel=1e-12)


def test_stage_two_under_a_broken_bound_does_not_raise_the_disparity() -> None:
    deltas, h = GRADIENTS, -GRADIENTS.mean(0) + torch.tensor([0.0, 0.0, 3.0, 0.0], dtype=torch.float64)
    updates = ConstrainedUpdate(LR * deltas, LOSSES, h.expand(3, 4), torch.full((3,), 0.5, dtype=torch.float64))
    algorithm = FCFL(sensitive=0, minmax_rounds=0, lr=LR)
    moved: Tensor = -algorithm.server_step(start(), Replies(updates), cohort_of()).server.theta
    assert float(moved @ h) >= -1e-10
    assert float((deltas @ moved).min()) >= -1e-10
    assert float(moved.norm()) > 1e-3


def test_many_classes_have_no_disparity() -> None:
    problem, federation = classes(2)
    with pytest.raises(ValueError, match="a disparity needs a binary decision, but the model has 3 outputs"):
        play(FCFL(sensitive=0), problem, federation, rounds=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, r"`temperature` must be in \(0, inf\), but is 0.0"),
        ({"max_disparity": 1.5}, r"`max_disparity` must be in \[0, 1\], but is 1.5"),
        ({"minmax_rounds": -1}, r"`minmax_rounds` must be in \[0, inf\), but is -1"),
        ({"sensitive": -2}, r"`sensitive` must be in \[0, inf\), but is -2"),
        ({"disparity": "odds"}, "`disparity` must be one of parity, opportunity, but is 'odds'"),
        ({"disparity": "opportunity"}, "`disparity` is 'opportunity', but has no effect without `sensitive`"),
        ({"max_disparity": 0.2}, "`max_disparity` is 0.2, but has no effect without `sensitive`"),
        (
            {"temperature": 0.2, "minmax_rounds": 0},
            "`temperature` is 0.2, but has no effect without `sensitive` and with minmax_rounds=0",
        ),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"FCFL: {message}"):
        FCFL(**settings)  # type: ignore[arg-type]

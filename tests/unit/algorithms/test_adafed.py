"""AdaFed: the paper's direction in closed form, and DQN-Fed's machinery with rates from losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.adafed import AdaFed, RatedLocalUpdate
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.parts.messages import DescentUpdate
from dqnfed.core.replies import Replies
from dqnfed.maths.directions import at_least_step
from dqnfed.maths.gramian import gramian
from dqnfed.maths.solvers import min_norm_weights
from tests.helpers.baselines import GRADIENTS, LOSSES, bowl_problem, bowls, classes, cohort_of
from tests.helpers.play import play
from tests.helpers.rows import agreeing_rows, gaussian_rows, positive_rates


def paper_direction(rows: Tensor, rates: Tensor) -> Tensor:
    """Return the direction d of the paper's form, as the server makes it with step_size = 1."""
    K, n = rows.shape
    algorithm = AdaFed(form="paper").prepare(bowl_problem(n), K, K)
    updates = DescentUpdate(rows, rates, loss=rates, curvature=torch.full_like(rates, torch.nan))
    before: Any = algorithm.init_server(bowl_problem(n), K)
    after: Any = algorithm.server_step(before, Replies(updates), cohort_of((1,) * K)).server
    direction: Tensor = -after.theta
    return direction


def sequential_direction(rows: Tensor, rates: Tensor) -> tuple[Tensor, float]:
    """Return d and S by the paper's scaled Gram-Schmidt recursion, one client after the other."""
    scaled: list[Tensor] = []
    for g, c in zip(rows, rates, strict=True):
        shares = [(g @ v) / (v @ v) for v in scaled]
        rest = g - sum((a * v for a, v in zip(shares, scaled, strict=True)), torch.zeros_like(g))
        scaled.append(rest / (c - sum(shares, torch.zeros_like(c))))
    inverse = torch.stack([1 / (v @ v) for v in scaled])
    return (inverse / inverse.sum()) @ torch.stack(scaled), float(inverse.sum())


@pytest.mark.parametrize(
    ("gamma", "S", "expected"),
    [
        (0.0, 1.14583333, [0.14545455, 0.65454545, 0.29090909, 0.58181818]),
        (1.0, 2.45691288, [-0.01541723, 0.35613798, 0.19117364, 0.49335132]),
        (2.0, 10.44093277, [-0.05260473, 0.16162349, 0.07763732, 0.24669803]),
    ],
)
def test_golden_directions(gamma: float, S: float, expected: list[float]) -> None:
    d = paper_direction(GRADIENTS, LOSSES**gamma)
    torch.testing.assert_close(d, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=5e-9)  # printed digits
    assert 1 / float(d @ d) == pytest.approx(S, abs=5e-8)


def test_a_client_asks_for_its_loss_to_the_power_gamma() -> None:
    problem, federation, _ = bowls(3)
    played = {g: play(AdaFed(gamma=g, form="paper"), problem, federation, rounds=1).thetas[-1] for g in (0.0, 1.0, 2.0)}
    targets = [federation.train.targets[a:b] for a, b in zip(*_bounds(federation.train.starts), strict=True)]
    gradients = torch.stack([-t.mean(0) for t in targets])
    losses = torch.stack([t.square().sum(1).mean() / 2 for t in targets])
    for gamma, theta in played.items():
        torch.testing.assert_close(-theta, paper_direction(gradients, losses**gamma), rtol=1e-12, atol=1e-14)


def _bounds(starts: Tensor) -> tuple[list[int], list[int]]:
    return starts[:-1].tolist(), starts[1:].tolist()


@pytest.mark.parametrize("seed", range(5))
def test_closed_form_is_the_sequential_one(seed: int) -> None:
    rows, rates = gaussian_rows(6, 40, seed=seed), positive_rates(6, seed=seed)
    d = paper_direction(rows, rates)
    oracle, S = sequential_direction(rows, rates)
    torch.testing.assert_close(d, oracle, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(rows @ (S * d), rates, rtol=1e-9, atol=1e-12)
    assert float(d @ d) * S == pytest.approx(1.0, rel=1e-9)


def test_order_of_clients_is_irrelevant() -> None:
    rows, rates = gaussian_rows(6, 40), positive_rates(6)
    order = torch.tensor([4, 1, 5, 0, 2, 3])
    torch.testing.assert_close(
        paper_direction(rows[order], rates[order]), paper_direction(rows, rates), rtol=1e-10, atol=1e-14
    )


def test_orthogonal_gradients() -> None:
    rows = torch.diag(torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64))[:3]
    squares = rows.square().sum(1)
    S = float((LOSSES.square() / squares).sum())
    torch.testing.assert_close(paper_direction(rows, LOSSES), (LOSSES / squares) @ rows / S, rtol=1e-12, atol=1e-15)


def test_scaling_the_rates_keeps_the_direction() -> None:
    rows, rates = gaussian_rows(4, 10), positive_rates(4)
    torch.testing.assert_close(
        paper_direction(rows, 7.0 * rates), paper_direction(rows, rates) / 7.0, rtol=1e-11, atol=1e-14
    )


def test_equal_rates_give_everybody_the_same_and_mgda_where_it_is_interior() -> None:
    rows = agreeing_rows(5, 60, seed=1, agreement=0.3)
    d = paper_direction(rows, torch.ones(5, dtype=torch.float64))
    slopes = rows @ d
    torch.testing.assert_close(slopes, slopes.mean().expand(5), rtol=1e-8, atol=0)
    weights = torch.from_numpy(min_norm_weights(gramian(rows).numpy()))
    assert bool((weights > 0).all())
    torch.testing.assert_close(d, weights @ rows, rtol=1e-8, atol=1e-12)


def test_a_client_without_loss_asks_for_nothing() -> None:
    rates = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    u = paper_direction(GRADIENTS, rates)
    slopes = GRADIENTS @ u
    assert abs(float(slopes[1])) < 1e-14
    assert float(slopes[2]) == pytest.approx(2 * float(slopes[0]), rel=1e-12)


@pytest.mark.parametrize("form", ["paper", "safeguarded"])
def test_identical_clients_follow_their_common_gradient(form: str) -> None:
    """The Gramian is singular; the step is still parallel to the one gradient there is."""
    problem, federation, centres = bowls(1, sizes=[5])
    data = federation.train.targets
    clients = [(data.new_zeros(5, 1), data) for _ in range(3)]
    same = type(federation).from_clients(clients, test=clients)
    theta = play(AdaFed(form=form), problem, same, rounds=1).thetas[-1]
    cosine = torch.nn.functional.cosine_similarity(theta, centres[0], dim=0)
    assert float(cosine) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize(
    ("step", "participation"), [("curvature", 1.0), ("line-search", 1.0), ("votes", 1.0), ("votes", 0.5)]
)
def test_it_is_dqn_fed_with_rates_from_losses(step: str, participation: float) -> None:
    problem, federation = classes(4)
    mine = play(AdaFed(step=step), problem, federation, rounds=6, participation=participation)
    theirs = play(DQNFed(step=step, rates="loss"), problem, federation, rounds=6, participation=participation)
    for ours, others in zip(mine.thetas, theirs.thetas, strict=True):
        assert torch.equal(ours, others)
    assert not torch.equal(mine.thetas[-1], problem.theta0)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 3.0])
def test_every_loss_falls(gamma: float) -> None:
    """Line search accepts a step only if no participant loses; all powers of the loss get somewhere."""
    problem, federation = classes(4)
    played = play(AdaFed(gamma=gamma, step="line-search"), problem, federation, rounds=5)
    assert all(record["rho"] == 1.0 for record in played.records)
    assert played.records[-1]["loss_after"] < 0.8 * played.records[0]["loss_before"]


def test_a_larger_gamma_serves_the_worst_client_more() -> None:
    slopes = {}
    for gamma in (0.0, 1.0, 2.0):
        d = paper_direction(GRADIENTS, LOSSES**gamma)
        decreases = GRADIENTS @ d
        slopes[gamma] = float(decreases[1] / decreases.sum())  # client 1 has the largest loss
    assert slopes[0.0] < slopes[1.0] < slopes[2.0]


def test_local_epochs_send_update_and_rate() -> None:
    problem, federation = classes(3)
    algorithm = AdaFed(epochs=2, lr=0.3).prepare(problem, 3, 3)
    assert (algorithm.local, algorithm.step, algorithm.metric) == ("sgd", "votes", "identity")
    played = play(AdaFed(epochs=2, lr=0.3), problem, federation, rounds=3)
    assert played.records[-1]["loss_after"] < played.records[0]["loss_before"]
    rates = torch.tensor([0.2, 0.9, 0.4], dtype=torch.float64)
    rows = agreeing_rows(3, 6)
    replies = Replies(RatedLocalUpdate(rows, loss=rates, rate=rates))
    after: Any = algorithm.server_step(algorithm.init_server(bowl_problem(6), 3), replies, cohort_of((1, 1, 1))).server
    step: Tensor = -after.theta
    squares = rows.square().sum(1)
    scaled = rates * squares.sum() / rates.sum()  # in units of the updates: only the rates' ratios are meant
    own = scaled[:, None] / squares[:, None] * rows  # every client's own step reaches its rate alone
    assert float(step.norm()) == pytest.approx(float(own.mean(0).norm()), rel=1e-12)
    wanted = at_least_step(rows, rates - 1e-3 * rates.mean()).step
    torch.testing.assert_close(step / step.norm(), wanted / wanted.norm(), rtol=1e-4, atol=1e-5)  # ridge 1e-6


def test_one_client_is_fedavg_with_local_epochs() -> None:
    """Of FedAvg's length in every round with step = "match"; the default starts with it."""
    problem, federation, _ = bowls(1, sizes=[6])
    first, theirs = (play(method, problem, federation, rounds=1) for method in (AdaFed(epochs=3), FedAvg(epochs=3)))
    torch.testing.assert_close(first.thetas[-1], theirs.thetas[-1], rtol=1e-12, atol=1e-14)
    mine = play(AdaFed(epochs=3, lr=0.2, step="match"), problem, federation, rounds=2).thetas[-1]
    plain = play(FedAvg(epochs=3, lr=0.2), problem, federation, rounds=2).thetas[-1]
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": -1.0}, r"`gamma` must be in \[0, inf\), but is -1.0"),
        ({"form": "literal"}, "`form` must be one of safeguarded, paper, but is 'literal'"),
        ({"step_size": 0.0}, r"`step_size` must be in \(0, inf\), but is 0.0"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"AdaFed: {message}"):
        AdaFed(**settings)  # type: ignore[arg-type]

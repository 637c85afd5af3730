"""q-FFL: golden steps, its reduction to FedAvg, and powers that can neither overflow nor freeze."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.qffl import QFFL, QFFLServer, QFFLUpdate
from dqnfed.core.replies import Replies
from tests.helpers.baselines import EXAMPLES, GRADIENTS, LOSSES, LR, bowls, classes, cohort_of
from tests.helpers.linear_clients import linear_clients
from tests.helpers.play import play
from tests.helpers.rows import gaussian_rows


def step_of(algorithm: QFFL, delta: Tensor, losses: Tensor, *, round: int = 0) -> Tensor:
    """Return what theta loses, for clients of equal size."""
    server = QFFLServer(delta.new_zeros(delta.shape[1]))
    cohort = cohort_of([1] * len(delta), round=round)
    return -algorithm.server_step(server, Replies(QFFLUpdate(delta, losses)), cohort).server.theta


@pytest.mark.parametrize(
    ("q", "weighting", "expected"),
    [
        (0.0, "uniform", (-0.11666667, -0.03333333, -0.06666667, -0.05)),
        (0.1, "uniform", (-0.10831021, -0.02480023, -0.06468706, -0.05340744)),
        (1.0, "uniform", (-0.06666667, 0.01904762, -0.05714286, -0.07619048)),
        (5.0, "uniform", (-0.02100473, 0.03720422, -0.03844194, -0.07510011)),
        (0.0, "examples", (-0.145, 0.010, -0.090, -0.080)),
        (1.0, "examples", (-0.08551724, 0.02758621, -0.06620690, -0.08)),
    ],
)
def test_known_steps(q: float, weighting: str, expected: tuple[float, ...]) -> None:
    """Through the whole engine: the clients' gradients, losses and sizes are those of the golden numbers."""
    problem, federation, _ = linear_clients()
    theta = play(QFFL(q=q, weighting=weighting, lr=LR), problem, federation, rounds=1).thetas[-1]
    torch.testing.assert_close(theta, theta.new_tensor(expected), rtol=0, atol=5e-9)


@pytest.mark.parametrize("weighting", ["examples", "uniform"])
def test_q_zero_is_fedavg_to_the_bit(weighting: str) -> None:
    problem, federation = classes(6)
    settings: dict[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 4, "momentum": 0.5, "weighting": weighting}
    plain = play(FedAvg(**settings), problem, federation, rounds=4, participation=0.5)
    zero = play(QFFL(q=0.0, **settings), problem, federation, rounds=4, participation=0.5)
    for mine, theirs in zip(zero.thetas, plain.thetas, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("q", [0.001, 0.1, 1.0, 2.0, 5.0, 10.0])
@pytest.mark.parametrize("seed", range(3))
def test_equals_the_formula_of_the_paper(q: float, seed: int) -> None:
    """The paper's sums, powers of the raw losses, n_k weights on both."""
    g, generator = gaussian_rows(5, 7, seed=seed), torch.Generator().manual_seed(seed)
    losses = 0.2 + 2 * torch.rand(5, generator=generator, dtype=torch.float64)
    sizes = torch.tensor([3, 1, 4, 1, 5])
    p, L = sizes.double() / sizes.sum(), 1 / LR
    D = (p * losses**q) @ g
    h = p @ (q * losses ** (q - 1) * g.square().sum(1) + L * losses**q)
    replies = Replies(QFFLUpdate(LR * g, losses))
    cohort = cohort_of(sizes.tolist())
    found = QFFL(q=q, lr=LR).server_step(QFFLServer(torch.zeros(7, dtype=torch.float64)), replies, cohort)
    torch.testing.assert_close(found.server.theta, -D / h, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("q", [0.1, 1.0, 5.0])
def test_equal_losses_give_a_shrunken_mean(q: float) -> None:
    g, F = gaussian_rows(4, 6, seed=1), 0.7
    expected = g.mean(0) / (1 / LR + q * g.square().sum(1).mean() / F)
    found = step_of(QFFL(q=q, lr=LR), LR * g, torch.full((4,), F, dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


def test_one_client_alone() -> None:
    g, F, q = gaussian_rows(1, 6, seed=2), 0.4, 2.0
    expected = g[0] / (1 / LR + q * g[0].square().sum() / F)
    found = step_of(QFFL(q=q, lr=LR), LR * g, torch.tensor([F], dtype=torch.float64))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize("q", [0.1, 1.0, 5.0])
def test_weights_are_the_powers_of_the_losses(q: float) -> None:
    """With orthonormal updates the step's entries are the weights, up to a common factor."""
    losses = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    step = step_of(QFFL(q=q), torch.eye(4, dtype=torch.float64), losses)
    torch.testing.assert_close(step / step[0], (losses / losses[0]) ** q, rtol=1e-13, atol=0)


@pytest.mark.parametrize("q", [0.5, 1.0, 2.0])
def test_the_objective_falls_on_quadratics(q: float) -> None:
    """Bowls have curvature 1, and L = 1 / lr = 5 is above it."""
    problem, federation, centres = bowls(5, 3, spread=0.0, seed=3)
    played = play(QFFL(q=q, lr=0.2, weighting="uniform"), problem, federation, rounds=15)
    objective = [float((((theta - centres).square().sum(1) / 2) ** (q + 1)).mean()) for theta in played.thetas]
    assert all(later < earlier for earlier, later in pairwise(objective))


def test_large_q_evens_out_the_losses() -> None:
    problem, federation, centres = bowls(4, 3, spread=0.0, seed=5)
    worst = [
        float((play(QFFL(q=q, lr=0.5), problem, federation, rounds=40).thetas[-1] - centres).square().sum(1).max())
        for q in (0.0, 1.0, 5.0)
    ]
    assert worst == sorted(worst, reverse=True)
    assert worst[-1] < 0.95 * worst[0]


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_do_not_overflow(scale: float, dtype: torch.dtype) -> None:
    """F^10 would leave float64 at both ends; the step must still be finite, and the same for losses in any unit."""
    g, losses = gaussian_rows(3, 5, dtype), torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    found = step_of(QFFL(q=10.0, lr=LR, floor=1e-40), g * scale**0.5, losses * scale)
    expected = step_of(QFFL(q=10.0, lr=LR), g, losses)
    torch.testing.assert_close(found / scale**0.5, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 5.0])
def test_a_client_at_zero_loss_neither_breaks_nor_stops_the_others(q: float) -> None:
    delta = torch.tensor([[0.0, 0.0], [0.1, 0.2]], dtype=torch.float64)
    step = step_of(QFFL(q=q), delta, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert bool(torch.isfinite(step).all())
    assert float(step @ delta[1]) > 0


def test_losses_below_the_floor_count_as_the_floor() -> None:
    low, raised = (torch.tensor([loss, 2.0, 0.5], dtype=torch.float64) for loss in (0.1, 0.4))
    found = step_of(QFFL(q=2.0, floor=0.4), GRADIENTS, low)
    assert torch.equal(found, step_of(QFFL(q=2.0), GRADIENTS, raised))
    assert not torch.allclose(found, step_of(QFFL(q=2.0), GRADIENTS, low))
    with pytest.raises(ValueError, match=r"QFFL: `floor` is 0.4, but has no effect with q = 0"):
        QFFL(q=0.0, floor=0.4)


def test_the_curvature_bound_follows_the_learning_rate_of_the_round() -> None:
    delta, losses = LR * GRADIENTS, LOSSES
    decayed = step_of(QFFL(q=2.0, lr=0.8, lr_decay=0.5, lr_decay_every=2), delta, losses, round=5)
    assert torch.equal(decayed, step_of(QFFL(q=2.0, lr=0.2), delta, losses))
    assert not torch.equal(decayed, step_of(QFFL(q=2.0, lr=0.8), delta, losses))


def test_unlike_paper_weights_make_up_for_uniform_sampling() -> None:
    """A client of 30 examples counts as three clients of 10 with the same data."""
    problem, federation, _ = linear_clients()
    triple = [0, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    problem2, federation2, _ = linear_clients(GRADIENTS[triple], LOSSES[triple], [10] * 10)
    one = play(QFFL(q=3.0), problem, federation, rounds=1).thetas[-1]
    many = play(QFFL(q=3.0, weighting="uniform"), problem2, federation2, rounds=1).thetas[-1]
    assert sum(EXAMPLES) == 100
    torch.testing.assert_close(one, many, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"q": -1.0}, r"QFFL: `q` must be in \[0, inf\), but is -1.0"),
        ({"q": float("inf")}, r"`q` must be in \[0, inf\)"),
        ({"floor": 0.0}, r"`floor` must be in \(0, inf\)"),
        ({"weighting": "size"}, "`weighting` must be one of examples, uniform, but is 'size'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QFFL(**settings)

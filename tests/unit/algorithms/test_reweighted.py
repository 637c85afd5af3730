"""Methods with a weight per client: the gradients of their objectives, their limits and formulas on small numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.func import grad

from dqnfed.algorithms.aaggff import AAggFF
from dqnfed.algorithms.drfl import DRFL
from dqnfed.algorithms.eagle import Eagle
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.feddg_ga import FedDGGA
from dqnfed.algorithms.fedeba_plus import FedEBAPlus
from dqnfed.algorithms.fedgini import FedGini
from dqnfed.algorithms.fedism import FedISM
from dqnfed.algorithms.gifair import GIFAIR
from dqnfed.algorithms.propfair import PropFair, proportional_loss
from dqnfed.algorithms.qffl import QFFL
from dqnfed.algorithms.term import TERM
from dqnfed.algorithms.vred import SemiVRed, VRed
from dqnfed.core.local_work import AnyMethod
from tests.helpers.baselines import EXAMPLES, GRADIENTS, LOSSES, LR, bowls, classes
from tests.helpers.linear_clients import linear_clients
from tests.helpers.numpy_clients import Floats
from tests.helpers.play import play

SHARES = {"uniform": np.full(3, 1 / 3), "examples": np.array(EXAMPLES) / sum(EXAMPLES)}


def first_weights(algorithm: AnyMethod, losses: Tensor = LOSSES) -> Floats:
    """Return the weights of the first round, by least squares from the step: the three gradients are independent."""
    problem, federation, _ = linear_clients(losses=losses)
    theta = play(algorithm, problem, federation, rounds=1).thetas[-1]
    return np.asarray(np.linalg.lstsq(-LR * GRADIENTS.numpy().T, theta.numpy(), rcond=None)[0])


def mean_and_variance(losses: Tensor, p: Tensor) -> Tensor:
    return p @ losses + 0.05 * (p @ (losses - p @ losses).square())


def mean_and_semivariance(losses: Tensor, p: Tensor) -> Tensor:
    return p @ losses + 0.05 * (p @ (losses - p @ losses).clamp(min=0).square())


def mean_and_differences(losses: Tensor, p: Tensor) -> Tensor:
    largest = float(p.min()) / (len(p) - 1)
    return p @ losses + 0.5 * largest * (losses[:, None] - losses[None, :]).abs().sum() / 2


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize(
    ("kind", "settings", "objective"),
    [
        (VRed, {"beta": 0.05}, mean_and_variance),
        (SemiVRed, {"beta": 0.05}, mean_and_semivariance),
        (GIFAIR, {"strength": 0.5}, mean_and_differences),
    ],
)
def test_weights_are_the_gradient_of_the_objective(
    kind: Callable[..., AnyMethod], settings: dict[str, Any], objective: Callable[..., Tensor], weighting: str
) -> None:
    """By automatic differentiation of the printed objective, with respect to the clients' losses."""
    expected = grad(objective)(LOSSES, torch.from_numpy(SHARES[weighting]))
    found = first_weights(kind(lr=LR, weighting=weighting, **settings))
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "algorithm",
    [
        VRed(beta=0.0),
        SemiVRed(beta=0.0),
        GIFAIR(strength=0.0, weighting="uniform"),
        Eagle(lam=0.0, weighting="uniform"),
        FedGini(epsilon=1.0),
        FedISM(q=0.0, beta=1.0),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_without_its_penalty_a_method_is_fedavg_to_the_bit(algorithm: AnyMethod) -> None:
    problem, federation = classes(6)
    work: dict[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 4, "momentum": 0.5}
    changed = type(algorithm)(**{**vars(algorithm), **work})
    mine = play(changed, problem, federation, rounds=4, participation=0.5)
    theirs = play(FedAvg(weighting="uniform", **work), problem, federation, rounds=4, participation=0.5)
    for a, b in zip(mine.thetas, theirs.thetas, strict=True):
        assert torch.equal(a, b)


def test_negative_weights_count_as_zero() -> None:
    found = first_weights(VRed(lr=LR, beta=10.0))
    raw = np.maximum((1 + 20.0 * (LOSSES.numpy() - LOSSES.mean().item())) / 3, 0.0)
    np.testing.assert_allclose(found, raw / raw.sum(), atol=1e-12)
    assert (found > -1e-12).all()


def test_drfl_weighs_by_the_loss_and_points_where_q_fedavg_does() -> None:
    np.testing.assert_allclose(first_weights(DRFL(lr=LR)), LOSSES / LOSSES.sum(), rtol=1e-12)
    qffl = first_weights(QFFL(q=1.0, lr=LR, weighting="uniform"))
    np.testing.assert_allclose(qffl / qffl.sum(), LOSSES / LOSSES.sum(), rtol=1e-12)


def test_fedgini_gives_the_largest_loss_the_weight_of_the_highest_rank() -> None:
    """K = 3: i (i + 1) is 0, 2, 6 with sum 8. The order of the losses is 0, 2, 1."""
    by_rank = np.array([1.0, 1 + 0.5 * 2 / 8, 1 + 0.5 * 6 / 8])
    np.testing.assert_allclose(first_weights(FedGini(lr=LR)), (by_rank / by_rank.sum())[[0, 2, 1]], rtol=1e-12)


def test_clients_with_equal_losses_have_equal_weights() -> None:
    tied = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    found = first_weights(FedGini(lr=LR, epsilon=0.0), tied)
    assert found[0] == pytest.approx(found[2], rel=1e-12)
    by_rank = np.array([1.0, 1 + 2 / 8, 1 + 6 / 8])
    shared = np.array([by_rank[:2].mean(), by_rank[2], by_rank[:2].mean()])
    np.testing.assert_allclose(found, shared / shared.sum(), rtol=1e-12)


def test_gifair_compares_groups_by_their_mean_losses() -> None:
    """Groups {0, 2} with mean 0.75 and {1} with loss 2: r is -1/2, 1, -1/2, and lambda at most 1/3."""
    found = first_weights(GIFAIR(lr=LR, weighting="uniform", groups="near,far,near"))
    np.testing.assert_allclose(found, 1 / 3 + 0.5 * (1 / 3) * np.array([-0.5, 1.0, -0.5]), rtol=1e-12)


@pytest.mark.parametrize(
    ("groups", "message"),
    [("a", "at least two groups"), ("a,,b", "name the group of every client"), ("a,b", "each of 3 clients")],
)
def test_gifair_refuses_groups_that_do_not_fit(groups: str, message: str) -> None:
    problem, federation, _ = linear_clients()
    with pytest.raises(ValueError, match=message):
        play(GIFAIR(groups=groups), problem, federation, rounds=1)


@pytest.mark.parametrize(("loss", "slope"), [(0.0, 0.5), (1.0, 1.0), (1.7, 1 / 0.3), (1.9, 0.5), (5.0, 0.5)])
def test_propfair_divides_gradients_by_what_is_left_to_the_base(loss: float, slope: float) -> None:
    point = torch.tensor(loss, dtype=torch.float64, requires_grad=True)
    proportional_loss(point, 2.0, 0.2, 2.0).backward()
    assert point.grad is not None
    assert float(point.grad) == pytest.approx(slope, rel=1e-12)


def test_propfair_with_huber_has_a_continuous_slope() -> None:
    slopes = [
        float(grad(proportional_loss)(torch.tensor(loss, dtype=torch.float64), 2.0, 0.2, 0.2))
        for loss in (1.8 - 1e-9, 1.8 + 1e-9)
    ]
    assert slopes[0] == pytest.approx(slopes[1], rel=1e-7)


def test_one_step_of_propfair_has_weights_one_over_what_is_left() -> None:
    found = first_weights(PropFair(lr=LR, base=3.0, weighting="uniform"))
    np.testing.assert_allclose(found, 1 / (3 * (3.0 - LOSSES.numpy())), rtol=1e-12)


def test_propfair_with_a_large_base_is_fedavg_at_the_rate_over_base() -> None:
    problem, federation = classes(4)
    work: dict[str, Any] = {"epochs": 2, "batch_size": 4}
    fair = play(PropFair(lr=0.3e9, base=1e9, **work), problem, federation, rounds=3).thetas[-1]
    plain = play(FedAvg(lr=0.3, **work), problem, federation, rounds=3).thetas[-1]
    torch.testing.assert_close(fair, plain, rtol=1e-7, atol=1e-8)


def test_aaggff_silo_follows_the_papers_formulas() -> None:
    """Two rounds by hand: the losses are linear in theta, so the second round's are known."""
    problem, federation, _ = linear_clients()
    played = play(AAggFF(lr=LR), problem, federation, rounds=2)
    G, p, slopes, H, theta = GRADIENTS.numpy(), np.full(3, 1 / 3), np.zeros(3), 4.0 * np.eye(3), np.zeros(4)
    for round in range(2):
        losses = LOSSES.numpy() + G @ theta
        r = (1 - np.exp(-((losses / losses.mean()) ** 2))) / 3
        g = -r / (1 + p @ r)
        slopes, H = slopes + g, H + np.outer(g, g)
        objective = quadratic(slopes, 4.0 * np.eye(3) + 3 / 4 * H)
        constraint = {"type": "eq", "fun": lambda q: q.sum() - 1}
        p = minimize(objective, p, bounds=[(0, 1)] * 3, constraints=constraint, tol=1e-15).x
        theta = theta - LR * p @ G
        np.testing.assert_allclose(played.thetas[round + 1], theta, atol=1e-7)
    assert p[1] == p.max(), "the largest loss has the largest weight"


def quadratic(slope: Floats, Q: Floats) -> Callable[[Floats], float]:
    return lambda p: float(slope @ p + p @ Q @ p / 2)


def test_aaggff_device_follows_the_papers_formulas() -> None:
    """With part of the clients; the doubly robust responses are unbiased for those of all clients."""
    losses = torch.tensor([0.5, 2.0, 1.0, 3.0], dtype=torch.float64)
    problem, federation, _ = linear_clients(torch.eye(4, dtype=torch.float64), losses, [5] * 4)
    played = play(AAggFF(lr=LR, response="exponential"), problem, federation, rounds=3, participation=0.5)
    p, slopes, theta = np.full(4, 0.25), np.zeros(4), np.zeros(4)
    for round, record in enumerate(played.records):
        here = record["clients"]
        now = (losses.numpy() + theta)[here]
        r = 0.5 * (1 - np.exp(-now / now.mean()))
        full = np.full(4, r.mean())
        full[here] = r.mean() + (r - r.mean()) / 0.5
        off = p @ (full - r.mean())
        slopes = slopes - full / (1 + r.mean()) + r.mean() * off / (1 + r.mean()) ** 2
        raw = np.exp(-slopes * np.sqrt(np.log(4)) / (np.sqrt(round + 1) * 2.5))
        p = raw / raw.sum()
        theta[here] -= LR * p[here] / p[here].sum()
        np.testing.assert_allclose(played.thetas[round + 1], theta, atol=1e-12)


@pytest.mark.parametrize("response", ["weibull", "exponential", "frechet", "normal", "gumbel", "logistic"])
@pytest.mark.parametrize("variant", ["silo", "device"])
def test_every_response_of_aaggff_favours_larger_losses(response: str, variant: str) -> None:
    found = first_weights(AAggFF(lr=LR, response=response, variant=variant))
    assert found[1] > found[2] > found[0]


def test_aaggff_chooses_its_variant_and_says_so() -> None:
    problem = linear_clients().problem
    assert AAggFF().prepare(problem, 10, 10).mode == "variant silo"
    assert AAggFF().prepare(problem, 10, 9).mode == "variant device"
    with pytest.raises(ValueError, match=r"`variant` is 'silo', .* but 9 of 10 do"):
        AAggFF(variant="silo").prepare(problem, 10, 9)


def test_fedism_weighs_by_the_rise_of_the_loss_uphill() -> None:
    """Linear losses rise by rho ||g||; the second round mixes the last weights in."""
    problem, federation, _ = linear_clients()
    played = play(FedISM(lr=LR, q=2.0, beta=0.25, rho=0.3), problem, federation, rounds=2)
    sharpness = 0.3 * np.linalg.norm(GRADIENTS, axis=1)
    now, before, theta = sharpness**2 / (sharpness**2).sum(), np.full(3, 1 / 3), np.zeros(4)
    for after in played.thetas[1:]:
        before = 0.25 * now + 0.75 * before
        theta = theta - LR * before @ GRADIENTS.numpy()
        np.testing.assert_allclose(after, theta, atol=1e-12)


def test_feddg_ga_moves_weights_by_what_averaging_cost() -> None:
    """Recomputed in NumPy with the authors' formula, 1/K for their 1/3; the gap is of the round before."""
    problem, federation, centres = bowls(3, 2, sizes=[4, 4, 4])
    targets = federation.train.targets.numpy().reshape(3, 4, 2)
    played = play(FedDGGA(lr=LR, step=0.2, decay_rounds=4), problem, federation, rounds=3)
    w, theta, own = np.full(3, 1 / 3), np.zeros(2), None

    def loss(k: int, at: Floats) -> float:
        return float(0.5 * np.square(targets[k] - at).sum(1).mean())

    for round, after in enumerate(played.thetas[1:]):
        if own is not None:
            gaps = np.array([loss(k, theta) for k in range(3)]) - own
            w = np.clip(w + 0.2 * (1 - round / 4) / 3 * gaps / np.abs(gaps).max(), 0, 1)
            w = w / w.sum()
        local = theta - LR * (theta - centres.numpy())
        own = np.array([loss(k, local[k]) for k in range(3)])
        theta = w @ local
        np.testing.assert_allclose(after, theta, atol=1e-12)


def test_feddg_ga_keeps_the_weight_of_a_client_that_was_away() -> None:
    problem, federation, _ = bowls(4, 2)
    played = play(FedDGGA(lr=LR), problem, federation, rounds=8, participation=0.5)
    for before, after, record in zip(played.servers, played.servers[1:], played.records, strict=False):
        fresh = [k for k in record["clients"] if int(before.last_round[k]) == record["round"] - 1]
        others = [k for k in range(4) if k not in fresh]
        ratio = after.client_weights[others] / before.client_weights[others]
        torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=1e-12, atol=0)


def test_eagle_measures_gaps_to_what_a_client_reaches_alone() -> None:
    """On bowls a client alone comes to its own mean: its gap is half the squared distance to it."""
    problem, federation, centres = bowls(3, 2)
    played = play(Eagle(lr=0.5, lam=0.1, alone_rounds=60, weighting="uniform"), problem, federation, rounds=4)
    theta = np.zeros(2)
    for after, record in zip(played.thetas[1:], played.records, strict=True):
        gaps = 0.5 * np.square(theta - centres.numpy()).sum(1)
        weights = (1 + 0.2 * (gaps - gaps.mean())) / 3
        theta = theta - 0.5 * weights @ (theta - centres.numpy())
        np.testing.assert_allclose(after, theta, atol=1e-10)
        assert record["diagnostics"]["gap_max"] == pytest.approx(gaps.max(), abs=1e-10)
        assert record["diagnostics"]["gap_std"] == pytest.approx(gaps.std(), abs=1e-10)


def test_eagle_asks_newcomers_to_train_alone_and_nobody_twice() -> None:
    problem, federation, _ = bowls(4, 2)
    played = play(Eagle(alone_rounds=5), problem, federation, rounds=6, participation=0.5)
    known: set[int] = set()
    for record in played.records:
        has_newcomer = not set(record["clients"]) <= known
        known |= set(record["clients"])
        assert record["passes"] == len(record["clients"]) * (1 + 5 + 1 if has_newcomer else 1)


def test_fedeba_plus_without_alignment_is_term() -> None:
    problem, federation = classes(4)
    work: dict[str, Any] = {"lr": 0.3, "epochs": 2, "batch_size": 4, "weighting": "uniform"}
    mine = play(FedEBAPlus(tau=0.5, alpha=0.0, **work), problem, federation, rounds=3).thetas[-1]
    theirs = play(TERM(t=2.0, **work), problem, federation, rounds=3).thetas[-1]
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("angle", [0.0, 90.0])
def test_fedeba_plus_follows_its_formulas(angle: float) -> None:
    """Two full-batch steps on linear losses: every local gradient is the client's g_k."""
    problem, federation, _ = linear_clients()
    played = play(FedEBAPlus(lr=LR, epochs=2, tau=2.0, alpha=0.3, angle=angle), problem, federation, rounds=1)
    G, raw = GRADIENTS.numpy(), np.exp(LOSSES.numpy() / 2.0)
    w = raw / raw.sum()
    aligned = 2 * LR * (w @ (0.7 * G + 0.3 * (w @ G)))
    plain = 0.7 * 2 * LR * (w @ G) + 0.3 * LR * G.mean(0)
    np.testing.assert_allclose(-played.thetas[-1], plain if angle == 90.0 else aligned, rtol=1e-12)
    assert played.records[0]["diagnostics"]["aligned"] == float(angle == 0.0)
    cosine = float(LOSSES.sum() / (LOSSES.norm() * 3**0.5))
    assert played.records[0]["diagnostics"]["angle"] == pytest.approx(np.degrees(np.arccos(cosine)), rel=1e-12)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (PropFair, {"epsilon": 2.0}, r"`epsilon` must be in \(0, 2\)"),
        (FedGini, {"epsilon": 1.5}, r"`epsilon` must be in \[0, 1\]"),
        (FedEBAPlus, {"alpha": 1.0}, r"`alpha` must be in \[0, 1\)"),
        (FedEBAPlus, {"alpha": 0.0, "angle": 10.0}, "`angle` is 10.0, but has no effect with alpha = 0"),
        (Eagle, {"alone_rounds": 0}, "`alone_rounds` must be in"),
        (VRed, {"weighting": "size"}, "`weighting` must be one of examples, uniform"),
    ],
)
def test_bad_settings_are_refused(kind: Callable[..., AnyMethod], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)

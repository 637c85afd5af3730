"""FedVARP: a run in NumPy, FedAvg with everybody, and steps that do not depend on who was sampled."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import torch

from dqnfed import Policy
from dqnfed.algorithms.fedavg import FedAvg, FedAvgUpdate
from dqnfed.algorithms.fedvarp import FedVARP, FedVARPServer, mean_of_last
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import Replies
from tests.helpers.baselines import GRADIENTS, bowl_problem, bowls, classes
from tests.helpers.linear_clients import linear_clients
from tests.helpers.numpy_clients import Floats
from tests.helpers.play import play
from tests.helpers.regressions import Regressions, local_update, regressions, shares_of
from tests.helpers.rows import gaussian_rows

EVERY_REPLY = Policy(max_update_norm=math.inf)


def oracle(
    case: Regressions, cohorts: list[list[int]], server_lr: float, weighting: str, lr_decay: float = 1.0
) -> list[Floats]:
    """Return the models of v = mean_k (d_k - y_k) + mean_j y_j, the second mean taken over all rows every round."""
    theta, y = np.ones(4), np.zeros((5, 4))
    counts = case.sizes if weighting == "examples" else np.ones(5)
    known = np.zeros(5, dtype=np.bool_)
    thetas = [theta]
    for round, cohort in enumerate(cohorts):
        scale = lr_decay**round
        updates = [local_update(case.clients[k], theta, lr=0.05 * scale, steps=3) / scale for k in cohort]
        # who has not replied yet counts with the mean number of examples of those who have
        assumed = np.where(known, counts, counts[known].mean() if known.any() else 1.0)
        v = shares_of(weighting, case.sizes[cohort]) @ (np.stack(updates) - y[cohort])
        v = v + np.average(y, axis=0, weights=assumed)
        theta = theta - server_lr * scale * v
        y[cohort], known[cohort] = updates, True
        thetas.append(theta)
    return thetas


@pytest.mark.parametrize("participation", [1.0, 0.6, 0.2])
@pytest.mark.parametrize(
    ("weighting", "server_lr", "lr_decay"), [("uniform", 1.0, 1.0), ("uniform", 0.4, 0.8), ("examples", 0.7, 1.0)]
)
def test_a_run_is_that_of_the_oracle(weighting: str, server_lr: float, lr_decay: float, participation: float) -> None:
    case = regressions()
    algorithm = FedVARP(server_lr=server_lr, weighting=weighting, lr=0.05, epochs=3, lr_decay=lr_decay)
    played = play(algorithm, case.problem, case.federation, rounds=15, participation=participation, policy=EVERY_REPLY)
    cohorts = [record["clients"] for record in played.records]
    expected = oracle(case, cohorts, server_lr, weighting, lr_decay)
    np.testing.assert_allclose(torch.stack(played.thetas), expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_with_everybody_in_every_round_it_is_fedavg(weighting: str) -> None:
    problem, federation = classes(5)
    settings = {"lr": 0.3, "epochs": 2, "batch_size": 6, "lr_decay": 0.9, "weighting": weighting}
    mine, plain = (
        torch.stack(play(algorithm, problem, federation, rounds=6).thetas)
        for algorithm in (FedVARP(**settings), FedAvg(**settings))  # type: ignore[arg-type]
    )
    torch.testing.assert_close(mine, plain, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize(("weighting", "shares"), [("uniform", (1 / 3, 1 / 3, 1 / 3)), ("examples", (0.1, 0.3, 0.6))])
def test_after_every_client_has_replied_constant_updates_give_one_step_whoever_is_sampled(
    weighting: str, shares: tuple[float, ...]
) -> None:
    """Losses that are linear in theta have constant gradients; lr falls by 2 % a round, and every step with it."""
    case = linear_clients()
    algorithm = FedVARP(lr=0.1, lr_decay=0.98, weighting=weighting)
    played = play(algorithm, case.problem, case.federation, rounds=40, participation=1 / 3, policy=EVERY_REPLY)
    sampled = [record["clients"][0] for record in played.records]
    first = next(t for t in range(40) if set(sampled[:t]) == {0, 1, 2})
    assert set(sampled[first:]) == {0, 1, 2}
    steps = torch.stack(played.thetas).diff(dim=0)[first:]
    rates = 0.1 * 0.98 ** torch.arange(first, 40, dtype=torch.float64)
    mean = torch.tensor(shares, dtype=torch.float64) @ GRADIENTS
    torch.testing.assert_close(steps, -torch.outer(rates, mean), rtol=1e-11, atol=1e-13)


def test_over_all_cohorts_the_mean_step_is_that_of_everybody_and_its_variance_that_of_the_changes() -> None:
    """The direction is unbiased whatever the rows hold, and varies as the mean of d_k - y_k does, not that of d_k."""
    deltas, last = gaussian_rows(5, 3, seed=1), gaussian_rows(5, 3, seed=1) + 0.1 * gaussian_rows(5, 3, seed=2)
    zero, ones = torch.zeros(3, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    server = FedVARPServer(zero, last, ones, last.sum(0))
    cohorts = [torch.tensor(cohort) for cohort in combinations(range(5), 2)]
    steps = torch.stack(
        [
            FedVARP()
            .server_step(server, Replies(FedAvgUpdate(deltas[c])), Cohort(c, torch.tensor([9, 2]), 5, 0))
            .server.theta
            for c in cohorts
        ]
    )
    torch.testing.assert_close(steps.mean(0), -deltas.mean(0), rtol=1e-13, atol=1e-15)
    changes = torch.stack([(deltas - last)[c].mean(0) for c in cohorts])
    torch.testing.assert_close(steps.var(0), changes.var(0), rtol=1e-11, atol=1e-15)
    assert bool((steps.var(0) < 0.1 * torch.stack([deltas[c].mean(0) for c in cohorts]).var(0)).all())


def test_it_reaches_the_optimum_with_one_client_a_round_where_fedavg_stays_noisy() -> None:
    problem, federation, centres = bowls(5, sizes=[4] * 5)
    errors = {
        kind: float((play(kind(lr=0.2), problem, federation, rounds=200, participation=0.2).thetas[-1] - best).norm())
        for best in (centres.mean(0),)
        for kind in (FedVARP, FedAvg)
    }
    assert errors[FedAvg] > 1e-2
    assert errors[FedVARP] < 1e-8


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_the_sum_that_is_kept_is_that_of_the_rows(weighting: str) -> None:
    problem, federation = classes(7)
    played = play(FedVARP(weighting=weighting, lr=0.3), problem, federation, rounds=12, participation=0.3)
    for server in played.servers:
        known = server.last.abs().sum(1) > 0
        counts = federation.n_examples.double() if weighting == "examples" else torch.ones(7).double()
        torch.testing.assert_close(server.weights, torch.where(known, counts, 0.0), rtol=0, atol=0)
        torch.testing.assert_close(server.total, (counts * known) @ server.last, rtol=1e-12, atol=1e-14)
    assert bool((played.servers[-1].weights > 0).all())


def test_roundings_of_one_long_update_do_not_stay_in_the_sum() -> None:
    """In float32 1e8 + 1 - 1e8 is 0; after as many rounds as it takes to sample everybody the sum is right again."""
    algorithm, problem = FedVARP(), bowl_problem(2)
    server = algorithm.init_server(problem, 4)
    server = FedVARPServer(server.theta.float(), server.last.float(), server.weights, server.total.float())
    for round in range(8):
        size = 1e8 if round == 0 else 1.0
        cohort = Cohort(torch.tensor([round % 4]), torch.tensor([5]), 4, round)
        server = algorithm.server_step(server, Replies(FedAvgUpdate(torch.full((1, 2), size))), cohort).server
    assert mean_of_last(server).tolist() == [1.0, 1.0]


def test_before_the_first_reply_of_a_client_its_update_counts_as_zero() -> None:
    """One of four clients has replied: the mean over all is a quarter of its update, whatever its examples."""
    for weighting in ("uniform", "examples"):
        server = FedVARP(weighting=weighting).init_server(bowl_problem(3), 4)
        assert mean_of_last(server).tolist() == [0.0, 0.0, 0.0]
        delta = torch.tensor([[1.0, -2.0, 4.0]], dtype=torch.float64)
        cohort = Cohort(torch.tensor([2]), torch.tensor([13]), 4, 0)
        after = FedVARP(weighting=weighting).server_step(server, Replies(FedAvgUpdate(delta)), cohort).server
        assert after.theta.tolist() == [-1.0, 2.0, -4.0]  # as FedAvg's
        torch.testing.assert_close(mean_of_last(after), delta[0] / 4, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"server_lr": 0.0}, r"`server_lr` must be in \(0, inf\), but is 0.0"),
        ({"weighting": "size"}, "`weighting` must be one of uniform, examples, but is 'size'"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"FedVARP: {message}"):
        FedVARP(**settings)  # type: ignore[arg-type]

"""The step length that is learnt: hand-made cohorts, their votes, and when a step is taken back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dqnfed.algorithms.parts.length import Votes
from dqnfed.algorithms.parts.messages import VotesState
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray

NAN = math.nan
N_CLIENTS = 20


def cohort(n: int = 4, *, round: int = 5, n_clients: int = N_CLIENTS, first: int = 0) -> Cohort:
    return Cohort(torch.arange(first, first + n), torch.ones(n), n_clients, round)


def after_a_step(
    *losses: float, votes: Votes | None = None, round: int = 4, floor: float = 0.0, n_clients: int = N_CLIENTS
) -> VotesState:
    """Return the state after a step with alpha 0.5; the first clients replied with these losses in the round."""
    votes = votes or Votes()
    state = votes.init(n_clients, floor)._replace(alpha=torch.tensor(0.5, dtype=torch.float64))
    return votes.record(state, np.array(losses), cohort(len(losses), round=round))


def counted(
    state: VotesState,
    along: list[float],
    losses: list[float],
    *,
    n_steps: int = 9,
    n_known: int = 10,
    votes: Votes | None = None,
) -> tuple[float, float]:
    """Return log m and the share of votes for longer steps."""
    found, share = (votes or Votes()).counted(
        state, np.array(along), np.array(losses), cohort(len(along)), n_steps, n_known
    )
    return float(found.log_m), share


# ------------------------------------------------------------------------------------------ votes


@pytest.mark.parametrize(
    ("along", "losses", "share"),
    [
        ([1.0, 1.0, 1.0, 1.0], [0.9, 0.9, 0.9, 0.9], 1.0),
        ([-1.0, -1.0, -1.0, -1.0], [0.9, 0.9, 0.9, 0.9], 0.0),
        ([1.0, -1.0, 1.0, -1.0], [0.9, 0.9, 0.9, 0.9], 0.5),
        ([1.0, 1.0, 1.0, 0.0], [0.9, 0.9, 0.9, 0.9], 0.75),  # a row that is perpendicular is not for longer steps
        ([1.0, 1.0, 1.0, 1.0], [0.9, 0.9, 1.01, 0.9], 0.75),  # a loss that has risen outvotes the row
        ([1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0], 1.0),  # one that has not changed does not
        ([1.0, 1.0, 1.0, 1.0], [0.9, 0.9, 0.9, NAN], 1.0),  # a comparison with NaN says nothing
    ],
)
def test_m_follows_the_share_of_those_who_still_gain(along: list[float], losses: list[float], share: float) -> None:
    state = after_a_step(1.0, 1.0, 1.0, 1.0)
    if math.isnan(losses[-1]):
        state, losses = after_a_step(1.0, 1.0, 1.0, NAN), [0.9, 0.9, 0.9, 7.0]
    log_m, found = counted(state, along, losses)
    assert found == share
    halved = math.log(2.0) if sum(losses[:3]) > 3.9 else 0.0
    assert log_m == pytest.approx(0.3 * (share - 0.5) - halved)


@pytest.mark.parametrize(("n_steps", "gain"), [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.3), (50, 0.3)])
def test_the_first_votes_weigh_more(n_steps: int, gain: float) -> None:
    state = after_a_step(1.0, 1.0, 1.0, 1.0)
    up, _ = counted(state, [1.0] * 4, [0.9] * 4, n_steps=n_steps)
    down, _ = counted(state, [-1.0] * 4, [0.9] * 4, n_steps=n_steps)
    assert (up, down) == pytest.approx((gain / 2, -gain / 2))


def test_losses_that_rise_by_more_than_three_tenths_halve_m() -> None:
    state = after_a_step(1.0, 1.0, 2.0, 2.0)
    along = [-1.0] * 4
    just_not, _ = counted(state, along, [1.3, 1.3, 2.6, 2.59])
    just_so, _ = counted(state, along, [1.3, 1.3, 2.6, 2.61])
    assert just_not == pytest.approx(-0.15)
    assert just_so == pytest.approx(-0.15 - math.log(2.0))


def test_clients_that_are_new_have_no_part_in_that() -> None:
    """Two clients are known and gained, two are new and have large losses."""
    log_m, share = counted(after_a_step(1.0, 1.0), [1.0] * 4, [0.9, 0.9, 50.0, 50.0])
    assert (log_m, share) == pytest.approx((0.15, 1.0))


def test_losses_count_from_their_floor() -> None:
    """From 1.0 to 1.2 is a rise by a fifth, above a floor of 0.9 it is threefold."""
    for floor, expected in ((0.0, -0.15), (0.9, -0.15 - math.log(2.0))):
        state = after_a_step(1.0, 1.0, 1.0, 1.0, floor=floor)
        assert counted(state, [-1.0] * 4, [1.2] * 4)[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("n_known", "n_clients", "is_free"), [(9, 20, False), (10, 20, True), (4, 5, False), (5, 5, True), (4, 4, True)]
)
def test_until_few_clients_are_known_m_does_not_rise_above_its_start(
    n_known: int, n_clients: int, is_free: bool
) -> None:
    votes, K = Votes(), 4
    state = after_a_step(*[1.0] * K, n_clients=n_clients)
    present = cohort(K, n_clients=n_clients)
    up, _ = votes.counted(state, np.ones(K), np.full(K, 0.9), present, 9, n_known)
    assert float(up.log_m) == pytest.approx(0.15 if is_free else 0.0)
    down, _ = votes.counted(state, -np.ones(K), np.full(K, 0.9), present, 9, n_known)
    assert float(down.log_m) == pytest.approx(-0.15)


@pytest.mark.parametrize(("start", "sign"), [(8.95, 1.0), (-8.95, -1.0)])
def test_m_has_limits(start: float, sign: float) -> None:
    state = after_a_step(*[1.0] * 4)._replace(log_m=torch.tensor(start, dtype=torch.float64))
    log_m, _ = counted(state, [sign] * 4, [0.9] * 4)
    assert log_m == pytest.approx(math.copysign(9.0, sign))


@pytest.mark.parametrize("changes", [{"alpha": torch.tensor(0.0)}, {"is_back": torch.tensor(True)}])
def test_without_a_last_step_nobody_votes(changes: dict[str, Any]) -> None:
    """Before the first step, and after one that was taken back."""
    state = after_a_step(1.0, 1.0, 1.0, 1.0)._replace(**changes)
    log_m, share = counted(state, [-1.0] * 4, [9.0] * 4)
    assert log_m == 0.0
    assert math.isnan(share)


# ------------------------------------------------------------------------------------------ length


def length(votes: Votes, state: VotesState, ratio: float, **given: Any) -> float:
    return votes.length(state, ratio, **{"beyond": False, "n_steps": 9, "n_known": 10, "cohort": cohort(), **given})


def test_a_step_is_m_times_the_clients_mean_step() -> None:
    state = after_a_step(1.0)._replace(log_m=torch.tensor(math.log(3.0), dtype=torch.float64))
    assert length(Votes(), state, 0.25) == pytest.approx(0.75)
    assert length(Votes(start=2.0), state, 0.25) == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("n_known", "n_steps", "share"),
    [
        (4, 0, 0.4),  # four of ten clients that would be enough
        (8, 1, 0.8),
        (6, 1, 0.6 * 6 / 8),  # two of the second cohort had been here before
        (4, 3, 0.4 * 4 / 16),
        (10, 9, 1.0),
    ],
)
def test_steps_are_shorter_while_few_clients_are_known(n_known: int, n_steps: int, share: float) -> None:
    state = after_a_step(1.0)
    assert length(Votes(slow_start=True), state, 1.0, n_known=n_known, n_steps=n_steps) == pytest.approx(share)
    assert length(Votes(), state, 1.0, n_known=n_known, n_steps=n_steps) == 1.0


def test_past_a_pareto_point_alpha_at_most_doubles() -> None:
    """There u is no longer the shortest step for everybody, and may be long."""
    state = after_a_step(1.0)
    assert length(Votes(), state, 5.0, beyond=True) == 1.0
    assert length(Votes(), state, 0.7, beyond=True) == 0.7
    assert length(Votes(), state, 5.0) == 5.0
    assert length(Votes(), Votes().init(4, 0.0), 5.0, beyond=True) == 5.0  # there was no step yet


# ------------------------------------------------------------------------------------------ losses


def test_losses_are_kept_by_client_with_their_round() -> None:
    votes = Votes()
    state = votes.record(votes.init(6, 0.5), np.array([2.5, 3.5]), cohort(2, round=3, first=1))
    later = votes.record(state, np.array([1.0]), cohort(1, round=8, first=2))
    np.testing.assert_array_equal(later.losses, [NAN, 2.0, 0.5, NAN, NAN, NAN])
    assert later.rounds.tolist() == [0, 3, 8, 0, 0, 0]
    assert float(state.start) == float(later.start) == 2.5  # the mean of the first round
    np.testing.assert_array_equal(state.losses, [NAN, 2.0, 3.0, NAN, NAN, NAN])  # an earlier state stays as it was


@pytest.mark.parametrize("retreat", [2.0, 1.2])
@pytest.mark.parametrize("age", [1, 2, 7])
def test_a_step_is_taken_back_if_losses_jump_by_more_than_they_may_in_the_time(retreat: float, age: int) -> None:
    votes, state = Votes(retreat=retreat), after_a_step(1.0, 1.0, 3.0, 3.0, round=4)
    limit = 1.0 + (retreat - 1.0) * age
    losses = np.array([2.0, 0.0, 2.0, 4.0])  # the mean is the same
    for factor, is_taken_back in ((limit - 1e-6, False), (limit + 1e-6, True)):
        found = votes.retreat_by(state, factor * losses, cohort(round=4 + age))
        assert (found > 1.0) is is_taken_back


@pytest.mark.parametrize(
    ("rise", "factor"),
    [(3.0, 2.0), (4.0, 2.0), (9.0, 3.0), (2500.0, 50.0), (1e6, 100.0), (math.inf, 100.0), (NAN, 100.0)],
)
def test_the_next_step_is_shorter_by_the_root_of_the_jump(rise: float, factor: float) -> None:
    votes, state = Votes(), after_a_step(1.0, 1.0, 1.0, 1.0)
    assert votes.retreat_by(state, np.full(4, rise), cohort()) == pytest.approx(factor)


def test_losses_of_new_clients_are_compared_with_those_at_the_start() -> None:
    """Which were 2, and are 1 now: a new client at 3.9 shows no jump, one at 4.1 does."""
    votes = Votes()
    state = votes.record(votes.init(N_CLIENTS, 0.0), np.full(4, 2.0), cohort(round=0))
    state = votes.record(state, np.ones(4), cohort(round=1))._replace(alpha=torch.tensor(0.5))
    for loss, is_taken_back in ((3.9, False), (4.1, True)):
        found = votes.retreat_by(state, np.full(4, loss), cohort(round=1, first=8))
        assert (found > 1.0) is is_taken_back
    later = votes.retreat_by(state, np.full(4, 4.1), cohort(round=2, first=8))
    assert later == 1.0  # two rounds allow for more


def test_a_cohort_of_small_losses_may_rise_to_what_is_usual() -> None:
    """Two fitted clients, and six whose losses are 1: what is far from their mean is no jump."""
    state = after_a_step(1e-9, 1e-9, *[1.0] * 6)
    assert Votes().retreat_by(state, np.array([1.4, 0.0]), cohort(2)) == 1.0
    assert Votes().retreat_by(state, np.array([3.1, 0.0]), cohort(2)) > 1.0


def test_no_step_is_taken_back_twice() -> None:
    votes, state = Votes(), after_a_step(1.0, 1.0, 1.0, 1.0)
    back = votes.shortened(state, 4.0)
    assert float(back.log_m) == pytest.approx(-math.log(4.0))
    assert bool(back.is_back)
    assert votes.retreat_by(back, np.full(4, 1e9), cohort()) == 1.0
    first = votes.init(N_CLIENTS, 0.0)
    assert votes.retreat_by(first, np.full(4, 1e9), cohort()) == 1.0  # there is nothing to take back
    low = state._replace(log_m=torch.tensor(-8.5, dtype=torch.float64))
    assert float(votes.shortened(low, 100.0).log_m) == -9.0


# ------------------------------------------------------------------------------------------ false losses


def false_losses(K: int, value: float) -> list[FloatArray]:
    """Return losses as before, but for one client's."""
    return [np.where(np.arange(K) == k, value, 1.0 + 0.02 * np.arange(K)) for k in (0, K // 2, K - 1)]


@pytest.mark.parametrize("value", [0.0, 3.0, 1e3, 1e12])
@pytest.mark.parametrize(("K", "retreat"), [(3, 2.0), (5, 2.0), (10, 2.0), (50, 2.0), (4, 1.2), (8, 1.2)])
def test_one_false_loss_takes_no_step_back_and_does_not_halve_m(K: int, retreat: float, value: float) -> None:
    votes = Votes(robust=True, retreat=retreat)
    state = after_a_step(*(1.0 + 0.02 * np.arange(K)), n_clients=K)
    present = cohort(K, n_clients=K)
    for losses in false_losses(K, value):
        assert votes.retreat_by(state, losses, present) == 1.0
        after, share = votes.counted(state, np.ones(K), losses, present, 9, K)
        assert K * share >= K - 1 - 1e-9
        assert float(after.log_m) == pytest.approx(0.3 * (share - 0.5))


def test_without_robustness_one_loss_decides() -> None:
    state = after_a_step(*[1.0] * 10)
    assert Votes().retreat_by(state, np.array([1e3, *[1.0] * 9]), cohort(10)) > 1.0


def test_robust_losses_still_show_a_jump_of_all() -> None:
    state = after_a_step(*[1.0] * 10)
    assert Votes(robust=True).retreat_by(state, np.full(10, 4.0), cohort(10)) == 2.0

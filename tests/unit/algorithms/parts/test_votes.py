"""The step length that is learnt: hand-made cohorts, their votes, and when a step is taken back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dqnfed.algorithms.parts.messages import VotesState
from dqnfed.algorithms.parts.votes import Votes
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray

NAN = math.nan
N_CLIENTS = 20


def cohort(n: int = 4, *, n_clients: int = N_CLIENTS, first: int = 0) -> Cohort:
    return Cohort(torch.arange(first, first + n), torch.ones(n), n_clients, 5)


def stepped(state: VotesState, n_steps: int = 1) -> VotesState:
    """Return the state so many steps later, the last with alpha 0.5."""
    return state._replace(
        depth=state.depth + n_steps, alpha=torch.tensor(0.5, dtype=torch.float64), is_back=torch.tensor(False)
    )


def after_a_step(*losses: float, floor: float = 0.0, n_clients: int = N_CLIENTS, n_steps: int = 1) -> VotesState:
    """Return the state some steps after the first clients replied with these losses, at the start model."""
    votes = Votes()
    state = votes.record(votes.init(n_clients, floor), np.array(losses), cohort(len(losses)))
    return stepped(state, n_steps)


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


@pytest.mark.parametrize(("gradients", "rise"), [(True, 1.1), (False, 1.3)])
def test_with_all_clients_and_gradients_a_rise_by_more_than_a_tenth_halves_m(gradients: bool, rise: float) -> None:
    """Steps that are too long and too short in turn would leave m where it is otherwise; batches raise losses too."""
    state = after_a_step(1.0, 1.0, 2.0, 2.0, n_clients=4)
    for more, log_m in ((-0.01, -0.15), (0.01, -0.15 - math.log(2.0))):
        losses, everybody = rise * np.array([1.0, 1.0, 2.0, 2.0 + more]), cohort(4, n_clients=4)
        found, _ = Votes(gradients=gradients).counted(state, -np.ones(4), losses, everybody, 9, 4)
        assert float(found.log_m) == pytest.approx(log_m)


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
    ("n_known", "n_clients", "is_free"),
    [
        (9, 20, False),
        (10, 20, True),
        (9, 13, False),
        (10, 13, True),
        (8, 12, False),  # three quarters of the clients are enough: some may never reply
        (9, 12, True),
        (3, 5, False),
        (4, 5, True),
        (2, 4, False),
        (3, 4, True),
        (2, 3, False),
        (3, 3, True),
        (1, 1, True),
    ],
)
def test_until_few_clients_are_known_m_does_not_rise_above_its_start(
    n_known: int, n_clients: int, is_free: bool
) -> None:
    votes, K = Votes(), min(n_clients, 4)
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
    assert length(Votes(first_m=2.0), state, 0.25) == pytest.approx(1.5)


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
    assert length(Votes(gradients=True), state, 1.0, n_known=n_known, n_steps=n_steps) == pytest.approx(share)
    assert length(Votes(), state, 1.0, n_known=n_known, n_steps=n_steps) == 1.0


@pytest.mark.parametrize(("n_clients", "enough"), [(4, 3), (8, 6), (11, 9), (12, 9), (13, 10), (40, 10)])
def test_steps_have_their_length_once_three_quarters_or_ten_clients_are_known(n_clients: int, enough: int) -> None:
    votes, state, present = Votes(gradients=True), after_a_step(1.0), cohort(1, n_clients=n_clients)
    assert length(votes, state, 1.0, n_known=enough, n_steps=50, cohort=present) == 1.0
    known = enough - 1
    assert length(votes, state, 1.0, n_known=known, n_steps=0, cohort=present) == pytest.approx(known / enough)


def test_past_a_pareto_point_alpha_at_most_doubles() -> None:
    """There u is no longer the shortest step for everybody, and may be long."""
    state = after_a_step(1.0)
    assert length(Votes(), state, 5.0, beyond=True) == 1.0
    assert length(Votes(), state, 0.7, beyond=True) == 0.7
    assert length(Votes(), state, 5.0) == 5.0
    assert length(Votes(), Votes().init(4, 0.0), 5.0, beyond=True) == 5.0  # there was no step yet


@pytest.mark.parametrize("first_m", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("log_m", [-2.0, -0.1, 0.0, 0.1, 5.0])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 0.9])
def test_past_a_pareto_point_a_step_is_at_most_as_long_as_the_clients_mean_step(
    first_m: float, log_m: float, ratio: float
) -> None:
    """alpha over the ratio is the step over the mean step; one that m makes shorter is as short as anywhere."""
    state = Votes().init(4, 0.0)._replace(log_m=torch.tensor(log_m, dtype=torch.float64))
    votes = Votes(first_m=first_m)
    found, free = length(votes, state, ratio, beyond=True), length(votes, state, ratio)
    assert free == pytest.approx(first_m * math.exp(log_m) * ratio)
    assert found == pytest.approx(min(free, ratio))


@pytest.mark.parametrize(
    ("share", "times"), [(0.0, 0.5), (0.25, 0.75), (0.49, 0.99), (0.5, 3.0), (0.75, 3.0), (1.0, 3.0), (NAN, math.inf)]
)
def test_with_all_clients_and_gradients_the_votes_limit_the_next_step(share: float, times: float) -> None:
    """With part of them, or local training, they do not."""
    votes, state = Votes(gradients=True), after_a_step(1.0)
    assert votes.longest(state, share, cohort(N_CLIENTS), 5) == pytest.approx(times)
    assert votes.longest(state, share, cohort(N_CLIENTS - 1), 5) == math.inf
    assert Votes().longest(state, share, cohort(N_CLIENTS), 5) == math.inf


@pytest.mark.parametrize(("n_steps", "times"), [(1, math.exp(0.5)), (2, math.exp(0.25)), (3, 1.25), (50, 1.25)])
def test_where_replies_may_be_false_a_step_of_local_training_grows_slowly(n_steps: int, times: float) -> None:
    """By a quarter, or as fast as the first votes let m grow: who comes and goes does not stretch it."""
    state = after_a_step(1.0)
    assert Votes(robust=True).longest(state, 1.0, cohort(N_CLIENTS), n_steps) == pytest.approx(times)
    assert Votes(robust=True, gradients=True).longest(state, 1.0, cohort(N_CLIENTS), n_steps) == 3.0


@pytest.mark.parametrize("K", [4, N_CLIENTS])
def test_after_a_step_taken_back_none_is_longer(K: int) -> None:
    assert Votes().longest(Votes().shortened(after_a_step(1.0), 4.0), NAN, cohort(K), 5) == 1.0


# ------------------------------------------------------------------------------------------ losses


def test_losses_are_kept_by_client_with_the_steps_before_them() -> None:
    votes = Votes()
    state = votes.record(stepped(votes.init(6, 0.5), 3), np.array([2.5, 3.5]), cohort(2, n_clients=6, first=1))
    later = votes.record(stepped(state, 5), np.array([1.0]), cohort(1, n_clients=6, first=2))
    np.testing.assert_array_equal(later.losses, [NAN, 2.0, 0.5, NAN, NAN, NAN])
    assert later.depths.tolist() == [0, 3, 8, 0, 0, 0]
    np.testing.assert_array_equal(state.losses, [NAN, 2.0, 3.0, NAN, NAN, NAN])  # an earlier state stays as it was
    assert later.starts.isnan().all()  # nobody replied at the start model


def test_losses_at_the_start_model_are_those_of_replies_there() -> None:
    """Two rounds before the first step, and replies after it."""
    votes = Votes()
    state = votes.record(votes.init(6, 0.5), np.array([2.5, 3.5]), cohort(2, n_clients=6))
    state = votes.record(state, np.array([4.5]), cohort(1, n_clients=6, first=2))
    later = votes.record(stepped(state), np.array([1.0, 1.0, 1.0]), cohort(3, n_clients=6, first=1))
    np.testing.assert_array_equal(later.starts, [2.0, 3.0, 4.0, NAN, NAN, NAN])
    np.testing.assert_array_equal(later.losses, [2.0, 0.5, 0.5, 0.5, NAN, NAN])


@pytest.mark.parametrize(
    ("K", "gradients", "jump"),
    [
        (4, False, 2.0),
        (4, True, 2.0),
        (N_CLIENTS - 1, False, 2.0),
        (N_CLIENTS, False, 2.0),
        (N_CLIENTS, True, 1.05),
    ],
)
@pytest.mark.parametrize("n_steps", [1, 2, 7])
def test_a_step_is_taken_back_if_losses_jump_by_more_than_the_steps_since_allow(
    K: int, gradients: bool, jump: float, n_steps: int
) -> None:
    """By 1 a step; by 0.05 if everybody is here with gradients, since neither draw nor batches change losses then."""
    votes, draw = Votes(gradients=gradients), np.random.default_rng(K)
    state = after_a_step(*draw.permutation(np.linspace(1.0, 3.0, K)), n_steps=n_steps)
    limit, losses = 1.0 + (jump - 1.0) * n_steps, draw.permutation(np.linspace(0.0, 4.0, K))  # the mean is the same
    for factor, is_taken_back in ((limit - 1e-6, False), (limit + 1e-6, True)):
        found = votes.retreat_by(state, factor * losses, cohort(K))
        assert (found > 1.0) is is_taken_back


def test_the_steps_are_averaged_over_the_cohort() -> None:
    """Two clients replied one step ago, two three steps ago: two steps allow for a rise to 3."""
    votes = Votes()
    state = stepped(votes.record(votes.init(N_CLIENTS, 0.0), np.ones(4), cohort(4)), 2)
    state = stepped(votes.record(state, np.ones(2), cohort(2)))
    for loss, is_taken_back in ((2.99, False), (3.01, True)):
        assert (votes.retreat_by(state, np.full(4, loss), cohort(4)) > 1.0) is is_taken_back


def test_a_step_that_was_taken_back_gives_losses_no_room() -> None:
    """Step, back, step: one step lies between the reply and now, though three rounds do."""
    votes = Votes()
    once = after_a_step(*[1.0] * 4)
    again = stepped(votes.shortened(once, 2.0))
    assert int(again.depth) == int(once.depth) == 1
    for loss, is_taken_back in ((1.99, False), (2.01, True)):
        for state in (once, again):
            assert (votes.retreat_by(state, np.full(4, loss), cohort(4)) > 1.0) is is_taken_back


@pytest.mark.parametrize("n_clients", [4, N_CLIENTS])
def test_rounding_is_no_reason_to_take_a_step_back(n_clients: int) -> None:
    """A round was held: the same clients are asked at the same model, and add up their examples in another order."""
    votes = Votes()
    state = votes.record(after_a_step(*[1.0] * 4, n_clients=n_clients), np.full(4, 0.9), cohort(n_clients=n_clients))
    assert votes.retreat_by(state, np.full(4, 0.9 * (1 + 1e-6)), cohort(n_clients=n_clients)) == 1.0


def test_rounds_without_a_step_give_losses_no_room() -> None:
    """Other clients were asked and nothing was done: what is allowed is what one step is allowed."""
    votes, state = Votes(), after_a_step(*[1.0] * 4)
    for first in (8, 12, 16):
        state = votes.record(state, np.ones(4), cohort(4, first=first))
    assert votes.retreat_by(state, np.full(4, 1.99), cohort(4)) == 1.0
    assert votes.retreat_by(state, np.full(4, 2.01), cohort(4)) > 1.0


@pytest.mark.parametrize(
    ("rise", "factor"),
    [(3.0, 2.0), (4.0, 2.0), (9.0, 3.0), (2500.0, 50.0), (1e6, 100.0), (math.inf, 100.0), (NAN, 100.0)],
)
def test_the_next_step_is_shorter_by_the_root_of_the_jump(rise: float, factor: float) -> None:
    votes, state = Votes(), after_a_step(1.0, 1.0, 1.0, 1.0)
    assert votes.retreat_by(state, np.full(4, rise), cohort()) == pytest.approx(factor)


def test_losses_of_new_clients_are_compared_with_those_at_the_start() -> None:
    """Which were 2, and are 1 now: one step on a new client at 3.9 shows no jump, one at 4.1 does."""
    votes = Votes()
    state = stepped(votes.record(votes.init(N_CLIENTS, 0.0), np.full(4, 2.0), cohort()))
    known = votes.record(state, np.ones(4), cohort())
    for loss, is_taken_back in ((3.9, False), (4.1, True)):
        found = votes.retreat_by(known, np.full(4, loss), cohort(first=8))
        assert (found > 1.0) is is_taken_back
    assert votes.retreat_by(stepped(known), np.full(4, 4.1), cohort(first=8)) == 1.0  # two steps allow for more


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
    assert not votes.is_above_start(back, np.full(4, 1e9), cohort())
    first = votes.init(N_CLIENTS, 0.0)
    assert votes.retreat_by(first, np.full(4, 1e9), cohort()) == 1.0  # there is nothing to take back
    low = state._replace(log_m=torch.tensor(-8.5, dtype=torch.float64))
    assert float(votes.shortened(low, 100.0).log_m) == -9.0


# ------------------------------------------------------------------------------------------ above the start


JUMPS = [(4, True, 2.0), (N_CLIENTS - 1, False, 2.0), (N_CLIENTS, False, 1.2), (N_CLIENTS, True, 1.2)]


@pytest.mark.parametrize(("K", "gradients", "jump"), JUMPS)
@pytest.mark.parametrize("n_steps", [1, 50])
def test_losses_clearly_above_those_at_the_start_say_so_however_many_steps_later(
    K: int, gradients: bool, jump: float, n_steps: int
) -> None:
    votes, starts = Votes(gradients=gradients), np.linspace(1.0, 3.0, K)
    state = after_a_step(*starts, n_steps=n_steps)
    state = stepped(votes.record(state, np.full(K, 100.0), cohort(K)))  # at their last replies they were higher
    for factor, is_above in ((jump - 1e-6, False), (jump + 1e-6, True)):
        assert votes.is_above_start(state, factor * starts[::-1], cohort(K)) is is_above


@pytest.mark.parametrize("factor", [math.inf, NAN])
def test_losses_that_are_no_numbers_are_above_the_start_if_those_before_were(factor: float) -> None:
    votes = Votes()
    for before, is_above in ((100.0, True), (1.0, False)):
        state = stepped(votes.record(after_a_step(*[1.0] * 4), np.full(4, before), cohort()))
        assert votes.is_above_start(state, np.full(4, factor), cohort()) is is_above


@pytest.mark.parametrize(("K", "gradients", "jump"), JUMPS)
def test_losses_that_were_low_until_the_last_step_are_not_above_the_start(K: int, gradients: bool, jump: float) -> None:
    """However high they are now: that step is taken back. The lower of the two is each client's own."""
    votes, starts = Votes(gradients=gradients), np.linspace(1.0, 3.0, K)
    for factor, is_above in ((1.0, False), (jump - 1e-6, False), (jump + 1e-6, True)):
        state = stepped(votes.record(after_a_step(*starts), factor * starts, cohort(K)))
        assert votes.is_above_start(state, np.full(K, 1e9), cohort(K)) is is_above
        first, second = np.full(K, 1e9), np.full(K, 1e9)
        first[::2], second[1::2] = factor * starts[::2], factor * starts[1::2]
        turns = stepped(votes.record(after_a_step(*starts), first, cohort(K)))
        assert votes.is_above_start(turns, second, cohort(K)) is is_above
    assert votes.retreat_by(stepped(votes.record(after_a_step(*starts), starts, cohort(K))), 9 * starts, cohort(K)) > 1


def test_after_a_return_the_losses_now_are_all_that_is_known() -> None:
    """Those at the last replies are forgotten then."""
    votes, state = Votes(), after_a_step(*[1.0] * 4)
    state = state._replace(losses=NAN * state.losses)
    for loss, is_above in ((1.9, False), (2.1, True)):
        assert votes.is_above_start(state, np.full(4, loss), cohort()) is is_above


def test_clients_that_were_first_asked_after_a_step_have_no_part_in_that() -> None:
    """Clients 0 to 3 replied at the start, 4 to 7 after a step; all had high losses at their last reply."""
    votes, huge, fine, bad = Votes(), [1e9] * 2, [1.9] * 2, [2.1] * 2
    state = after_a_step(*[1.0] * 4)
    state = stepped(votes.record(state, np.full(8, 1e9), cohort(8)))
    assert not votes.is_above_start(state, np.array(fine + huge), cohort(first=2))
    assert not votes.is_above_start(state, np.array(huge + huge), cohort(first=4))
    assert votes.is_above_start(state, np.array(bad + [0.0] * 2), cohort(first=2))


def test_a_client_that_is_asked_for_the_first_time_counts_with_the_largest_loss_at_the_start() -> None:
    """Its own is not known; what was never so high there says that the way since was wrong."""
    votes, state = Votes(), after_a_step(1.0, 3.0)
    for loss, is_above in ((5.9, False), (6.1, True), (NAN, True)):
        assert votes.is_above_start(state, np.full(2, loss), cohort(2, first=4)) is is_above
    assert not votes.is_above_start(state, np.array([0.5, 7.4]), cohort(2, first=1))  # 7.9 of two clients with 3 and 3
    many = after_a_step(*[3.0] * 10)
    assert not votes.is_above_start(many, np.full(2, 9.0), cohort(2, first=12))  # ten are known: a step back will do


def test_at_the_start_nothing_is_above_it() -> None:
    """Before the first step, and after one that was taken back."""
    votes, jumped = Votes(), np.full(4, 1e9)
    state = votes.record(votes.init(N_CLIENTS, 0.0), np.ones(4), cohort())
    assert not votes.is_above_start(state, jumped, cohort())
    later = stepped(votes.record(stepped(state), jumped, cohort()))
    assert votes.is_above_start(later, jumped, cohort())
    assert not votes.is_above_start(votes.shortened(later, 2.0), jumped, cohort())


def test_losses_at_the_start_count_from_their_floor() -> None:
    """From 1.0 to 1.25 is a rise by a quarter, above a floor of 0.9 it is 3.5-fold."""
    for floor, is_above in ((0.0, False), (0.9, True)):
        state = stepped(Votes().record(after_a_step(*[1.0] * 4, floor=floor), np.full(4, 9.0), cohort()))
        assert Votes().is_above_start(state, np.full(4, 1.25), cohort()) is is_above
        state = stepped(Votes().record(after_a_step(*[1.0] * 4, floor=floor), np.full(4, 1.25), cohort()))
        assert Votes().is_above_start(state, np.full(4, 9.0), cohort()) is is_above


# ------------------------------------------------------------------------------------------ false losses


def false_losses(K: int, value: float) -> list[FloatArray]:
    """Return losses as before, but for one client's."""
    return [np.where(np.arange(K) == k, value, 1.0 + 0.02 * np.arange(K)) for k in (0, K // 2, K - 1)]


@pytest.mark.parametrize("value", [0.0, 3.0, 1e3, 1e12])
@pytest.mark.parametrize(("K", "n_clients"), [(3, 50), (5, 50), (10, 50), (50, 51), (4, 4), (8, 8), (30, 30)])
def test_one_false_loss_takes_no_step_back_and_does_not_halve_m(K: int, n_clients: int, value: float) -> None:
    votes = Votes(robust=True)
    state = after_a_step(*(1.0 + 0.02 * np.arange(K)), n_clients=n_clients)
    present = cohort(K, n_clients=n_clients)
    for losses in false_losses(K, value):
        assert votes.retreat_by(state, losses, present) == 1.0
        assert not votes.is_above_start(state, losses, present)
        after, share = votes.counted(state, np.ones(K), losses, present, 9, max(K, 10))
        assert K * share >= K - 1 - 1e-9
        assert float(after.log_m) == pytest.approx(0.3 * (share - 0.5))


def test_without_robustness_one_loss_decides() -> None:
    state = after_a_step(*[1.0] * 10)
    assert Votes().retreat_by(state, np.array([1e3, *[1.0] * 9]), cohort(10)) > 1.0


def test_robust_losses_still_show_a_jump_of_all() -> None:
    state = after_a_step(*[1.0] * 10)
    assert Votes(robust=True).retreat_by(state, np.full(10, 4.0), cohort(10)) == 2.0

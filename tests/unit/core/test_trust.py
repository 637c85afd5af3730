"""Consistency of replies: verdicts from losses, slopes and rates, and what a server makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed import AdaFed, DQNFed, Evaluation, Policy, RunResult, run, vectorised
from dqnfed.core.algorithm import AnyAlgorithm, Cohort
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.core.runners import Stacked
from dqnfed.core.trust import Trust, TrustState, jump_sizes, slope_mismatch
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_problem
from tests.helpers.bowls import Case, network_bowl, softmax_bowl

EVERYBODY = torch.arange(5)
WRONG_LOSS, WRONG_RATE = "loss does not change as its gradient says", "rate is larger than its loss allows"
X = torch.ones(1, dtype=torch.float64)  # a step of length 1, along which a gradient is its slope


class Reply(NamedTuple):
    gradient: Tensor
    rate: Tensor
    loss: Tensor


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def replies(losses: list[float], slopes: list[float], rates: list[float] | None = None) -> Replies[Reply]:
    return Replies(Reply(doubles(slopes)[:, None], doubles(rates or [0.0] * len(losses)), doubles(losses)))


def cohort(clients: Tensor = EVERYBODY) -> Cohort:
    return Cohort(clients, torch.ones(len(clients)), 5, 1)


def allowing(n: int) -> Trust:
    """Return the rule that leaves out at most n of five clients."""
    return Trust(drop_share=n / 5)


def claimed(losses: list[float], decreases: list[float], state: TrustState | None = None) -> TrustState:
    """Return the record after five clients replied about a step, which was then made half as long."""
    trust = allowing(1)
    state = trust.init(5, 0.0) if state is None else state
    nobody = torch.arange(0)
    state = trust.record_claims(state, replies(losses, decreases), cohort(), X, nobody)
    return state._replace(slopes=0.5 * state.slopes)


def test_a_loss_that_rises_against_both_gradients_is_inconsistent() -> None:
    state, slopes, losses = claimed([2.0] * 5, [1.0] * 5), [-0.4] * 5, [1.55, 1.55, 2.45, 1.55, 1.99]
    found = {n: allowing(n).check_replies(state, replies(losses, slopes), cohort(), X) for n in (0, 1, 2)}
    assert allowing(2).left_out(found[2]) == ((2, WRONG_LOSS), (4, WRONG_LOSS))
    assert allowing(1).left_out(found[1]) == ((2, WRONG_LOSS),)  # the worse one
    assert allowing(0).left_out(found[0]) == ()


def test_a_verdict_stays_until_losses_and_gradients_agree_again() -> None:
    trust, slopes, fallen = allowing(1), [-0.4] * 5, [1.55] * 5
    others = torch.tensor([0, 1, 3, 4])
    caught = trust.check_replies(
        claimed([2.0] * 5, [1.0] * 5), replies([1.55, 1.55, 2.45, 1.55, 1.55], slopes), cohort(), X
    )
    assert [client for client, _ in trust.left_out(caught)] == [2]
    absent = replace(trust, drop_share=0.25).check_replies(caught, replies(fallen[:4], slopes[:4]), cohort(others), X)
    assert trust.left_out(absent) == ()  # it is not there to be left out
    back = trust.record_claims(absent, replies(fallen[:4], [1.0] * 4), cohort(others), X, torch.arange(0))
    again = trust.check_replies(back, replies(fallen, slopes), cohort(), X)  # nothing is known of its last step
    assert [client for client, _ in trust.left_out(again)] == [2]
    cleared = trust.check_replies(claimed([2.0] * 5, [1.0] * 5, back), replies(fallen, slopes), cohort(), X)
    assert trust.left_out(cleared) == ()


def test_no_rate_is_above_twice_what_the_loss_can_fall_by() -> None:
    rates = [2.0, 3.9, 4.1, torch.nan, 1e6]
    unknown = replies([2.0] * 5, [torch.nan] * 5, rates)
    found = allowing(3).check_replies(allowing(3).init(5, 1.0), unknown, cohort(), X)
    assert allowing(3).left_out(found) == ((2, WRONG_RATE), (4, WRONG_RATE))
    free = replace(allowing(3), checks_rates=False)
    assert free.left_out(free.check_replies(free.init(5, 1.0), unknown, cohort(), X)) == ()


def test_clipped_replies_are_checked_as_they_were_sent() -> None:
    """A rate that was scaled down with its reply is compared with the loss in its own size."""
    trust, factors = allowing(1), doubles([1.0, 1.0, 0.1, 1.0, 1.0])
    sent = replies([2.0] * 5, [torch.nan] * 5, [2.0, 2.0, 1.0, 2.0, 2.0])
    state = trust.check_replies(trust.init(5, 0.0), sent, cohort()._replace(factors=factors), X)
    assert trust.left_out(state) == ((2, WRONG_RATE),)


def test_a_probe_shows_false_slopes() -> None:
    trust = allowing(3)
    before = replies([2.0] * 5, [1.0, 1.0, -1.0, 1.0, 1e6])
    state = trust.record_claims(trust.init(5, 0.0), before, cohort(), X, torch.arange(0))
    losses = [2.0 - 1e-3, 2.0 - 9e-4, 2.0 - 1e-3, 2.0 + 1e-3, 2.0 - 1e-3]
    found = trust.check_ahead(state, replies(losses, [0.0] * 5), "loss", cohort(), 1e-3)
    assert found is not None
    assert [client for client, _ in trust.left_out(found)] == [2, 3, 4]
    assert trust.check_ahead(found, replies(losses, [0.0] * 5), "loss", cohort(), 1e-3) is None  # nobody new


def test_a_client_that_leaves_no_common_descent_is_named_too() -> None:
    trust = allowing(1)
    state = trust.record_claims(trust.init(5, 0.0), replies([1.0] * 5, [1.0] * 5), cohort(), X, torch.tensor([1]))
    ((client, why),) = trust.left_out(state)
    assert client == 1
    assert "no common descent" in why
    assert trust.trusted(state, cohort()).tolist() == [True, False, True, True, True]


def test_the_untrusted_are_no_part_of_the_federation() -> None:
    trust = allowing(1)
    state = trust.record_claims(trust.init(5, 0.0), replies([1.0] * 5, [1.0] * 5), cohort(), X, torch.tensor([1]))
    kept, part = trust.without_untrusted(state, replies([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5), cohort())
    assert kept.scalars("loss").tolist() == [1.0, 3.0, 4.0, 5.0]
    assert (part.clients.tolist(), part.n_clients) == ([0, 2, 3, 4], 4)


class FalseReplies:
    """A cohort in which one client changes fields of its replies from some round on."""

    def __init__(self, factor: float, *names: str, client: int = 1, after: int = 0) -> None:
        self._factor, self._names, self._client, self._after, self._calls = factor, names, client, after, 0

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: object, memory: object) -> Stacked:
        updates, memory = vectorised()(algorithm, problem, tasks, sent, memory)
        self._calls += 1
        if self._calls <= self._after:
            return updates, memory
        changed = {}
        for name in set(self._names) & set(updates._fields):
            changed[name] = getattr(updates, name).clone()
            changed[name][self._client] *= self._factor
        return updates._replace(**changed), memory


def trained(algorithm: AnyAlgorithm, case: Case, cohort: FalseReplies | None = None, rounds: int = 8) -> RunResult:
    seldom = Evaluation(every=rounds, participants=False)
    return run(algorithm, *case[:2], rounds=rounds, cohort=cohort, evaluation=seldom, policy=Policy(drop_share=0.2))


def clients_left_out(result: RunResult) -> list[set[int]]:
    return [{fault["client"] for fault in record["dropped"]} for record in result.history[1:]]


def test_a_client_with_false_replies_is_left_out_from_the_first_round_on() -> None:
    """Whoever turns everything round that comes from its gradient, in the first round's measurements too."""
    fields = ("gradient", "probed_slope", "probed_curvature", "curvature")
    for algorithm in (DQNFed(), AdaFed(), DQNFed(step="line-search")):
        found = clients_left_out(trained(algorithm, network_bowl(), FalseReplies(-10.0, *fields)))
        assert all(1 in clients for clients in found), (algorithm, found)


def test_a_client_whose_replies_become_false_is_left_out_at_once() -> None:
    """Its loss changed as its gradient said before, and not as it says now."""
    false_later = FalseReplies(-10.0, "gradient", after=4)  # calls: two in the first round, then one a round
    found = clients_left_out(trained(DQNFed(), network_bowl(), false_later))
    assert [1 in clients for clients in found] == [False, False, False, True, True, True, True, True]


def test_a_client_with_false_replies_does_not_hold_up_a_line_search_for_long() -> None:
    """It claims to win where it loses, so no step is short enough for it: it is out at once, and stays out.

    Rounds are held only where the others have converged, by which the loss has come to what it is without lies.
    """
    honest = trained(DQNFed(step="line-search"), softmax_bowl(), rounds=12)
    result = trained(DQNFed(step="line-search"), softmax_bowl(), FalseReplies(-10.0, "gradient", after=9), rounds=12)
    lies = [record for record in result.history if [fault["client"] for fault in record.get("dropped", [])] == [1]]
    assert [record["round"] for record in lies] == list(range(4, 12))  # from its first lie on
    assert [record["status"] for record in lies[:3]] == ["next"] * 3
    assert result.summary["train_loss"]["mean"] <= 1.1 * honest.summary["train_loss"]["mean"]


def test_honest_clients_are_trusted() -> None:
    """Two or three of ten digits each, a network: nobody is left out, and the policy costs nothing.

    Its steps are others: no few clients may shorten them much.
    """
    built = build_problem(read_config("digits", ["data.clients=10"]))
    case = Case(built.problem, built.federation)
    guarded = trained(DQNFed(), case, rounds=20)
    free = run(DQNFed(), *case[:2], rounds=20, evaluation=Evaluation(every=20, participants=False))
    assert guarded.summary["n_dropped"] == 0
    assert guarded.summary["train_loss"]["mean"] <= 1.1 * free.summary["train_loss"]["mean"]


def test_without_the_policy_nothing_is_recorded() -> None:
    case = network_bowl()
    server = DQNFed().prepare(case.problem, 6, 6).init_server(case.problem, 6)
    assert [len(t) for t in server.trust[2:]] == [0] * 5


class Curved(NamedTuple):
    gradient: Tensor
    rate: Tensor
    loss: Tensor
    curvature: Tensor


def test_a_false_curvature_is_replaced_by_what_the_gradients_show() -> None:
    """Over a step of length 1 slopes went from -0.5 to -0.4: the curvature is 0.1."""
    state, trust = claimed([2.0] * 5, [1.0] * 5), allowing(1)
    plain = replies([1.55] * 5, [-0.4] * 5).updates
    said = doubles([0.1, 1e6, -0.1, float("nan"), 0.11])
    given = Replies(Curved(*plain, said))
    state = trust.check_replies(state, given, cohort(), X)
    kept, _ = trust.without_untrusted(state, given, cohort())
    assert kept.scalars("curvature").tolist() == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.11])
    unknown = trust.check_replies(trust.init(5, 0.0), given, cohort(), X)
    kept, _ = trust.without_untrusted(unknown, given, cohort())
    assert kept.scalars("curvature").tolist() == pytest.approx(said.tolist(), nan_ok=True)


def test_slopes_that_are_measured_must_be_those_of_the_gradients() -> None:
    claimed_slopes = np.array([-1.0, -2.0, -1.5, -1.0, -3.0])
    assert slope_mismatch(-0.5 * claimed_slopes, claimed_slopes).max() <= 1e-12
    for factor in (1e6, 1e-6, -1.0):
        false = -0.5 * claimed_slopes * np.array([1.0, factor, 1.0, 1.0, 1.0])
        assert np.flatnonzero(slope_mismatch(false, claimed_slopes) > 0.5).tolist() == [1]


def test_a_loss_cannot_jump_a_short_way_ahead() -> None:
    slopes = np.array([-1e-3, -2e-3, -1e-3, 0.0])
    assert jump_sizes(slopes, 0.9 * slopes, 1e-9).max() < 0.5
    assert np.flatnonzero(jump_sizes(slopes, slopes + np.array([0.0, 0.0, 0.0, 2.0]), 1e-9) > 0.5).tolist() == [3]


def test_who_comes_back_does_not_hold_the_step_and_who_goes_does() -> None:
    """All curvatures that limited the last step limit this one, too, unless one of its clients is missing."""
    nine, ten = torch.arange(10) < 9, torch.ones(10, dtype=torch.bool)
    careful = Trust(drop_share=0.2)
    assert careful.all_again(ten, ten)
    assert careful.all_again(nine, ten)
    assert not careful.all_again(ten, nine)
    assert not careful.all_again(torch.arange(10) < 5, ten)  # more than may have been left out
    assert not careful.all_again(torch.zeros(0, dtype=torch.bool), ten)
    assert not Trust().all_again(nine, ten)

"""Whom to believe: verdicts from losses, slopes and rates, and what a server makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from dqnfed import AdaFed, DQNFed, Evaluation, Policy, RunResult, run
from dqnfed.algorithms import testimony
from dqnfed.algorithms.common_descent import CommonDescent
from dqnfed.algorithms.testimony import (
    acquitted,
    acted_on,
    asserted,
    first_testimony,
    heard,
    left_out,
    measured,
    n_disbelieved,
    n_left_out,
    without,
)
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import Problem, Task
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_problem
from dqnfed.sim.cohort import Answers, vectorised
from tests.helpers.bowls import Case, network_bowl, softmax_bowl

EVERYBODY = torch.arange(5)


def said(losses: list[float], decreases: list[float]) -> testimony.Testimony:
    """Return the record after five clients spoke about a step, which was then made half as long."""
    return acted_on(asserted(first_testimony(5, 0.0), EVERYBODY, doubles(losses), doubles(decreases)), 0.5)


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_loss_that_rises_against_both_gradients_is_not_believed() -> None:
    record = said([2.0] * 5, [1.0] * 5)
    slopes = doubles([-0.4, -0.4, -0.4, -0.4, -0.4])
    losses = doubles([1.55, 1.55, 2.45, 1.55, 1.99])
    found = heard(record, EVERYBODY, losses, None, slopes, may_drop=2)
    assert left_out(found) == (
        (2, "loss does not move as its gradient says"),
        (4, "loss does not move as its gradient says"),
    )
    assert [k for k, _ in left_out(heard(record, EVERYBODY, losses, None, slopes, may_drop=1))] == [2]  # the worse one
    assert n_left_out(heard(record, EVERYBODY, losses, None, slopes, may_drop=0)) == 0


def test_doubts_stay_until_they_are_removed() -> None:
    record = said([2.0] * 5, [1.0] * 5)
    silent = torch.tensor([0, 1, 3, 4])
    slopes, fallen = doubles([-0.4] * 5), doubles([1.55] * 5)
    caught = heard(record, EVERYBODY, doubles([1.55, 1.55, 2.45, 1.55, 1.55]), None, slopes, may_drop=1)
    assert n_disbelieved(caught) == 1
    absent = heard(caught, silent, fallen[:4], None, slopes[:4], may_drop=1)
    assert n_left_out(absent) == 0  # it is not there to be left out
    back = asserted(absent, silent, fallen[:4], doubles([1.0] * 4))  # nothing is known of its last step
    assert left_out(heard(back, EVERYBODY, fallen, None, slopes, may_drop=1))[0][0] == 2
    cleared = heard(
        acted_on(asserted(back, EVERYBODY, doubles([2.0] * 5), doubles([1.0] * 5)), 0.5),
        EVERYBODY,
        fallen,
        None,
        slopes,
        may_drop=1,
    )
    assert n_left_out(cleared) == 0


def test_nobody_wins_more_than_twice_its_loss() -> None:
    unknown = first_testimony(5, 1.0)
    losses, slopes = doubles([2.0] * 5), doubles([torch.nan] * 5)
    rates = doubles([2.0, 3.9, 4.1, torch.nan, 1e6])
    found = heard(unknown, EVERYBODY, losses, rates, slopes, may_drop=3)
    assert left_out(found) == ((2, "rate is larger than its loss allows"), (4, "rate is larger than its loss allows"))


def test_a_probe_shows_who_misled_the_server() -> None:
    record = asserted(first_testimony(5, 0.0), EVERYBODY, doubles([2.0] * 5), doubles([1.0, 1.0, -1.0, 1.0, 1e6]))
    losses = doubles([2.0 - 1e-3, 2.0 - 9e-4, 2.0 - 1e-3, 2.0 + 1e-3, 2.0 - 1e-3])
    found = measured(record, EVERYBODY, losses, length=1e-3, may_drop=3)
    assert [client for client, _ in left_out(found)] == [2, 3, 4]


def test_who_leaves_no_common_descent_is_named_too() -> None:
    record = without(first_testimony(5, 0.0), torch.tensor([1]))
    ((client, why),) = left_out(record)
    assert client == 1
    assert "no common descent" in why
    assert n_disbelieved(record) == 0
    assert n_left_out(acquitted(record)) == 0


class Lying:
    """A cohort in which one client changes fields of its answers from some round on."""

    def __init__(self, factor: float, *names: str, liar: int = 1, after: int = 0) -> None:
        self._factor, self._names, self._liar, self._after, self._calls = factor, names, liar, after, 0

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: object, memory: object) -> Answers:
        updates, memory = vectorised()(algorithm, problem, tasks, sent, memory)
        self._calls += 1
        if self._calls <= self._after:
            return updates, memory
        changed = {}
        for name in set(self._names) & set(updates._fields):
            changed[name] = getattr(updates, name).clone()
            changed[name][self._liar] *= self._factor
        return updates._replace(**changed), memory


def trained(algorithm: AnyAlgorithm, case: Case, cohort: Lying | None = None, rounds: int = 8) -> RunResult:
    seldom = Evaluation(every=rounds, participants=False)
    return run(algorithm, *case[:2], rounds=rounds, cohort=cohort, evaluation=seldom, policy=Policy(drop_share=0.2))


def whom_it_left_out(result: RunResult) -> list[set[int]]:
    return [{fault["client"] for fault in record["dropped"]} for record in result.history[1:]]


def test_a_liar_is_left_out_from_the_first_round_on() -> None:
    """Whoever turns everything round that comes from its gradient, in the first round's measurements too."""
    fields = ("gradient", "probed_slope", "probed_curvature", "curvature")
    for algorithm in (DQNFed(), AdaFed(), DQNFed(step="line-search")):
        found = whom_it_left_out(trained(algorithm, network_bowl(), Lying(-10.0, *fields)))
        assert all(1 in clients for clients in found), (algorithm, found)


def test_a_client_that_begins_to_lie_is_left_out_at_once() -> None:
    """Its loss moved as it had said before, and not as it says now."""
    lying = Lying(-10.0, "gradient", after=4)  # calls: two in the first round, then one a round
    found = whom_it_left_out(trained(DQNFed(), network_bowl(), lying))
    assert [1 in clients for clients in found] == [False, False, False, True, True, True, True, True]


def test_a_liar_does_not_hold_up_a_line_search_for_long() -> None:
    """It claims to win where it loses, so no step is short enough for it: one round is lost, and then it is out."""
    honest = trained(DQNFed(step="line-search"), softmax_bowl(), rounds=12)
    result = trained(DQNFed(step="line-search"), softmax_bowl(), Lying(-10.0, "gradient", after=9), rounds=12)
    assert sum(record["status"] == "hold" for record in result.history) <= 2
    assert result.history[-1]["status"] != "hold"  # it goes on, or has come to where no step serves all the others
    assert result.summary["train_loss"]["mean"] <= 1.1 * honest.summary["train_loss"]["mean"]


def test_honest_clients_are_believed() -> None:
    """Two or three of ten digits each, a network: nobody is left out, so that the policy costs nothing."""
    built = build_problem(read_config("digits", ["data.clients=10"]))
    case = Case(built.problem, built.federation)
    guarded = trained(DQNFed(), case, rounds=20)
    free = run(DQNFed(), *case[:2], rounds=20, evaluation=Evaluation(every=20, participants=False))
    assert guarded.summary["n_dropped"] == 0
    assert torch.equal(guarded.theta, free.theta)


def test_without_the_policy_nothing_is_recorded() -> None:
    case = network_bowl()
    server = DQNFed().prepare(case.problem, 6, 6).init_server(case.problem, 6)
    assert isinstance(DQNFed(), CommonDescent)
    assert [len(t) for t in server.testimony[2:]] == [0, 0, 0, 0]

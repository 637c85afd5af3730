"""A client unpads the sum of its method's own step, once a message, and refuses every other question."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from dqnfed import Federation
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.mgda import MGDA
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.secure.queries import Claims, Query, Refusal
from dqnfed.secure.ring import Words
from tests.helpers.bowls import BOWLS, Case
from tests.helpers.secure import Wire, secure_run

METHODS: list[AnyAlgorithm] = [FedAvg(), MGDA(), DQNFed()]


@pytest.fixture(scope="module")
def case() -> Case:
    return BOWLS["network"][-1]()


def other_weights(query: Query, claims: Claims) -> tuple[Query, Claims]:
    weights = query.weights.copy()
    weights[0] += weights.max() // 1000
    return query._replace(weights=weights), claims


def one_row(query: Query, claims: Claims) -> tuple[Query, Claims]:
    weights = np.zeros_like(query.weights)
    weights[1] = 2**20
    return query._replace(weights=weights), claims


def false_norm(query: Query, claims: Claims) -> tuple[Query, Claims]:
    return query, claims._replace(norms={field: norms * 1.001 for field, norms in claims.norms.items()})


def longer_replies(query: Query, claims: Claims) -> tuple[Query, Claims]:
    view = claims.view
    factors = {field: np.full(len(norms), 3.0) for field, norms in claims.norms.items()}
    return query, claims._replace(view=type(view)(view.updates, view.places, factors))


def another_message(query: Query, claims: Claims) -> tuple[Query, Claims]:
    return query._replace(message=query.message._replace(digest=b"\0" * 32)), claims


def no_such_field(query: Query, claims: Claims) -> tuple[Query, Claims]:
    return query._replace(field="loss"), claims


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other_weights, "differ from those of the method's own step"),
        (one_row, "differ from those of the method's own step"),
        (false_norm, "not what is claimed"),
        (longer_replies, "may be shortened"),
        (another_message, "did not reply to the message"),
        (no_such_field, "no padded field"),
    ],
)
@pytest.mark.parametrize("algorithm", METHODS, ids=lambda method: type(method).__name__)
def test_a_question_that_is_not_the_methods_own_is_refused(
    algorithm: AnyAlgorithm, change: Callable[[Query, Claims], tuple[Query, Claims]], why: str, case: Case
) -> None:
    with pytest.raises(Refusal, match=why):
        secure_run(algorithm, case, Wire(change))


def test_a_made_up_gramian_is_refused_by_the_client_whose_row_it_is(case: Case) -> None:
    def false_gram(query: Query, claims: Claims) -> tuple[Query, Claims]:
        return query, claims._replace(grams={field: 2.0 * gram for field, gram in claims.grams.items()})

    with pytest.raises(Refusal, match="claimed product of client"):
        secure_run(MGDA(), case, Wire(false_gram))


def test_a_sum_that_is_nearly_one_clients_row_is_refused_by_the_client_too(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The method's own weights, from a server that does not check what it releases."""
    inputs, targets = case.federation.train.inputs, case.federation.train.targets
    sizes = ((60, 10), (2, 2), (2, 2))
    clients = [(inputs[:n].repeat(times, 1), targets[:n].repeat(times)) for n, times in sizes]
    uneven = case._replace(federation=Federation.from_clients(clients))
    monkeypatch.setattr("dqnfed.secure.source.check_release", lambda *_: None)
    with pytest.raises(Refusal, match="the effective number of clients is 1"):
        secure_run(FedAvg(weighting="examples"), uneven, Wire())


def test_a_client_answers_once_a_message(case: Case) -> None:
    class Greedy(Wire):
        """Asks every client for the sum, then for one more."""

        def __call__(self, message, link):  # type: ignore[no-untyped-def]
            tapped = super().__call__(message, link)

            class Again:
                products, form = tapped.products, tapped.form

                def unpad(self, query: Query, claims: Claims) -> Words:
                    for _ in range(len(query.clients) + 1):
                        words = tapped.unpad(query, claims)
                    return words

            return Again()

    with pytest.raises(Refusal, match="already"):
        secure_run(FedAvg(), case, Greedy())


def test_honest_questions_are_answered_by_different_clients(case: Case) -> None:
    wire = Wire()
    result = secure_run(DQNFed(), case, wire, rounds=4)
    assert [record["status"] for record in result.history[1:]] == ["next"] * 4
    per_message = [sum(query.message == message for query in wire.queries) for message in wire.messages]
    assert max(per_message) == 2, "the mean gradient, and the step"
    assert len({message.digest for message in wire.messages}) == len(wire.messages)

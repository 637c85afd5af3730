"""A client unpads the sum of its method's own step, once a message, and refuses every other question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from dqnfed import Federation, Policy
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.mgda import MGDA
from dqnfed.algorithms.qffl import QFFL
from dqnfed.core.algorithm import AnyAlgorithm, Cohort
from dqnfed.core.problem import Problem
from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.queries import Claims, ClientCheck, OwnReply, Query, Refusal
from dqnfed.secure.replies import Like, View
from dqnfed.secure.ring import FloatArray, Words, whole_weights
from tests.helpers.bowls import BOWLS, Case, linear_model
from tests.helpers.secure import Wire, secure_run

LIKE = Like(torch.Size([2]), torch.float64, torch.device("cpu"))
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


def test_a_step_with_another_number_than_the_client_sent_is_refused(case: Case) -> None:
    """What the server says that it got is right, but what it computes with is not; lower numbers are its right."""

    def larger_losses(query: Query, claims: Claims) -> tuple[Query, Claims]:
        seen = claims.view.updates
        return query, claims._replace(view=replace(claims.view, updates=seen._replace(loss=2.0 * seen.loss)))

    with pytest.raises(Refusal, match="may be held below that"):
        secure_run(QFFL(), case, Wire(larger_losses))
    bounded = secure_run(QFFL(), case, Wire(), policy=Policy(scalar_bounds=1.0), rounds=4)
    assert any("held" in record for record in bounded.history), "numbers that a policy holds are no lie"


def test_unequal_weights_of_very_many_clients_are_rounded_more_and_not_refused() -> None:
    """Of 6,000 clients a weight has 18 binary places, and is right to 2e-6 only."""
    K = 6000
    weights = 1.0 + np.random.default_rng(0).random(K)
    query, claims = questioned(weights)
    key = PadKey.fresh()
    own = OwnReply(0, query.message, {"delta": np.ones(2) / np.sqrt(2.0)}, {}, {"delta": LIKE})
    assert len(ClientCheck(FedAvg(weighting="examples"), own).unpad(key, query, claims)) == 2
    off = query.weights.copy()
    off[7] += 2
    with pytest.raises(Refusal, match="differ from those"):
        ClientCheck(FedAvg(weighting="examples"), own).unpad(key, query._replace(weights=off), claims)


def questioned(weights: FloatArray) -> tuple[Query, Claims]:
    """The question for FedAvg's sum over clients with unit rows and so many examples."""
    K = len(weights)
    sizes = torch.from_numpy(np.rint(1e6 * weights)).long()
    whole, scale = whole_weights(sizes.double().numpy() / float(sizes.sum()))
    message = Message(b"1" * 32, tuple(range(K)))
    updates = FedAvg.info.replies[0](torch.ones(K, 1, dtype=torch.float64))
    server = FedAvg().init_server(Problem.from_module(linear_model(1, 1)), K)
    cohort, view = Cohort(torch.arange(K), sizes, K, 0), View(updates, tuple(range(K)), {})
    claims = Claims(updates, {"delta": np.ones(K)}, {}, (), {}, (), server, cohort, view)
    return Query(message, "delta", tuple(range(K)), whole, scale), claims


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

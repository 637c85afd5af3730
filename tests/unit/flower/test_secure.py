"""Secure aggregation through Flower messages: the simulator's model, drop-outs, new keys, the server's whole view."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from scipy import stats

from dqnfed import Evaluation, Policy, RunResult, run
from dqnfed.algorithms.ditto import Ditto
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.mgda import MGDA
from dqnfed.algorithms.scaffold import Scaffold
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_problem
from dqnfed.flower import Client, InProcessGrid
from dqnfed.flower.app import client_app, client_number
from dqnfed.flower.secure_records import read_form
from dqnfed.flower.strategy import Strategy
from dqnfed.secure.forms import Form, form_products, padded_products
from dqnfed.secure.keys import Identity, fresh_identities, new_private_key
from dqnfed.secure.pads import Message as PaddedMessage
from dqnfed.secure.pads import PadKey, evaluation_of, fresh_nonce
from dqnfed.secure.rows import cosines, padded_row
from dqnfed.secure.sums import Number, moments, padded_numbers, rounded_score, unpadding_numbers
from tests.helpers.bowls import BOWLS, Case
from tests.helpers.flower import Fault, Moment, at, has_forgotten, is_dead, no_fault, with_faults
from tests.helpers.flower import deployed as plainly_deployed
from tests.helpers.turns import relative_distance

QUIET = Evaluation(every=3, participants=False)
SUMS = Evaluation(metrics="aggregate-only")


@pytest.fixture(scope="module")
def case() -> Case:
    return BOWLS["network"][-1]()


class Watched(InProcessGrid):
    """Notes every message that the server sends and every reply that it gets; nodes may be offline."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sent: list[Message] = []
        self.received: list[Message] = []
        self.offline: set[int] = set()

    def get_node_ids(self) -> Iterable[int]:
        return [node for node in super().get_node_ids() if node not in self.offline]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        messages = list(messages)
        self.sent += messages
        found = list(super().send_and_receive(messages, timeout=timeout))
        self.received += found
        return found


def grid_of(
    algorithm: AnyAlgorithm,
    case: Case,
    identities: list[Identity],
    fault_at: Callable[[Moment], Fault | None] = no_fault,
    *,
    sums_only: bool = False,
) -> Watched:
    def describe(context: Context) -> Client:
        number = client_number(context)
        data = case.federation.only(number)
        return Client(algorithm, case.problem, data, secure=identities[number], sums_only=sums_only)

    return Watched(with_faults(client_app(describe), fault_at), case.federation.n_clients)


def deployed(
    algorithm: AnyAlgorithm,
    case: Case,
    grid: Watched,
    *,
    rounds: int = 3,
    share: float = 1.0,
    evaluation: Evaluation = QUIET,
    **options: Any,
) -> RunResult:
    strategy = Strategy(
        algorithm,
        case.problem,
        n_clients=case.federation.n_clients,
        participation=share,
        evaluation=evaluation,
        wait=0.0,
        secure=True,
        **options,
    )
    strategy.start(grid, num_rounds=rounds)
    assert strategy.result is not None
    return strategy.result


def pad_settings(grid: Watched) -> list[dict[str, Any]]:
    """Return what every message says about its pads."""
    found = [message.content.get("secure") for message in grid.sent]
    return [dict(each) for each in found if isinstance(each, ConfigRecord)]


def nonces(grid: Watched) -> list[bytes]:
    return list(dict.fromkeys(each["nonce"] for each in pad_settings(grid)))


def assert_pads_are_used_once(*grids: Watched) -> None:
    """Record the hash and the words of every padded reply: no client pads for a message twice, and no words repeat."""
    for number in range(6):
        context = grids[-1].contexts[100 + number]
        used: Any = context.state["dqnfed-secure-used"]
        digests = list(used["digests"])
        assert len(set(digests)) == len(digests) >= 2
    replies = [reply for grid in grids for reply in grid.received if reply.has_content()]
    words = [
        array.numpy().tobytes()
        for reply in replies
        for key, array in reply.content.array_records.get("padded", {}).items()
        if key.endswith(("words", "numbers"))
    ]
    assert len(set(words)) == len(words) >= 12
    asked = [nonce for grid in grids for nonce in nonces(grid)]
    assert len(set(asked)) == len(asked)


def keys(grid: Watched) -> set[str]:
    return {each["context"] for each in pad_settings(grid)}


@pytest.mark.parametrize("share", [1.0, 2 / 3])
@pytest.mark.parametrize("algorithm", [FedAvg(), Scaffold(), MGDA(), DQNFed()], ids=lambda a: type(a).__name__)
def test_the_model_is_the_simulators(algorithm: AnyAlgorithm, share: float, case: Case) -> None:
    grid = grid_of(algorithm, case, fresh_identities(case.federation.n_clients))
    found = deployed(algorithm, case, grid, share=share)
    expected = run(
        algorithm, case.problem, case.federation, rounds=3, participation=share, evaluation=QUIET, secure=True
    )
    assert [r["status"] for r in found.history] == [r["status"] for r in expected.history]
    assert found.summary["n_dropped"] == 0
    assert relative_distance(found.theta, expected.theta) <= 1e-9
    assert len(keys(grid)) == 1, "one common key as long as the clients are the same"


def in_the_open(
    algorithm: AnyAlgorithm, case: Case, fault_at: Callable[[Moment], Fault | None] = no_fault, **options: Any
) -> RunResult:
    return plainly_deployed(algorithm, case, fault_at, evaluation=QUIET, policy=Policy(drop_share=0.0), **options)


def test_a_client_that_is_silent_in_a_round_is_not_in_its_sum(case: Case) -> None:
    grid = grid_of(MGDA(), case, fresh_identities(6), at(2, 1, is_dead))
    found = deployed(MGDA(), case, grid)
    assert [d["client"] for d in found.history[2]["dropped"]] == [2]
    assert [record["status"] for record in found.history[1:]] == ["next"] * 3
    assert relative_distance(found.theta, in_the_open(MGDA(), case, at(2, 1, is_dead), rounds=3).theta) <= 1e-6
    assert_pads_are_used_once(grid)


def test_a_client_that_is_lost_within_a_step_costs_the_round(case: Case) -> None:
    """It has replied, and does not answer the question for products in the metric."""

    def lost(message: Message, context: Context) -> Message:
        about: Any = message.content["about"]
        if about.get("question") == "form" and client_number(context) == 3 and about["round"] == 1:
            raise TimeoutError
        return inner(message, context)

    grid = grid_of(DQNFed(), case, fresh_identities(6))
    inner, grid._app = grid._app, lost
    found = deployed(DQNFed(), case, grid)
    assert [record["status"] for record in found.history[1:]] == ["next", "hold", "next"]
    assert_pads_are_used_once(grid)


def test_a_client_that_left_and_came_back_has_a_new_key_each_time(case: Case) -> None:
    identities = fresh_identities(6)
    grid = grid_of(FedAvg(), case, identities)

    class Leaves:
        def start(self, *_: Any) -> None: ...
        def end(self, *_: Any) -> None: ...
        def fail(self, *_: Any) -> None: ...

        def round(self, record: dict[str, Any], *_: Any) -> None:
            grid.offline = {104} if record["round"] == 0 else set()

    found = deployed(FedAvg(), case, grid, rounds=4, observers=[Leaves()])
    assert [d["client"] for d in found.history[2]["dropped"]] == [4]
    assert len(keys(grid)) == 3
    assert len(nonces(grid)) == 4
    assert relative_distance(found.theta, in_the_open(FedAvg(), case, at(4, 1, is_dead), rounds=4).theta) <= 1e-6
    assert_pads_are_used_once(grid)


def test_a_resumed_server_uses_no_pad_twice(case: Case, tmp_path: Path) -> None:
    identities = fresh_identities(6)
    expected = deployed(DQNFed(), case, grid_of(DQNFed(), case, identities), rounds=4)
    first, second = (grid_of(DQNFed(), case, identities) for _ in range(2))
    deployed(DQNFed(), case, first, rounds=2, out=tmp_path / "run")
    second.contexts = first.contexts
    found = deployed(DQNFed(), case, second, rounds=4, out=tmp_path / "run", resume=True)
    assert relative_distance(found.theta, expected.theta) <= 1e-6
    assert_pads_are_used_once(first, second)


def test_a_client_replies_once_to_a_message(case: Case) -> None:
    grid = grid_of(FedAvg(), case, fresh_identities(6))
    deployed(FedAvg(), case, grid, rounds=1)
    again = [m for m in grid.sent if m.metadata.message_type == "train"][:1]
    [reply] = grid.send_and_receive(again)
    assert reply.has_error()
    assert "would use its pads again" in str(reply.error.reason)


def test_a_restarted_node_with_a_folder_replies_once_to_a_message_too(case: Case, tmp_path: Path) -> None:
    grid = grid_of(FedAvg(), case, fresh_identities(6))
    for context in grid.contexts.values():
        context.node_config["memory-dir"] = str(tmp_path)
    deployed(FedAvg(), case, grid, rounds=1)
    again = [m for m in grid.sent if m.metadata.message_type == "train"][:1]
    grid.contexts[again[0].metadata.dst_node_id].state.clear()
    [reply] = grid.send_and_receive(again)
    assert "would use its pads again" in str(reply.error.reason)


def test_a_client_unpads_one_sum_of_a_message(case: Case) -> None:
    grid = grid_of(FedAvg(), case, fresh_identities(6))
    deployed(FedAvg(), case, grid, rounds=1)
    asked = [m for m in grid.sent if m.content["about"].get("question") == "unpad"]
    [again] = grid.send_and_receive(asked)
    assert "has unpadded a sum of this message already" in str(again.error.reason)


def test_a_client_gives_products_in_a_form_once_and_few_of_its_row(case: Case) -> None:
    """A server that asks again, with other vectors or for the entries of a row."""
    grid = grid_of(DQNFed(), case, fresh_identities(6))
    deployed(DQNFed(), case, grid, rounds=2)
    asked = [m for m in grid.sent if m.content["about"].get("question") == "form"][-1:]
    arrays: Any = asked[0].content["secure"]
    arrays["vectors"] = Array(2.0 * arrays["vectors"].numpy())
    [again] = grid.send_and_receive(asked)
    assert "does so once" in str(again.error.reason)
    about: Any = asked[0].content["about"]
    asked[0].content["about"] = ConfigRecord({**about, "question": "products"})
    asked[0].content["secure"] = ArrayRecord({"vectors": Array(np.eye(case.problem.n_parameters))})
    [row] = grid.send_and_receive(asked)
    assert "gives 4 products of a row at most, but is asked for 24" in str(row.error.reason)


def test_a_node_that_forgot_its_reply_does_not_unpad_and_another_one_does(case: Case) -> None:
    grid = grid_of(FedAvg(), case, fresh_identities(6))
    inner, asked = grid._app, []

    def forgets(message: Message, context: Context) -> Message:
        about: Any = message.content["about"]
        if message.metadata.message_type == "query" and "digest" in about:
            asked.append(context.node_id)
            if len(asked) == 1:
                return has_forgotten(message, context, inner)
        return inner(message, context)

    grid._app = forgets
    found = deployed(FedAvg(), case, grid, rounds=1)
    assert found.history[1]["status"] == "next"
    assert len(asked) == 2


def test_a_client_with_a_key_does_not_reply_in_the_open(case: Case) -> None:
    grid = grid_of(FedAvg(), case, fresh_identities(6))
    strategy = Strategy(FedAvg(), case.problem, n_clients=6, evaluation=QUIET, wait=0.0)
    strategy.start(grid, num_rounds=1)
    assert strategy.result is not None
    assert all("under pads alone" in d["why"] for d in strategy.result.history[1]["dropped"])
    assert torch.equal(strategy.result.theta, case.problem.theta0)


def test_another_key_than_the_rosters_is_refused(case: Case) -> None:
    identities = fresh_identities(6)
    identities[3] = replace(identities[3], private=new_private_key())
    found = deployed(FedAvg(), case, grid_of(FedAvg(), case, identities), rounds=1)
    assert [d["client"] for d in found.history[1]["dropped"]] == [3]
    assert "does not name the key of client 3" in found.history[1]["dropped"][0]["why"]


def test_no_message_to_the_server_holds_a_row_and_its_words_are_random(case: Case) -> None:
    """The server's whole view of training: scalars, norms and uniform words."""
    grid = grid_of(DQNFed(), case, fresh_identities(6))
    deployed(DQNFed(), case, grid, rounds=12)
    n, words = case.problem.n_parameters, []
    for reply in grid.received:
        for name, kept in reply.content.items():
            if not isinstance(kept, ArrayRecord):
                continue
            for key, array in kept.items():
                values = array.numpy()
                if values.dtype == np.uint64:
                    # a client's own correction is 0 by definition, and says nothing
                    words.append(values[values != 0] if key.endswith("corrections") else values.ravel())
                else:
                    assert values.size == 1, f"{name}/{key} has {values.size} numbers in the open"
    everything = np.concatenate(words)
    assert len(everything) > 12 * 6 * n
    assert stats.chisquare(np.bincount(everything.view(np.uint8), minlength=256)).pvalue > 1e-4


MEASURED = [FedAvg(), *(pytest.param(each, marks=pytest.mark.slow) for each in (Ditto(), DQNFed()))]


@pytest.mark.parametrize("algorithm", MEASURED, ids=lambda a: type(a).__name__)
def test_sums_of_what_clients_measure_are_the_simulators(algorithm: AnyAlgorithm, case: Case, tmp_path: Path) -> None:
    grid = grid_of(algorithm, case, fresh_identities(6), sums_only=True)
    found = deployed(algorithm, case, grid, rounds=2, evaluation=SUMS, out=tmp_path)
    expected = run(algorithm, case.problem, case.federation, rounds=2, evaluation=SUMS, secure=True)
    for record, usual in zip(found.history, expected.history, strict=True):
        assert record["accuracy"]["mean"] == pytest.approx(usual["accuracy"]["mean"], rel=1e-9)
        assert record["accuracy"]["std"] == pytest.approx(usual["accuracy"]["std"], rel=1e-9)
        assert record["train_loss"]["mean"] == pytest.approx(usual["train_loss"]["mean"], rel=1e-9)
        assert math.isnan(record["accuracy"]["worst10"])
    n_phases = 3 if isinstance(algorithm, DQNFed) else 2  # its first round has a second message
    assert len(nonces(grid)) == 3 + n_phases, "each evaluation and each message of training has pads of its own"


def evaluates(message: Message) -> bool:
    return str(message.metadata.message_type) == "evaluate" and "secure" in message.content


def test_a_client_that_is_silent_in_an_evaluation_is_not_in_its_sums(case: Case) -> None:
    def at_second(moment: Moment) -> Fault | None:
        return is_dead if not moment.is_training and moment[:2] == (2, 1) else None

    grid = grid_of(FedAvg(), case, fresh_identities(6), at_second, sums_only=True)
    found = deployed(FedAvg(), case, grid, rounds=2, evaluation=SUMS)
    assert "silent" not in found.history[1]
    assert found.history[2]["silent"] == [2]
    opened = run(FedAvg(), case.problem, case.federation, rounds=2, secure=True)
    scores = [row[5] for row in opened.client_rows if row[0] == 1 and row[1] != 2]
    assert found.history[2]["accuracy"]["mean"] == pytest.approx(np.mean(scores), abs=2.0**-8)


@pytest.mark.slow
def test_with_fewer_than_five_replies_nothing_is_unpadded(case: Case) -> None:
    def at_second(moment: Moment) -> Fault | None:
        return is_dead if not moment.is_training and moment.round == 1 and moment.client < 2 else None

    grid = grid_of(FedAvg(), case, fresh_identities(6), at_second, sums_only=True)
    found = deployed(FedAvg(), case, grid, rounds=3, evaluation=SUMS)
    assert found.history[2]["accuracy"] is None
    assert found.history[3]["accuracy"] is not None


@pytest.mark.slow
def test_sums_that_no_scores_have_are_not_used(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    """A client that sends other words is not found out, but a mean or deviation that is impossible is not used."""
    grid = grid_of(FedAvg(), case, fresh_identities(6), sums_only=True)
    inner = grid._app

    def lies(message: Message, context: Context) -> Message:
        reply = inner(message, context)
        if client_number(context) == 3 and evaluates(message):
            words = reply.content.array_records["padded"]["numbers"].numpy().copy()
            words[1, 1] += np.uint64(1)  # 2^64 / 2^48 points
            reply.content["padded"] = ArrayRecord({"numbers": Array(words)})
        return reply

    grid._app = lies
    with caplog.at_level("WARNING", logger="dqnfed"):
        found = deployed(FedAvg(), case, grid, rounds=1, evaluation=SUMS)
    assert all(record["accuracy"] is None for record in found.history)
    told = [record.getMessage() for record in caplog.records if "are not used" in record.getMessage()]
    assert len(told) == 2
    assert all("contradict each other" in line or "mean scores" in line for line in told)


def test_a_client_unpads_sums_once_and_only_of_what_it_measured(case: Case) -> None:
    grid = grid_of(FedAvg(), case, fresh_identities(6), sums_only=True)
    deployed(FedAvg(), case, grid, rounds=1, evaluation=SUMS)
    last = next(m for m in reversed(grid.sent) if m.content["about"].get("question") == "unpad-sums")
    [again] = grid.send_and_receive([last])
    assert "answers one question" in str(again.error.reason)
    other = next(m for m in grid.sent if m.content["about"].get("question") == "unpad-sums" and m is not last)
    [old] = grid.send_and_receive([other])
    assert "did not measure anything for the message" in str(old.error.reason)
    asked = next(m for m in reversed(grid.sent) if evaluates(m))
    [twice] = grid.send_and_receive([asked])
    assert "would use its pads again" in str(twice.error.reason)


def test_a_client_for_sums_does_not_measure_in_the_open(case: Case) -> None:
    grid = grid_of(FedAvg(), case, fresh_identities(6), sums_only=True)
    with pytest.raises(TimeoutError, match="gives losses and scores for sums under pads alone"):
        deployed(FedAvg(), case, grid, rounds=1)
    open_grid = grid_of(FedAvg(), case, fresh_identities(6))
    found = deployed(FedAvg(), case, open_grid, rounds=1, evaluation=SUMS)
    assert all(record["accuracy"] is None for record in found.history)
    assert all("gives losses and scores in the open" in refused["why"] for refused in found.history[0]["refused"])
    with pytest.raises(ValueError, match="`sums_only` needs `secure`"):
        Client(FedAvg(), case.problem, case.federation.only(0), sums_only=True)


def test_sums_over_fewer_clients_than_those_asked_for_need_five(case: Case) -> None:
    """A server that asks for the pads of three clients, or of one client twice, is refused."""
    grid = grid_of(FedAvg(), case, fresh_identities(6), sums_only=True)
    inner, asked = grid._app, []

    def curious(message: Message, context: Context) -> Message:
        about: Any = message.content["about"]
        if about.get("question") == "unpad-sums":
            asked.append(client_number(context))
            mine, wanted = client_number(context), [[0, 1, 2], [3, 3, 3, 4, 5], [0, 1, 2, 3, 9]]
            others = [client for client in wanted[len(asked) % 3] if client != mine]
            message.content["about"] = ConfigRecord({**about, "clients": sorted([mine, *others])})
        return inner(message, context)

    grid._app = curious
    found = deployed(FedAvg(), case, grid, rounds=1, evaluation=SUMS)
    assert all(record["accuracy"] is None for record in found.history)
    assert len(asked) == 12
    assert math.isnan(found.summary["accuracy"]["mean"])


def digits_view() -> tuple[Watched, Any]:
    """Return what a server of DQN-Fed with 20 clients sent and got, and their examples' problem."""
    built = build_problem(read_config("digits", ["run.seed=0"]))
    case = Case(built.problem, built.federation)
    assert built.federation.n_clients == 20
    grid = grid_of(DQNFed(), case, fresh_identities(20), sums_only=True)
    deployed(DQNFed(), case, grid, rounds=3, evaluation=SUMS)
    return grid, case


def last_form(grid: Watched) -> Form:
    """Return the last question for products in the metric."""
    asked = [m for m in grid.sent if m.content["about"].get("question") == "form"]
    return read_form(asked[-1].content)


def assert_metric_follows_from_products(G: np.ndarray[Any, Any], form: Form) -> None:
    """Rows turned within the span of the metric's vectors have the same products in the metric and random words, but
    other products with every vector.
    """
    everything, powers = form.vectors.double().numpy(), np.ldexp(1.0, [-e for e in form.exponents])
    used = np.square(everything).sum(1) > 0.0
    vectors, middle = everything[used], (form.middle * np.outer(powers, powers))[np.ix_(used, used)]
    axes, triangle = np.linalg.qr(vectors.T)
    _, own = np.linalg.eigh(triangle @ middle @ triangle.T)
    axis = axes @ own[:, :1]  # of the metric, as a reflection along it is
    turned = G - 2.0 * (G @ axis) @ axis.T
    assert (np.abs((turned - G) @ vectors.T).max(axis=0) > 1e-3 * np.abs(G @ vectors.T).max(axis=0)).all()
    key, message, norms = PadKey.fresh(), PaddedMessage(fresh_nonce() * 2, tuple(range(20))), np.linalg.norm(G, axis=1)
    views = [
        [padded_products(key, message, "gradient", row, norms[k], k, form) for k, row in enumerate(each)]
        for each in (G, turned)
    ]
    products = [form_products(view, norms, range(20), form) for view in views]
    np.testing.assert_allclose(products[0], products[1], atol=1e-9 * np.abs(products[0]).max())
    for view in views:
        words = np.concatenate([np.append(each.words, each.corrections[each.corrections != 0]) for each in view])
        assert stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue > 1e-4


def test_the_servers_view_of_digits_follows_from_gramian_scalars_and_step() -> None:
    """Twenty clients, every kind of message, evaluation included: with other gradients of the same products, and other
    losses and scores of the same sums, the server has the same numbers and random words.
    """
    grid, _ = digits_view()
    seen: set[str] = set()
    for reply in grid.received:
        for name, kept in reply.content.items():
            if isinstance(kept, ArrayRecord):
                for key, array in kept.items():
                    values = array.numpy()
                    seen.add("update/number" if name == "update" else f"{name}/{key.rpartition('/')[2]}")
                    assert values.dtype == np.uint64 or values.size == 1
            elif isinstance(kept, MetricRecord):
                seen.add(f"{name}: {sorted(kept)}")
    sizes = sorted(["n-train", "n-test", "n-validation"])
    padded = {"padded/words", "padded/corrections", "padded/norm", "padded/numbers"}
    pads, form = {"pads/words", "pads/numbers"}, {"form/words", "form/corrections", "form/square"}
    assert seen == {"update/number", *padded, *pads, *form, f"evaluation: {sizes}"}

    states = [context.state["dqnfed-secure-rows"] for context in grid.contexts.values()]
    G = np.stack([record["gradient"].numpy() for record in states if isinstance(record, ArrayRecord)])
    v = np.random.default_rng(0).standard_normal((G.shape[1], 1))
    turned = G - 2.0 * (G @ v) @ v.T / np.square(v).sum()  # a reflection keeps all products
    assert_metric_follows_from_products(G, last_form(grid))
    pad_key, message = PadKey.fresh(), PaddedMessage(fresh_nonce() * 2, tuple(range(20)))
    views = [
        [padded_row(pad_key, message, "gradient", row, k, with_products=True) for k, row in enumerate(each)]
        for each in (G, turned)
    ]
    products = [cosines(view, range(20)) for view in views]
    np.testing.assert_allclose(products[0], products[1], atol=1e-7)
    for view in views:
        words = np.concatenate([np.append(row.words, row.corrections[row.corrections != 0]) for row in view])
        assert stats.chisquare(np.bincount(words.view(np.uint8), minlength=256)).pvalue > 1e-4

    measured = evaluation_of("run", 1, ["loss", "scores", "squares"], {}, range(20), fresh_nonce())
    drawn = np.random.default_rng(1).uniform(0.0, 100.0, (20, 2))
    results = []
    for numbers in (drawn, drawn[::-1]):  # another client's numbers each
        each = [
            padded_numbers(pad_key, measured, k, [Number(float(loss)), Number(rounded_score(float(score)), True)])
            for k, (loss, score) in enumerate(numbers)
        ]
        taken_off = unpadding_numbers(pad_key, measured, 7, range(20), [False, True])
        results.append(moments(each, taken_off, [False, True], [20, 20]))
        assert stats.chisquare(np.bincount(np.concatenate(each).view(np.uint8).ravel(), minlength=256)).pvalue > 1e-4
    assert results[0][1] == results[1][1]
    assert str(results[0][0]) == str(results[1][0])

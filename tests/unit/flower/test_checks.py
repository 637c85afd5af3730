"""The rules for replies, one by one: what is refused, and what the reason says."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from dqnfed import DQNFed, FedAvg, Policy
from dqnfed.algorithms import REGISTRY
from dqnfed.core.expected import expected_reply, layout_of, own_model_names
from dqnfed.core.problem import score_range
from dqnfed.core.tensors import row
from dqnfed.flower import checks
from dqnfed.flower.checks import Question, Refused, Reported, held_sizes, read_member, read_report, read_update
from dqnfed.flower.exchange import first_line
from dqnfed.sim.setup import cohort_size
from tests.contract.cases import METHODS, suited_case, turns_of
from tests.helpers.bowls import network_bowl
from tests.helpers.flower import Fault, Moment, deployed, scaled, sends_wrong_shape

PROBLEM = network_bowl().problem
N_PARAMETERS = PROBLEM.n_parameters
GLOBAL = Question(["global"], with_loss=True)


def evaluation(**changes: Any) -> RecordDict:
    numbers: dict[str, Any] = {
        "loss": 1.0,
        "scores": [50.0],
        "losses": [1.0],
        "n-train": 9,
        "n-test": 3,
        "n-validation": 0,
    }
    about: dict[str, Any] = {"client": 0, "name": "zero", "group": "", "models": ["global"], "forgot": False}
    for key, value in changes.items():
        place: dict[str, Any] = about if key in about else numbers
        place[key.replace("_", "-")] = value
    return RecordDict({"evaluation": MetricRecord(numbers), "about": ConfigRecord(about)})


def update(kind: str = "FedAvgUpdate", **arrays: Any) -> RecordDict:
    fields = {name: Array(np.asarray(value)) for name, value in arrays.items()}
    return RecordDict({"update": ArrayRecord(fields), "about": ConfigRecord({"kind": kind, "forgot": False})})


def read(content: RecordDict, algorithm: Any = None) -> Any:
    method = (algorithm or FedAvg()).prepare(PROBLEM, 6, 6)
    sent = method.send(method.init_server(PROBLEM, 6))
    return read_update(content, method.info.replies, expected_reply(method, PROBLEM, sent), PROBLEM)


@pytest.mark.parametrize("name", METHODS)
def test_the_server_knows_what_replies_look_like(name: str) -> None:
    """Without an example of any client: the same kind, names, types and shapes as the messages of a run."""
    case = suited_case(name)
    size = cohort_size(2 / 3, case.federation.n_clients)
    method = REGISTRY[name]().prepare(case.problem, case.federation.n_clients, size)
    for turn in turns_of(name):
        assert expected_reply(method, case.problem, turn.sent) == layout_of(row(turn.updates, 0))


def test_an_honest_reply_is_read() -> None:
    delta = np.arange(float(N_PARAMETERS))
    assert torch.equal(read(update(delta=delta)).delta, torch.from_numpy(delta))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (update(delta=np.zeros(N_PARAMETERS + 1)), r"delta has the shape \[25\], but the server expects \[24\]"),
        (update(delta=np.zeros((1, N_PARAMETERS))), r"shape \[1, 24\]"),
        (update(delta=np.zeros(N_PARAMETERS, np.float32)), "type float32, but the server expects float64"),
        (
            update(delta=np.zeros(N_PARAMETERS), more=np.zeros(1)),
            "fields 'delta, more', but the server expects 'delta'",
        ),
        (update(step=np.zeros(N_PARAMETERS)), "fields 'step', but"),
        (update("QFFLUpdate", delta=np.zeros(N_PARAMETERS)), "no message kind 'QFFLUpdate'"),
        (RecordDict(), "no record 'about'"),
        (RecordDict({"about": ConfigRecord({"kind": "FedAvgUpdate"})}), "no record 'update'"),
    ],
)
def test_another_layout_is_refused(content: RecordDict, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(content)


def test_a_reply_to_another_message_is_refused() -> None:
    with pytest.raises(Refused, match="it is a TrialUpdate, but the server expects a DescentUpdate"):
        read(update("TrialUpdate", trial_loss=np.float64(1.0)), DQNFed())


def test_a_training_loss_below_the_floor_is_refused() -> None:
    content = update("QFFLUpdate", delta=np.zeros(N_PARAMETERS), loss=np.float64(-1.0))
    with pytest.raises(Refused, match="its loss is below 0, the floor of losses"):
        read(content, REGISTRY["qffl"]())


def test_with_two_clients_the_servers_model_decides_not_a_vote() -> None:
    case = network_bowl()
    federation = case.federation
    two = type(case)(case.problem, type(federation).from_clients([_data(federation, c) for c in (0, 1)], n_classes=3))

    def plan(moment: Moment) -> Fault | None:
        return sends_wrong_shape if moment.is_training and moment.client == 0 else None

    result = deployed(FedAvg(), two, plan, rounds=2)
    for record in result.history[1:]:
        assert [fault["client"] for fault in record["dropped"]] == [0]
        assert record["status"] == "next"


def _data(federation: Any, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = federation.train.rows(torch.tensor([client]))
    return federation.train.inputs[rows], federation.train.targets[rows]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"loss": math.nan}, "its loss is nan"),
        ({"loss": math.inf}, "its loss is inf"),
        ({"loss": -1.0}, "losses are finite and at least 0"),
        ({"losses": [-1.0]}, "losses are finite and at least 0"),
        ({"losses": []}, "0 losses for 1 models"),
        ({"scores": []}, "0 scores for 1 models"),
        ({"scores": [1.0, 2.0]}, "2 scores for 1 models"),
        ({"scores": [100.5]}, r"accuracy is 100.5, but must be in \[0, 100\]"),
        ({"scores": [math.nan]}, "accuracy is nan"),
        ({"models": ["a,b\nround"]}, "it evaluated the models"),
        ({"more": 1.0}, "its evaluation has the numbers"),
    ],
)
def test_an_impossible_evaluation_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused, match=why):
        read_report(evaluation(**changes), GLOBAL, PROBLEM)


def test_a_possible_evaluation_is_read() -> None:
    assert read_report(evaluation(), GLOBAL, PROBLEM) == Reported(1.0, [50.0], [1.0])
    only_scores = read_report(evaluation(loss=math.nan), Question(["global"], with_loss=False), PROBLEM)
    assert math.isnan(only_scores.loss)


@pytest.mark.parametrize(
    "changes", [{"n_train": 0}, {"n_train": -5}, {"n_train": 3.7}, {"n_test": 0}, {"n_train": 2**62}]
)
def test_an_impossible_size_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="must be a whole number"):
        read_member(evaluation(**changes))


def test_names_print_on_one_line() -> None:
    assert read_member(evaluation(name="a\nb\x00c\u202e")).name == "abc"
    assert read_member(evaluation(name="\n")).name == "client 0"
    assert len(read_member(evaluation(name="x" * 1000)).name) == checks.LONGEST_NAME


def test_a_size_counts_for_at_most_the_ratio_and_all_others_together() -> None:
    assert held_sizes([10, 20, 30], 100.0) == [10, 20, 30]
    assert held_sizes([10, 10, 10**15], 5.0) == [10, 10, 50]
    assert held_sizes([10] * 9 + [10**15], 3.0) == [10] * 9 + [30]
    assert held_sizes([10] * 9 + [10**15], 100.0) == [10] * 9 + [90]


def test_a_loss_far_above_all_others_is_refused() -> None:
    usual = {client: Reported(1.0, [50.0], [1.0]) for client in range(4)}
    assert checks.far_off(usual, 0.0) == {}
    odd = usual | {4: Reported(1e9, [50.0], [1.0])}
    assert list(checks.far_off(odd, 0.0)) == [4]
    assert checks.far_off(odd, 1e8) == {}  # as large as losses have been
    assert checks.far_off({0: usual[0], 4: odd[4]}, 0.0) == {}  # of two nobody's is usual


def test_sizes_are_fixed_when_a_client_is_first_met() -> None:
    def larger(message: Any, context: Any, app: Any) -> Any:
        reply = app(message, context)
        numbers = dict(reply.content.metric_records["evaluation"])
        reply.content["evaluation"] = MetricRecord({**numbers, "n-train": 50 * int(numbers["n-train"])})
        return reply

    def plan(moment: Moment) -> Fault | None:
        return larger if not moment.is_training and moment.client == 2 and moment.round >= 0 else None

    result = deployed(FedAvg(), network_bowl(), plan, rounds=2)
    assert result.theta.tolist() == deployed(FedAvg(), network_bowl(), rounds=2).theta.tolist()
    for record in result.history[1:]:
        assert {each["client"] for each in record["refused"]} == {2}
        assert "; sizes are fixed" in record["refused"][0]["why"]


def test_model_names_are_the_servers_own() -> None:
    assert own_model_names(FedAvg(), PROBLEM, 6) == ["global"]
    assert own_model_names(REGISTRY["ditto"](), PROBLEM, 6) == ["personal", "global"]


def test_scores_have_a_range() -> None:
    assert score_range("accuracy") == score_range("auc") == (0.0, 100.0)
    assert score_range("negative squared error") == (-math.inf, 0.0)
    assert score_range("closeness") == (-math.inf, math.inf)


def test_a_held_scalar_is_written_down() -> None:
    def plan(moment: Moment) -> Fault | None:
        return scaled(1e4, "loss") if moment.is_training and moment.client == 1 else None

    result = deployed(REGISTRY["qffl"](), network_bowl(), plan, rounds=1, policy=Policy(scalar_bounds=30.0))
    ((held),) = result.history[1]["held"]
    assert (held["client"], held["field"]) == (1, "loss")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("\n  no number \r\n more", "no number"),
        ("is \x00 or \x1b[31m\ud800", r"is \x00 or \x1b[31m\ud800"),
        ("\x1b" * 300, r"\x1b" * 50),
        ("\n\n", "ValueError"),
    ],
)
def test_of_an_error_one_printable_line_is_told(text: str, line: str) -> None:
    assert first_line(ValueError(text)) == line

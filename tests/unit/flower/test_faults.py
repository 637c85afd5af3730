"""Clients that fail in every way, nodes that restart, servers that are killed: the run goes on, and says so."""

from __future__ import annotations

import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from torch import Tensor

from dqnfed import DQNFed, Evaluation, FedAvg, Policy, run
from dqnfed.algorithms import REGISTRY
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.run_folder import load_tensors
from dqnfed.flower.exchange import fields_of
from tests.helpers.bowls import network_bowl
from tests.helpers.flower import (
    Fault,
    Moment,
    at,
    deployed,
    fleet,
    has_forgotten,
    is_dead,
    is_late,
    raises,
    sends_nan,
    sends_nonsense,
    sends_wrong_shape,
)
from tests.helpers.folders import newest_tensors
from tests.helpers.quick import in_turn
from tests.helpers.repository import ROOT
from tests.helpers.turns import relative_distance

AGREE = 1e-10  # as in the contract: roundings of another order of sums
FAULTS: dict[str, tuple[Fault, str]] = {
    "NaN": (sends_nan, "update is not finite"),
    "an exception": (raises, "its app failed: RuntimeError: the disk of this client is full"),
    "a wrong shape": (sends_wrong_shape, "but the server expects"),
    "nonsense": (sends_nonsense, "its reply is refused: it has no record 'update'"),
    "nothing in time": (is_dead, "no reply before the timeout"),
    "a reply that comes too late": (is_late, "no reply before the timeout"),
}


@dataclass(frozen=True, kw_only=True)
class FedAvgWithoutOne(FedAvg):
    """FedAvg whose second round does without client 2: what a fault of that client must come to."""

    def select(self, server: Any, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return sampled[sampled != 2] if round == 1 else sampled


@dataclass(frozen=True, kw_only=True)
class DQNFedWithoutOne(DQNFed):
    """DQN-Fed likewise; its clients remember, and client 2 must not remember the round that it missed."""

    def select(self, server: Any, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return sampled[sampled != 2] if round == 1 else sampled


@pytest.mark.parametrize(("fault", "method"), in_turn(FAULTS, ["fedavg", "dqn-fed"]))
def test_a_client_at_fault_counts_as_absent(fault: str, method: str, caplog: pytest.LogCaptureFixture) -> None:
    case, (behaviour, why) = network_bowl(), FAULTS[fault]
    algorithm: AnyAlgorithm = FedAvg() if method == "fedavg" else DQNFed()
    oracle: AnyAlgorithm = FedAvgWithoutOne() if method == "fedavg" else DQNFedWithoutOne()
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        result = deployed(algorithm, case, at(2, 1, behaviour), rounds=4)
    expected = run(oracle, case.problem, case.federation, rounds=4)
    assert relative_distance(result.theta, expected.theta) <= AGREE
    (dropped,) = result.history[2]["dropped"]
    assert dropped["client"] == 2
    assert why in dropped["why"]
    assert "round 1: client 2 dropped" in caplog.text
    assert [record["dropped"] for record in result.history[1:] if record["round"] != 1] == [[], [], []]
    assert result.summary["n_dropped"] == 1


@pytest.mark.parametrize("behaviour", [sends_nan, raises, is_dead])
def test_if_all_clients_fail_the_model_stays_and_the_run_goes_on(behaviour: Fault) -> None:
    case = network_bowl()

    def plan(moment: Moment) -> Fault | None:
        return behaviour if moment.is_training and moment.round == 1 else None

    result = deployed(DQNFed(), case, plan, rounds=4)
    held = result.history[2]
    assert [record["status"] for record in result.history] == ["start", "next", "hold", "next", "next"]
    assert held["train_loss"] == result.history[1]["train_loss"]
    assert {fault["client"] for fault in held["dropped"]} == set(range(6))
    assert held["bytes_up"] == (0 if behaviour is not sends_nan else held["bytes_up"])
    assert result.summary["train_loss"]["mean"] < held["train_loss"]["mean"]


def test_a_second_phase_does_without_those_who_missed_the_first() -> None:
    case = network_bowl()
    asked: list[Moment] = []

    def plan(moment: Moment) -> Fault | None:
        asked.append(moment)
        return raises if moment.is_training and moment[:3] == (3, 0, 0) else None

    result = deployed(DQNFed(), case, plan, rounds=1)
    second_phase = [moment.client for moment in asked if moment.is_training and moment.phase == 1]
    assert sorted(second_phase) == [0, 1, 2, 4, 5]
    assert result.history[1]["status"] == "next"


def test_a_round_that_is_lost_halfway_leaves_no_trace() -> None:
    """All clients fail after the first phase: they, too, go on from where the round began, as if it had not been."""
    case, algorithm = network_bowl(), DQNFed(step="line-search")

    def plan(moment: Moment) -> Fault | None:
        return is_dead if moment.is_training and moment.round == 2 and moment.phase > 0 else None

    found = deployed(algorithm, case, plan, rounds=5)
    assert [record["status"] for record in found.history[1:]] == ["next", "next", "hold", "next", "next"]
    assert torch.equal(found.theta, deployed(algorithm, case, rounds=4).theta)


def test_a_client_that_is_silent_in_an_evaluation_is_left_out_of_its_mean() -> None:
    case = network_bowl()

    def plan(moment: Moment) -> Fault | None:
        return raises if not moment.is_training and moment[:2] == (4, 0) else None

    result = deployed(FedAvg(), case, plan, rounds=2)
    expected = run(FedAvg(), case.problem, case.federation, rounds=2)
    rows = {row[1]: row for row in expected.client_rows if row[0] == 0}
    others = [rows[c][4] for c in range(6) if c != 4]
    assert result.history[1]["silent"] == [4]
    assert result.history[1]["train_loss"]["mean"] == pytest.approx(sum(others) / 5)
    assert result.history[2]["train_loss"]["mean"] == pytest.approx(expected.history[2]["train_loss"]["mean"])
    assert relative_distance(result.theta, expected.theta) <= AGREE


def test_policies_may_end_the_run_instead() -> None:
    case = network_bowl()
    with pytest.raises(ValueError, match=r"client 2 is missing in round 1 .*on_missing.*\"proceed\" goes on"):
        deployed(FedAvg(), case, at(2, 1, raises), rounds=3, policy=Policy(on_missing="fail"))
    with pytest.raises(ValueError, match=r"client 2 sent an update that is not finite in round 1"):
        deployed(FedAvg(), case, at(2, 1, sends_nan), rounds=3, policy=Policy(on_nonfinite="fail"))


def test_too_few_replies_hold_the_model() -> None:
    case = network_bowl()
    result = deployed(FedAvg(), case, at(2, 1, raises), rounds=3, policy=Policy(min_replies=6))
    assert [record["status"] for record in result.history[1:]] == ["next", "hold", "next"]


@pytest.mark.parametrize(
    "name", ["dqn-fed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("scaffold", "ditto"))]
)
def test_a_restarted_node_starts_with_a_new_memory_or_reads_its_disk(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case, algorithm = network_bowl(), REGISTRY[name]()
    undisturbed = deployed(algorithm, case, rounds=5)
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        forgetful = deployed(algorithm, case, at(2, 2, has_forgotten), rounds=5)
    assert "round 2: client 2 lost its memory and starts with a new one" in caplog.text
    assert forgetful.summary["train_loss"]["mean"] < forgetful.history[1]["train_loss"]["mean"]
    assert forgetful.summary["n_dropped"] == 0
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        careful = deployed(algorithm, case, at(2, 2, has_forgotten), rounds=5, memory_dir=tmp_path)
    assert torch.equal(careful.theta, undisturbed.theta)
    assert "lost its memory" not in caplog.text


@pytest.mark.parametrize("name", ["dqn-fed", "ditto"])
def test_a_node_may_come_back_under_another_id(name: str) -> None:
    case, algorithm = network_bowl(), REGISTRY[name]()
    grid = fleet(algorithm, case)

    class Moves:
        """An observer after whose second round the node of client 2 is another one, with the same memory."""

        def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...

        def round(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 1:
                context = grid.contexts.pop(102)
                context.node_id = 999
                grid.contexts[999] = context

        def end(self, summary: Mapping[str, Any]) -> None: ...

    moved = deployed(algorithm, case, rounds=4, grid=grid, observers=[Moves()])
    assert torch.equal(moved.theta, deployed(algorithm, case, rounds=4).theta)
    assert moved.summary["n_dropped"] == 0


def test_an_offline_client_is_named_and_not_waited_for() -> None:
    case, algorithm = network_bowl(), FedAvg()
    grid = fleet(algorithm, case)

    class Leaves:
        def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...

        def round(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 0:
                del grid.contexts[105]

        def end(self, summary: Mapping[str, Any]) -> None: ...

    result = deployed(algorithm, case, rounds=3, grid=grid, observers=[Leaves()])
    for record in result.history[2:]:
        assert record["dropped"] == [{"client": 5, "why": "its node is offline"}]
        assert record["silent"] == [5]


def test_unknown_nodes_do_not_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    """A client goes; nodes come that report to be another, one that does not exist, or nothing readable."""
    case, algorithm = network_bowl(), FedAvg()
    asked: list[int] = []
    grid = fleet(algorithm, case)
    honest = grid._app

    def app(message: Message, context: Context) -> Message:
        asked.append(context.node_id)
        reply = honest(message, context)
        if context.node_id == 901:
            reply.content["about"] = ConfigRecord({**fields_of(reply.content, "about"), "client": 17})
        if context.node_id == 902:
            del reply.content["evaluation"]
        return reply

    grid._app = app

    class Newcomers:
        def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...

        def round(self, record: Mapping[str, Any]) -> None:
            if record["round"] == 0:
                gone = grid.contexts.pop(105)
                for node in (900, 901, 902):
                    config = {**gone.node_config, "partition-id": 2}
                    grid.contexts[node] = Context(1, node, config, RecordDict(), {})

        def end(self, summary: Mapping[str, Any]) -> None: ...

    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        result = deployed(algorithm, case, rounds=3, grid=grid, observers=[Newcomers()])
    assert result.summary["rounds"] == 3
    assert [record["dropped"] for record in result.history[2:]] == 2 * [[{"client": 5, "why": "its node is offline"}]]
    assert "nodes 102 and 900 both report that they are client 2" in caplog.text
    assert "node 901 reports that it is client 17" in caplog.text
    assert "node 902 does not report which client it is: it has no record 'evaluation'" in caplog.text
    assert [asked.count(node) for node in (900, 901, 902)] == [1, 1, 1]


class Killed(BaseException):
    """The server's end, without any chance to clean up."""


def killed_at(moment: Moment) -> Any:
    def plan(now: Moment) -> Fault | None:
        if now == moment:
            raise Killed
        return None

    return plan


@pytest.mark.parametrize(
    ("name", "round", "phase", "is_training", "share"),
    [
        ("dqn-fed", 0, 0, True, 0.7),
        ("dqn-fed", 0, 1, True, 1.0),  # where all take part there are two phases in the first round
        pytest.param("dqn-fed", 2, 0, True, 0.7, marks=pytest.mark.slow),
        ("dqn-fed", 2, 0, False, 0.7),
        pytest.param("dqn-fed", 2, 0, True, 1.0, marks=pytest.mark.slow),
        pytest.param("ditto", 0, 0, True, 0.7, marks=pytest.mark.slow),
        pytest.param("ditto", 3, 0, True, 0.7, marks=pytest.mark.slow),
    ],
)
def test_a_killed_server_resumes_to_the_same_bits(
    name: str, round: int, phase: int, is_training: bool, share: float, tmp_path: Path
) -> None:
    """Whatever the clients had already done in the lost round, they go back to where the server goes on."""
    case, algorithm = network_bowl(), REGISTRY[name]()
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    undisturbed = deployed(algorithm, case, rounds=5, out=whole, participation=share)
    kept = tmp_path / "memories"
    second = undisturbed.history[1 + round]["clients"][1]  # one client has replied by then
    plan = killed_at(Moment(second, round, phase, is_training))
    with pytest.raises(Killed):
        deployed(algorithm, case, plan, rounds=5, out=parts, memory_dir=kept, participation=share)
    resumed = deployed(algorithm, case, rounds=5, out=parts, memory_dir=kept, participation=share, resume=True)
    assert torch.equal(resumed.theta, undisturbed.theta)
    assert (parts / "clients.csv").read_text() == (whole / "clients.csv").read_text()


SCRIPT = """
import os, signal, sys
from pathlib import Path
from dqnfed import DQNFed
from tests.helpers.bowls import network_bowl
from tests.helpers.flower import deployed

def plan(moment):
    if moment.is_training and moment[:2] == (2, 2):
        os.kill(os.getpid(), signal.SIGKILL)

folder = Path(sys.argv[1])
deployed(DQNFed(), network_bowl(), plan, rounds=4, out=folder / "run", memory_dir=folder / "memories")
"""


def test_a_server_killed_by_the_system_resumes(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    resumed = deployed(
        DQNFed(), network_bowl(), rounds=4, out=tmp_path / "run", memory_dir=tmp_path / "memories", resume=True
    )
    assert torch.equal(resumed.theta, deployed(DQNFed(), network_bowl(), rounds=4).theta)
    assert [record["round"] for record in resumed.history] == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("algorithm", [FedAvg(), DQNFed(), DQNFed(step="line-search")])
def test_only_aggregates_are_written_if_so_wished(algorithm: AnyAlgorithm, tmp_path: Path) -> None:
    case = network_bowl()
    private = deployed(algorithm, case, rounds=2, out=tmp_path, evaluation=Evaluation(metrics="aggregate-only"))
    usual = deployed(algorithm, case, rounds=2)
    assert torch.equal(private.theta, usual.theta)
    assert private.summary["accuracy"] == usual.summary["accuracy"]
    assert (tmp_path / "clients.csv").read_text().splitlines() == [",".join(usual.columns)]
    losses = {row[4] for row in usual.client_rows if row[0] >= 0}  # at the start all are the same
    texts = [path.read_text() for path in tmp_path.rglob("*.json*")]
    assert all(math.isfinite(loss) for loss in losses)
    shared = {record["train_loss"]["max"] for record in usual.history}  # the largest loss is an aggregate too
    assert not any(repr(loss) in text for text in texts for loss in losses - shared)
    tensors, _ = load_tensors(newest_tensors(tmp_path))
    tensors.pop("server.votes.losses", None)  # what DQN-Fed's server itself keeps of the clients' last replies
    numbers = torch.cat([t.double().flatten() for t in tensors.values()])
    assert not bool(torch.isin(torch.tensor(sorted(losses), dtype=torch.float64), numbers).any())

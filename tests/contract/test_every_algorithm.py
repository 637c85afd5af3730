"""What every registered method owes its users, whatever its paper says.

A method that cannot keep one of these promises names the test in its `info.exemptions`, with the reason.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dqnfed import Evaluation, RunResult, run
from dqnfed.algorithms import REGISTRY
from dqnfed.core.replies import Replies
from dqnfed.core.run_folder import load_tensors, save_tensors
from dqnfed.core.tensors import from_named_tensors, map_tensors, named_tensors, row, tensors
from dqnfed.sim.setup import cohort_size
from tests.contract.cases import (
    EDGES,
    LOCAL_WORK,
    METHODS,
    REFUSED_EDGES,
    REFUSED_SETTINGS,
    five_rounds,
    hard_case,
    suited_case,
    turns_of,
)
from tests.helpers.bowls import BOWLS
from tests.helpers.quick import in_turn
from tests.helpers.turns import Turn, played_turns, relative_distance, replayed_round

AGREE = 1e-10  # relative, float64: some 10^5 roundings, far below anything a different formula would give


@cache
def default_run(name: str, work: str) -> RunResult:
    return five_rounds(name, work, run)


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def is_finite(result: RunResult) -> bool:
    losses = [record["train_loss"]["mean"] for record in result.history if record["train_loss"] is not None]
    return bool(torch.isfinite(result.theta).all()) and bool(torch.isfinite(torch.tensor(losses)).all())


def is_same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Return whether two records have the same bits; NaN equals NaN."""
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def rounds_of(turns: list[Turn]) -> list[list[Turn]]:
    grouped: dict[int, list[Turn]] = {}
    for turn in turns:
        grouped.setdefault(turn.cohort.round, []).append(turn)
    return list(grouped.values())


@pytest.mark.parametrize(("name", "work"), in_turn(METHODS, LOCAL_WORK))
def test_same_seed_same_bits(name: str, work: str) -> None:
    first, second = default_run(name, work), five_rounds(name, work, run)
    assert torch.equal(first.theta, second.theta)
    assert without_times(first.history) == without_times(second.history)
    assert first.client_rows == second.client_rows


@pytest.mark.parametrize("name", METHODS)
def test_server_memory_and_messages_survive_a_file(name: str, tmp_path: Path) -> None:
    for turn in turns_of(name):
        records = (turn.server, turn.step.server, turn.sent, turn.memory_after, turn.updates, row(turn.memory_after, 0))
        for record in records:
            save_tensors(tmp_path / "record.safetensors", named_tensors(record), {})
            back = from_named_tensors(type(record), load_tensors(tmp_path / "record.safetensors")[0])
            assert [t.dtype for t in tensors(back)] == [t.dtype for t in tensors(record)]
            assert is_same(back, record)


@pytest.mark.parametrize("name", METHODS)
def test_messages_are_of_the_declared_kinds(name: str) -> None:
    info = REGISTRY[name].info
    for turn in turns_of(name):
        assert type(turn.server) is info.server
        assert type(turn.step.server) is info.server
        assert type(turn.sent) in info.messages
        assert type(turn.updates) in info.replies
        assert type(turn.memory_before) is info.memory
        assert type(turn.memory_after) is info.memory
        assert all(isinstance(value, float) for value in turn.step.diagnostics.values())
        clients = turn.cohort.clients.tolist()
        assert clients == sorted(set(clients))
        assert set(clients) <= set(range(turn.cohort.n_clients))


@pytest.mark.parametrize("name", METHODS)
def test_fields_that_hold_the_start_model_hold_it(name: str) -> None:
    """A run may start from a model that was trained before: it is put into all of these fields."""
    case = suited_case(name)
    prepared = REGISTRY[name]().prepare(case.problem, case.federation.n_clients, case.federation.n_clients)
    server = prepared.init_server(case.problem, case.federation.n_clients)
    for field in prepared.info.theta_fields:
        assert torch.equal(getattr(server, field), case.problem.theta0.expand_as(getattr(server, field))), field


@pytest.mark.parametrize("name", METHODS)
def test_order_of_replies_is_irrelevant(name: str) -> None:
    algorithm, case = REGISTRY[name](), suited_case(name)
    for phases in rounds_of(turns_of(name)):
        k = len(phases[0].cohort.clients)
        backwards = torch.arange(k - 1, -1, -1)
        for order in (backwards, backwards.roll(2)):
            found = replayed_round(algorithm, case, phases, order)
            assert relative_distance(found.theta, phases[-1].step.server.theta) <= AGREE


@pytest.mark.parametrize("name", METHODS)
def test_steps_leave_their_arguments_alone(name: str) -> None:
    """A held or interrupted round goes back to the states before it, so no step may write into them."""
    algorithm, case = REGISTRY[name](), suited_case(name)
    prepared = algorithm.prepare(case.problem, case.federation.n_clients, len(turns_of(name)[0].cohort.clients))
    for turn in turns_of(name):
        given = (turn.server, turn.sent, turn.memory_before, turn.updates)
        copies = [map_tensors(torch.clone, record) for record in given]
        prepared.client_step(case.problem, row(turn.tasks, 0), turn.sent, row(turn.memory_before, 0))
        steps = [prepared.server_step(turn.server, Replies(turn.updates), turn.cohort) for _ in range(2)]
        assert all(is_same(record, copy) for record, copy in zip(given, copies, strict=True))
        assert is_same(steps[0].server, steps[1].server)


@pytest.mark.parametrize("name", METHODS)
def test_later_steps_leave_earlier_states_alone(name: str) -> None:
    """After four rounds, everything that was sent, kept or returned on the way still has the bits that it had then."""
    case = suited_case(name)
    size = cohort_size(2 / 3, case.federation.n_clients)
    held: list[tuple[tuple[Any, ...], tuple[Any, ...]]] = []

    def hold(turn: Turn) -> None:
        records = (turn.server, turn.sent, turn.tasks, turn.memory_before, turn.memory_after, turn.updates)
        held.extend((record, map_tensors(torch.clone, record)) for record in (*records, turn.step.server))

    played_turns(REGISTRY[name](), case, rounds=4, cohort_size=size, on_turn=hold)
    for record, then in held:
        assert is_same(record, then), type(record).__name__


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", METHODS)
def test_stays_finite_on_hard_federations(name: str, edge: str) -> None:
    case = hard_case(name, edge)
    seldom = Evaluation(every=2)

    def result() -> RunResult:
        share = case.participation
        return run(REGISTRY[name](), case.problem, case.federation, rounds=3, participation=share, evaluation=seldom)

    if (name, edge) in REFUSED_EDGES:
        with pytest.raises(ValueError, match=REFUSED_EDGES[name, edge]):
            result()
        return
    found = result()
    assert "not finite" not in found.summary["reason"]
    assert is_finite(found)


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in REFUSED_SETTINGS.items() for key in keys])
def test_settings_of_the_table_are_refused_by_name(name: str, key: str) -> None:
    case, n_clients = suited_case(name), suited_case(name).federation.n_clients
    with pytest.raises(ValueError, match=f"`{key}` must be"):
        REGISTRY[name](**{key: LOCAL_WORK["mini-batches"][key]}).prepare(case.problem, n_clients, n_clients)


@pytest.mark.parametrize("name", METHODS)
def test_goes_on_without_a_broken_client(name: str) -> None:
    """A client whose data are not numbers is dropped and named; the others train, or hold if it takes everybody."""
    case, broken = suited_case(name), 2
    inputs = case.federation.train.inputs.clone()
    inputs[case.federation.train.starts[broken]] = torch.nan
    examples = case.federation.train._replace(inputs=inputs)
    federation = type(case.federation)(examples, examples, n_classes=case.federation.n_classes)
    result = run(REGISTRY[name](), case.problem, federation, rounds=3)
    assert bool(torch.isfinite(result.theta).all())
    is_held = [record["status"] == "hold" for record in result.history[1:]]
    assert torch.equal(result.theta, case.problem.theta0) == all(is_held)
    for record in result.history[1:]:
        assert {drop["client"] for drop in record["dropped"]} == {broken}


@pytest.mark.parametrize(
    ("name", "kind", "bowl"),
    [
        (name, kind, n)
        for name in METHODS
        for kind in BOWLS
        if kind in REGISTRY[name].info.problem_kinds
        for n in range(len(BOWLS[kind]))
    ],
)
def test_mean_loss_falls_on_a_bowl(name: str, kind: str, bowl: int) -> None:
    case = BOWLS[kind][bowl]()
    seldom = Evaluation(every=6, participants=False)
    result = run(REGISTRY[name](), case.problem, case.federation, rounds=6, evaluation=seldom)
    assert result.summary["train_loss"]["mean"] < result.summary["start"]["train_loss"]["mean"]


class Interrupter:
    """An observer that presses Ctrl-C in the middle of a run."""

    def __init__(self, after_round: int) -> None:
        self.after_round = after_round

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...

    def round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self.after_round:
            os.kill(os.getpid(), signal.SIGINT)

    def end(self, summary: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize("name", METHODS)
def test_interrupted_and_resumed_equals_uninterrupted(name: str, tmp_path: Path) -> None:
    case = suited_case(name)
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def result_in(out: Path, *, resume: bool = False, observers: tuple[Interrupter, ...] = ()) -> RunResult:
        return run(
            REGISTRY[name](),
            case.problem,
            case.federation,
            rounds=5,
            participation=0.5,
            evaluation=Evaluation(every=2),
            out=out,
            resume=resume,
            observers=observers,
        )

    straight = result_in(whole)
    half = result_in(parts, observers=(Interrupter(after_round=1),))
    assert (half.summary["status"], half.summary["rounds"]) == ("interrupted", 2)
    resumed = result_in(parts, resume=True)

    assert torch.equal(resumed.theta, straight.theta)
    assert (parts / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert (parts / "clients.csv").read_text() == (whole / "clients.csv").read_text()
    lines = [(folder / "metrics.jsonl").read_text().splitlines() for folder in (parts, whole)]
    assert without_times([json.loads(line) for line in lines[0]]) == without_times(
        [json.loads(line) for line in lines[1]]
    )
    last = [load_tensors(next((folder / "checkpoint").glob("*.safetensors")))[0] for folder in (parts, whole)]
    assert last[0].keys() == last[1].keys()
    assert all(torch.equal(last[0][key].nan_to_num(), last[1][key].nan_to_num()) for key in last[0])

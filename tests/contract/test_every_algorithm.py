"""What every registered method owes its users, whatever its paper says.

A method that cannot keep one of these promises names the test in its `exemptions`, with the reason.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dqnfed import Evaluation, RunResult, looped, run, threads, vectorised
from dqnfed.algorithms import REGISTRY
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import Problem
from dqnfed.core.run_folder import load_tensors, save_tensors
from dqnfed.core.tensors import from_named_tensors, map_tensors, named_tensors, row, tensors
from dqnfed.flower import run_in_process
from dqnfed.sim.engine import cohort_size
from tests.helpers.bowls import BOWLS, Case, federation_of, labelled_clients, linear_model, small_network
from tests.helpers.turns import Turn, played_turns, relative_distance, replayed_round

METHODS = sorted(REGISTRY)
RUNNERS: dict[str, Callable[..., RunResult]] = {  # every way to run a method; all must give what `run` gives
    "chunked": partial(run, cohort=vectorised(chunk=4)),
    "looped": partial(run, cohort=looped()),
    "threads": partial(run, cohort=threads(3)),
    "flower": run_in_process,
}
LOCAL_WORK: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "mini-batches": {"epochs": 2, "batch_size": 8, "momentum": 0.5, "weight_decay": 1e-3, "lr_decay": 0.9},
}
AGREE = 1e-10  # relative, float64: some 10^5 roundings, far below anything a different formula would give


def configured(name: str, settings: Mapping[str, Any], case: Case) -> AnyAlgorithm:
    """Return the method with the settings; skips the test if the method refuses them and says why."""
    try:
        algorithm = REGISTRY[name](**settings)
        algorithm.prepare(case.problem, case.federation.n_clients, case.federation.n_clients)
    except ValueError as refusal:
        if not settings:
            raise
        pytest.skip(f"{name} refuses {dict(settings)}: {refusal}")
    return algorithm


def refusal_of(name: str, case: Case, share: float) -> str | None:
    """Return why the method cannot work with a share of the clients, as it says itself; None if it can."""
    n_clients = case.federation.n_clients
    try:
        REGISTRY[name]().prepare(case.problem, n_clients, cohort_size(share, n_clients))
    except ValueError as refusal:
        return str(refusal)
    return None


def share_for(name: str, case: Case, share: float) -> float:
    """Return the share of clients to sample: the given one, or all where the method needs every client."""
    return share if refusal_of(name, case, share) is None else 1.0


@cache
def reference(name: str, work: str) -> RunResult:
    """Return five vectorised rounds, the run that all others are compared with."""
    return five_rounds(name, work, run)


def five_rounds(name: str, work: str, runner: Callable[..., RunResult]) -> RunResult:
    case = suited_case(name)
    algorithm = configured(name, LOCAL_WORK[work], case)
    share = share_for(name, case, 0.7)
    return runner(
        algorithm,
        case.problem,
        case.federation,
        rounds=5,
        participation=share,
        evaluation=Evaluation(every=2, participants=False),
    )


def suited_case(name: str) -> Case:
    """Return a small problem of a kind that the method says it suits."""
    kind = next(kind for kind in BOWLS if kind in REGISTRY[name].suits)
    return BOWLS[kind][-1]()


def clients_edge(name: str, case: str) -> Case:
    """Return the named hard federation, on a problem of a kind that the method suits."""

    def problem(n_inputs: int = 4, n_hidden: int = 3, n_classes: int = 3) -> Problem:
        if "convex" in REGISTRY[name].suits:
            return Problem.from_module(linear_model(n_inputs, n_classes))
        return Problem.from_module(small_network(n_inputs, n_hidden, n_classes))

    clients = labelled_clients(6, 4)
    if case == "duplicate clients":
        return Case(problem(), federation_of([clients[0], clients[1], clients[0], clients[2], clients[1]]))
    if case == "identical clients":
        return Case(problem(), federation_of([clients[0]] * 5))
    if case == "one sampled client":
        return Case(problem(), federation_of(clients), participation=1 / 6)
    if case == "one client at all":
        return Case(problem(), federation_of(clients[:1]))
    if case == "more clients than parameters":  # 4 parameters
        two_inputs = labelled_clients(7, 2, n_classes=2)
        return Case(problem(n_inputs=2, n_hidden=1, n_classes=2), federation_of(two_inputs))
    if case == "a zero-gradient client":  # no weight reaches inputs of zero, and a bias is pulled equally by all labels
        return Case(problem(), federation_of([*clients, (torch.zeros(6, 4, dtype=torch.float64), torch.arange(6) % 3)]))
    if case == "equal losses":  # the first outputs are zero, so everybody starts at ln 3
        return Case(problem(), federation_of(clients))
    assert case == "a tenth of ten clients"
    return Case(problem(), federation_of(labelled_clients(10, 4)), participation=0.1)


EDGES = (
    "duplicate clients",
    "identical clients",
    "one sampled client",
    "one client at all",
    "more clients than parameters",
    "a zero-gradient client",
    "equal losses",
    "a tenth of ten clients",
)


def without_times(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def is_finite(result: RunResult) -> bool:
    losses = [record["train_loss"]["mean"] for record in result.history if record["train_loss"] is not None]
    return bool(torch.isfinite(result.theta).all()) and bool(torch.isfinite(torch.tensor(losses)).all())


@cache
def turns_of(name: str) -> list[Turn]:
    """Return the phases of three rounds, with everybody or, where the method can, with two thirds of the clients."""
    case = suited_case(name)
    size = cohort_size(share_for(name, case, 2 / 3), case.federation.n_clients)
    return played_turns(REGISTRY[name](), case, rounds=3, cohort_size=size)


def rounds_of(turns: list[Turn]) -> list[list[Turn]]:
    grouped: dict[int, list[Turn]] = {}
    for turn in turns:
        grouped.setdefault(turn.cohort.round, []).append(turn)
    return list(grouped.values())


@pytest.mark.parametrize("work", LOCAL_WORK)
@pytest.mark.parametrize("name", METHODS)
def test_same_seed_same_bits(name: str, work: str) -> None:
    first, second = reference(name, work), five_rounds(name, work, run)
    assert torch.equal(first.theta, second.theta)
    assert without_times(first.history) == without_times(second.history)
    assert first.client_rows == second.client_rows


@pytest.mark.parametrize(
    ("runner", "work"),
    [(runner, work) for runner in RUNNERS for work in LOCAL_WORK if (runner, work) != ("chunked", "mini-batches")],
)
@pytest.mark.parametrize("name", METHODS)
def test_every_runner_agrees_with_vectorised(name: str, runner: str, work: str) -> None:
    expected, found = reference(name, work), five_rounds(name, work, RUNNERS[runner])
    assert relative_distance(found.theta, expected.theta) <= AGREE
    assert found.summary["accuracy"] == pytest.approx(expected.summary["accuracy"])


@pytest.mark.parametrize("name", METHODS)
def test_server_memory_and_messages_survive_a_file(name: str, tmp_path: Path) -> None:
    for turn in turns_of(name):
        records = (turn.server, turn.step.server, turn.sent, turn.memory_after, turn.updates, row(turn.memory_after, 0))
        for record in records:
            save_tensors(tmp_path / "record.safetensors", named_tensors(record), {})
            back = from_named_tensors(type(record), load_tensors(tmp_path / "record.safetensors")[0])
            assert [t.dtype for t in tensors(back)] == [t.dtype for t in tensors(record)]
            assert all(torch.equal(a.isnan(), b.isnan()) for a, b in zip(tensors(back), tensors(record), strict=True))
            pairs = zip(tensors(back), tensors(record), strict=True)
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


@pytest.mark.parametrize("name", METHODS)
def test_messages_are_of_the_declared_kinds(name: str) -> None:
    algorithm = REGISTRY[name]
    for turn in turns_of(name):
        assert type(turn.server) is algorithm.Server
        assert type(turn.step.server) is algorithm.Server
        assert type(turn.sent) in algorithm.Sent
        assert type(turn.updates) in algorithm.Update
        assert type(turn.memory_before) is algorithm.Memory
        assert type(turn.memory_after) is algorithm.Memory
        assert all(isinstance(value, float) for value in turn.step.diagnostics.values())
        clients = turn.cohort.clients.tolist()
        assert clients == sorted(set(clients))
        assert set(clients) <= set(range(turn.cohort.n_clients))


@pytest.mark.parametrize("name", METHODS)
def test_order_of_answers_is_irrelevant(name: str) -> None:
    algorithm, case = REGISTRY[name](), suited_case(name)
    for phases in rounds_of(turns_of(name)):
        k = len(phases[0].cohort.clients)
        backwards = torch.arange(k - 1, -1, -1)
        for order in (backwards, backwards.roll(2)):
            found = replayed_round(algorithm, case, phases, order)
            assert relative_distance(found.theta, phases[-1].step.server.theta) <= AGREE


@pytest.mark.parametrize("name", METHODS)
def test_steps_leave_their_arguments_alone(name: str) -> None:
    """A held or interrupted round goes back to the states before it, so nobody may write into them."""
    algorithm, case = REGISTRY[name](), suited_case(name)
    prepared = algorithm.prepare(case.problem, case.federation.n_clients, len(turns_of(name)[0].cohort.clients))
    for turn in turns_of(name):
        given = (turn.server, turn.sent, turn.memory_before, turn.updates)
        copies = [map_tensors(torch.clone, record) for record in given]
        prepared.client_step(case.problem, row(turn.tasks, 0), turn.sent, row(turn.memory_before, 0))
        first = prepared.server_step(turn.server, turn.updates, turn.cohort)
        for record, copy in zip(given, copies, strict=True):
            for (field, mine), other in zip(named_tensors(record).items(), tensors(copy), strict=True):
                left_alone = torch.equal(mine.nan_to_num(), other.nan_to_num())
                assert left_alone or (record is turn.server and field in prepared.reuses), field
        again = prepared.server_step(turn.server, turn.updates, turn.cohort)  # what counts is still there
        for mine, other in zip(tensors(again.server), tensors(first.server), strict=True):
            assert torch.equal(mine.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", METHODS)
def test_stays_finite_on_hard_federations(name: str, edge: str) -> None:
    case = clients_edge(name, edge)
    refusal = refusal_of(name, case, case.participation)
    if refusal is not None:
        pytest.skip(f"{name} refuses: {refusal}")
    seldom = Evaluation(every=2)
    result = run(
        REGISTRY[name](), case.problem, case.federation, rounds=3, participation=case.participation, evaluation=seldom
    )
    assert "not finite" not in result.summary["reason"]
    assert is_finite(result)


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


@pytest.mark.parametrize(("kind", "bowl"), [(kind, n) for kind, cases in BOWLS.items() for n in range(len(cases))])
@pytest.mark.parametrize("name", METHODS)
def test_mean_loss_falls_on_a_bowl(name: str, kind: str, bowl: int) -> None:
    if kind not in REGISTRY[name].suits:
        pytest.skip(f"{name} does not suit {kind} problems")
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
    share = share_for(name, case, 0.5)
    whole, parts = tmp_path / "whole", tmp_path / "parts"

    def played(out: Path, *, resume: bool = False, observers: tuple[Interrupter, ...] = ()) -> RunResult:
        return run(
            REGISTRY[name](),
            case.problem,
            case.federation,
            rounds=5,
            participation=share,
            evaluation=Evaluation(every=2),
            out=out,
            resume=resume,
            observers=observers,
        )

    straight = played(whole)
    half = played(parts, observers=(Interrupter(after_round=1),))
    assert (half.summary["status"], half.summary["rounds"]) == ("interrupted", 2)
    resumed = played(parts, resume=True)

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

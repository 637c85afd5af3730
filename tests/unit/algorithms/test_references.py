"""What federated methods are compared with: every client alone, and all rows in one place."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from dqnfed import Evaluation, FedAvg, Federation, Problem, RunResult, run
from dqnfed.algorithms import REFERENCES, REGISTRY
from dqnfed.algorithms.local_only import LocalOnly
from dqnfed.algorithms.pooled import Pooled
from dqnfed.cli import app
from dqnfed.core.federation import Examples
from dqnfed.experiments.config import ConfigError
from dqnfed.experiments.experiment import method_named, suitable_algorithms
from dqnfed.flower import Client, Strategy
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.bowls import labelled_clients, small_network
from tests.helpers.folders import contents

WORK: dict[str, Any] = {"lr": 0.3, "epochs": 3, "momentum": 0.5, "weight_decay": 1e-3, "lr_decay": 0.9}


def four_clients() -> Federation:
    return Federation.from_clients(labelled_clients(4, 4), test=0.2, validation=0.2)


def a_problem() -> Problem:
    return Problem.from_module(small_network(4, 3, 3))


def merged(examples: Examples) -> Examples:
    return Examples(examples.inputs, examples.targets, torch.tensor([0, len(examples.inputs)]))


def scores(result: RunResult, round: int) -> list[float]:
    column = result.columns.index("accuracy")
    return [float(row[column]) for row in result.client_rows if row[0] == round and row[column] is not None]


def test_local_only_is_a_federation_of_one_for_every_client() -> None:
    """With full batches there is no draw, so that FedAvg with one client is the same arithmetic."""
    federation, problem = four_clients(), a_problem()
    alone = run(LocalOnly(**WORK), problem, federation, rounds=6)
    for c in range(4):
        one = run(FedAvg(**WORK), problem, federation.only(c), rounds=6)
        for mine, other in zip([row for row in alone.client_rows if row[1] == c], one.client_rows, strict=True):
            assert mine[0] == other[0]
            assert [mine[3] is None, *mine[4:]] == pytest.approx([other[3] is None, *other[4:]], rel=1e-9)


def test_nothing_crosses_the_network_and_the_budget_is_that_of_fedavg() -> None:
    federation, problem = four_clients(), a_problem()
    work = {**WORK, "batch_size": 5}
    wanted = run(FedAvg(**work), problem, federation, rounds=4, participation=0.5).summary["totals"]
    for method in (LocalOnly(**work), Pooled(**work)):
        found = run(method, problem, federation, rounds=4, participation=0.5).summary["totals"]
        assert (found["bytes_up"], found["bytes_down"]) == (0, 0)
        assert found["passes"] == wanted["passes"]


def test_a_client_that_is_not_sampled_does_not_train() -> None:
    federation, problem = four_clients(), a_problem()
    result = run(LocalOnly(**WORK), problem, federation, rounds=1, participation=0.5)
    [sampled] = [record["clients"] for record in result.history if record["round"] == 0]
    losses = {row[:2]: row[4] for row in result.client_rows}
    assert {c for c in range(4) if losses[0, c] != losses[-1, c]} == set(sampled)


def test_pooled_is_a_federation_of_one_client_who_holds_all_rows() -> None:
    federation, problem = four_clients(), a_problem()
    whole = Federation(merged(federation.train), merged(federation.test), None, ("all",), None, 3)
    one = run(FedAvg(**WORK), problem, whole, rounds=6)
    pooled = run(Pooled(**WORK), problem, federation, rounds=6)
    torch.testing.assert_close(pooled.theta, one.theta, rtol=1e-10, atol=1e-12)
    n_test = federation.test.sizes.double()
    mean = float(n_test @ torch.tensor(scores(pooled, 5)).double() / n_test.sum())
    assert mean == pytest.approx(one.accuracy["mean"])  # the same model, counted row by row


def test_pooled_batches_hold_every_row_of_the_cohort_once_an_epoch() -> None:
    federation, problem = four_clients(), a_problem()
    tasks = TaskBuilder(federation, problem, Pooled(epochs=2, batch_size=7), seed=0)
    clients = torch.tensor([0, 2])
    task = tasks.pooled(clients, 3)
    n = int(federation.n_examples[clients].sum())
    assert len(task.inputs) == n
    for epoch in task.batches.flatten().view(2, -1):
        assert sorted(r for r in epoch.tolist() if r >= 0) == list(range(n))
    assert not torch.equal(task.batches, tasks.pooled(clients, 4).batches)


class Interrupter:
    def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...

    def round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    def end(self, summary: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize("name", REFERENCES)
def test_interrupted_and_resumed_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    federation, problem = four_clients(), a_problem()

    def result_in(folder: str, observers: tuple[Interrupter, ...] = (), *, resume: bool = False) -> RunResult:
        return run(
            REFERENCES[name](**WORK, batch_size=5),
            problem,
            federation,
            rounds=6,
            participation=0.75,
            evaluation=Evaluation(every=2, select="loss"),
            out=tmp_path / folder,
            observers=observers,
            resume=resume,
        )

    result_in("whole")
    assert result_in("parts", (Interrupter(),)).summary["status"] == "interrupted"
    result_in("parts", resume=True)
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_local_only_has_no_model_for_all(tmp_path: Path) -> None:
    result = run(LocalOnly(), a_problem(), four_clients(), rounds=1, out=tmp_path / "run")
    assert result.theta.numel() == 0
    for found in (result, RunResult.load(tmp_path / "run")):
        with pytest.raises(ValueError, match="one model for each client"):
            found.model()


@pytest.mark.parametrize("name", REFERENCES)
def test_deployments_refuse_a_reference_by_name(name: str) -> None:
    method, problem, federation = REFERENCES[name](), a_problem(), four_clients()
    with pytest.raises(ValueError, match=f"{type(method).__name__} .* not federated and cannot run on Flower"):
        Strategy(method, problem, n_clients=4)
    with pytest.raises(ValueError, match="not federated"):
        Client(method, problem, federation.only(0))


def test_references_are_listed_and_asked_for_by_name_alone() -> None:
    done = CliRunner().invoke(app, ["list", "algorithms"], catch_exceptions=False)
    for name in REFERENCES:
        assert name in done.output
        assert name not in REGISTRY
        assert name not in suitable_algorithms("network")
        assert method_named(name) is REFERENCES[name]
        with pytest.raises(ConfigError, match=f"{name} is a reference"):
            method_named(f"fedcorr+{name}")

"""The best model by validation on Flower: the one that the simulator keeps, on the server and on the clients."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from dqnfed import Ditto, Evaluation, FedAvg, RunResult, run
from dqnfed.algorithms.ditto import DittoMemory
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.run_folder import load_tensors
from dqnfed.experiments.experiment import run_experiment
from dqnfed.flower import Client, InProcessGrid, Strategy, client_app, run_in_process
from dqnfed.flower.app import client_number
from dqnfed.flower.client_memory import FACTS, ClientMemory
from dqnfed.flower.exchange import fields_of
from dqnfed.flower.new_app import new_app
from tests.helpers.folders import contents, newest_tensors
from tests.helpers.selection import linear_clients, linear_problem
from tests.helpers.turns import relative_distance

FEDERATION = linear_clients()
NOISY = FedAvg(lr=0.1, batch_size=4, epochs=2)
PERSONAL = Ditto(lr=0.1, batch_size=4, epochs=2, lam=0.1)
WATCHED: dict[str, Any] = {"rounds": 7, "participation": 0.5, "evaluation": Evaluation(select="loss")}
AGREE = 1e-10


def describe(context: Context) -> Client:
    return Client(PERSONAL, linear_problem(), FEDERATION.only(client_number(context)))


@pytest.mark.parametrize("select", ["loss", "worst10"])
def test_the_kept_model_is_the_simulators(select: str, caplog: pytest.LogCaptureFixture) -> None:
    evaluation = Evaluation(select=select, every=2)
    expected = run(NOISY, linear_problem(), FEDERATION, rounds=11, evaluation=evaluation)
    with caplog.at_level("INFO", logger="flwr"):
        found = run_in_process(NOISY, linear_problem(), FEDERATION, rounds=11, evaluation=evaluation)
    assert expected.summary["kept_round"] < 10
    assert_same(found, expected)
    assert f"dqnfed: kept the model of round {found.summary['kept_round']} (" in caplog.text


def assert_same(found: RunResult, expected: RunResult) -> None:
    assert relative_distance(found.theta, expected.theta) <= AGREE
    for key in ("select", "kept_round", "accuracy", "train_loss"):
        assert found.summary[key] == pytest.approx(expected.summary[key])
    assert found.summary["models"].keys() == expected.summary["models"].keys()
    assert found.summary["kept_validation"] == pytest.approx(expected.summary["kept_validation"])


def test_clients_keep_their_own_models_of_the_kept_round(tmp_path: Path) -> None:
    """Ditto's personal models never leave their nodes: each still has the one that the summary's numbers are of."""
    expected = run(PERSONAL, linear_problem(), FEDERATION, **WATCHED, out=tmp_path)
    assert 0 < expected.summary["kept_round"] < 6
    stored, _ = load_tensors(newest_tensors(tmp_path))
    grid = InProcessGrid(client_app(describe), 4)
    strategy = Strategy(
        PERSONAL, linear_problem(), n_clients=4, participation=0.5, evaluation=WATCHED["evaluation"], wait=0.0,
        out=tmp_path / "flower",
    )  # fmt: skip
    strategy.start(grid, num_rounds=7)
    assert strategy.result is not None
    assert_same(strategy.result, expected)
    receipts, _ = load_tensors(newest_tensors(tmp_path / "flower"))
    rows, places = stored["kept.memory_row_of"].tolist(), receipts["kept.memory_row_of"].tolist()
    assert [place >= 0 for place in places] == [row >= 0 for row in rows] == [False, True, True, True]
    for client, context in list(enumerate(grid.contexts.values()))[1:]:  # client 0 has not taken part by then
        place = places[client]
        tag = (int(receipts["kept.memory.round"][place]), int(receipts["kept.memory.phase"][place]))
        assert tag[0] <= expected.summary["kept_round"]
        facts = context.state[FACTS]
        assert isinstance(facts, ConfigRecord)
        kept = ClientMemory(context, str(facts["run"]), client, DittoMemory).after(tag)
        assert relative_distance(kept.personal, stored["kept.memory.personal"][rows[client]]) <= AGREE


class Killed(Exception):
    pass


class KilledAfter:
    def __init__(self, round_: int) -> None:
        self._round = round_

    def start(self, out: Path | None, config: Mapping[str, Any]) -> None: ...

    def round(self, record: Mapping[str, Any]) -> None:
        if record["round"] == self._round:
            raise Killed

    def end(self, summary: Mapping[str, Any]) -> None: ...


@pytest.mark.parametrize("method", [NOISY, PERSONAL], ids=["fedavg", "ditto"])
def test_a_killed_server_goes_on_with_the_model_that_it_kept(method: AnyAlgorithm, tmp_path: Path) -> None:
    def start(name: str, **options: Any) -> None:
        places: dict[str, Any] = {"out": tmp_path / name, "memory_dir": tmp_path / f"{name}-memory"}
        run_in_process(method, linear_problem(), FEDERATION, **WATCHED, **places, **options)

    start("whole")
    with pytest.raises(Killed):
        start("cut", observers=[KilledAfter(5)])
    start("cut", resume=True)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_the_best_model_needs_validation_examples_of_every_client() -> None:
    told = r'`eval.select` is "loss".*not every client has validation examples'
    with pytest.raises(ValueError, match=told):
        run_in_process(NOISY, linear_problem(), linear_clients(validation=0.0), **WATCHED)


def test_a_client_that_reports_no_losses_is_silent() -> None:
    """Whatever a client sends, the run goes on without it: the others choose the model."""
    app = client_app(lambda context: Client(NOISY, linear_problem(), FEDERATION.only(client_number(context))))

    def faulty(message: Message, context: Context) -> Message:
        reply = app(message, context)
        about = fields_of(message.content, "about")
        if client_number(context) == 3 and about.get("part") == "validation":
            evaluation: Any = reply.content["evaluation"]
            evaluation["losses"] = []
            evaluation["scores"] = []
        return reply

    strategy = Strategy(NOISY, linear_problem(), n_clients=4, wait=0.0, evaluation=Evaluation(select="loss"))
    strategy.start(InProcessGrid(faulty, 4), num_rounds=4)
    assert strategy.result is not None
    assert strategy.result.summary["kept_validation"]["evaluations"] > 0


def test_training_examples_are_not_evaluated_again_for_validation() -> None:
    seen: list[tuple[str, bool]] = []
    app = client_app(lambda context: Client(NOISY, linear_problem(), FEDERATION.only(client_number(context))))

    def watched(message: Message, context: Context) -> Message:
        about = fields_of(message.content, "about")
        if "part" in about and client_number(context) == 0:
            seen.append((str(about["part"]), bool(about["with-loss"])))
        return app(message, context)

    evaluation = Evaluation(select="loss", patience=2, participants=False)
    strategy = Strategy(NOISY, linear_problem(), n_clients=4, wait=0.0, evaluation=evaluation)
    strategy.start(InProcessGrid(watched, 4), num_rounds=1)
    assert seen == [("test", True), ("test", True), ("validation", False)]  # the start model, then the first round


def test_a_new_app_keeps_the_best_model_when_its_run_config_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_app(tmp_path / "select app", clients=3, algorithm="fedavg", rounds=3)
    monkeypatch.syspath_prepend(tmp_path / "select app")
    changes = "data.validation=0.2; data.limit=200; eval.select='loss'; run.dtype='float64'"
    run_config: dict[str, bool | float | int | str] = {"clients": 3, "rounds": 3, "seed": 1, "set": changes}
    task, server = import_module("select_app.task"), import_module("select_app.server_app")
    config = task.config_of(Context(1, 1, {}, RecordDict(), run_config))
    assert config.eval.select == "loss"
    strategy = server.deployed_strategy(config, task.problem_of(config), run_config)
    strategy.start(InProcessGrid(import_module("select_app.client_app").app, 3, run_config=run_config), num_rounds=3)
    assert_same(strategy.result, run_experiment(config, None))

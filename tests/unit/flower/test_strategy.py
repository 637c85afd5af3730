"""Before the first round: who is there, who reports a wrong number, and who runs something else."""

from __future__ import annotations

import io
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context
from flwr.cli.build import build_fab_from_disk

from dqnfed import DQNFed, Evaluation, FedAvg, Policy, run
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.problem import Problem
from dqnfed.core.tensors import named_parameters
from dqnfed.experiments.deploy import free_folder
from dqnfed.experiments.experiment import run_experiment
from dqnfed.flower import Client, InProcessGrid, Strategy, client_app, run_in_process
from dqnfed.flower.app import client_number
from dqnfed.flower.lock import sole_writer
from dqnfed.flower.new_app import new_app
from dqnfed.flower.records import array_record, named_arrays
from dqnfed.flower.roster import Member, Roster
from dqnfed.sim.claims import few_clients
from tests.helpers.bowls import linear_model, network_bowl
from tests.helpers.flower import Fault, Moment, fleet, raises
from tests.helpers.turns import relative_distance


def strategy_for(algorithm: AnyAlgorithm, **options: Any) -> Strategy:
    return Strategy(algorithm, network_bowl().problem, n_clients=6, wait=0.0, **options)


def test_an_absent_client_is_waited_for_and_then_named() -> None:
    grid = fleet(FedAvg(), network_bowl())
    del grid.contexts[104]
    with pytest.raises(TimeoutError, match=r"clients \[4\] did not come within 0 s"):
        strategy_for(FedAvg()).start(grid)


def test_late_and_forgetful_clients_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """One node comes online later, one fails when it is first asked which client it is: both take part."""
    for name in ("POLL_SECONDS", "SETTLING_SECONDS", "ASK_AGAIN_SECONDS"):
        monkeypatch.setattr(f"dqnfed.flower.strategy.{name}", 0.01)
    first = iter([True])

    def plan(moment: Moment) -> Fault | None:
        return raises if moment.client == 2 and next(first, False) else None

    grid = fleet(FedAvg(), network_bowl(), plan)
    late, looks = grid.contexts.pop(104), iter(range(4))

    def online() -> list[int]:
        if next(looks, None) is None:
            grid.contexts[104] = late
        return list(grid.contexts)

    monkeypatch.setattr(grid, "get_node_ids", online)
    strategy = Strategy(FedAvg(), network_bowl().problem, n_clients=6, wait=60.0)
    strategy.start(grid, num_rounds=2)
    assert strategy.result is not None
    assert relative_distance(strategy.result.theta, run(FedAvg(), *network_bowl()[:2], rounds=2).theta) <= 1e-10


def test_two_nodes_cannot_be_the_same_client() -> None:
    grid = fleet(FedAvg(), network_bowl())
    grid.contexts[105].node_config["partition-id"] = 1
    with pytest.raises(ValueError, match=r"both report that they are client 1; give every node a `partition-id`"):
        strategy_for(FedAvg(), policy=Policy(on_missing="fail")).start(grid)
    going_on = strategy_for(FedAvg())
    going_on.start(grid, num_rounds=2)
    assert going_on.result is not None
    assert [fault["client"] for fault in going_on.result.history[1]["dropped"]] == [5]
    assert "both report that they are client 1" in going_on.result.history[0]["refused"][0]["why"]


def test_a_number_that_does_not_exist_is_refused() -> None:
    grid = fleet(FedAvg(), network_bowl())
    grid.contexts[105].node_config["partition-id"] = 6
    with pytest.raises(TimeoutError, match=r"there is no client 6: this federation has clients 0 to 5"):
        strategy_for(FedAvg()).start(grid)
    six = Member(6, "six", "", 10, 2, 0)
    assert "it is client 6, but there are 6 clients, 0 to 5" in Roster(6).objection(105, six, {105})


def test_a_client_that_comes_back_keeps_its_sizes() -> None:
    roster = Roster(2)
    roster.enter(100, Member(0, "zero", "", 10, 2, 0))
    assert roster.objection(200, Member(0, "zero", "", 12, 2, 0), {200}) == (
        "its `n-train` was 10 and is now 12; sizes are fixed"
    )
    assert roster.objection(200, Member(0, "zero", "", 10, 2, 0), {200}) == ""
    roster.enter(200, Member(0, "0", "", 10, 2, 0))
    assert roster.node_of == {0: 200}
    assert roster.members[0].name == "zero"


def test_a_policy_that_no_round_can_meet_is_refused_before_anybody_is_waited_for() -> None:
    with pytest.raises(ValueError, match=r"`policy.min_replies` is 4, but only 3 clients are asked each round"):
        strategy_for(FedAvg(), participation=0.5, policy=Policy(min_replies=4))


def test_patience_needs_validation_examples_here_too() -> None:
    evaluation = Evaluation(patience=2)
    with pytest.raises(
        ValueError, match=r"`patience` watches validation scores, but this federation has no validation"
    ):
        strategy_for(FedAvg(), evaluation=evaluation).start(fleet(FedAvg(), network_bowl()), num_rounds=2)


def test_early_stopping_watches_validation_scores_on_flower_too() -> None:
    """Other test examples, same validation examples: the run ends where the simulator's ends."""
    generator = torch.Generator().manual_seed(0)
    clients = []
    for shift in (-0.5, 0.0, 0.5):
        inputs = torch.randn(40, 4, generator=generator, dtype=torch.float64) + shift
        clients.append((inputs, (inputs[:, 0] > inputs[:, 1]).long()))
    whole = Federation.from_clients(clients, test=0.25, validation=0.25)
    other = replace(whole, test=Examples(whole.test.inputs, 1 - whole.test.targets, whole.test.starts))
    problem, watched = Problem.from_module(linear_model(4, 2)), Evaluation(patience=2)
    expected = run(FedAvg(lr=0.3), problem, whole, rounds=60, evaluation=watched).summary
    assert expected["status"] == "stopped"
    for data in (whole, other):
        found = run_in_process(FedAvg(lr=0.3), problem, data, rounds=60, evaluation=watched).summary
        assert (found["rounds"], found["reason"]) == (expected["rounds"], expected["reason"])


def test_a_client_with_other_settings_is_refused_with_the_difference() -> None:
    with pytest.raises(TimeoutError, match=r"differ in: FedAvg\(lr=0.3 there, FedAvg\(lr=0.1 here"):
        strategy_for(FedAvg(lr=0.3)).start(fleet(FedAvg(lr=0.1), network_bowl()))


def test_bounds_of_the_server_are_its_own_business() -> None:
    case, policy = network_bowl(), Policy(rate_bounds=1.5)
    found = run_in_process(DQNFed(), *case[:2], rounds=2, policy=policy)
    expected = run(DQNFed(rate_bounds=1.5), *case[:2], rounds=2)
    assert relative_distance(found.theta, expected.theta) <= 1e-10


def test_a_node_without_a_number_says_how_to_give_one() -> None:
    context = Context(run_id=1, node_id=1, node_config={}, state=None, run_config={})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="--node-config 'partition-id=0'"):
        client_number(context)


def test_a_node_holds_one_client() -> None:
    case = network_bowl()
    with pytest.raises(ValueError, match="a node holds the data of one client, but was given 6"):
        Client(FedAvg(), *case[:2])


def test_flowers_own_configs_are_refused() -> None:
    with pytest.raises(ValueError, match="train_config, evaluate_config and evaluate_fn have no meaning here"):
        strategy_for(FedAvg()).start(fleet(FedAvg(), network_bowl()), train_config=ConfigRecord({"lr": 0.1}))


def test_initial_arrays_are_the_start_and_the_result_is_the_model() -> None:
    case = network_bowl()
    start = torch.full_like(case.problem.theta0, 0.1)
    arrays = array_record(named_parameters(start, case.problem.layout))
    strategy = strategy_for(FedAvg())
    result = strategy.start(fleet(FedAvg(), case), arrays, num_rounds=1)
    assert strategy.result is not None
    parameters = named_arrays(result.arrays)
    flat = torch.cat([parameters[name].reshape(-1) for name, _ in case.problem.layout])
    assert torch.equal(flat, strategy.result.theta)
    assert not torch.equal(flat, run(FedAvg(), *case[:2], rounds=1).theta)
    assert result.evaluate_metrics_clientapp[1]["mean"] == strategy.result.accuracy["mean"]
    assert result.train_metrics_clientapp.keys() == {1}


def test_records_are_those_of_the_simulator() -> None:
    case, evaluation = network_bowl(), Evaluation(every=2)
    found = run_in_process(DQNFed(), *case[:2], rounds=3, participation=0.5, evaluation=evaluation)
    expected = run(DQNFed(), *case[:2], rounds=3, participation=0.5, evaluation=evaluation)
    for mine, theirs in zip(found.history, expected.history, strict=True):
        assert mine.keys() == theirs.keys()
        for key in ("round", "status", "clients", "bytes_up", "bytes_down", "passes", "rho", "dropped", "clipped"):
            assert mine.get(key) == theirs.get(key)
        assert mine["train_loss"] == (theirs["train_loss"] and pytest.approx(theirs["train_loss"]))
    assert [row[:3] for row in found.client_rows] == [row[:3] for row in expected.client_rows]
    assert [row[3:] for row in found.client_rows] == [pytest.approx(row[3:]) for row in expected.client_rows]


def test_the_new_app_is_the_experiment_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its settings run in the simulator; its two apps, imported as Flower would, give the same model."""
    written = new_app(tmp_path / "My federation", clients=4, algorithm="fedavg", rounds=2)
    assert {path.suffix for path in written} == {".toml", ".md", ".py", ""}
    assert not any("@" in path.read_text() for path in written if path.name not in ("server_app.py",))
    monkeypatch.syspath_prepend(str(tmp_path / "My federation"))
    from importlib import import_module

    config_of, problem_of = (getattr(import_module("my_federation.task"), n) for n in ("config_of", "problem_of"))
    app = import_module("my_federation.client_app").app
    run_config = {"clients": 4, "algorithm": "fedavg", "rounds": 2, "seed": 3, "set": "train.lr=0.5; run.seed=4"}
    context = Context(run_id=1, node_id=1, node_config={}, state=None, run_config=run_config)  # type: ignore[arg-type]
    config = config_of(context)
    assert (config.train.lr, config.run.seed, config.policy.rate_bounds) == (0.5, 4, 10.0)
    strategy = import_module("my_federation.server_app").deployed_strategy(config, problem_of(config), run_config)
    strategy.start(InProcessGrid(app, 4, run_config=run_config), num_rounds=2)
    assert relative_distance(strategy.result.theta, run_experiment(config, None).theta) <= 1e-5  # float32


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's own
def test_results_are_not_sent_to_the_nodes(tmp_path: Path) -> None:
    """Flower packs the app's text files for all nodes; run folders hold what the server knows about every client."""
    app = tmp_path / "my-federation"
    new_app(app)
    run(FedAvg(), *network_bowl()[:2], rounds=1, out=app / "run")
    with zipfile.ZipFile(io.BytesIO(build_fab_from_disk(app))) as packed:
        names = packed.namelist()
    assert "my_federation/experiment.toml" in names
    assert not [name for name in names if name.startswith("run")]


def test_a_run_is_never_written_over_another(tmp_path: Path) -> None:
    """An unfinished run goes on in its folder, or stays as it is; a finished one stays."""
    out, case = tmp_path / "run", network_bowl()
    assert free_folder(out, resume=True) == out
    run(FedAvg(), *case[:2], rounds=1, out=out)
    assert free_folder(out, resume=True) == tmp_path / "run-2"
    run(FedAvg(), *case[:2], rounds=1, out=tmp_path / "run-2")
    (tmp_path / "run-2" / "summary.json").unlink()  # as if it had been killed
    assert free_folder(out, resume=True) == tmp_path / "run-2"
    assert free_folder(out, resume=False) == tmp_path / "run-3"


@pytest.mark.parametrize("name", ["", "3rd", "---"])
def test_a_folder_that_cannot_name_a_package_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    with pytest.raises(FileExistsError if not name else ValueError, match=r"used|cannot name"):
        new_app(tmp_path / (name or "used"))


def test_client_apps_may_be_made_by_hand() -> None:
    case = network_bowl()

    def describe(context: Context) -> Client:
        return Client(FedAvg(), case.problem, case.federation.only(client_number(context)))

    strategy = strategy_for(FedAvg())
    strategy.start(InProcessGrid(client_app(describe), 6), num_rounds=2)
    assert strategy.result is not None
    assert relative_distance(strategy.result.theta, run(FedAvg(), *case[:2], rounds=2).theta) <= 1e-10


def test_two_servers_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with sole_writer(tmp_path), pytest.raises(BlockingIOError, match="another process writes to"):
        strategy_for(FedAvg(), out=tmp_path).start(fleet(FedAvg(), network_bowl()), num_rounds=1)
    strategy_for(FedAvg(), out=tmp_path).start(fleet(FedAvg(), network_bowl()), num_rounds=1)
    assert (tmp_path / "summary.json").is_file()


def test_the_log_says_what_the_check_of_replies_can_do() -> None:
    assert "every client is believed" in few_clients(0.2, 2)
    assert "two that lie can win" in few_clients(0.2, 3)
    assert few_clients(0.2, 10) == "of 10 clients a round up to 2 can be left out for inconsistent replies"
    assert "policy.drop_share = 0" in few_clients(0.0, 10)

"""A deployment as the documentation describes it: TLS, node keys, three SuperNodes, the app of `dqnfed new-app`.

Every message starts a process of its own on its node, so a round takes many seconds: one deployment serves all tests.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dqnfed import RunResult
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import run_experiment
from dqnfed.flower.new_app import new_app
from tests.helpers.repository import ROOT
from tests.helpers.superlink import BIN, Deployment, write_node_key

N_CLIENTS = 3
EXACT = ["run.dtype='float64'", "eval.every=3", "eval.participants=false"]  # few messages, all digits


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("deployment")
    made = Deployment(folder)
    made.environment["PYTHONPATH"] = str(ROOT)  # for clients that are told to fail
    try:
        made.start_superlink()
        made.register([f"key{client}" for client in range(N_CLIENTS)])
        for client in range(N_CLIENTS):
            start_client(made, client)  # the server waits until all are online
        yield made
    finally:
        made.close()


def start_client(deployment: Deployment, client: int) -> None:
    memory = deployment.folder / f"memory-{client}"
    deployment.start_node(f"node{client}", f"key{client}", f"partition-id={client} memory-dir='{memory}'")


def start_client_again(deployment: Deployment, client: int) -> None:
    """Start a killed client's node; the SuperLink refuses it until it has noticed that the old one is gone."""
    for _ in range(12):
        start_client(deployment, client)
        time.sleep(15)
        if deployment.is_running(f"node{client}"):
            return
        deployment.stop(f"node{client}", kill=True)
    raise AssertionError(deployment.log(f"node{client}")[-3000:])


def settings(app: Path, changes: list[str], **run_config: Any) -> str:
    """Return the text of --run-config."""
    keys = {"out": str(app / "run"), **run_config, "set": "; ".join(changes)}
    return " ".join(f"{key}={json.dumps(value)}" for key, value in keys.items())


def deployed(deployment: Deployment, app: Path, changes: list[str], **run_config: Any) -> RunResult:
    done = deployment.run(app, settings(app, changes, **run_config))
    summary = app / "run" / "summary.json"
    assert summary.is_file(), done.stdout[-4000:] + done.stderr[-2000:] + deployment.log("node0")[-3000:]
    return RunResult.load(app / "run")


def simulated(app: Path, changes: list[str], rounds: int) -> RunResult:
    """Return what the simulator makes of the app's experiment."""
    (experiment,) = app.rglob("experiment.toml")
    return run_experiment(read_config(str(experiment), [*changes, f"train.rounds={rounds}"]), None)


def assert_same_model(found: RunResult, expected: RunResult) -> None:
    assert (found.theta - expected.theta).abs().max() <= 1e-6
    assert found.summary["accuracy"] == pytest.approx(expected.summary["accuracy"])


def test_dqn_fed_over_tls_equals_the_simulator_and_strangers_are_refused(deployment: Deployment) -> None:
    app = deployment.folder / "dqn-app"
    new_app(app, clients=N_CLIENTS)
    write_node_key(deployment.folder / "stranger")
    deployment.start_node("unregistered", "stranger", "partition-id=0")
    deployment.start_node("plaintext", "key0", "partition-id=0", is_plaintext=True)
    result = deployed(deployment, app, EXACT, rounds=2)
    assert_refused(deployment, "unregistered", "plaintext")
    assert result.summary["rounds"] == 2
    assert result.summary["n_dropped"] == 0
    assert_same_model(result, simulated(app, EXACT, 2))


def assert_refused(deployment: Deployment, *names: str) -> None:
    for name in names:
        assert deployment.ended(name) not in (0, None), f"{name} was not refused:\n{deployment.log(name)}"
        deployment.stop(name)


@pytest.mark.slow
def test_a_node_without_a_key_is_refused(deployment: Deployment) -> None:
    deployment.start_node("keyless", None, "partition-id=0")
    assert_refused(deployment, "keyless")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "ditto"])
def test_other_methods_equal_the_simulator(deployment: Deployment, name: str) -> None:
    app = deployment.folder / f"{name}-app"
    new_app(app, clients=N_CLIENTS, algorithm=name)
    changes = [*EXACT, "train.epochs=2", "train.batch_size=64", "train.lr=0.3"]
    result = deployed(deployment, app, changes, rounds=3)
    assert_same_model(result, simulated(app, changes, 3))


FAULTY_CLIENT = """

import time
from tests.helpers.flower import at, raises, sends_nan, sends_wrong_shape, with_faults

def sleeps(message, context, answer):
    time.sleep(260)
    return answer(message, context)

plans = [at(0, 0, sends_nan), at(1, 1, raises), at(2, 2, sends_wrong_shape), at(1, 3, sleeps)]
honest = app
faulty = with_faults(honest, lambda moment: next((plan(moment) for plan in plans if plan(moment)), None))
app = type(honest)()
app.train()(faulty)
app.evaluate()(honest)
"""


@pytest.mark.slow
def test_faults_over_the_network_are_named_and_survived(deployment: Deployment) -> None:
    app = deployment.folder / "faulty-app"
    new_app(app, clients=N_CLIENTS, algorithm="fedavg")
    (client_app,) = app.rglob("client_app.py")
    client_app.write_text(client_app.read_text() + FAULTY_CLIENT)
    changes = [*EXACT, "policy.timeout=200"]
    result = deployed(deployment, app, changes, rounds=5)
    dropped = [record["dropped"] for record in result.history[1:]]
    assert [[fault["client"] for fault in faults] for faults in dropped] == [[0], [1], [2], [1], []]
    reasons = [faults[0]["why"] for faults in dropped[:4]]
    assert reasons[0] == "update is not finite"
    assert "its app failed" in reasons[1]
    assert "another shape" in reasons[2]
    assert reasons[3] == "no reply before the timeout"
    assert result.summary["train_loss"]["mean"] < result.summary["start"]["train_loss"]["mean"]


@pytest.mark.slow
def test_a_killed_node_comes_back_with_its_memory(deployment: Deployment) -> None:
    app = deployment.folder / "restart-app"
    new_app(app, clients=N_CLIENTS)
    running = in_background(deployment, app, EXACT, rounds=8)
    wait_for_round(app, 0)
    deployment.stop("node1", kill=True)
    start_client_again(deployment, 1)
    running.wait(900)
    result = RunResult.load(app / "run")
    assert result.summary["rounds"] == 8
    dropped = [[fault["client"] for fault in record["dropped"]] for record in result.history[1:]]
    assert dropped[0] == dropped[-1] == []  # it was there, and it is there again
    assert {client for clients in dropped for client in clients} <= {1}
    assert result.summary["train_loss"]["mean"] < result.summary["start"]["train_loss"]["mean"]


KILLED_SERVER = """

import os
import signal
from pathlib import Path

class Kill:
    def start(self, out, config): ...
    def end(self, summary): ...
    def round(self, record):
        if record["round"] == 1 and not Path(MARKER).exists():
            Path(MARKER).touch()
            os.kill(os.getpid(), signal.SIGKILL)

usual = deployed_strategy

def deployed_strategy(config, problem, run_config):
    strategy = usual(config, problem, run_config)
    strategy._observers = (Kill(),)
    return strategy
"""


@pytest.mark.slow
def test_a_killed_server_app_resumes_to_the_undisturbed_model(deployment: Deployment, tmp_path: Path) -> None:
    app = deployment.folder / "killed-app"
    new_app(app, clients=N_CLIENTS)
    (server_app,) = app.rglob("server_app.py")
    marker = json.dumps(str(tmp_path / "killed"))
    server_app.write_text(server_app.read_text() + KILLED_SERVER.replace("MARKER", marker))
    deployment.run(app, settings(app, EXACT, rounds=4))
    assert (tmp_path / "killed").exists()
    assert not (app / "run" / "summary.json").exists()
    result = deployed(deployment, app, EXACT, rounds=4)
    assert result.summary["rounds"] == 4
    assert_same_model(result, simulated(app, EXACT, 4))


@pytest.mark.slow
def test_a_killed_superlink_resumes_to_the_undisturbed_model(deployment: Deployment) -> None:
    app = deployment.folder / "superlink-app"
    new_app(app, clients=N_CLIENTS)
    running = in_background(deployment, app, EXACT, rounds=4)
    wait_for_round(app, 1)
    deployment.stop("superlink", kill=True)
    deployment.kill_server_apps()
    running.wait(900)
    deployment.start_superlink()
    deployment.wait_for_nodes(N_CLIENTS)
    result = deployed(deployment, app, EXACT, rounds=4)
    assert result.summary["rounds"] == 4
    assert torch.isfinite(result.theta).all()
    assert_same_model(result, simulated(app, EXACT, 4))


def in_background(deployment: Deployment, app: Path, changes: list[str], **run_config: Any) -> subprocess.Popen[bytes]:
    command = [str(BIN / "flwr"), "run", str(app), "tls", "--stream", "--run-config"]
    return subprocess.Popen(
        [*command, settings(app, changes, **run_config)],
        cwd=deployment.folder,
        env=deployment.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_round(app: Path, round: int) -> None:
    lines = app / "run" / "metrics.jsonl"
    end = time.monotonic() + 600
    while not (lines.is_file() and f'"round": {round},' in lines.read_text()):
        assert time.monotonic() < end, f"round {round} was not played"
        time.sleep(0.5)

"""A deployment as the documentation describes it: TLS, node keys, three SuperNodes, the app of `dqnfed new-app`.

Every message starts a process of its own on its node, so a round takes many seconds: one deployment serves all tests.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context
from flwr.proto.control_pb2 import ListRunsRequest
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from dqnfed import RunResult
from dqnfed.experiments.config import read_config
from dqnfed.experiments.deploy import deployed_client, deployed_strategy
from dqnfed.experiments.experiment import build_problem, run_experiment
from dqnfed.flower import Client, InProcessGrid
from dqnfed.flower.app import client_app as flower_app
from dqnfed.flower.app import client_number
from dqnfed.flower.new_app import new_app
from tests.helpers.flower import Fault, Moment, at, is_dead, is_late, with_faults
from tests.helpers.pages import blocks_of
from tests.helpers.repository import ROOT
from tests.helpers.superlink import BIN, PUBLIC, Deployment, write_node_key

N_CLIENTS = 3
PROTOBUF = "application/protobuf"
EXACT = ["run.dtype='float64'", "eval.every=3", "eval.participants=false"]  # few messages, all digits


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    for tool in ("bash", "openssl", "ssh-keygen"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed, and the guide uses it")
    made = Deployment(tmp_path_factory.mktemp("deployment"))
    # Clients that are told to fail need the tests' helpers.
    made.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    try:
        made.open()
        made.join(range(N_CLIENTS))  # the server waits until all are online
        yield made
    finally:
        made.close()


def start_client_again(deployment: Deployment, client: int) -> None:
    """Start a killed client's node; the SuperLink refuses it until it has noticed that the old one is gone."""
    for _ in range(12):
        deployment.start_client(client)
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


def test_the_guide_leads_to_the_simulators_model_and_strangers_are_refused(deployment: Deployment) -> None:
    app = guides_app(deployment, rounds=1)
    assert "nothing wrong was found" in deployment.follow("check")
    stranger = Stranger(deployment)
    with ThreadPoolExecutor(2) as pool:
        training = pool.submit(deployment.follow, "train")
        stranger.tries_everything()
        training.result()
    result = RunResult.load(app / "run")
    assert result.summary["rounds"] == 1
    assert result.summary["n_dropped"] == 0
    assert_same_model(result, simulated(app, EXACT, 1))
    stranger.got_nothing(n_runs=1)


def guides_app(deployment: Deployment, rounds: int) -> Path:
    """Return the app of the guide's first command, with few messages and all digits."""
    blocks = blocks_of(ROOT / "docs" / "how-to" / "deploy.md")
    (making,) = [block.code.splitlines()[0] for block in blocks if block.code.startswith("dqnfed new-app")]
    done = subprocess.run(
        making.split(), cwd=deployment.folder, env=deployment.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    app = deployment.folder / making.split()[2]
    settings_file = app / "pyproject.toml"
    changed = re.sub(r"(?m)^rounds = .*", f"rounds = {rounds}", settings_file.read_text())
    settings_file.write_text(re.sub(r'(?m)^set = ""', f"set = {json.dumps('; '.join(EXACT))}", changed))
    return app


class Stranger:
    """Somebody with `ca.crt` who reaches the open port, and a client who tries more than it may."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.home = deployment.folder / "stranger-home"
        self.home.mkdir()
        config = (deployment.folder / "flwr" / "config.toml").read_text()
        loopback = f"127.0.0.1:{deployment.superlink_port}"
        assert loopback in config
        (self.home / "config.toml").write_text(config.replace(loopback, f"{PUBLIC}:{deployment.port}"))
        write_node_key(deployment.folder / "stranger")
        self.mark = deployment.folder / "code-of-the-stranger-ran"
        self.app = deployment.folder / "evil"
        new_app(self.app, clients=N_CLIENTS)
        for side in ("server_app.py", "client_app.py"):
            (path,) = self.app.rglob(side)
            path.write_text(path.read_text() + f"\nopen({json.dumps(str(self.mark))}, 'w').close()\n")

    def tries_everything(self) -> None:
        """Every attempt of the issue at once; each must fail by itself."""
        deployment = self.deployment
        deployment.start_node("unregistered", "stranger", "partition-id=0")
        deployment.start_node("keyless", None, "partition-id=0")
        deployment.start_node("plaintext", "client0", "partition-id=0", is_plaintext=True)
        attempts = [
            ("supernode", "register", "stranger.pub", "mine"),
            ("run", str(self.app), "mine"),
            ("ls", "mine"),
        ]
        with ThreadPoolExecutor(2) as pool:
            for done in pool.map(lambda attempt: deployment.flwr(*attempt, home=self.home), attempts):
                assert done.returncode != 0, done.args
                assert "403 Forbidden" in done.stdout + done.stderr
        # A client has a key, which `flwr` has no use for: it signs every call of Flower's interfaces by hand.
        closed = sorted(path for _, path in PROTOBUF_REQUEST_TYPES if not path.startswith("/v1/fleet/"))
        assert set(self.signed_statuses([*closed, "/v1/fleet/unregister-node"])) == {403}
        assert self.signed_statuses(["/v1/fleet/register-node"]) == [412]
        assert_refused(deployment, "unregistered", "keyless", "plaintext")

    def signed_statuses(self, paths: list[str]) -> list[int]:
        """Return the statuses of calls that are signed with the key of client 0, as its node signs."""
        folder = self.deployment.folder
        key = serialization.load_ssh_private_key((folder / "client0").read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        signing = NodeAuthHttpInterceptor(key, key.public_key())
        verify = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        with httpx.Client(base_url=f"https://{PUBLIC}:{self.deployment.port}", verify=verify, timeout=60) as client:
            asked = [client.build_request("POST", path, headers={"Content-Type": PROTOBUF}) for path in paths]
            calls = [ProtobufRequestContext("", ListRunsRequest(), request) for request in asked]
            return [signing.intercept(call, lambda signed: client.send(signed.request)).status_code for call in calls]

    def got_nothing(self, n_runs: int) -> None:
        """Check what is left of the attempts: refusals in the logs, and nothing else."""
        deployment = self.deployment
        refusals = (deployment.folder / "proxy" / "refused.log").read_text()
        for call in ("register-node", "start-run", "list-runs"):
            assert f'"POST /v1/control/{call} HTTP/1.1" 403' in refusals
        assert '"POST /v1/fleet/register-node HTTP/1.1" 412' in refusals  # the node without a key
        assert '"POST /v1/fleet/activate-node HTTP/1.1" 412' in refusals  # that with an unknown key
        assert "No SuperNode found with the given public key" in deployment.log("superlink")
        assert "/v1/control/start-run" in deployment.log("superlink")
        assert not self.mark.exists()
        runs = json.loads(deployment.flwr("ls", "mine", "--format", "json").stdout)["runs"]
        assert len(runs) == n_runs
        nodes = json.loads(deployment.flwr("supernode", "list", "mine", "--format", "json").stdout)["nodes"]
        assert len(nodes) == N_CLIENTS
        elsewhere = {(host, port) for host, port in deployment.open_sockets() if host != "127.0.0.1"}
        assert elsewhere == {(PUBLIC, deployment.port)}  # nothing but the proxy can be reached from outside


def assert_refused(deployment: Deployment, *names: str) -> None:
    for name in names:
        assert deployment.ended(name) not in (0, None), f"{name} was not refused:\n{deployment.log(name)}"
        deployment.stop(name)


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
    assert "but the server expects" in reasons[2]
    assert reasons[3] == "no reply before the timeout"
    assert result.summary["train_loss"]["mean"] < result.summary["start"]["train_loss"]["mean"]


SENT = "Sent successfully"  # Flower's words in a node's log
WAITING_CLIENT = """

import time
from pathlib import Path
from tests.helpers.flower import moment_of, with_faults

def waits(message, context, answer):
    moment = moment_of(message, context)
    place = Path(FOLDER) / f"{moment.client}-{moment.round}"
    place.with_suffix(".here").touch()
    while not place.with_suffix(".go").exists():
        time.sleep(0.2)
    return answer(message, context)

honest = app
patient = with_faults(honest, lambda m: waits if m.is_training and m[:2] in [(1, 1), (0, 2), (2, 2)] else None)
app = type(honest)()
app.train()(patient)
app.evaluate()(honest)
"""


@pytest.mark.slow
def test_one_node_killed_in_mid_round_and_one_restarted_leave_the_right_model(
    deployment: Deployment, tmp_path: Path
) -> None:
    """Client 1 dies while it works on round 1, and misses round 2; client 2 is stopped and started during round 2."""
    app = deployment.folder / "restart-app"
    new_app(app, clients=N_CLIENTS)
    (client_app,) = app.rglob("client_app.py")
    client_app.write_text(client_app.read_text() + WAITING_CLIENT.replace("FOLDER", json.dumps(str(tmp_path))))
    running = in_background(deployment, app, EXACT, rounds=5)
    wait_for_file(tmp_path / "1-1.here")
    deployment.stop("node1", kill=True)
    wait_for_round(app, 1)  # without client 1, which Flower finds to be gone after a minute
    wait_for_file(tmp_path / "0-2.here")
    wait_for_file(tmp_path / "2-2.here")
    n_sent = deployment.log("node2").count(SENT)
    (tmp_path / "2-2.go").touch()
    deployment.wait_until(lambda: deployment.log("node2").count(SENT) > n_sent, "client 2 has replied in round 2")
    deployment.stop("node2")
    deployment.start_client(2)
    start_client_again(deployment, 1)
    deployment.wait_for_nodes(N_CLIENTS)
    (tmp_path / "0-2.go").touch()
    running.wait(900)
    result = RunResult.load(app / "run")
    assert result.summary["rounds"] == 5
    dropped = [[fault["client"] for fault in record["dropped"]] for record in result.history[1:]]
    assert dropped[:2] == [[], [1]]
    assert dropped[2] in ([1], [1, 2])  # Flower loses a reply that the server has not fetched when the node leaves
    assert dropped[3:] == [[], []]
    plans = [at(1, 1, is_dead), at(1, 2, is_dead), *([at(2, 2, is_late)] if 2 in dropped[2] else [])]
    assert_same_model(result, in_process(app, plans, rounds=5))


def in_process(app: Path, plans: list[Callable[[Moment], Fault | None]], rounds: int) -> RunResult:
    """Return the result of the app's experiment in one process, where clients miss messages by plan."""
    (file,) = app.rglob("experiment.toml")
    config = read_config(str(file), [*EXACT, f"train.rounds={rounds}"])
    built = build_problem(config)

    def describe(context: Context) -> Client:
        return deployed_client(config, built.problem, built.federation.only(client_number(context)))

    faulty = with_faults(flower_app(describe), lambda m: next((plan(m) for plan in plans if plan(m)), None))
    strategy = deployed_strategy(config, built.problem, {"clients": N_CLIENTS})
    strategy.start(InProcessGrid(faulty, N_CLIENTS), num_rounds=rounds)
    assert strategy.result is not None
    return strategy.result


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
    command = [str(BIN / "flwr"), "run", str(app), "mine", "--stream", "--run-config"]
    return subprocess.Popen(
        [*command, settings(app, changes, **run_config)],
        cwd=deployment.folder,
        env=deployment.environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def wait_for_file(path: Path) -> None:
    end = time.monotonic() + 600
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} was not written"
        time.sleep(0.2)


def wait_for_round(app: Path, round: int) -> None:
    lines = app / "run" / "metrics.jsonl"
    end = time.monotonic() + 600
    while not (lines.is_file() and f'"round": {round},' in lines.read_text()):
        assert time.monotonic() < end, f"round {round} was not played"
        time.sleep(0.5)

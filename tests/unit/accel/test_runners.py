"""Every way to run a cohort gives the same training: vectorised, looped, on threads and on a Ray cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from torch import Tensor, nn

from dqnfed import DQNFed, Evaluation, FedAvg, Federation, Problem, RunResult, looped, run, threads, vectorised
from dqnfed.accel.automatic import automatic
from dqnfed.accel.ray_cluster import ClientWork, RayRunner, Worker, WorkerPool, balanced_work, n_workers, ray_cluster
from dqnfed.accel.threads import Threads, one_core_workers
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.runners import CohortRunner, Looped, Vectorised
from dqnfed.experiments.config import ConfigError, read_config
from dqnfed.experiments.experiment import build_experiment
from dqnfed.experiments.machine import chosen_cohort
from tests.helpers.bowls import Case, labelled_clients, network_bowl, small_network

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning:ray.*")
METHODS: dict[str, AnyAlgorithm] = {
    "fedavg": FedAvg(lr=0.1, batch_size=4, epochs=2, momentum=0.5),
    "dqn-fed": DQNFed(),
}
# In float32 a rounding may decide whether absent clients can be served too, after which two runs differ.
METHODS_OF_FLOAT32 = METHODS | {"dqn-fed": DQNFed(cached_clients=0)}
ROUNDS = 20
# Relative, of theta. In float64 some 10^5 roundings; in float32 DQN-Fed's step is decided by nearly parallel gradients,
# so that every round makes differences in the last bits larger, most with convolutions on some processors.
TOLERANCES = {
    ("fedavg", torch.float64): 1e-10,
    ("dqn-fed", torch.float64): 1e-10,
    ("fedavg", torch.float32): 1e-4,
    ("dqn-fed", torch.float32): 5e-2,
}
CONVOLVED_TOLERANCES = TOLERANCES | {("dqn-fed", torch.float32): 0.2}


def convolved_bowl(dtype: torch.dtype) -> Case:
    """Return a small convolutional network on images of 5 x 5 pixels, clients of different sizes."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        module = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(3, 3)).to(dtype)
    clients = [(x.view(-1, 1, 5, 5), y) for x, y in labelled_clients(6, 25)]
    return Case(Problem.from_module(module), Federation.from_clients(clients))


def dense_bowl(dtype: torch.dtype) -> Case:
    problem = Problem.from_module(small_network(4, 3, 3).to(dtype))
    return Case(problem, network_bowl().federation)


BOWLS: dict[str, Callable[[torch.dtype], Case]] = {"dense": dense_bowl, "convolved": convolved_bowl}


def trained(algorithm: AnyAlgorithm, case: Case, cohort: CohortRunner | None, rounds: int = ROUNDS) -> RunResult:
    evaluation = Evaluation(every=rounds, participants=False)
    return run(
        algorithm,
        case.problem,
        case.federation,
        rounds=rounds,
        participation=0.5,
        cohort=cohort,
        evaluation=evaluation,
        accelerate=True,
    )


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Two workers on this machine, for all tests: to start them is what takes long."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield WorkerPool(2)
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("method", "bowl"),
    [
        ("fedavg", "convolved"),
        pytest.param("dqn-fed", "dense", marks=pytest.mark.slow),
        pytest.param("dqn-fed", "convolved", marks=pytest.mark.slow),
        pytest.param("fedavg", "dense", marks=pytest.mark.slow),
    ],
)
def test_runners_agree_after_twenty_rounds(method: str, bowl: str, dtype: torch.dtype, pool: WorkerPool) -> None:
    """Ray and threads have the same bits: in both, every client is computed by one core."""
    case = BOWLS[bowl](dtype)
    algorithm = (METHODS if dtype == torch.float64 else METHODS_OF_FLOAT32)[method]
    expected = trained(algorithm, case, vectorised()).theta
    size = float(expected.norm())
    found = {
        "looped": trained(algorithm, case, looped()).theta,
        "threads": trained(algorithm, case, threads(2)).theta,
        "ray": trained(algorithm, case, RayRunner(case.federation, pool)).theta,
    }
    tolerance = (CONVOLVED_TOLERANCES if bowl == "convolved" else TOLERANCES)[method, dtype]
    for name, theta in found.items():
        assert float((theta - expected).norm()) <= tolerance * size, name
    assert torch.equal(found["threads"], found["ray"])


@pytest.mark.parametrize("n_workers", [1, 2, 7])
def test_work_on_a_cluster_is_given_out_once_and_evenly(n_workers: int) -> None:
    sizes = [5, 1, 4, 2, 9, 3]
    parts = balanced_work([ClientWork(k, None, None, None) for k in range(6)], sizes, n_workers)
    assert sorted(one.place for part in parts for one in part) == list(range(6))
    loads = [sum(sizes[one.place] for one in part) for part in parts]
    assert max(loads) <= max(max(sizes), 2 * sum(sizes) / n_workers)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_threads_does_not_change_the_bits(workers: int) -> None:
    case = convolved_bowl(torch.float32)
    assert torch.equal(
        trained(METHODS["dqn-fed"], case, threads(workers)).theta, trained(METHODS["dqn-fed"], case, threads(2)).theta
    )


def test_threads_have_one_core_each_and_leave_the_others_theirs() -> None:
    before = torch.get_num_threads()
    assert list(one_core_workers(2).map(lambda _: torch.get_num_threads(), range(4))) == [1] * 4
    assert torch.get_num_threads() == before


def test_replies_that_do_not_fit_in_memory_go_to_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    case = dense_bowl(torch.float64)
    expected = trained(METHODS["dqn-fed"], case, threads(2)).theta
    monkeypatch.setattr("dqnfed.core.host_memory.SMALL", 0)
    monkeypatch.setattr("dqnfed.core.host_memory.free_bytes", lambda: 0.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made: list[Tensor] = []
    original = torch.from_file

    def noted(*arguments: Any, **named: Any) -> Tensor:
        made.append(original(*arguments, **named))
        return made[-1]

    monkeypatch.setattr("torch.from_file", noted)
    assert torch.equal(trained(METHODS["dqn-fed"], case, threads(2)).theta, expected)
    assert made
    assert not list(tmp_path.iterdir())  # nothing is left behind


def test_an_error_in_a_thread_is_raised() -> None:
    case = dense_bowl(torch.float64)
    with pytest.raises(ValueError, match="client 2"):
        trained(Refusing(), case, threads(2))


def test_an_error_in_a_worker_is_raised(pool: WorkerPool) -> None:
    case = dense_bowl(torch.float64)
    with pytest.raises(ValueError, match="client 2"):
        trained(Refusing(), case, RayRunner(case.federation, pool))


@dataclass(frozen=True, kw_only=True)
class Refusing(FedAvg):
    """FedAvg whose larger clients refuse."""

    def client_step(self, problem: Problem, task: Any, sent: Any, memory: Any) -> Any:
        if len(task.mask) > 9:
            raise ValueError("client 2 refuses")
        return super().client_step(problem, task, sent, memory)


@dataclass(frozen=True, kw_only=True)
class Killed(FedAvg):
    """FedAvg whose worker is killed once, in a round, after some of its clients are done."""

    mark: str = ""

    def client_step(self, problem: Problem, task: Any, sent: Any, memory: Any) -> Any:
        if len(task.mask) > 10 and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().client_step(problem, task, sent, memory)


def test_a_worker_that_is_killed_in_a_round_loses_nothing(
    tmp_path: Path, pool: WorkerPool, caplog: pytest.LogCaptureFixture
) -> None:
    case, mark = dense_bowl(torch.float32), tmp_path / "killed"
    algorithm = Killed(lr=0.1, batch_size=4, mark=str(mark))
    found = trained(algorithm, case, RayRunner(case.federation, pool), rounds=5)
    assert mark.exists()
    assert "a worker stopped" in caplog.text
    assert torch.equal(found.theta, trained(algorithm, case, threads(2), rounds=5).theta)


def test_data_are_sent_once_and_messages_once_a_round(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    case, sent, put = dense_bowl(torch.float32), list[Any](), ray.put

    def noted(value: Any) -> Any:
        sent.append(value)
        return put(value)

    monkeypatch.setattr(ray, "put", noted)
    trained(METHODS["fedavg"], case, RayRunner(case.federation, pool), rounds=6)
    inputs = case.federation.train.inputs
    assert sum(isinstance(value, np.ndarray) and value.shape == inputs.shape for value in sent) == 1
    assert len(sent) == 4 + 6  # method, problem, inputs, targets; a message a round


def test_lazy_clients_travel_with_their_work(pool: WorkerPool) -> None:
    clients = labelled_clients(6, 4)
    lazy = Federation.from_function(lambda c: clients[c], [len(x) for x, _ in clients], n_classes=3)
    case = Case(dense_bowl(torch.float64).problem, lazy)
    found = trained(METHODS["fedavg"], case, RayRunner(lazy, pool), rounds=4)
    assert torch.equal(found.theta, trained(METHODS["fedavg"], case, threads(2), rounds=4).theta)


def test_shares_of_gpus_say_how_many_workers_there_are() -> None:
    for cores, gpus, share, expected in (
        (16, 0, 0.0, 16), (16, 1, 1.0, 1), (16, 1, 0.25, 4), (16, 2, 0.4, 4), (3, 8, 0.5, 3), (4, 0, 0.5, 1),
        (16, 1, 0.1, 10),
    ):  # fmt: skip
        assert n_workers({"CPU": cores, "GPU": gpus}, share) == expected


def test_a_worker_whose_gpu_is_not_there_says_so(pool: WorkerPool) -> None:
    """Ray counts what it is told; torch sees what is there."""
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    worker: Any = ray.remote(Worker).options(num_cpus=0).remote(30, 0.5)
    with pytest.raises(RuntimeError, match=r"0\.5 of a GPU by Ray's count, but torch on .* sees none"):
        ray.get(worker.ready.remote())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("on_server", ["cpu", "cuda"])
def test_workers_with_half_a_gpu_each_train_the_same_model(on_server: str) -> None:
    ray.shutdown()
    ray.init("local", num_cpus=2, num_gpus=1, include_dashboard=False, log_to_driver=False)
    try:
        case = convolved_bowl(torch.float64)
        there = Case(case.problem.to(on_server), case.federation.to(on_server))
        runner = ray_cluster(there.federation, workers=2, gpu_share=0.5)
        found = trained(METHODS["fedavg"], there, runner, rounds=5).theta.cpu()
        torch.testing.assert_close(
            found, trained(METHODS["fedavg"], case, looped(), rounds=5).theta, rtol=1e-9, atol=1e-11
        )
        assert len(runner.pool.alive) == 2
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_two_machines_give_the_bits_of_one(method: str) -> None:
    """A cluster of two nodes; in the middle of the run one of them disappears and comes back."""
    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        node = cluster.add_node(num_cpus=1)
        ray.init(address=cluster.address, log_to_driver=False)
        case, algorithm = convolved_bowl(torch.float32), METHODS[method]
        runner = ray_cluster(case.federation, workers=2, address=cluster.address)
        assert torch.equal(trained(algorithm, case, runner, 5).theta, trained(algorithm, case, threads(), 5).theta)
        cluster.remove_node(node)
        cluster.add_node(num_cpus=1)
        assert torch.equal(trained(algorithm, case, runner, 8).theta, trained(algorithm, case, threads(), 8).theta)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (nn.Linear(25, 3), Vectorised),  # little work: all clients at once
        (nn.Sequential(nn.Linear(25, 2000), nn.ReLU(), nn.Linear(2000, 400), nn.ReLU(), nn.Linear(400, 3)), Threads),
        (nn.Sequential(nn.Unflatten(1, (1, 5, 5)), nn.Conv2d(1, 900, 5), nn.Flatten(), nn.Linear(900, 3)), Threads),
    ],
)
def test_the_rule_goes_by_the_work_of_one_gradient(module: nn.Module, kind: type) -> None:
    federation = Federation.from_clients(labelled_clients(6, 25))
    assert isinstance(automatic(FedAvg(), Problem.from_module(module.double()), federation), kind)


def test_the_config_names_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(name: str) -> CohortRunner:
        changes = [f"run.cohort={name}", "data.name=bowls", "run.workers=3", "run.device=cpu"]
        return chosen_cohort(build_experiment(read_config("digits", changes)))

    kinds = {"auto": Vectorised, "threads": Threads, "looped": Looped, "vectorised": Vectorised, "ray": RayRunner}
    assert {name: type(chosen(name)) for name in kinds} == kinds
    with_three = chosen("ray")
    assert isinstance(with_three, RayRunner)
    assert with_three.pool.workers == 3
    monkeypatch.setattr("dqnfed.experiments.machine.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"dqnfed\[ray\]"):
        chosen("ray")

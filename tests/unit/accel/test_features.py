"""Examples whose first layers were applied once: the same model and the same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dqnfed.accel import features
from dqnfed.accel.features import with_features
from dqnfed.accel.graph_runner import graphed
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.algorithms.fcfl import FCFL
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fednl_head import FedNLHead
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_experiment
from dqnfed.models.layers import Normalise
from dqnfed.sim.engine import run


def images(n_clients: int = 5) -> Federation:
    g = torch.Generator().manual_seed(0)
    clients = []
    for _ in range(n_clients):
        pixels = torch.randint(0, 256, (24, 3, 4, 4), generator=g, dtype=torch.uint8)
        clients.append((pixels, torch.randint(0, 3, (24,), generator=g)))
    return Federation.from_clients(clients, validation=0.2)


def network(*before: nn.Module) -> Problem:
    torch.manual_seed(1)
    dense = nn.Sequential(nn.Flatten(), nn.Linear(48, 7), nn.ReLU(), nn.Linear(7, 3))
    return Problem.from_module(nn.Sequential(*before, dense))


def normalised() -> Problem:
    return network(Normalise([0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))


class Bytes:
    """What is asked of inputs, on a GPU that is not there."""

    def __init__(self, inputs: Tensor) -> None:
        self._inputs, self.is_cuda, self.dtype = inputs, True, inputs.dtype

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inputs, name)

    def __len__(self) -> int:
        return len(self._inputs)


def applied(
    problem: Problem, federation: Federation, monkeypatch: pytest.MonkeyPatch, free: int = 2**30
) -> tuple[Problem, Federation]:
    """Return what a GPU with so many bytes to spare would get, on the host."""

    def on_a_gpu(federation: Federation) -> list[Any]:
        parts = [federation.train, federation.test, federation.validation]
        return [part._replace(inputs=Bytes(part.inputs)) for part in parts if part is not None]  # type: ignore[arg-type]

    monkeypatch.setattr(features, "_parts", on_a_gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2**30))
    return with_features(problem, federation)


@pytest.mark.parametrize(
    "algorithm", [FedAvg(lr=0.1, batch_size=8), DQNFed(), FedNLHead()], ids=lambda a: type(a).__name__
)
def test_a_run_ends_with_the_same_bits(algorithm: AnyAlgorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, federation = normalised(), images()
    plain = run(algorithm, problem, federation, rounds=4)
    seen, floats = applied(problem, federation, monkeypatch)
    assert floats.train.inputs.shape == (len(federation.train.inputs), 48)
    assert floats.validation is not None
    other = run(algorithm, seen, floats, rounds=4)
    assert torch.equal(plain.theta, other.theta)
    assert plain.summary["accuracy"] == other.summary["accuracy"]


def test_the_trained_module_takes_the_images_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, federation = normalised(), images()
    seen, floats = applied(problem, federation, monkeypatch)
    result = run(FedAvg(lr=0.1), seen, floats, rounds=2)
    outputs = seen.predict(result.theta, floats.test.inputs)
    torch.testing.assert_close(result.model()(federation.test.inputs), outputs)


@pytest.mark.parametrize(
    "problem",
    [
        Problem.from_module(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(8, 3))),
        network(nn.Dropout(0.5), Normalise([0.5] * 3, [0.5] * 3)),
        normalised().autocast(torch.bfloat16),
    ],
    ids=["convolutions", "another layer before", "another precision"],
)
def test_other_models_stay_as_they_are(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = images()
    assert applied(problem, federation, monkeypatch) == (problem, federation)


def test_a_host_keeps_its_bytes() -> None:
    problem, federation = normalised(), images()
    assert with_features(problem, federation) == (problem, federation)


def test_floats_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, federation = normalised(), images()
    train = federation.train._replace(inputs=federation.train.inputs / 255.0)
    federation = replace(federation, train=train)
    assert applied(problem, federation, monkeypatch) == (problem, federation)


def test_a_full_gpu_keeps_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, federation = normalised(), images()
    n_floats = 5 * 24 * 48
    assert applied(problem, federation, monkeypatch, free=16 * 4 * n_floats)[1] is not federation
    assert applied(problem, federation, monkeypatch, free=16 * 4 * n_floats - 1) == (problem, federation)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("algorithm", [FedAvg(lr=0.1, batch_size=8), DQNFed()], ids=lambda a: type(a).__name__)
def test_on_a_gpu_a_run_ends_with_the_same_bits(algorithm: AnyAlgorithm) -> None:
    problem, federation = normalised().to("cuda"), images().to("cuda")
    seen, floats = with_features(problem, federation)
    assert floats.train.inputs.is_floating_point()
    plain, other = (
        run(algorithm, *given, rounds=4, cohort=graphed()) for given in ((problem, federation), (seen, floats))
    )
    assert torch.equal(plain.theta, other.theta)


def test_a_method_that_reads_the_inputs_itself_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sign of a byte is not that of a normalised pixel."""
    asked: list[Problem] = []

    def noted(problem: Problem, federation: Federation) -> tuple[Problem, Federation]:
        asked.append(problem)
        return problem, federation

    monkeypatch.setattr("dqnfed.experiments.experiment.with_features", noted)
    for method, n_asked in (("fedavg", 1), ("fcfl", 1), ("afl", 2)):
        build_experiment(read_config("digits", ["run.device=cpu"]).with_algorithm(method))
        assert len(asked) == n_asked
    assert FCFL.info.reads_inputs

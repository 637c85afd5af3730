"""Settings for GPUs: refused elsewhere with the way out, and each run's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import Problem, Task
from dqnfed.core.runners import Stacked, vectorised
from dqnfed.core.tensors import map_tensors
from dqnfed.experiments import experiment as experiment_module
from dqnfed.experiments.config import ConfigError, read_config
from dqnfed.experiments.experiment import build_experiment, run_experiment
from dqnfed.experiments.machine import compiled, in_precision
from dqnfed.experiments.memory import Chosen, chosen_again, chosen_before

CPU = ["run.device=cpu"]


@pytest.fixture
def torchs_own() -> Iterator[None]:
    """Leave torch's choices as they were."""
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.parametrize("precision", ["default", "float32"])
def test_a_cpu_computes_in_float32(precision: str) -> None:
    experiment = build_experiment(read_config("digits", [*CPU, f"run.precision={precision}"]))
    assert experiment.problem.theta0.dtype == torch.float32


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_a_cpu_has_no_other_precision(precision: str) -> None:
    with pytest.raises(ConfigError, match=f"run.precision is '{precision}', for GPUs, but the device is 'cpu'; leave"):
        build_experiment(read_config("digits", [*CPU, f"run.precision={precision}"]))


def test_a_cpu_compiles_nothing() -> None:
    with pytest.raises(ConfigError, match=r"run\.compile is for GPUs, but the device is 'cpu'; leave it out"):
        build_experiment(read_config("digits", [*CPU, "run.compile=true"]))


class OnAGPU:
    """A problem of which nothing is asked but where it is."""

    theta0 = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    module: nn.Module | None = None

    def autocast(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


@pytest.mark.usefixtures("torchs_own")
def test_what_one_run_chose_does_not_hold_for_the_next() -> None:
    problem = cast(Problem, OnAGPU())
    chosen: dict[str, tuple[str, bool]] = {}
    for precision in ("float32", "default", "tf32", "default", "bf16", "float32"):
        in_precision(problem, precision)
        now = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
        assert chosen.setdefault(precision, now) == now
    assert chosen == {
        "default": ("highest", True),
        "float32": ("highest", False),
        "tf32": ("high", True),
        "bf16": ("highest", True),
    }


@pytest.mark.parametrize(("layer", "cohort"), [(nn.Linear(3, 3), "auto"), (nn.Conv2d(3, 3, 3), "vectorised")])
def test_only_convolutions_on_streams_are_compiled(layer: nn.Module, cohort: str) -> None:
    problem = OnAGPU()
    problem.module = nn.Sequential(layer)
    with pytest.raises(ConfigError, match="networks with convolutions"):
        compiled(cast(Problem, problem), cohort)


def test_a_resumed_run_computes_with_the_threads_that_it_began_with(tmp_path: Path) -> None:
    folder, threads = tmp_path / "run", torch.get_num_threads()

    def trained(rounds: int, n_threads: int | None, *, resume: bool = True) -> None:
        few = ["data.clients=4", "data.limit=200", "algorithm.name=fedavg", "model.hidden=[4]", "run.device=cpu"]
        config = read_config("digits", [*few, f"train.rounds={rounds}"])
        own = config.run.model_copy(update={"threads": n_threads})  # the preset says one
        run_experiment(config.model_copy(update={"run": own}), folder, resume=resume)

    try:
        torch.set_num_threads(2)
        trained(2, None, resume=False)
        assert json.loads((folder / "machine.json").read_text()) == {"threads": 2}
        torch.set_num_threads(3)
        trained(3, None)
        assert torch.get_num_threads() == 2
        trained(4, 3)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)


class MarkedChunks:
    """A runner whose replies show in how large chunks they were computed."""

    def __init__(self, chunk: int | None) -> None:
        self._chunk = chunk

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Stacked:
        updates, kept = vectorised(self._chunk)(algorithm, problem, tasks, sent, memory)
        shift = 1e-3 * (self._chunk or 0)
        return map_tensors(lambda t: t + shift if t.is_floating_point() else t, updates), kept


def test_a_resumed_run_has_the_same_bits_although_the_machine_would_choose_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["data.clients=4", "data.limit=200", "algorithm.name=fedavg", "model.hidden=[4]", "run.device=cpu"]
    monkeypatch.setattr("dqnfed.experiments.machine.vectorised", MarkedChunks)
    free = [2]
    monkeypatch.setattr(
        experiment_module, "chosen_now", lambda *_, **__: Chosen(torch.get_num_threads(), None, 1, free[0])
    )

    def trained(folder: str, rounds: int, *, resume: bool = False) -> Tensor:
        config = read_config("digits", [*few, f"train.rounds={rounds}"])
        return run_experiment(config, tmp_path / folder, resume=resume).theta

    undisturbed = trained("undisturbed", 4)
    trained("stopped", 2)
    free[0] = 3
    assert torch.equal(trained("stopped", 4, resume=True), undisturbed)
    assert json.loads((tmp_path / "stopped" / "machine.json").read_text())["chunk"] == 2
    assert not torch.equal(trained("other", 4), undisturbed)  # so the bits do show the choice


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"threads": "two"}', '{"threads": 0}', '{"threads": 1, "lanes": 2}'])
def test_a_choice_that_cannot_be_read_is_made_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / "machine.json").write_text(text)
    assert chosen_before(tmp_path) is None


def test_a_resumed_run_may_hold_no_more_of_a_gpu_than_before(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * 2**30, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: shares.append(share))
    before, gpu = Chosen(2, 64, 3, None), torch.device("cuda")
    assert chosen_again(before, "10GiB", gpu) == before
    assert chosen_again(before, None, gpu) == before
    assert shares == [0.1, 1.0]

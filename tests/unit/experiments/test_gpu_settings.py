"""Settings for GPUs: refused elsewhere with the way out, and each run's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from dqnfed.core.problem import Problem
from dqnfed.experiments.config import ConfigError, read_config
from dqnfed.experiments.experiment import build_experiment, compiled, in_precision, run_experiment

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
    few = ["data.clients=4", "data.limit=200", "algorithm.name=fedavg", "model.hidden=[4]", "run.device=cpu"]
    config, folder, threads = read_config("digits", [*few, "train.rounds=2"]), tmp_path / "run", torch.get_num_threads()
    run_experiment(config, folder)
    assert json.loads((folder / "machine.json").read_text()) == {"threads": threads}
    longer = read_config("digits", [*few, "train.rounds=3"])
    try:
        torch.set_num_threads(threads + 1)
        run_experiment(longer, folder, resume=True)
        assert torch.get_num_threads() == threads
        run_experiment(
            read_config("digits", [*few, "train.rounds=4", f"run.threads={threads + 1}"]), folder, resume=True
        )
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)

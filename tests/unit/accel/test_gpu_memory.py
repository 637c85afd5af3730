"""A run takes no more of a GPU than it may, and does as much at once as that allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dqnfed import FedAvg, run, vectorised
from dqnfed.accel import gpu_memory
from dqnfed.accel.gpu_memory import (
    GIB,
    LANE_EXTRA,
    MOST_EVALUATED,
    MOST_STREAMS,
    Need,
    least_bytes,
    measured_need,
    memory_plan,
)
from dqnfed.accel.kernels import FastKernels, evaluating
from dqnfed.accel.streams import streams
from dqnfed.algorithms import REGISTRY
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.experiments.config import ConfigError, read_config
from dqnfed.experiments.experiment import build_experiment
from dqnfed.experiments.memory import allowed_bytes, chosen_now
from dqnfed.models import build
from tests.helpers.bowls import labelled_clients, network_bowl, normal

RESNET = Need(fixed=2 * GIB, example=2**20, step=GIB, client=3 * GIB)
CNN = Need(fixed=GIB // 2, example=2**18, step=GIB // 4, client=GIB // 2)
DENSE = Need(fixed=GIB // 2, example=2**14, step=2**22, client=2**24)


def taken(need: Need, evaluated: int, streams: int, chunk: int | None, cohort_size: int, *, on_streams: bool) -> int:
    """Return what a plan takes, by hand."""
    clients = streams * (need.step + LANE_EXTRA) if on_streams else (chunk or cohort_size) * need.client
    return need.fixed + clients + evaluated * need.example


@pytest.mark.parametrize("need", [RESNET, CNN, DENSE])
@pytest.mark.parametrize("on_streams", [True, False])
@pytest.mark.parametrize("cohort_size", [1, 3, 10, 500])
def test_a_plan_stays_within_its_budget_and_grows_with_it(need: Need, on_streams: bool, cohort_size: int) -> None:
    before = (0, 0, 0)
    least = least_bytes(need, on_streams=on_streams)
    for step in range(60):
        budget = int(least * 1.2**step)
        plan = memory_plan(budget, need, cohort_size, on_streams=on_streams)
        used = taken(need, *plan, cohort_size, on_streams=on_streams)
        room_for_one = need.example + need.fixed + (need.step + LANE_EXTRA if on_streams else need.client)
        assert used <= max(budget, room_for_one)  # with one client and one example at once there is nothing less
        assert 1 <= plan.evaluated <= MOST_EVALUATED
        assert 1 <= plan.streams <= min(MOST_STREAMS, cohort_size)
        clients = plan.streams if on_streams else plan.chunk or cohort_size
        assert clients >= before[1]
        before = (plan.evaluated, clients, used)
    assert before[0] == MOST_EVALUATED
    assert before[1] == (min(MOST_STREAMS, cohort_size) if on_streams else cohort_size)


def test_free_memory_changes_nothing() -> None:
    assert memory_plan(100 * GIB, RESNET, 10, on_streams=True) == (MOST_EVALUATED, MOST_STREAMS, None)
    assert memory_plan(100 * GIB, DENSE, 10, on_streams=False) == (MOST_EVALUATED, 1, None)


def test_less_memory_takes_streams_chunks_and_examples_away() -> None:
    assert memory_plan(8 * GIB, RESNET, 10, on_streams=True)[1:] == (5, None)
    assert memory_plan(4 * GIB, RESNET, 10, on_streams=True)[1:] == (1, None)
    assert memory_plan(4 * GIB, CNN, 10, on_streams=False).chunk == 6
    assert memory_plan(4 * GIB, CNN, 5, on_streams=False).chunk is None


@pytest.mark.parametrize("on_streams", [True, False])
def test_a_run_is_refused_below_its_own_need_alone(on_streams: bool) -> None:
    least = least_bytes(RESNET, on_streams=on_streams)
    assert memory_plan(least, RESNET, 10, on_streams=on_streams).evaluated >= 1
    with pytest.raises(MemoryError, match=rf"needs {least / GIB:.2f} GiB .* `run\.memory` allows"):
        memory_plan(least - 1, RESNET, 10, on_streams=on_streams)


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("4GiB", 4 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("800MB", 800_000_000),
        (0.5, 5 * GIB),
        (1, 10 * GIB),
        (None, 8 * GIB),
    ],
)
def test_a_size_or_a_share(memory: str | float | None, expected: int) -> None:
    assert allowed_bytes(memory, 10 * GIB) == expected


@pytest.mark.parametrize("memory", ["4", "GiB", "4 TB", "0GiB", "-1GiB", 0.0, -0.5, 1.01, True, float("nan")])
def test_what_is_neither_is_refused(memory: str | float) -> None:
    with pytest.raises(ConfigError, match=r"run\.memory"):
        allowed_bytes(memory, 10 * GIB)


def test_a_cpu_has_no_such_memory() -> None:
    config = read_config("digits", ["run.memory=4GiB", "run.device=cpu"])
    with pytest.raises(ConfigError, match=r"run\.memory is a GPU"):
        build_experiment(config)


def test_kernels_keep_what_is_evaluated_at_once() -> None:
    problem = evaluating(network_bowl().problem, 64)
    assert isinstance(problem.kernels, FastKernels)
    assert problem.kernels.fresh()._on_gpu == 64


def case_of(model: str, dtype: torch.dtype = torch.float32) -> tuple[Problem, Federation]:
    """Return a network for small images, and six clients of them."""
    module = build(model, input_shape=(1, 8, 8), n_outputs=3, settings={}, seed=0).to(dtype)
    clients = [(normal(10 + c, 1, 8, 8, seed=c).to(dtype), torch.arange(10 + c) % 3) for c in range(6)]
    return Problem.from_module(module), Federation.from_clients(clients)


@pytest.mark.parametrize("model", ["cnn", "mlp"])
@pytest.mark.parametrize("method", ["dqn-fed", "fedavg", "scaffold", "ditto"])
@pytest.mark.parametrize("on_streams", [True, False])
def test_the_need_is_tried_on_the_model_itself(
    model: str, method: str, on_streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of few examples and gradients of one client's batch are computed; what is kept is counted."""
    tried: list[Any] = []

    def peak_of(compute: Callable[[], Any], device: torch.device) -> int:
        tried.append(compute())
        return 1000

    monkeypatch.setattr(gpu_memory, "peak_of", peak_of)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10)
    problem, federation = case_of(model)
    prepared = REGISTRY[method](batch_size=4).prepare(problem, 6, 3)
    need = measured_need(problem, federation, prepared, 3, on_streams=on_streams)
    outputs, moved, *_ = tried
    n = problem.n_parameters
    assert outputs.shape[1] == 3
    assert torch.as_tensor(moved[0]).numel() == n
    assert (need.step > 1000, need.client > 1000) == (on_streams, not on_streams)
    assert need.fixed >= 10 + 3 * 3 * 4 * n


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["cnn", "mlp"])
def test_a_run_on_a_gpu_holds_what_it_may_and_trains_the_same_model(model: str) -> None:
    on_cpu = case_of(model, torch.float64)
    problem, federation = on_cpu[0].to("cuda"), on_cpu[1].to("cuda")
    on_streams, algorithm = model == "cnn", FedAvg(batch_size=4)
    found = {}
    for memory in ("1GiB", "400MiB", 0.8):
        chosen = chosen_now(memory, problem, federation, algorithm, 6, on_streams=on_streams)
        assert chosen.evaluated is not None
        runner = streams(chosen.streams or 1) if on_streams else vectorised(chosen.chunk)
        torch.cuda.empty_cache()
        found[memory] = run(algorithm, evaluating(problem, chosen.evaluated), federation, rounds=3, cohort=runner)
        if isinstance(memory, str):
            assert found[memory].summary["gpu_bytes"] <= allowed_bytes(memory, 0)
    torch.cuda.set_per_process_memory_fraction(1.0)
    for result in found.values():
        torch.testing.assert_close(result.theta, found[0.8].theta, rtol=1e-8, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_small_evaluations_are_those_of_large_ones() -> None:
    clients = Federation.from_clients(labelled_clients(6, 4)).to("cuda")
    problem: Problem = network_bowl().problem.to("cuda")
    found = [
        evaluating(problem, n).kernels.forward(problem, problem.theta0, *clients.train[:2], fixed=False)
        for n in (3, 8192)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-8)

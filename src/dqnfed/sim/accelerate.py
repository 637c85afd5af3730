"""The one module that chooses from `dqnfed.accel`; without that package every computation has its plain form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.kernels import PLAIN
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from dqnfed.core.runners import CohortRunner, vectorised


class Acceleration(Protocol):
    """What may be computed in a faster form; every form gives the same results but for rounding."""

    def problem(self, problem: Problem) -> Problem:
        """Return the problem with kernels for gradients, local SGD and evaluation."""

    @property
    def replies(self) -> Callable[[Any], Replies[Any]]:
        """Makes replies of stacked updates."""

    @contextmanager
    def memory(self) -> Iterator[Callable[[], None]]:
        """Manage the process's memory during a run; gives a function to be called after every round."""


SMALL_WORK = 5e5  # parameters times examples of one gradient on a CPU, below which the plain forms are as fast


class Plain:
    """Everything in its plain form; `keeps_kernels`: but for kernels that the problem was given."""

    replies: type[Replies[Any]] = Replies

    def __init__(self, *, keeps_kernels: bool = False) -> None:
        self._keeps_kernels = keeps_kernels

    def problem(self, problem: Problem) -> Problem:
        return problem if self._keeps_kernels else replace(problem, kernels=PLAIN)

    @contextmanager
    def memory(self) -> Iterator[Callable[[], None]]:
        yield lambda: None


def is_installed() -> bool:
    """Return whether the faster forms are installed."""
    return find_spec("dqnfed.accel") is not None


def acceleration(*, enabled: bool = True) -> Acceleration:
    """Return the faster forms where they are installed and wanted, else the plain ones."""
    if not enabled or not is_installed():
        return Plain()
    chosen: Acceleration = import_module("dqnfed.accel").Accelerated()
    return chosen


def acceleration_for(
    problem: Problem, federation: Federation, algorithm: AnyAlgorithm, *, enabled: bool | None
) -> Acceleration:
    """Return the forms for a run; None: the faster ones where there is enough to compute.

    By a rule of sizes alone, so that the same run has the same bits on every machine.
    """
    if enabled is not None:
        return acceleration(enabled=enabled)
    batch_size = getattr(algorithm, "batch_size", None) or float(federation.n_examples.double().mean())
    is_small = problem.theta0.device.type == "cpu" and problem.n_parameters * batch_size < SMALL_WORK
    return Plain(keeps_kernels=True) if is_small else acceleration()


def automatic(algorithm: AnyAlgorithm, problem: Problem, federation: Federation) -> CohortRunner:
    """Return the fastest runner for this model on its device, by a rule; without the faster forms, plain vmap."""
    if not is_installed():
        return vectorised()
    return _runner("automatic", algorithm, problem, federation)


def on_streams(algorithm: AnyAlgorithm, problem: Problem, federation: Federation) -> bool:
    """Return whether a GPU's clients are best run apart from each other: networks with large convolutions."""
    return is_installed() and bool(_function("automatic", "on_streams")(algorithm, problem, federation))


def threads(workers: int | None = None) -> CohortRunner:
    """Return the runner that spreads the clients over the cores, for models whose work is worth a thread."""
    return _runner("threads", workers)


def streams(n_streams: int = 5) -> CohortRunner:
    """Return the runner for convolutional networks on a GPU: clients in parallel on streams of its own."""
    return _runner("streams", n_streams)


def graphed(*, emulate: bool = False) -> CohortRunner:
    """Return the runner that captures a cohort's step in a CUDA graph; `emulate` does so on a CPU, for tests."""
    return _runner("graph_runner", emulate=emulate, function="graphed")


def ray_cluster(
    federation: Federation,
    *,
    workers: int | None = None,
    address: str | None = None,
    gpu_share: float = 0.0,  # of a GPU, that each worker has; 0: none
) -> CohortRunner:
    """Return the runner that spreads this federation's clients over a Ray cluster."""
    return _runner("ray_cluster", federation, workers=workers, address=address, gpu_share=gpu_share)


def compiled(problem: Problem) -> Problem:
    """Return the same problem whose steps of training are compiled by torch when they are first taken."""
    changed: Problem = _function("kernels", "compiled")(problem)
    return changed


def evaluating(problem: Problem, n_examples: int) -> Problem:
    """Return the same problem, of which so many examples are evaluated at once on a GPU."""
    changed: Problem = _function("kernels", "evaluating")(problem, n_examples)
    return changed


def memory_plan(
    budget: int,
    problem: Problem,
    federation: Federation,
    algorithm: AnyAlgorithm,
    cohort_size: int,
    *,
    on_streams: bool,
) -> Any:
    """Return what a run on a GPU can do at once with so many bytes."""
    need = _function("gpu_memory", "measured_need")(problem, federation, algorithm, cohort_size, on_streams=on_streams)
    return _function("gpu_memory", "memory_plan")(budget, need, cohort_size, on_streams=on_streams)


def with_features(problem: Problem, federation: Federation) -> tuple[Problem, Federation]:
    """Return a problem of the same values on examples to which the first layers were applied, where that pays."""
    if not is_installed():
        return problem, federation
    changed: tuple[Problem, Federation] = _function("features", "with_features")(problem, federation)
    return changed


def _runner(module: str, *given: Any, function: str | None = None, **settings: Any) -> CohortRunner:
    runner: CohortRunner = _function(module, function or module)(*given, **settings)
    return runner


def _function(module: str, name: str) -> Callable[..., Any]:
    if not is_installed():
        raise ValueError(
            f"`{name}` is part of the package dqnfed.accel, which is not installed here; `vectorised()` and `looped()` "
            "give the same results."
        )
    found: Callable[..., Any] = getattr(import_module(f"dqnfed.accel.{module}"), name)
    return found

"""Clients in parallel on one GPU: each on a stream of its own, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

import torch

from dqnfed.accel.graph_runner import cuda_graph_safe
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import ModuleModel, Problem, Task
from dqnfed.core.runners import Stacked, stacked_replies
from dqnfed.core.tensors import stack


class Lane:
    """A stream, and the copy of the model that the clients on it use."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self._copied: tuple[Problem, Problem] | None = None  # which problem, and its copy

    def replica(self, problem: Problem) -> Problem:
        """Return the lane's own copy of the problem's module, which a forward pass changes for a while."""
        if self._copied is None or self._copied[0] is not problem:
            self._copied = (problem, problem.replica())
        return self._copied[1]


@dataclass(frozen=True)
class Streams:
    """For models whose small steps leave most of a GPU idle, and whose layers do not vectorise well: convolutions.

    A stream queues no more than some dozen steps; a thread that launches more has to wait. So every stream has a
    launching thread of its own, and the others go on while one waits.
    """

    n_streams: int = 5  # ten clients, the usual cohort, then share them evenly
    _lanes: list[Lane] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Stacked:
        return stacked_replies(self, algorithm, problem, tasks, sent, memory)

    def per_client(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        here = torch.cuda.current_stream()
        if not self._lanes and not cuda_graph_safe(algorithm):
            torch.linalg.inv(problem.theta0.new_ones(1, 1))  # two threads must not load torch's solvers at once
        while len(self._lanes) < self.n_streams:
            self._lanes.append(Lane())
        for lane in self._lanes:
            lane.stream.wait_stream(here)
        order = balanced([len(task.batches) for task in tasks], self.n_streams)

        def run_lane(number: int) -> list[tuple[int, Any]]:
            own = self._lanes[number].replica(problem)
            with torch.cuda.stream(self._lanes[number].stream):
                mine = [k for k, lane in order if lane == number]
                return [(k, algorithm.client_step(own, tasks[k], sent, memories[k])) for k in mine]

        # a function of the user's own may not be safe to call from two threads
        spread = launchers(self.n_streams).map if isinstance(problem.predict, ModuleModel) else map
        replies = dict(chain.from_iterable(spread(run_lane, range(self.n_streams))))
        for lane in self._lanes:
            here.wait_stream(lane.stream)
        found = [replies[k] for k in range(len(tasks))]
        return stack([update for update, _ in found]), [memory for _, memory in found]


@cache
def launchers(n: int) -> ThreadPoolExecutor:
    """Return n threads that launch a GPU's work; they live as long as the process."""
    return ThreadPoolExecutor(n, thread_name_prefix="dqnfed-stream")


def balanced(sizes: Sequence[int], n_lanes: int) -> list[tuple[int, int]]:
    """Return (which, lane) in the order of work: the largest first, each to the lane with the smallest load."""
    loads = [0] * n_lanes
    order = []
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        lane = min(range(n_lanes), key=loads.__getitem__)
        loads[lane] += sizes[k]
        order.append((k, lane))
    return order


def streams(n_streams: int = 5) -> Streams:
    """Return the runner for convolutional networks on a GPU."""
    return Streams(n_streams)

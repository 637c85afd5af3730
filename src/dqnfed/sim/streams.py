"""Clients side by side on one GPU: each on a stream of its own, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import stack
from dqnfed.sim.cohort import Answers, stacked_answers


@dataclass(frozen=True)
class Streams:
    """For models whose small steps leave most of a GPU idle, and whose layers do not vectorise well: convolutions."""

    n_streams: int = 5  # ten clients, the usual cohort, then share them evenly
    _streams: list[torch.cuda.Stream] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Answers:
        return stacked_answers(self, algorithm, problem, tasks, sent, memory)

    def apart(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        here = torch.cuda.current_stream()
        while len(self._streams) < self.n_streams:
            self._streams.append(torch.cuda.Stream())
        for stream in self._streams:
            stream.wait_stream(here)
        answers: dict[int, Any] = {}
        for k, lane in shared_out([len(task.batches) for task in tasks], self.n_streams):
            with torch.cuda.stream(self._streams[lane]):
                answers[k] = algorithm.client_step(problem, tasks[k], sent, memories[k])
        for stream in self._streams:
            here.wait_stream(stream)
        found = [answers[k] for k in range(len(tasks))]
        return stack([update for update, _ in found]), [memory for _, memory in found]


def shared_out(sizes: Sequence[int], n_lanes: int) -> list[tuple[int, int]]:
    """Return (which, lane) in the order of work: the largest first, each to the lane with the least to do."""
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

"""Ways to run `client_step` for a whole cohort; all give the same replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.func import vmap

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import concatenated, gather, n_rows, row, stack

Stacked = tuple[Any, Any]  # stacked updates (or their `Replies`), stacked memories
Gather = Callable[[Task], Task]  # from tasks that name the rows of their examples to tasks that hold them


class CohortRunner(Protocol):
    """Runs one client step for every row of the tasks."""

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Stacked: ...


@runtime_checkable
class PerClientRunner(Protocol):
    """Runs every client on a task and a memory of its own: nothing is padded or copied."""

    def per_client(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Return the stacked updates, and the clients' new memories."""


@runtime_checkable
class IndexedRunner(Protocol):
    """Runs tasks that name the rows of their examples, and gathers these examples itself."""

    def runs_indexed(self, algorithm: AnyAlgorithm, sent: Any, device: torch.device) -> bool:
        """Whether it can do so for this message to clients whose examples are on the device."""

    def indexed(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any, gathered: Gather
    ) -> Stacked:
        """Return the replies and the stacked memories."""


def is_vectorised(algorithm: AnyAlgorithm, sent: Any) -> bool:
    """Return whether clients can reply to this message under vmap."""
    return not isinstance(sent, algorithm.info.looped_messages)


@dataclass(frozen=True)
class Vectorised:
    """All clients at once under `torch.func.vmap`, or in chunks of `chunk` clients when memory is short."""

    chunk: int | None = None

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Stacked:
        if not is_vectorised(algorithm, sent):
            return Looped()(algorithm, problem, tasks, sent, memory)

        def one(task: Task, kept: Any) -> Stacked:
            return algorithm.client_step(problem, task, sent, kept)

        n = n_rows(tasks)
        if self.chunk is None or self.chunk >= n:
            return vmap(one)(tasks, memory)
        parts = [
            vmap(one)(gather(tasks, chosen), gather(memory, chosen)) for chosen in torch.arange(n).split(self.chunk)
        ]
        return concatenated([u for u, _ in parts]), concatenated([m for _, m in parts])


@dataclass(frozen=True)
class Looped:
    """One client after the other: the reference, and what methods use that do not vectorise."""

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Stacked:
        return stacked_replies(self, algorithm, problem, tasks, sent, memory)

    def per_client(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        found = [
            algorithm.client_step(problem, task, sent, memory) for task, memory in zip(tasks, memories, strict=True)
        ]
        return stack([update for update, _ in found]), [memory for _, memory in found]


def stacked_replies(
    runner: PerClientRunner, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any
) -> Stacked:
    """Return what clients that are run one by one make of stacked tasks and memories."""
    places = range(n_rows(tasks))
    updates, memories = runner.per_client(
        algorithm, problem, [row(tasks, k) for k in places], sent, [row(memory, k) for k in places]
    )
    return updates, stack(memories)


def vectorised(chunk: int | None = None) -> CohortRunner:
    """Return the runner that does all clients at once."""
    return Vectorised(chunk)


def looped() -> CohortRunner:
    """Return the runner that does one client after the other."""
    return Looped()

"""Ways to run `client_step` for a whole cohort; all give the same answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.digest import Digest
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import concatenated, gather, n_rows, row, stack

Answers = tuple[Any, Any]  # stacked updates, stacked memories


class CohortRunner(Protocol):
    """Runs one client step for every row of the tasks."""

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Answers: ...


@runtime_checkable
class ApartRunner(Protocol):
    """Runs the clients apart from each other, each on a task and a memory of its own: nothing is padded or copied."""

    def apart(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """Return the stacked updates, and the clients' new memories."""


class Digested(NamedTuple):
    """A cohort's answers, and a function that waits for their digest."""

    updates: Any  # stacked
    memory: Any  # stacked
    arrived: Callable[[], Digest] | None  # None: the server has to look at the answers themselves


Lookup = Callable[[Task], Task]  # from tasks that name the rows of their examples to tasks that hold them


class Begun(NamedTuple):
    """What the clients of a round made of the message before it."""

    found: Tensor  # [K, m]
    tasks: Task  # theirs, with their examples


@runtime_checkable
class DigestingRunner(Protocol):
    """Makes a digest of the answers where they are, and sends it to the host while others go on."""

    def digests(self, device: torch.device) -> bool:
        """Whether it does so for clients whose examples are there."""

    def digested(
        self,
        algorithm: AnyAlgorithm,
        problem: Problem,
        tasks: Task,
        sent: Any,
        memory: Any,
        looked_up: Lookup,
        rows: Tensor | None = None,
        begun: Begun | None = None,
    ) -> Digested:
        """Return the answers to tasks whose examples have yet to be looked up; the digest compares them with rows.

        `begun` is what these clients began with, where they did; the memory may hold what they found.
        """

    def begun(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, looked_up: Lookup) -> Begun:
        """Return what the clients of the next round make of this round's message; it holds until the next call."""


@dataclass(frozen=True)
class Vectorised:
    """All clients at once under `torch.func.vmap`, or in chunks of `chunk` clients when memory is short."""

    chunk: int | None = None

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Answers:
        if not algorithm.vectorises_for(sent):
            return Looped()(algorithm, problem, tasks, sent, memory)

        def one(task: Task, kept: Any) -> Answers:
            return algorithm.client_step(problem, task, sent, kept)

        n = n_rows(tasks)
        size = self.chunk or n
        parts: list[Answers] = []
        for start in range(0, n, size):
            chosen = torch.arange(start, min(start + size, n))
            whole = len(chosen) == n
            parts.append(
                vmap(one)(tasks, memory) if whole else vmap(one)(gather(tasks, chosen), gather(memory, chosen))
            )
        return concatenated([u for u, _ in parts]), concatenated([m for _, m in parts])


@dataclass(frozen=True)
class Looped:
    """One client after the other: the reference, and what methods use that do not vectorise."""

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Answers:
        return stacked_answers(self, algorithm, problem, tasks, sent, memory)

    def apart(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        answers = [
            algorithm.client_step(problem, task, sent, memory) for task, memory in zip(tasks, memories, strict=True)
        ]
        return stack([update for update, _ in answers]), [memory for _, memory in answers]


def stacked_answers(
    runner: ApartRunner, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any
) -> Answers:
    """Return what clients that are run apart make of stacked tasks and memories."""
    places = range(n_rows(tasks))
    updates, memories = runner.apart(
        algorithm, problem, [row(tasks, k) for k in places], sent, [row(memory, k) for k in places]
    )
    return updates, stack(memories)


def vectorised(chunk: int | None = None) -> CohortRunner:
    """Return the runner that does all clients at once."""
    return Vectorised(chunk)


def looped() -> CohortRunner:
    """Return the runner that does one client after the other."""
    return Looped()

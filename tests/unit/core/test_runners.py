"""Ways to run a cohort: the same replies, in the same order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from dqnfed import FedAvg, looped, vectorised
from dqnfed.core.algorithm import Empty, Info, Theta
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import gather
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.bowls import network_bowl


@dataclass(frozen=True, kw_only=True)
class Branching(FedAvg):
    """FedAvg whose clients branch on a value, which `vmap` cannot do."""

    info: ClassVar[Info] = replace(FedAvg.info, looped_messages=(Theta,))

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[Any, Empty]:
        update, memory = super().client_step(problem, task, sent, memory)
        return (update if float(task.mask.sum()) > 9 else update._replace(delta=-update.delta)), memory


def deltas(algorithm: FedAvg, runner: Any, order: torch.Tensor | None = None) -> torch.Tensor:
    problem, federation, _ = network_bowl()
    everyone = torch.arange(6)
    tasks = TaskBuilder(federation, problem, algorithm, 0).stacked(everyone, 0)
    memory = MemoryStore(algorithm, problem, 6).get(everyone, tasks)
    if order is not None:
        tasks, memory = gather(tasks, order), gather(memory, order)
    updates, kept = runner(algorithm, problem, tasks, Theta(problem.theta0), memory)
    assert len(kept.nothing) == 6
    found: torch.Tensor = updates.delta
    return found


@pytest.mark.parametrize("chunk", [1, 4, 5, 6, 100])
def test_chunks_of_any_size_give_the_same_rows(chunk: int) -> None:
    algorithm = FedAvg(epochs=2, batch_size=3)
    torch.testing.assert_close(
        deltas(algorithm, vectorised(chunk)), deltas(algorithm, looped()), rtol=1e-12, atol=1e-15
    )


def test_rows_follow_the_tasks() -> None:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    straight = deltas(FedAvg(), vectorised())
    torch.testing.assert_close(deltas(FedAvg(), vectorised(), order), straight[order], rtol=1e-12, atol=1e-15)


def test_messages_that_do_not_vectorise_are_looped() -> None:
    found = deltas(Branching(), vectorised())
    assert torch.equal(found, deltas(Branching(), looped()))
    plain = deltas(FedAvg(), looped())
    signs = [1.0 if 8 + c > 9 else -1.0 for c in range(6)]
    assert torch.equal(found, plain * torch.tensor(signs, dtype=torch.float64)[:, None])

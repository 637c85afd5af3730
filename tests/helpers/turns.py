"""One federation played by hand, phase by phase, so that tests can look at every message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm, Cohort, ServerStep, Status
from dqnfed.core.problem import Task
from dqnfed.core.replies import Replies
from dqnfed.core.runners import Looped
from dqnfed.core.tensors import gather
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.tasks import TaskBuilder, sampled_clients
from tests.helpers.bowls import Case


class Turn(NamedTuple):
    """One phase of one round: what went down, what came up, and what the server made of it."""

    server: Any
    sent: Any
    tasks: Task
    memory_before: Any
    memory_after: Any
    updates: Any
    cohort: Cohort
    step: ServerStep[Any]


def played_turns(
    algorithm: AnyAlgorithm,
    case: Case,
    *,
    rounds: int,
    cohort_size: int,
    replies: Callable[[Any], Replies[Any]] = Replies,
    on_turn: Callable[[Turn], None] = lambda _: None,
) -> list[Turn]:
    """Return every phase of the rounds, clients looped one by one, nobody screened; `on_turn` gets each at once."""
    problem, federation, _ = case
    prepared = algorithm.prepare(problem, federation.n_clients, cohort_size)
    builder = TaskBuilder(federation, problem, prepared, 0)
    store = MemoryStore(prepared, problem, federation.n_clients)
    server = prepared.init_server(problem, federation.n_clients)
    turns: list[Turn] = []
    for round in range(rounds):
        sampled = sampled_clients(0, round, federation.n_clients, cohort_size)
        clients = prepared.select(server, round, sampled, federation.n_clients)
        tasks = builder.stacked(clients, round)
        cohort = Cohort(clients, federation.n_examples[clients], federation.n_clients, round)
        status = Status.AGAIN
        while status is Status.AGAIN:
            sent, before = prepared.send(server), store.get(clients, tasks)
            updates, after = Looped()(prepared, problem, tasks, sent, before)
            step = prepared.server_step(server, replies(updates), cohort)
            store.put(clients, after)
            turns.append(Turn(server, sent, tasks, before, after, updates, cohort, step))
            on_turn(turns[-1])
            server, status = step.server, step.status
    return turns


def replayed_round(algorithm: AnyAlgorithm, case: Case, phases: list[Turn], order: Tensor) -> Any:
    """Return the server after the phases of one round whose replies reach it in another order."""
    prepared = algorithm.prepare(case.problem, case.federation.n_clients, len(order))
    server = phases[0].server
    for turn in phases:
        permuted = turn.cohort._replace(clients=turn.cohort.clients[order], n_examples=turn.cohort.n_examples[order])
        server = prepared.server_step(server, Replies(gather(turn.updates, order)), permuted).server
    return server


def relative_distance(one: Tensor, other: Tensor) -> float:
    """Return |one - other| over the larger of the two lengths, 0 where both are zero."""
    size = max(float(torch.linalg.vector_norm(one)), float(torch.linalg.vector_norm(other)), 1e-300)
    return float(torch.linalg.vector_norm(one - other)) / size

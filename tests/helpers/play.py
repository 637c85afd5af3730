"""Rounds played by the engine, with its state laid open: what clients keep, and every model on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.runners import vectorised
from dqnfed.core.screening import Policy
from dqnfed.core.tensors import row
from dqnfed.sim.clients import Answers, LocalClients
from dqnfed.sim.rounds import run_round
from dqnfed.sim.setup import cohort_size, fresh_state
from dqnfed.sim.state import Evaluation, Record, Setup, State
from dqnfed.sim.tasks import TaskBuilder


class Played(NamedTuple):
    state: State
    thetas: list[Tensor]  # the model before the first round and after every round
    servers: list[Any]  # the server's state likewise
    records: list[Record]

    def memory(self, client: int) -> Any:
        """Return what the client keeps; it must have taken part."""
        return row(self.state.memory.rows, int(self.state.memory.row_of[client]))


@dataclass(frozen=True)
class SometimesAway(LocalClients):
    """Clients in this process, some of which do not reply in some rounds."""

    away: frozenset[tuple[int, int]] = frozenset()  # round and client

    def train(self, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int) -> Answers:
        missing = [k for k in clients.tolist() if (state.round, k) in self.away]
        here = torch.tensor([k for k in clients.tolist() if k not in missing])
        found = super().train(setup, state, here, sent, phase)
        return found._replace(missing=[(k, "client is away") for k in missing])


def play(
    algorithm: AnyAlgorithm,
    problem: Problem,
    federation: Federation,
    *,
    rounds: int,
    participation: float = 1.0,
    seed: int = 0,
    policy: Policy | None = None,
    clients: LocalClients | None = None,
) -> Played:
    """Return the states that the engine goes through in the given number of rounds."""
    size = cohort_size(participation, federation.n_clients)
    prepared = algorithm.prepare(problem, federation.n_clients, size)
    tasks = TaskBuilder(federation, problem, prepared, seed)
    evaluation = Evaluation(every=rounds + 1)
    rules, who = policy or Policy(), clients or LocalClients()
    setup = Setup(prepared, problem, federation, rounds, size, seed, vectorised(), evaluation, rules, tasks, who)
    state = fresh_state(setup)
    servers, records = [state.server], []
    for _ in range(rounds):
        record, _rows = run_round(setup, state)
        servers.append(state.server)
        records.append(record)
    return Played(state, [server.theta for server in servers], servers, records)

"""Rounds played by the engine, with its state laid open: what clients keep, and every model on the way."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.runners import vectorised
from dqnfed.core.screening import Policy
from dqnfed.core.tensors import row
from dqnfed.sim.engine import cohort_size, fresh_state, run_round
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


def play(
    algorithm: AnyAlgorithm,
    problem: Problem,
    federation: Federation,
    *,
    rounds: int,
    participation: float = 1.0,
    seed: int = 0,
    policy: Policy | None = None,
) -> Played:
    """Return the states that the engine goes through in the given number of rounds."""
    size = cohort_size(participation, federation.n_clients)
    prepared = algorithm.prepare(problem, federation.n_clients, size)
    tasks = TaskBuilder(federation, problem, prepared, seed)
    evaluation = Evaluation(every=rounds + 1)
    setup = Setup(
        prepared, problem, federation, rounds, size, seed, vectorised(), evaluation, policy or Policy(), tasks
    )
    state = fresh_state(setup)
    servers, records = [state.server], []
    for _ in range(rounds):
        record, _rows = run_round(setup, state)
        servers.append(state.server)
        records.append(record)
    return Played(state, [server.theta for server in servers], servers, records)

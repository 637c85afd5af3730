"""Pooled: one model on all rows in one place; what a federation without a loss by federating would reach."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from dqnfed.algorithms.fedavg import FedAvgServer, FedAvgUpdate
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


@dataclass(frozen=True, kw_only=True)
class Pooled(LocalWork[FedAvgServer, Empty, FedAvgUpdate]):
    """All rows in one place: the reference for what federating costs. Not federated.

    Objective: the mean loss over all examples.

    Client: none. Each round makes `epochs` of SGD over the rows of the round's clients together, shuffled: with
    all clients, over all rows. Every row is passed as often as in a federated run of the same rounds.

    Server: theta after that work.

    State: theta.

    Payload: 0 floats up, 0 down: the rows would have to travel once, which no run counts.

    Evaluation: the one model, on every client's examples; the kept round by the same rule (`eval.select`).

    Differences: none; it is a reference and not of a paper. With mini-batches it makes about as many steps a round as
    all clients together, each client of a federation only its own.

    Reference: the centralised baseline of McMahan, Moore, Ramage, Hampson & Agüera y Arcas, AISTATS 2017.
    """

    info: ClassVar[Info] = Info(
        server=FedAvgServer,
        replies=(FedAvgUpdate,),
        training="pooled",
        problem_kinds=frozenset({"network", "convex", "batch-norm"}),
    )

    def init_server(self, problem: Problem, n_clients: int) -> FedAvgServer:
        return FedAvgServer(problem.theta0.clone())

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedAvgUpdate, Empty]:
        return FedAvgUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(
        self, server: FedAvgServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedAvgServer]:
        return ServerStep(FedAvgServer(server.theta - replies.rows("delta")[0]))  # the same update for every client

    def uplink_bits(self, reply: Any) -> int:
        return 0

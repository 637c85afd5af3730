"""Local only: every client trains a model of its own, alone; what joining a federation is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvgServer
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class LocalOnlyMemory(NamedTuple):
    personal: Tensor  # [n] the client's own model


@dataclass(frozen=True, kw_only=True)
class LocalOnly(LocalWork[FedAvgServer, LocalOnlyMemory, Empty]):
    """Every client alone: the reference for what joining brings. Not federated.

    Objective: for every client k, its own loss F_k.

    Client: `epochs` of SGD a round from its own model, with the batches that it would have in a federation; it sends
    nothing.

    Server: none. The start model is the same for everybody, and so are rounds, local work and the rule by which
    the kept model is chosen (`eval.select`): one round for all clients, as for every other method.

    State: client, its own model (n floats), which changes in the rounds that sample it; with all clients, in every
    round.

    Payload: 0 floats up, 0 down.

    Evaluation: every client's own model on its own examples, training losses too. There is no model for all: the run
    folder has none to predict with.

    Differences: none; it is a reference and not of a paper.

    Reference: the local baseline of comparisons such as Ditto's (Li, Hu, Beirami & Smith, ICML 2021, Section 4).
    """

    info: ClassVar[Info] = Info(
        server=FedAvgServer,
        messages=(Empty,),
        memory=LocalOnlyMemory,
        replies=(Empty,),
        needs=("sum",),
        personal=True,
        training="alone",
        problem_kinds=frozenset({"network", "convex", "batch-norm"}),
    )

    def init_server(self, problem: Problem, n_clients: int) -> FedAvgServer:
        return FedAvgServer(problem.theta0.clone())

    def init_memory(self, problem: Problem, task: Task) -> LocalOnlyMemory:
        return LocalOnlyMemory(problem.theta0.clone())

    def send(self, server: FedAvgServer) -> Empty:
        return Empty(server.theta.new_zeros(0))

    def client_step(
        self, problem: Problem, task: Task, sent: Empty, memory: LocalOnlyMemory
    ) -> tuple[Empty, LocalOnlyMemory]:
        return sent, LocalOnlyMemory(self.local_sgd(problem, task, memory.personal))

    def server_step(self, server: FedAvgServer, replies: Replies[Empty], cohort: Cohort) -> ServerStep[FedAvgServer]:
        return ServerStep(server)

    def models(self, server: FedAvgServer, memory: LocalOnlyMemory) -> dict[str, Tensor]:
        return {"personal": memory.personal}

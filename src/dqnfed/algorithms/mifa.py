"""MIFA: every client counts with its last update, whether it is available or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Info, ServerStep, Theta, check_range
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class MIFAServer(NamedTuple):
    theta: Tensor  # [n]
    total: Tensor  # [n] sum of the last updates of all clients that have replied, each over its lr
    seen: Tensor  # [n_clients] whether the client has replied


class MIFAMemory(NamedTuple):
    last: Tensor  # [n] the client's last update over its lr; zeros before its first


class MIFAUpdate(NamedTuple):
    change: Tensor  # [n] the client's update over its lr, less the one before


@dataclass(frozen=True, kw_only=True)
class MIFA(LocalWork[MIFAServer, MIFAMemory, MIFAUpdate]):
    """Memory-augmented impatient averaging (Gu et al., NeurIPS 2021): unavailable clients count with their last update.

    Objective: the mean of the clients' losses, whoever is available, and however that depends on the data.

    Client: `epochs` of SGD from theta; sends how its update, divided by lr, has changed since the one it sent last.

    Server: theta - server_lr * lr * the mean over all clients that have ever replied of their last updates.

    State: client, its last update (n floats); server, theta, the sum of the last updates, and who has replied.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: the paper has all clients reply in the first round; here a client enters the mean with its first reply.
    The paper keeps the last updates on the server or, as here, on the clients, who then send changes: the server needs
    sums alone. Changes are never clipped, since the client has kept its new update. With all clients in every round it
    is FedAvg with uniform weights, but for rounding. Roundings of the sum add up over the rounds.

    Reference: Gu, Huang, Zhang & Huang, Fast Federated Learning in the Presence of Arbitrary Device Unavailability,
    NeurIPS 2021.
    """

    # no `clip_fields`: a client whose update has not changed sends zeros, which is no fault
    info: ClassVar[Info] = Info(
        server=MIFAServer, memory=MIFAMemory, replies=(MIFAUpdate,), needs=("sum",), own_descent=False
    )

    server_lr: float = 1.0  # > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)

    def init_server(self, problem: Problem, n_clients: int) -> MIFAServer:
        theta = problem.theta0
        return MIFAServer(theta.clone(), torch.zeros_like(theta), torch.zeros(n_clients, dtype=torch.bool))

    def init_memory(self, problem: Problem, task: Task) -> MIFAMemory:
        return MIFAMemory(torch.zeros_like(problem.theta0))

    def client_step(
        self, problem: Problem, task: Task, sent: Theta, memory: MIFAMemory
    ) -> tuple[MIFAUpdate, MIFAMemory]:
        update = (sent.theta - self.local_sgd(problem, task, sent.theta)) / task.lr
        return MIFAUpdate(update - memory.last), MIFAMemory(update)

    def server_step(self, server: MIFAServer, replies: Replies[MIFAUpdate], cohort: Cohort) -> ServerStep[MIFAServer]:
        total = server.total + replies.combine("change", torch.ones(len(replies), dtype=torch.float64))
        seen = server.seen.index_fill(0, cohort.clients, True)
        rate = self.server_lr * self.lr_at(cohort.round) / int(seen.sum())
        return ServerStep(MIFAServer(server.theta - rate * total, total, seen))

"""FedVARP: the last updates of absent clients take the sampling of clients out of the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvgUpdate, client_weights
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_choice, check_range
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.gramian import combine


class FedVARPServer(NamedTuple):
    theta: Tensor  # [n]
    last: Tensor  # [N, n] y_j, every client's last update; zeros before its first
    weights: Tensor  # [N] of the clients that have replied, 1 or their examples; 0: not yet
    total: Tensor  # [n] sum_j weights_j y_j


@dataclass(frozen=True, kw_only=True)
class FedVARP(LocalWork[FedVARPServer, Empty, FedAvgUpdate]):
    """Variance reduction for partial participation (Jhunjhunwala et al., UAI 2022).

    Objective: the mean of the clients' losses; with `weighting = "examples"`, the mean loss over all examples.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: theta - server_lr * v with v = mean_k (delta_k - y_k) + mean_j y_j, the first mean over the cohort, the
    second over all N clients; then y_k = delta_k. With all clients in every round v is the mean update, and the method
    FedAvg.

    State: server, theta, the last updates of all clients (N x n floats, and as much again while a round is computed)
    and their sum. The sum changes by the K rows of a round and is computed anew every N / K rounds, so that roundings
    do not add up. Most of a server step is the copy of the other rows: states of earlier rounds are never changed.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: none with the default weighting, which is the paper's and not FedAvg's default here. With
    `weighting = "examples"` both means are weighted by examples; clients that have not replied yet count in the second
    one with y = 0 and as many examples as the others have on average. The paper's updates are divided by lr and by the
    number of local steps. Here y_j is divided by the decay of lr alone, so that older updates fit the present lr;
    clients with more examples make more steps, as with FedAvg.

    Reference: Jhunjhunwala, Sharma, Nagarkatti & Joshi, FedVARP: Tackling the Variance Due to Partial Client
    Participation in Federated Learning, UAI 2022.
    """

    info: ClassVar[Info] = Info(server=FedVARPServer, replies=(FedAvgUpdate,), needs=("rows",), clip_fields=("delta",))

    server_lr: float = 1.0  # > 0
    weighting: str = "uniform"  # uniform | examples

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("uniform", "examples"))

    def init_server(self, problem: Problem, n_clients: int) -> FedVARPServer:
        theta = problem.theta0
        weights = torch.zeros(n_clients, dtype=torch.float64)
        return FedVARPServer(theta.clone(), theta.new_zeros(n_clients, len(theta)), weights, torch.zeros_like(theta))

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedAvgUpdate, Empty]:
        return FedAvgUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(
        self, server: FedVARPServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedVARPServer]:
        decay = self.lr_at(cohort.round) / self.lr
        replies = replies.scaled(torch.full((len(replies),), 1.0 / decay, dtype=torch.float64), ("delta",))
        new = replies.rows("delta")
        places = cohort.clients.to(new.device)
        change = new - server.last[places]
        v = combine(client_weights(self.weighting, cohort), change) + mean_of_last(server)
        theta = server.theta - self.server_lr * decay * v
        counts = cohort.n_examples.double() if self.weighting == "examples" else torch.ones(len(new)).double()
        weights = server.weights.index_copy(0, cohort.clients, counts)
        last = replies.put("delta", torch.arange(len(new)), server.last, cohort.clients)
        rounds = -(-cohort.n_clients // len(new))  # in which so many clients reply as there are
        is_due = cohort.round % rounds == rounds - 1
        total = combine(weights, last) if is_due else server.total + combine(counts, change)
        return ServerStep(FedVARPServer(theta, last, weights, total))


def mean_of_last(server: FedVARPServer) -> Tensor:
    """Return the weighted mean of all clients' last updates; those not known yet have weight, but are zero."""
    n_known, n_clients = int((server.weights > 0).sum()), len(server.weights)
    if n_known == 0:
        return server.total
    return server.total * (n_known / (n_clients * float(server.weights.sum())))

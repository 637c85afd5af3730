"""FedAvg: the weighted mean of the clients' local updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_choice, check_range
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class FedAvgServer(NamedTuple):
    theta: Tensor  # [n]


class FedAvgUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it


def client_weights(weighting: str, cohort: Cohort) -> Tensor:
    """Return the clients' weights [K], summing to 1: by training examples, or all the same."""
    weights = (
        cohort.n_examples.double()
        if weighting == "examples"
        else cohort.n_examples.new_ones(len(cohort.clients)).double()
    )
    return weights / weights.sum()


@dataclass(frozen=True, kw_only=True)
class FedAvg(LocalWork[FedAvgServer, Empty, FedAvgUpdate]):
    """Federated averaging (McMahan et al., AISTATS 2017).

    Objective: the mean loss over all examples; with `weighting = "uniform"`, over all clients.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: theta - server_lr * sum_k w_k delta_k, w_k the client's share of the cohort's examples, or 1/K.

    State: theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: none. Codes of the fair federated learning literature mostly take the plain mean, which is
    `weighting = "uniform"`; with equally large clients the two are the same.

    Reference: McMahan, Moore, Ramage, Hampson & Agüera y Arcas, Communication-Efficient Learning of Deep Networks from
    Decentralized Data, AISTATS 2017.
    """

    info: ClassVar[Info] = Info(server=FedAvgServer, replies=(FedAvgUpdate,), needs=("sum",), clip_fields=("delta",))

    server_lr: float = 1.0  # > 0
    weighting: str = "examples"  # examples | uniform

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("examples", "uniform"))

    def init_server(self, problem: Problem, n_clients: int) -> FedAvgServer:
        return FedAvgServer(problem.theta0.clone())

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedAvgUpdate, Empty]:
        return FedAvgUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(
        self, server: FedAvgServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedAvgServer]:
        step = replies.combine("delta", client_weights(self.weighting, cohort))
        return ServerStep(FedAvgServer(server.theta - self.server_lr * step))

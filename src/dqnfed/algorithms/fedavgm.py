"""FedAvgM: FedAvg with momentum on the server."""

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


class FedAvgMServer(NamedTuple):
    theta: Tensor  # [n]
    velocity: Tensor  # [n] sum of the mean updates, older ones discounted by beta a round


@dataclass(frozen=True, kw_only=True)
class FedAvgM(LocalWork[FedAvgMServer, Empty, FedAvgUpdate]):
    """Federated averaging with server momentum (Hsu, Qi & Brown, 2019).

    Objective: the mean loss over all examples, as FedAvg.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: v = beta v + sum_k w_k delta_k, w_k the client's share of the cohort's examples, or 1/K; then
    theta - server_lr * v. A constant update is in the end taken 1 / (1 - beta) times a round, so lr or server_lr may
    have to be smaller than FedAvg's.

    State: server, theta and v (n floats), which starts at zero. beta = 0 is FedAvg.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: none from the paper's formula, where server_lr is 1. Unlike the paper's experiments, which name
    Nesterov's accelerated gradient, v itself is the step, as in that formula.

    Reference: Hsu, Qi & Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification, arXiv:1909.06335, 2019.
    """

    info: ClassVar[Info] = Info(server=FedAvgMServer, replies=(FedAvgUpdate,), needs=("sum",), clip_fields=("delta",))

    beta: float = 0.9  # momentum of the server, in [0, 1); 0: FedAvg
    server_lr: float = 1.0  # > 0
    weighting: str = "examples"  # examples | uniform

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "beta", low=0.0, high=1.0, open_high=True)
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("examples", "uniform"))

    def init_server(self, problem: Problem, n_clients: int) -> FedAvgMServer:
        return FedAvgMServer(problem.theta0.clone(), torch.zeros_like(problem.theta0))

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedAvgUpdate, Empty]:
        return FedAvgUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(
        self, server: FedAvgMServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedAvgMServer]:
        mean = replies.combine("delta", client_weights(self.weighting, cohort))
        velocity = self.beta * server.velocity + mean
        return ServerStep(FedAvgMServer(server.theta - self.server_lr * velocity, velocity))

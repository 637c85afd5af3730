"""FedAdam: Adam on the server, with the clients' mean update in the place of the gradient."""

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


class FedAdamServer(NamedTuple):
    theta: Tensor  # [n]
    first_moment: Tensor  # [n] running mean of the mean update
    second_moment: Tensor  # [n] running mean of its square


@dataclass(frozen=True, kw_only=True)
class FedAdam(LocalWork[FedAdamServer, Empty, FedAvgUpdate]):
    r"""Adaptive federated optimisation with Adam on the server (Reddi et al., ICLR 2021, Algorithm 2).

    Objective: the mean loss over all examples, as FedAvg.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: with the weighted mean update D, m = beta1 m + (1 - beta1) D, v = beta2 v + (1 - beta2) D^2, and then
    :math:`\theta - \text{server\_lr} \cdot m / (\sqrt{v} + \tau)`, coordinate by coordinate.

    State: server, theta and the two moments; m starts at 0 and v at tau^2.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: none. As in the paper the moments are not corrected for their start. Adaptivity lies in the server:
    every coordinate moves by about server_lr a round, so server_lr is to be tuned, not lr alone.

    Reference: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar & McMahan, Adaptive Federated Optimization, ICLR
    2021.
    """

    info: ClassVar[Info] = Info(server=FedAdamServer, replies=(FedAvgUpdate,), needs=("sum",), clip_fields=("delta",))

    server_lr: float = 0.01  # > 0
    beta1: float = 0.9  # of the mean update, in [0, 1)
    beta2: float = 0.99  # of its square, in [0, 1)
    tau: float = 1e-3  # degree of adaptivity: added to the root of the second moment, > 0
    weighting: str = "examples"  # examples | uniform

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_range(self, "beta1", low=0.0, high=1.0, open_high=True)
        check_range(self, "beta2", low=0.0, high=1.0, open_high=True)
        check_range(self, "tau", low=0.0, open_low=True)
        check_choice(self, "weighting", ("examples", "uniform"))

    def init_server(self, problem: Problem, n_clients: int) -> FedAdamServer:
        theta = problem.theta0
        return FedAdamServer(theta.clone(), torch.zeros_like(theta), torch.full_like(theta, self.tau**2))

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedAvgUpdate, Empty]:
        return FedAvgUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(
        self, server: FedAdamServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedAdamServer]:
        mean = replies.combine("delta", client_weights(self.weighting, cohort))
        first = self.beta1 * server.first_moment + (1.0 - self.beta1) * mean
        second = self.next_second_moment(server.second_moment, mean.square())
        step = first / (second.sqrt() + self.tau)
        return ServerStep(FedAdamServer(server.theta - self.server_lr * step, first, second))

    def next_second_moment(self, before: Tensor, square: Tensor) -> Tensor:
        """Return the second moment after a round whose mean update has this square."""
        return self.beta2 * before + (1.0 - self.beta2) * square

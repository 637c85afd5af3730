"""FedDyn: a regulariser on every client that makes the clients' optima agree with the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvgUpdate
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Theta, check_range
from dqnfed.core.kernels import Pull
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class FedDynServer(NamedTuple):
    theta: Tensor  # [n]
    drift: Tensor  # [n] h, alpha times the sum of all clients' updates over their number


class FedDynMemory(NamedTuple):
    slope: Tensor  # [n] the gradient of the client's loss at its last local model, if that was its minimiser


@dataclass(frozen=True, kw_only=True)
class FedDyn(LocalWork[FedDynServer, FedDynMemory, FedAvgUpdate]):
    r"""Dynamic regularisation (Acar et al., ICLR 2021, Algorithm 1).

    Objective: the mean of the clients' losses.

    Client: `epochs` of SGD from theta on :math:`F_k(v) - g_k^\top v + \frac{\alpha}{2} \|v - \theta\|^2`; then g_k
    loses alpha (v - theta). Sends its update, theta minus v.

    Server: h gains alpha / N times the sum of the updates; theta - mean_k delta_k - h / alpha.

    State: client, g_k (n floats); server, theta and h. Both start at zero.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: the paper minimises the client's objective exactly; here local SGD does as far as it goes. h / alpha
    adds up all past updates, which g_k must balance: with far fewer local steps than the minimisation needs (lr times
    steps well below 1 / alpha) theta overshoots and may diverge; a larger alpha, more epochs or a larger lr help, and
    alpha = 1 / (lr times steps) is safe. The authors' code divides alpha by a client's share of the examples; here it
    is the same for all.

    Reference: Acar, Zhao, Matas Navarro, Mattina, Whatmough & Saligrama, Federated Learning Based on Dynamic
    Regularization, ICLR 2021.
    """

    info: ClassVar[Info] = Info(
        server=FedDynServer,
        memory=FedDynMemory,
        replies=(FedAvgUpdate,),
        needs=("sum",),
        own_descent=False,  # the client's slope g_k is in the update
    )

    alpha: float = 1.0  # strength of the regulariser, > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "alpha", low=0.0, open_low=True)

    def init_server(self, problem: Problem, n_clients: int) -> FedDynServer:
        return FedDynServer(problem.theta0.clone(), torch.zeros_like(problem.theta0))

    def init_memory(self, problem: Problem, task: Task) -> FedDynMemory:
        return FedDynMemory(torch.zeros_like(problem.theta0))

    def client_step(
        self, problem: Problem, task: Task, sent: Theta, memory: FedDynMemory
    ) -> tuple[FedAvgUpdate, FedDynMemory]:
        pull = Pull(sent.theta, self.alpha)
        delta = sent.theta - self.local_sgd(problem, task, sent.theta, pull=pull, correction=-memory.slope)
        return FedAvgUpdate(delta), FedDynMemory(memory.slope + self.alpha * delta)

    def server_step(
        self, server: FedDynServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedDynServer]:
        mean = replies.mean("delta")
        drift = server.drift + self.alpha * len(replies) / cohort.n_clients * mean
        return ServerStep(FedDynServer(server.theta - mean - drift / self.alpha, drift))

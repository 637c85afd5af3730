"""FedExP: FedAvg with a server step that is longer the more the clients' updates differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvgUpdate, client_weights
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_choice, check_range
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.gramian import norm_of


class FedExPServer(NamedTuple):
    theta: Tensor  # [n]
    previous: Tensor  # [n] theta before the last round; at first theta itself


@dataclass(frozen=True, kw_only=True)
class FedExP(LocalWork[FedExPServer, Empty, FedAvgUpdate]):
    r"""Federated averaging with an extrapolated step (Jhunjhunwala, Wang & Joshi, ICLR 2023, Algorithm 1).

    Objective: the mean of the clients' losses; with `weighting = "examples"`, the mean loss over all examples.

    Client: `epochs` of SGD from theta; sends its update, theta before minus theta after.

    Server: with the mean update D, theta - eta D, where
    :math:`\eta = \max\big(1, \sum_k \|\delta_k\|^2 / (2 K (\|D\|^2 + \text{eps}))\big)`. Updates that are alike give
    eta = 1, which is FedAvg; updates that cancel each other give up to the mean of their squared lengths over 2 eps.
    eta is the diagnostic `extrapolation`.

    State: server, theta and the theta before it.

    Payload: n floats up, n down.

    Evaluation: the mean of the last two iterates, since an extrapolated step makes theta oscillate; the last one is
    reported beside it, and training losses are those of the last one. With `average_last_two = false`, the last one
    alone.

    Differences: none from the paper's formula. Unlike the authors' code, which adds K eps instead of eps, multiplies
    eps by the square of lr's decay each round and weighs clients by examples, the formula is as printed and eps is
    constant; `weighting = "examples"` weighs both the mean update and the mean of the squares as that code does. Unlike
    the authors' code, the model after the first round is averaged with the start model, too. eps has the unit of a
    squared update, so it is to be tuned with lr: where it is much larger than the squared updates, eta is always 1. The
    authors' code has 1e-3 for CIFAR-10, CIFAR-100 and CINIC-10 with lr 0.01, and 0.1 for EMNIST with lr 0.1.

    Reference: Jhunjhunwala, Wang & Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023.
    """

    info: ClassVar[Info] = Info(
        server=FedExPServer,
        replies=(FedAvgUpdate,),
        needs=("sum",),
        clip_fields=("delta",),
        theta_fields=("theta", "previous"),
    )

    eps: float = 1e-3  # added to the squared length of the mean update, >= 0; larger: less extrapolation
    average_last_two: bool = True  # whether the mean of the last two iterates is evaluated
    weighting: str = "uniform"  # uniform | examples

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "eps", low=0.0)
        check_choice(self, "weighting", ("uniform", "examples"))

    def init_server(self, problem: Problem, n_clients: int) -> FedExPServer:
        return FedExPServer(problem.theta0.clone(), problem.theta0.clone())

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedAvgUpdate, Empty]:
        return FedAvgUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(
        self, server: FedExPServer, replies: Replies[FedAvgUpdate], cohort: Cohort
    ) -> ServerStep[FedExPServer]:
        weights = client_weights(self.weighting, cohort)
        mean = replies.combine("delta", weights)
        eta = extrapolation(float(weights.numpy() @ np.square(replies.norms("delta"))), norm_of(mean), self.eps)
        return ServerStep(FedExPServer(server.theta - eta * mean, server.theta), diagnostics={"extrapolation": eta})

    def models(self, server: FedExPServer, memory: Empty) -> dict[str, Tensor]:
        if not self.average_last_two:
            return super().models(server, memory)
        return {"averaged": (server.theta + server.previous) / 2, "global": server.theta}


def extrapolation(mean_square: float, mean_norm: float, eps: float) -> float:
    """Return the length of the server's step, from the mean of the squared updates and the norm of their mean."""
    square = mean_norm**2 + eps
    return max(1.0, mean_square / (2.0 * square)) if square > 0.0 else 1.0  # updates that cancel exactly make no step

"""SCAFFOLD: control variates that take the drift out of the clients' local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import client_weights
from dqnfed.core.algorithm import LOCAL_WORK, Cohort, Info, ServerStep, check_choice, check_range
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class ScaffoldServer(NamedTuple):
    theta: Tensor  # [n]
    control: Tensor  # [n] c, the mean of the clients' control variates


class ScaffoldMemory(NamedTuple):
    control: Tensor  # [n] c_k, the mean gradient of the client's last local steps


class ScaffoldSent(NamedTuple):
    theta: Tensor  # [n]
    control: Tensor  # [n]


class ScaffoldUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    control_change: Tensor  # [n] new c_k minus the old one


@dataclass(frozen=True, kw_only=True)
class Scaffold(LocalWork[ScaffoldServer, ScaffoldMemory, ScaffoldUpdate]):
    r"""Stochastic controlled averaging (Karimireddy et al., ICML 2020, Algorithm 1, option II).

    Objective: the mean of the clients' losses; with `weighting = "examples"`, the mean loss over all examples.

    Client: `epochs` of SGD from theta with every gradient corrected by c - c_k; then
    :math:`c_k^+ = c_k - c + (\theta - v) / (S \cdot \text{lr})` after S steps to v. Sends theta - v and c_k^+ - c_k.

    Server: theta - server_lr * sum_k w_k delta_k and c + (K / n_clients) * sum_k w_k (c_k^+ - c_k).

    State: client, c_k (n floats); server, theta and c. All control variates start at zero, so that the first round is
    FedAvg's.

    Payload: 2n floats up, 2n down.

    Evaluation: the global model.

    Differences: none. Local momentum is refused: c_k would no longer be the client's mean gradient.

    Reference: Karimireddy, Kale, Mohri, Reddi, Stich & Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated
    Learning, ICML 2020.
    """

    info: ClassVar[Info] = Info(
        server=ScaffoldServer,
        memory=ScaffoldMemory,
        messages=(ScaffoldSent,),
        replies=(ScaffoldUpdate,),
        needs=("sum",),
        own_descent=False,  # the control variates are in the update
        clip_fields=("delta",),  # not control_change: the client has already kept its new c_k
        local_work=frozenset(LOCAL_WORK) - {"momentum"},
    )

    server_lr: float = 1.0  # > 0
    weighting: str = "uniform"  # uniform | examples

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("uniform", "examples"))
        if self.momentum:
            raise ValueError(
                f"Scaffold: `momentum` must be 0, but is {self.momentum}; with it a client's update would not measure "
                "its mean gradient, which the control variates are made of."
            )

    def init_server(self, problem: Problem, n_clients: int) -> ScaffoldServer:
        return ScaffoldServer(problem.theta0.clone(), torch.zeros_like(problem.theta0))

    def init_memory(self, problem: Problem, task: Task) -> ScaffoldMemory:
        return ScaffoldMemory(torch.zeros_like(problem.theta0))

    def send(self, server: ScaffoldServer) -> ScaffoldSent:
        return ScaffoldSent(server.theta, server.control)

    def client_step(
        self, problem: Problem, task: Task, sent: ScaffoldSent, memory: ScaffoldMemory
    ) -> tuple[ScaffoldUpdate, ScaffoldMemory]:
        correction = sent.control - memory.control
        local = self.local_sgd(problem, task, sent.theta, correction=correction)
        delta = sent.theta - local
        change = delta / (n_local_steps(task) * task.lr) - sent.control
        return ScaffoldUpdate(delta, change), ScaffoldMemory(memory.control + change)

    def server_step(
        self, server: ScaffoldServer, replies: Replies[ScaffoldUpdate], cohort: Cohort
    ) -> ServerStep[ScaffoldServer]:
        weights = client_weights(self.weighting, cohort)
        share = len(cohort.clients) / cohort.n_clients
        theta = server.theta - self.server_lr * replies.combine("delta", weights)
        control = server.control + replies.combine("control_change", share * weights)
        return ServerStep(ScaffoldServer(theta, control))


def n_local_steps(task: Task) -> Tensor:
    """Return how many local steps the client makes: batches without examples are none."""
    if task.batches.shape[-1] == 0:
        return torch.full_like(task.lr, len(task.batches))
    return (task.batches >= 0).any(-1).sum().to(task.lr.dtype)

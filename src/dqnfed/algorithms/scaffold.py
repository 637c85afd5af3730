"""SCAFFOLD: control variates that take the drift out of the clients' local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import client_weights
from dqnfed.core.algorithm import LOCAL_WORK, Cohort, Info, ServerStep, check_choice, check_range, check_used
from dqnfed.core.gradients import loss_gradient
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
    r"""Stochastic controlled averaging (Karimireddy et al., ICML 2020, Algorithm 1).

    Objective: the mean of the clients' losses; with `weighting = "examples"`, the mean loss over all examples.

    Client: `epochs` of SGD from theta with every gradient corrected by c - c_k; then
    :math:`c_k^+ = c_k - c + (\theta - v) / (S \cdot \text{lr})` after S steps to v (`control = "gradient"`: its
    gradient at theta). Sends theta - v and c_k^+ - c_k.

    Server: theta - server_lr * sum_k w_k delta_k and c + (K / n_clients) * sum_k w_k (c_k^+ - c_k).

    State: client, c_k (n floats); server, theta and c. All control variates start at zero, so that the first round is
    FedAvg's.

    Payload: 2n floats up, 2n down.

    Evaluation: the global model.

    Differences: none. Local momentum and Adam are refused: c_k would no longer be the client's mean gradient. With part
    of the clients a round, c_k is of an older model and a newcomer has none: local work may then go wild at a rate at
    which FedAvg trains (MNIST by writer, a tenth of 500 clients, lr 0.1), and with option II the client keeps that as
    c_k. A reply that is clipped has its change of c_k scaled likewise. `control = "gradient"`, option I, has the
    client's gradient at theta as c_k for one more pass over its data, and trains there.

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
        clip_fields=("delta", "control_change"),  # one client whose local work went wild must not become everybody's c
        local_work=frozenset(LOCAL_WORK) - {"momentum", "nesterov", "optimizer"},
    )

    server_lr: float = 1.0  # > 0
    weighting: str = "uniform"  # uniform | examples
    control: str = "update"  # update | gradient: the paper's option II or I

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("uniform", "examples"))
        check_choice(self, "control", ("update", "gradient"))
        one_step = self.epochs == 1 and self.batch_size is None
        check_used(self, "control", used=not one_step, why="with one full-batch step a round, where both are the same")
        if self.momentum:
            raise ValueError(
                f"Scaffold: `momentum` must be 0, but is {self.momentum}; with it a client's update would not measure "
                "its mean gradient, which the control variates are made of."
            )
        if self.optimizer != "sgd":
            raise ValueError(
                f"Scaffold: `optimizer` must be 'sgd', but is '{self.optimizer}'; with it a client's update would not "
                "measure its mean gradient, which the control variates are made of."
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
        delta = sent.theta - self.local_sgd(problem, task, sent.theta, correction=correction)
        if self.control == "gradient":
            change = loss_gradient(problem, sent.theta, task) - memory.control
        else:
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

    def passes(self, sent: ScaffoldSent) -> float:
        return self.epochs + (1.0 if self.control == "gradient" else 0.0)


def n_local_steps(task: Task) -> Tensor:
    """Return how many local steps the client makes: batches without examples are none."""
    if task.batches.shape[-1] == 0:
        return torch.full_like(task.lr, len(task.batches))
    return (task.batches >= 0).any(-1).sum().to(task.lr.dtype)

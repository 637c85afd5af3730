"""FedRep: a common body, and a last layer of each client's own that never leaves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import client_weights
from dqnfed.core.algorithm import Cohort, Info, ServerStep, check_choice, check_range
from dqnfed.core.heads import last_layer
from dqnfed.core.kernels import PLAIN
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class Body(NamedTuple):
    body: Tensor  # [n - h]


class FedRepServer(NamedTuple):
    theta: Tensor  # [n] the body, and after it the head of the start
    n_body: Tensor  # [] entries of the body


class FedRepMemory(NamedTuple):
    head: Tensor  # [h] weight and bias of the client's last layer


class FedRepUpdate(NamedTuple):
    delta: Tensor  # [m] the body before the local work minus the body after it


@dataclass(frozen=True, kw_only=True)
class FedRep(LocalWork[FedRepServer, FedRepMemory, FedRepUpdate]):
    r"""Federated representation learning (Collins et al., ICML 2021).

    Objective: :math:`\min_\phi \sum_k p_k \min_{h_k} F_k(\phi, h_k)`, phi the body, h_k the client's last layer.

    Client: trains its head on the body phi that it was sent, `head_passes` times through its local work, then phi on
    that head, once; sends delta_k = phi - phi_k.

    Server: phi - server_lr * sum_k w_k delta_k.

    State: client, its head (h numbers), which starts at theta_0's and changes in its rounds alone; server, phi, beside
    which the head of theta_0 stays as it is.

    Payload: n - h floats up, n - h down.

    Evaluation: every client's own model, the body under its own head, training losses too. There is no model for all,
    so that a run has none to predict with: its folder holds the body under the start model's head.

    Differences: the paper has 10 epochs for the head and one for the body; here `epochs` are the body's, and the head
    has `head_passes` times as many, on the same batches. The paper averages all clients alike: weighting = "uniform".

    Reference: Collins, Hassani, Mokhtari & Shakkottai, Exploiting Shared Representations for Personalized Federated
    Learning, ICML 2021.
    """

    info: ClassVar[Info] = Info(
        server=FedRepServer,
        messages=(Body,),
        memory=FedRepMemory,
        replies=(FedRepUpdate,),
        needs=("sum",),
        clip_fields=("delta",),
        problem_kinds=frozenset({"network"}),
        personal=True,
        own_part="a last layer",
    )

    head_passes: int = 5  # through the local work, for the head, >= 1
    server_lr: float = 1.0  # > 0
    weighting: str = "examples"  # examples | uniform

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "head_passes", low=1)
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("examples", "uniform"))

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        if last_layer(problem).start == 0:
            raise ValueError("FedRep: the model has one layer, so that there is no body to share; use local-only.")
        return self

    def unused(self) -> frozenset[str]:
        several = self.head_passes > 1 and self.optimizer == "sgd"  # steps of the head
        return super().unused() - ({"momentum"} if several else set())

    def init_server(self, problem: Problem, n_clients: int) -> FedRepServer:
        return FedRepServer(problem.theta0.clone(), torch.tensor(last_layer(problem).start))

    def init_memory(self, problem: Problem, task: Task) -> FedRepMemory:
        return FedRepMemory(problem.theta0[last_layer(problem).start :].clone())

    def client_step(
        self, problem: Problem, task: Task, sent: Body, memory: FedRepMemory
    ) -> tuple[FedRepUpdate, FedRepMemory]:
        with_body = part_of(problem, lambda head: torch.cat([sent.body, head]))
        longer = task._replace(batches=task.batches.repeat(self.head_passes, 1))
        head = self.local_sgd(with_body, longer, memory.head)
        with_head = part_of(problem, lambda body: torch.cat([body, head]))
        return FedRepUpdate(sent.body - self.local_sgd(with_head, task, sent.body)), FedRepMemory(head)

    def send(self, server: FedRepServer) -> Body:
        return Body(body_of(server))

    def server_step(
        self, server: FedRepServer, replies: Replies[FedRepUpdate], cohort: Cohort
    ) -> ServerStep[FedRepServer]:
        step = replies.combine("delta", client_weights(self.weighting, cohort))
        body = body_of(server)
        theta = torch.cat([body - self.server_lr * step, server.theta[len(body) :]])
        return ServerStep(server._replace(theta=theta))

    def models(self, server: FedRepServer, memory: FedRepMemory) -> dict[str, Tensor]:
        return {"personal": torch.cat([body_of(server), memory.head])}

    def passes(self, sent: Any) -> float:
        return float(self.epochs * (1 + self.head_passes))


def body_of(server: FedRepServer) -> Tensor:
    """Return the common part of theta."""
    return server.theta[: int(server.n_body)]


def part_of(problem: Problem, whole: Callable[[Tensor], Tensor]) -> Problem:
    """Return the problem of training a part of theta, which `whole` completes."""
    return replace(problem, predict=lambda part, inputs: problem.predict(whole(part), inputs), kernels=PLAIN)

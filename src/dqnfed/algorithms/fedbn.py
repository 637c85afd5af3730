"""FedBN: a common model but for its BatchNorm layers, which never leave their clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import client_weights
from dqnfed.core.algorithm import Cohort, Info, ServerStep, check_choice, check_range
from dqnfed.core.local_work import LocalWork
from dqnfed.core.norm_training import with_statistics
from dqnfed.core.problem import BATCH_NORM, Problem, Task
from dqnfed.core.replies import Replies


class SharedPart(NamedTuple):
    shared: Tensor  # [m] all of the model but BatchNorm


class FedBNServer(NamedTuple):
    theta: Tensor  # [n] the common part, and after it the BatchNorm layers of the start
    n_shared: Tensor  # [] entries of the common part


class FedBNMemory(NamedTuple):
    norms: Tensor  # [b] weights, biases, means and variances of the client's BatchNorm layers


class FedBNUpdate(NamedTuple):
    delta: Tensor  # [m] the common part before the local work minus the common part after it


@dataclass(frozen=True, kw_only=True)
class FedBN(LocalWork[FedBNServer, FedBNMemory, FedBNUpdate]):
    r"""Federated learning with local batch normalisation (Li et al., ICLR 2021, Algorithm 1).

    Objective: :math:`\min_\phi \sum_k p_k \min_{b_k} F_k(\phi, b_k)`, b_k the weights and biases of client k's
    BatchNorm layers, phi all else.

    Client: `epochs` of SGD on phi and b_k together, BatchNorm with the statistics of each batch; sends delta_k = phi -
    phi_k and keeps b_k and the statistics that its examples have then.

    Server: phi - server_lr * sum_k w_k delta_k.

    State: client, weights, biases, means and variances of its BatchNorm layers (b floats), which change in its rounds
    alone; server, phi, beside which the layers of theta_0 stay as they are.

    Payload: n - b floats up, n - b down.

    Evaluation: every client's own model, phi with its own BatchNorm layers, training losses too. There is no model for
    all, so that a run has none to predict with.

    Differences: the paper's clients keep running averages over their batches; here means and variances are those of all
    the client's training examples, from one forward pass at the end of its local work, and before its first round at
    the start model. Variances are over the count. The paper averages all clients alike: weighting = "uniform".

    Reference: Li, Jiang, Zhang, Kamp & Dou, FedBN: Federated Learning on Non-IID Features via Local Batch
    Normalization, ICLR 2021.
    """

    info: ClassVar[Info] = Info(
        server=FedBNServer,
        messages=(SharedPart,),
        memory=FedBNMemory,
        replies=(FedBNUpdate,),
        needs=("sum",),
        clip_fields=("delta",),
        problem_kinds=frozenset({BATCH_NORM}),
        personal=True,
        own_part="BatchNorm layers",
        reads_inputs=True,  # for their statistics
    )

    server_lr: float = 1.0  # > 0
    weighting: str = "examples"  # examples | uniform

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("examples", "uniform"))

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        if problem.norms is None:
            raise ValueError(
                "FedBN: the model has no BatchNorm layer that a client could keep, so that this is FedAvg; use fedavg, "
                'or a model with BatchNorm (`model.norm = "batch"` for mlp and cnn).'
            )
        if problem.norms.n_shared == 0:
            raise ValueError("FedBN: the model is nothing but BatchNorm, so that there is nothing to share.")
        return self

    def init_server(self, problem: Problem, n_clients: int) -> FedBNServer:
        return FedBNServer(problem.theta0.clone(), torch.tensor(n_shared_of(problem)))

    def init_memory(self, problem: Problem, task: Task) -> FedBNMemory:
        return FedBNMemory(with_statistics(problem, problem.theta0, task)[n_shared_of(problem) :])

    def send(self, server: FedBNServer) -> SharedPart:
        return SharedPart(shared_part(server))

    def client_step(
        self, problem: Problem, task: Task, sent: SharedPart, memory: FedBNMemory
    ) -> tuple[FedBNUpdate, FedBNMemory]:
        theta = self.local_sgd(problem, task, torch.cat([sent.shared, memory.norms]))
        n = len(sent.shared)
        return FedBNUpdate(sent.shared - theta[:n]), FedBNMemory(theta[n:])

    def server_step(
        self, server: FedBNServer, replies: Replies[FedBNUpdate], cohort: Cohort
    ) -> ServerStep[FedBNServer]:
        step = replies.combine("delta", client_weights(self.weighting, cohort))
        shared = shared_part(server)
        theta = torch.cat([shared - self.server_lr * step, server.theta[len(shared) :]])
        return ServerStep(server._replace(theta=theta))

    def models(self, server: FedBNServer, memory: FedBNMemory) -> dict[str, Tensor]:
        return {"personal": torch.cat([shared_part(server), memory.norms])}


def n_shared_of(problem: Problem) -> int:
    """Return how many entries of theta are common."""
    assert problem.norms is not None  # checked in `prepare`
    return problem.norms.n_shared


def shared_part(server: FedBNServer) -> Tensor:
    """Return the common part of theta."""
    return server.theta[: int(server.n_shared)]

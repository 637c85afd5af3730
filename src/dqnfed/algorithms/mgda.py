"""MGDA: the shortest vector in the convex hull of the clients' updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Status, Theta, check_range
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.solvers import min_norm_weights


class MGDAServer(NamedTuple):
    theta: Tensor  # [n]


class MGDAUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it


@dataclass(frozen=True, kw_only=True)
class MGDA(LocalWork[MGDAServer, Empty, MGDAUpdate]):
    """MGDA, the multiple-gradient descent algorithm, on the clients' raw updates (FedMGDA).

    Objective: Pareto stationarity of (F_1, ..., F_K): go on as long as some step lowers every client's loss.

    Client: makes `epochs` of SGD from theta (by default one full-batch step); sends the update delta_k.

    Server: subtracts `server_lr` times d = sum_k w_k delta_k, where w minimises ||sum_k w_k delta_k||^2 over the
    simplex; then delta_k . d >= ||d||^2 for every client. Solved exactly on the float64 Gramian. The step carries the
    local learning rate because the updates do. Short updates get large weights, which `fedmgda-plus` cures.

    State: none beyond theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: Unlike the paper, a client whose update is zero is left out of the cohort: with it the shortest vector
    is zero, and one client at its optimum would end the training of all. Unlike the widely used two-task solver,
    solutions at an end point are exact, not 0.999 and 0.001, and the solver always ends.

    Reference: Desideri, "Multiple-gradient descent algorithm (MGDA) for multiobjective optimization", Comptes Rendus
    Mathematique 2012; federated by Hu, Shaloudegi, Zhang & Yu, IEEE TNSE 2022.
    """

    info: ClassVar[Info] = Info(server=MGDAServer, replies=(MGDAUpdate,), needs=("gram",), clip_fields=("delta",))

    server_lr: float = 1.0  # > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)

    def init_server(self, problem: Problem, n_clients: int) -> MGDAServer:
        return MGDAServer(problem.theta0.clone())

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[MGDAUpdate, Empty]:
        return MGDAUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(self, server: MGDAServer, replies: Replies[MGDAUpdate], cohort: Cohort) -> ServerStep[MGDAServer]:
        M = replies.gram("delta")
        weights = min_norm_weights(M)
        step = replies.combine("delta", weights)
        diagnostics = {"n_active": float((weights > 0).sum()), "norm": float(step.norm())}
        rounding = 10 * torch.finfo(step.dtype).eps * float(M.diagonal().max()) ** 0.5
        if diagnostics["norm"] <= rounding:  # Pareto-stationary for this cohort
            return ServerStep(server, Status.HOLD, diagnostics)
        return ServerStep(MGDAServer(server.theta - self.server_lr * step), diagnostics=diagnostics)

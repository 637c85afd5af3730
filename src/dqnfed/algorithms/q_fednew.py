"""Q-FedNew: FedNew whose clients send a few bits per coordinate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.fednew import Fresh, Kept
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Status, check_range
from dqnfed.core.curvature import (
    client_gradient,
    client_hessian,
    hessian_passes,
    log_full_participation,
    refuse_if_too_large,
)
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.quantise import Quantised, dequantised, quantised
from dqnfed.maths.symmetric import damped_factor, factored_solution


class QFedNewServer(NamedTuple):
    theta: Tensor  # [n]
    step: Tensor  # [n] y, what was subtracted last
    sent_steps: Tensor  # [C, n] every client's last quantised step
    n_rounds: Tensor  # [] int64


class QFedNewMemory(NamedTuple):
    dual: Tensor  # [n] lambda_k
    sent_step: Tensor  # [n] its last quantised step, as the server knows it
    factor: Tensor  # [n, n]


class QFedNewUpdate(NamedTuple):
    change: Quantised  # of the step against the last quantised one


@dataclass(frozen=True, kw_only=True)
class QFedNew(LocalWork[QFedNewServer, QFedNewMemory, QFedNewUpdate]):
    """Quantised FedNew (Elgabli et al., ICML 2022).

    Objective: the mean of the clients' losses, convex.

    Client: FedNew's y_k; the change against its last quantised step is rounded at random, without bias, to `bits`
    bits a coordinate. No local training: lr, epochs and batch_size are not used.

    Server: rebuilds every client's quantised step and goes on as FedNew with these, in the mean and in the duals.

    State: client, FedNew's and its last quantised step; server, theta, y and all quantised steps.

    Payload: bits * n bits and one float up, 2 n floats down.

    Evaluation: the global model.

    Differences: an unchanged step (range zero) is sent as zeros; the authors' code divides by the range.

    Reference: PMLR 162:5861, arXiv 2206.08829.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=QFedNewServer,
        memory=QFedNewMemory,
        messages=(Fresh, Kept),
        replies=(QFedNewUpdate,),
        needs=("rows",),
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    rho: float = 0.1  # penalty on disagreement, > 0
    alpha: float = 0.01  # damping of the Newton direction, >= 0
    refresh: int = 1  # rounds between new Hessians; 0: the first one is kept
    bits: int = 3  # a coordinate, 1 to 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "rho", low=0.0, open_low=True)
        check_range(self, "alpha", low=0.0)
        check_range(self, "refresh", low=0)
        check_range(self, "bits", low=1, high=30)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        log_full_participation("q-fednew", n_clients, cohort_size)
        refuse_if_too_large(problem, 2 * n_clients, "Q-FedNew", "fednew-cg")
        return self

    def init_server(self, problem: Problem, n_clients: int) -> QFedNewServer:
        theta = problem.theta0.clone()
        steps = theta.new_zeros(n_clients, len(theta))
        return QFedNewServer(theta, torch.zeros_like(theta), steps, torch.zeros((), dtype=torch.long))

    def init_memory(self, problem: Problem, task: Task) -> QFedNewMemory:
        zeros = torch.zeros_like(problem.theta0)
        return QFedNewMemory(zeros, zeros.clone(), zeros.new_zeros(len(zeros), len(zeros)))

    def noise(self, problem: Problem, generator: torch.Generator) -> Tensor:
        return torch.rand(problem.n_parameters, generator=generator, dtype=torch.float64).to(problem.theta0.dtype)

    def select(self, server: QFedNewServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return torch.arange(n_clients)

    def send(self, server: QFedNewServer) -> Fresh | Kept:
        t = int(server.n_rounds)
        renews = t == 0 or (self.refresh > 0 and t % self.refresh == 0)
        return Fresh(server.theta, server.step) if renews else Kept(server.theta, server.step)

    def client_step(
        self, problem: Problem, task: Task, sent: Fresh | Kept, memory: QFedNewMemory
    ) -> tuple[QFedNewUpdate, QFedNewMemory]:
        dual, factor = memory.dual + self.rho * (memory.sent_step - sent.step), memory.factor
        if isinstance(sent, Fresh):
            factor = damped_factor(client_hessian(problem, task, sent.theta), self.alpha + self.rho)
        wanted = client_gradient(problem, task, sent.theta) - dual + self.rho * sent.step
        change = quantised(factored_solution(factor, wanted) - memory.sent_step, task.noise, bits=self.bits)
        return QFedNewUpdate(change), QFedNewMemory(
            dual, memory.sent_step + dequantised(change, bits=self.bits), factor
        )

    def server_step(
        self, server: QFedNewServer, replies: Replies[QFedNewUpdate], cohort: Cohort
    ) -> ServerStep[QFedNewServer]:
        clients = cohort.clients.to(server.theta.device)
        received = Quantised(replies.rows("change.levels"), replies.rows("change.radius"))
        changes = dequantised(received, bits=self.bits)
        steps = server.sent_steps.index_add(0, clients, changes)
        step = steps[clients].mean(0)
        widest = float(replies.scalars("change.radius").max())
        return ServerStep(
            QFedNewServer(server.theta - step, step, steps, server.n_rounds + 1),
            Status.NEXT,
            {"quantiser_range": widest},
        )

    def uplink_bits(self, reply: QFedNewUpdate) -> int:
        return self.bits * len(reply.change.levels) + 8 * reply.change.radius.element_size()

    def passes(self, sent: Fresh | Kept) -> float:
        return 1.0 + (hessian_passes(sent.theta) if isinstance(sent, Fresh) else 0.0)

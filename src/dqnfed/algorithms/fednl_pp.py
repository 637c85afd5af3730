"""FedNL-PP: FedNL for cohorts that change from round to round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.hessian_learning import NEEDS, HessianLearner, Init, Known, included
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Status, Theta
from dqnfed.core.curvature import client_gradient, client_hessian, hessian_passes
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.compressors import Code
from dqnfed.maths.symmetric import packed, packed_norm, positive_solution, unpacked


class FedNLPPServer(NamedTuple):
    theta: Tensor  # [n]
    known: Known  # of all clients' estimates
    error_total: Tensor  # [] the sum of all clients' errors l_k
    target_total: Tensor  # [n] the sum of all clients' v_k
    is_started: Tensor  # [] bool


class FedNLPPMemory(NamedTuple):
    estimate: Tensor  # [T]
    error: Tensor  # [] l_k = ||Hessian - estimate||_F, at the last model it received
    target: Tensor  # [n] v_k = (estimate + l_k I) w_k - gradient(w_k), w_k that model


class Start(NamedTuple):
    hessian: Tensor  # [T], or [0] with start = "zero"
    error: Tensor  # []
    target: Tensor  # [n]


class FedNLPPUpdate(NamedTuple):
    code: Code
    error_change: Tensor  # []
    target_change: Tensor  # [n]


@dataclass(frozen=True, kw_only=True)
class FedNLPP(HessianLearner[FedNLPPServer, FedNLPPMemory, Start | FedNLPPUpdate]):
    """FedNL with partial participation (Safaryan et al., ICML 2022, Algorithm 2).

    Objective: the mean of the clients' losses, strongly convex, with Lipschitz Hessians; local theory.

    Client: keeps estimate, error l_k and v_k = (estimate + l_k I) w_k - gradient(w_k) of the last model w_k that it
    received; when sampled it renews all three at theta and sends the compressed Hessian difference and the changes of
    l_k and v_k. No local training: lr, epochs and batch_size are not used.

    Server: keeps the means over all clients; theta = (H + l I)^-1 v. Only regularisation, no projection, exists.

    State: client, n (n + 1) / 2 + n + 1 floats; server, as many and theta.

    Payload: n + |S| + 1 floats up, n down. In round 0 all clients send l_k and v_k (and their Hessians) at the start
    model.

    Evaluation: the global model.

    Differences: none; round 0, in which all clients take part, is the paper's initialisation and its first model
    update.

    Reference: arXiv 2106.02969.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=FedNLPPServer,
        memory=FedNLPPMemory,
        messages=(Init, Theta),
        replies=(Start, FedNLPPUpdate),
        needs=NEEDS,
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )
    own_name: ClassVar[str] = "FedNL-PP"

    def init_server(self, problem: Problem, n_clients: int) -> FedNLPPServer:
        theta = problem.theta0.clone()
        known = self.none_known(problem, n_clients)
        return FedNLPPServer(theta, known, theta.new_zeros(()), torch.zeros_like(theta), torch.tensor(False))

    def init_memory(self, problem: Problem, task: Task) -> FedNLPPMemory:
        estimate, theta = self.first_estimate(problem, task), problem.theta0
        error = packed_norm(packed(client_hessian(problem, task, theta)) - estimate, len(theta))
        return FedNLPPMemory(estimate, error, _target(estimate, error, theta, client_gradient(problem, task, theta)))

    def select(self, server: FedNLPPServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return sampled if bool(server.is_started) else torch.arange(n_clients)

    def send(self, server: FedNLPPServer) -> Init | Theta:
        return Theta(server.theta) if bool(server.is_started) else Init(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Init | Theta, memory: FedNLPPMemory
    ) -> tuple[Start | FedNLPPUpdate, FedNLPPMemory]:
        if isinstance(sent, Init):
            hessian = memory.estimate if self.start == "hessian" else memory.estimate.new_zeros(0)
            return Start(hessian, memory.error, memory.target), memory
        learnt = self.learn(problem, task, sent.theta, memory.estimate)
        error = packed_norm(learnt.hessian - learnt.estimate, len(sent.theta))
        target = _target(learnt.estimate, error, sent.theta, client_gradient(problem, task, sent.theta))
        update = FedNLPPUpdate(learnt.code, error - memory.error, target - memory.target)
        return update, FedNLPPMemory(learnt.estimate, error, target)

    def server_step(
        self, server: FedNLPPServer, replies: Replies[Start | FedNLPPUpdate], cohort: Cohort
    ) -> ServerStep[FedNLPPServer]:
        n = len(server.theta)
        if replies.kind is Start:
            known = self.first_known(server.known, replies, cohort)
            error_total = server.error_total + float(replies.scalars("error").sum())
            target_total = replies.combine("target", torch.ones(len(replies)))
        else:  # of a client that was not there in round 0 only changes would be known
            usable, clients = included(server.known, replies, cohort.clients)
            if not clients.shape[0]:
                return ServerStep(server, Status.HOLD)
            known = self.next_known(server.known, usable, cohort._replace(clients=clients), n)
            error_total = server.error_total + float(usable.scalars("error_change").sum())
            target_total = server.target_total + usable.combine("target_change", torch.ones(len(usable)))
        n_known = known.clients.sum()
        shift = (error_total / n_known).clamp(min=0.0)
        eye = torch.eye(n, dtype=shift.dtype, device=shift.device)
        theta = positive_solution(unpacked(known.mean(), n) + shift * eye, target_total / n_known)
        changed = FedNLPPServer(theta, known, error_total, target_total, torch.tensor(True))
        return ServerStep(changed, Status.NEXT, {"shift": float(shift)})

    def uplink_bits(self, reply: Start | FedNLPPUpdate) -> int:
        if isinstance(reply, Start):
            return super().uplink_bits(reply)
        n, float_bits = len(reply.target_change), 8 * reply.target_change.element_size()
        return (n + 1) * float_bits + self.code_bits(n, float_bits)

    def passes(self, sent: Init | Theta) -> float:
        return 1.0 + hessian_passes(sent.theta)


def _target(estimate: Tensor, error: Tensor, theta: Tensor, gradient: Tensor) -> Tensor:
    return unpacked(estimate, len(theta)) @ theta + error * theta - gradient

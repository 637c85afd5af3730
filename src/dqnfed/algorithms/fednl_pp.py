"""FedNL-PP: FedNL for cohorts that change from round to round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.hessian_learning import Begin, HessianLearner
from dqnfed.core.algorithm import Cohort, ServerStep, Status, Theta
from dqnfed.core.curvature import client_gradient, client_hessian, hessian_passes
from dqnfed.core.problem import Problem, Task
from dqnfed.maths.compressors import Code, mean_expanded
from dqnfed.maths.symmetric import n_packed, packed, packed_norm, positive_solution, unpacked


class FedNLPPServer(NamedTuple):
    theta: Tensor  # [n]
    hessian: Tensor  # [T] the mean of ALL clients' estimates
    shift: Tensor  # [] the mean of all clients' errors
    target: Tensor  # [n] the mean of all clients' v_k
    has_begun: Tensor  # [] bool


class FedNLPPMemory(NamedTuple):
    estimate: Tensor  # [T]
    error: Tensor  # [] l_k = ||Hessian - estimate||_F, at the last model it saw
    target: Tensor  # [n] v_k = (estimate + l_k I) w_k - gradient(w_k), w_k the last model it saw


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

    Client: keeps estimate, error l_k and v_k = (estimate + l_k I) w_k - gradient(w_k) of the last model w_k it saw;
    when sampled it renews all three at theta and sends the compressed Hessian difference and the changes of l_k and
    v_k. No local training: lr, epochs and batch_size are not used.

    Server: keeps the means over all clients; theta = (H + l I)^-1 v. Only regularisation, no projection, exists.

    State: client, n (n + 1) / 2 + n + 1 floats; server, as many and theta.

    Payload: n + |S| + 1 floats up, n down. In round 0 everybody sends l_k and v_k (and its Hessian) at the start
    model.

    Evaluation: the global model.

    Differences: none; round 0, in which everybody takes part, is the paper's initialisation and its first model
    update.

    Reference: arXiv 2106.02969.

    Curvature: exact Hessian.
    """

    Server: ClassVar[type] = FedNLPPServer
    Memory: ClassVar[type] = FedNLPPMemory
    Sent: ClassVar[tuple[type, ...]] = (Begin, Theta)
    Update: ClassVar[tuple[type, ...]] = (Start, FedNLPPUpdate)
    own_name: ClassVar[str] = "FedNL-PP"

    def init_server(self, problem: Problem, n_clients: int) -> FedNLPPServer:
        theta = problem.theta0.clone()
        hessian = theta.new_zeros(n_packed(len(theta)))
        return FedNLPPServer(theta, hessian, theta.new_zeros(()), torch.zeros_like(theta), torch.tensor(False))

    def init_memory(self, problem: Problem, task: Task) -> FedNLPPMemory:
        estimate, theta = self.first_estimate(problem, task), problem.theta0
        error = packed_norm(packed(client_hessian(problem, task, theta)) - estimate, len(theta))
        return FedNLPPMemory(estimate, error, _target(estimate, error, theta, client_gradient(problem, task, theta)))

    def cohort(self, server: FedNLPPServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return sampled if bool(server.has_begun) else torch.arange(n_clients)

    def send(self, server: FedNLPPServer) -> Begin | Theta:
        return Theta(server.theta) if bool(server.has_begun) else Begin(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Begin | Theta, memory: FedNLPPMemory
    ) -> tuple[Start | FedNLPPUpdate, FedNLPPMemory]:
        if isinstance(sent, Begin):
            hessian = memory.estimate if self.start == "hessian" else memory.estimate.new_zeros(0)
            return Start(hessian, memory.error, memory.target), memory
        learnt = self.learn(problem, task, sent.theta, memory.estimate)
        error = packed_norm(learnt.hessian - learnt.estimate, len(sent.theta))
        target = _target(learnt.estimate, error, sent.theta, client_gradient(problem, task, sent.theta))
        update = FedNLPPUpdate(learnt.code, error - memory.error, target - memory.target)
        return update, FedNLPPMemory(learnt.estimate, error, target)

    def server_step(
        self, server: FedNLPPServer, updates: Start | FedNLPPUpdate, cohort: Cohort
    ) -> ServerStep[FedNLPPServer]:
        n, n_clients = len(server.theta), cohort.n_clients
        if isinstance(updates, Start):
            if len(cohort.clients) < n_clients:
                return ServerStep(server, Status.HOLD)
            hessian = updates.hessian.mean(0) if self.start == "hessian" else server.hessian
            shift, target = updates.error.mean(), updates.target.mean(0)
        else:
            how = self.how(n)
            hessian = server.hessian + self.learning_rate(how) * mean_expanded(how, updates.code, n_clients)
            shift = server.shift + updates.error_change.sum() / n_clients
            target = server.target + updates.target_change.sum(0) / n_clients
        eye = torch.eye(n, dtype=shift.dtype, device=shift.device)
        theta = positive_solution(unpacked(hessian, n) + shift.clamp(min=0.0) * eye, target)
        return ServerStep(
            FedNLPPServer(theta, hessian, shift, target, torch.tensor(True)), Status.NEXT, {"shift": float(shift)}
        )

    def uplink_bits(self, updates: Start | FedNLPPUpdate) -> int:
        if isinstance(updates, Start):
            return super().uplink_bits(updates)
        n, float_bits = updates.target_change.shape[1], 8 * updates.target_change.element_size()
        return (n + 1) * float_bits + self.code_bits(n, float_bits)

    def passes(self, sent: Begin | Theta) -> float:
        return 1.0 + hessian_passes(sent.theta)


def _target(estimate: Tensor, error: Tensor, theta: Tensor, gradient: Tensor) -> Tensor:
    return unpacked(estimate, len(theta)) @ theta + error * theta - gradient

"""FedNL-CR: FedNL with cubic regularisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.hessian_learning import NEEDS, HessianLearner, Init, Known
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Status, Theta, check_range
from dqnfed.core.curvature import LinearProblem, client_gradient, client_hessian, hessian_passes, log_full_participation
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.compressors import Code
from dqnfed.maths.cubic import cubic_step
from dqnfed.maths.symmetric import unpacked

LOGISTIC_THIRD_DERIVATIVE = 1.0 / (6.0 * 3.0**0.5)  # the largest of log(1 + e^-z)


class FedNLCRServer(NamedTuple):
    theta: Tensor  # [n]
    known: Known  # of the clients' estimates
    lipschitz: Tensor  # [] M, of the mean Hessian
    is_started: Tensor  # [] bool


class FedNLCRMemory(NamedTuple):
    estimate: Tensor  # [T]


class Start(NamedTuple):
    hessian: Tensor  # [T], or [0] with start = "zero"
    lipschitz: Tensor  # [] of the client's Hessian


class FedNLCRUpdate(NamedTuple):
    gradient: Tensor  # [n]
    code: Code
    error: Tensor  # []


@dataclass(frozen=True, kw_only=True)
class FedNLCR(HessianLearner[FedNLCRServer, FedNLCRMemory, Start | FedNLCRUpdate]):
    """FedNL with cubic regularisation (Safaryan et al., ICML 2022, Algorithm 4).

    Objective: the mean of the clients' losses, convex; converges from any start.

    Client: as FedNL with `regularisation`. No local training: lr, epochs and batch_size are not used.

    Server: adds the minimiser h of g'h + h'(H + mean l_k I)h / 2 + M ||h||^3 / 6, found from its scalar secular
    equation.

    State: as FedNL, and M.

    Payload: n + |S| + 1 floats up, n down; M_k (one float) and, with `start = "hessian"`, the Hessian in a first
    phase.

    Evaluation: the global model.

    Differences: none from the paper. The authors' Python code updates the last client's estimate only, mixes r and
    r^2 in the secular equation and projects with the transposed eigenvectors; none of that is here.

    Reference: arXiv 2106.02969.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=FedNLCRServer,
        memory=FedNLCRMemory,
        messages=(Init, Theta),
        replies=(Start, FedNLCRUpdate),
        needs=NEEDS,
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )
    own_name: ClassVar[str] = "FedNL-CR"

    start: str = "zero"
    lipschitz: float | None = None  # M, > 0; None: mean ||a||^3 / (6 sqrt 3) over the rows a of a linear model, the
    # logistic bound; for other models how much the Hessian changes over a unit step along the gradient

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lipschitz is not None:
            check_range(self, "lipschitz", low=0.0, open_low=True)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        log_full_participation("fednl-cr", n_clients, cohort_size)
        return super().prepare(problem, n_clients, cohort_size)

    def init_server(self, problem: Problem, n_clients: int) -> FedNLCRServer:
        theta = problem.theta0.clone()
        known = self.none_known(problem, n_clients)
        return FedNLCRServer(theta, known, theta.new_zeros(()), torch.tensor(False))

    def init_memory(self, problem: Problem, task: Task) -> FedNLCRMemory:
        return FedNLCRMemory(self.first_estimate(problem, task))

    def select(self, server: FedNLCRServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return torch.arange(n_clients)

    def send(self, server: FedNLCRServer) -> Init | Theta:
        return Theta(server.theta) if bool(server.is_started) else Init(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Init | Theta, memory: FedNLCRMemory
    ) -> tuple[Start | FedNLCRUpdate, FedNLCRMemory]:
        if isinstance(sent, Init):
            hessian = memory.estimate if self.start == "hessian" else memory.estimate.new_zeros(0)
            return Start(hessian, self._lipschitz(problem, task, sent.theta)), memory
        learnt = self.learn(problem, task, sent.theta, memory.estimate)
        update = FedNLCRUpdate(client_gradient(problem, task, sent.theta), learnt.code, learnt.error)
        return update, FedNLCRMemory(learnt.estimate)

    def _lipschitz(self, problem: Problem, task: Task, theta: Tensor) -> Tensor:
        if self.lipschitz is not None:
            return torch.full_like(theta[0], self.lipschitz)
        if not isinstance(problem, LinearProblem):
            gradient = client_gradient(problem, task, theta)
            moved = theta - gradient / gradient.norm().clamp(min=torch.finfo(theta.dtype).tiny)
            change = client_hessian(problem, task, moved) - client_hessian(problem, task, theta)
            size: Tensor = torch.linalg.vector_norm(change)
            return size
        cubes = task.inputs.to(theta.dtype).square().sum(-1).pow(1.5)
        bound: Tensor = LOGISTIC_THIRD_DERIVATIVE * (cubes * task.mask).sum() / task.mask.sum().clamp(min=1)
        return bound

    def server_step(
        self, server: FedNLCRServer, replies: Replies[Start | FedNLCRUpdate], cohort: Cohort
    ) -> ServerStep[FedNLCRServer]:
        if replies.kind is Start:
            known = self.first_known(server.known, replies, cohort)
            lipschitz = server.theta.new_tensor(float(replies.scalars("lipschitz").mean()))
            return ServerStep(FedNLCRServer(server.theta, known, lipschitz, torch.tensor(True)), Status.AGAIN)
        n, shift = len(server.theta), float(replies.scalars("error").mean())
        hessian = unpacked(server.known.mean(), n)
        curvature = hessian + shift * torch.eye(n, dtype=hessian.dtype, device=hessian.device)
        found = cubic_step(curvature, replies.mean("gradient"), float(server.lipschitz))
        known = self.next_known(server.known, replies, cohort, n)
        changed = server._replace(theta=server.theta - found.step, known=known)
        return ServerStep(changed, Status.NEXT, {"shift": shift, "radius": found.radius})

    def uplink_bits(self, reply: Start | FedNLCRUpdate) -> int:
        if isinstance(reply, Start):
            return super().uplink_bits(reply)
        n, float_bits = len(reply.gradient), 8 * reply.gradient.element_size()
        return (n + 1) * float_bits + self.code_bits(n, float_bits)

    def passes(self, sent: Init | Theta) -> float:
        return 1.0 + hessian_passes(sent.theta)

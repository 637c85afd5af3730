"""FedNL: Newton's method with Hessians learnt from compressed differences."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.hessian_learning import NEEDS, HessianLearner, Init, Known
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Status, Theta, check_choice, check_range, check_used
from dqnfed.core.curvature import client_gradient, hessian_passes, log_full_participation
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.compressors import Code
from dqnfed.maths.symmetric import positive_solution, projected_solution, unpacked

MIN_MU = 1e-8  # for problems without a ridge


class FedNLServer(NamedTuple):
    theta: Tensor  # [n]
    known: Known  # of the clients' estimates
    is_started: Tensor  # [] bool


class FedNLMemory(NamedTuple):
    estimate: Tensor  # [T] upper triangle


class Start(NamedTuple):
    hessian: Tensor  # [T]


class FedNLUpdate(NamedTuple):
    gradient: Tensor  # [n]
    code: Code  # the compressed difference between the Hessian and its estimate
    error: Tensor  # [] its Frobenius norm before compression; [0] with step = "projection", which does not need it


@dataclass(frozen=True, kw_only=True)
class FedNL(HessianLearner[FedNLServer, FedNLMemory, Start | FedNLUpdate]):
    """Federated Newton Learn (Safaryan, Islamov, Qian & Richtarik, ICML 2022, Algorithm 1).

    Objective: the mean of the clients' losses, strongly convex, with Lipschitz Hessians. The theory is local: a
    poor start may diverge with `step = "projection"` (Top-n on a1a from zero does); `fednl-ls` and `fednl-cr` do
    not.

    Client: compresses D_k = Hessian - estimate into S_k, sends gradient, S_k and, for `regularisation`, l_k =
    ||D_k||_F; moves its estimate by alpha S_k. No local training: lr, epochs and batch_size are not used.

    Server: `projection` (the paper's Option 1) subtracts P_mu(H)^-1 g, eigenvalues raised to mu; `regularisation`
    (Option 2) subtracts (H + mean l_k I)^-1 g, a matrix that dominates the true Hessian. Then H moves by alpha mean
    S_k: the step uses the estimate of the round before.

    State: client, n (n + 1) / 2 floats; server, theta and as many.

    Payload: n + |S| (+ 1) floats up with |S| = R (n + 1) for rank and k values with k indices for top and random, n
    down; `start = "hessian"` sends n (n + 1) / 2 once, in a first phase.

    Evaluation: the global model.

    Differences: none from the paper. Unlike the authors' Python code, l_k is the Frobenius norm in every variant,
    projection uses the symmetric eigensolver, and index bits are counted.

    Reference: arXiv 2106.02969.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=FedNLServer,
        memory=FedNLMemory,
        messages=(Init, Theta),
        replies=(Start, FedNLUpdate),
        needs=NEEDS,
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    step: str = "projection"  # projection (Option 1) | regularisation (Option 2)
    mu: float | None = None  # smallest eigenvalue after projection, > 0; None: the problem's ridge

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "step", ("projection", "regularisation"))
        if self.mu is not None:
            check_range(self, "mu", low=0.0, open_low=True)
        check_used(self, "mu", used=self.step == "projection", why='with `step = "regularisation"`')
        if self.step == "projection" and self.start == "zero":
            raise ValueError(
                'FedNL: `step = "projection"` with `start = "zero"` makes the first step gradient / mu: it diverges. '
                'Use `start = "hessian"`, `step = "regularisation"`, or fednl-ls.'
            )

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        log_full_participation("fednl", n_clients, cohort_size)
        prepared = super().prepare(problem, n_clients, cohort_size)
        has_floor = self.mu is not None or self.step == "regularisation"
        return prepared if has_floor else replace(prepared, mu=smallest_eigenvalue(problem))

    def init_server(self, problem: Problem, n_clients: int) -> FedNLServer:
        known = self.none_known(problem, n_clients)
        return FedNLServer(problem.theta0.clone(), known, torch.tensor(self.start == "zero"))

    def init_memory(self, problem: Problem, task: Task) -> FedNLMemory:
        return FedNLMemory(self.first_estimate(problem, task))

    def select(self, server: FedNLServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return torch.arange(n_clients)

    def send(self, server: FedNLServer) -> Init | Theta:
        return Theta(server.theta) if bool(server.is_started) else Init(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Init | Theta, memory: FedNLMemory
    ) -> tuple[Start | FedNLUpdate, FedNLMemory]:
        if isinstance(sent, Init):
            return Start(memory.estimate), memory
        learnt = self.learn(problem, task, sent.theta, memory.estimate)
        error = learnt.error if self.step == "regularisation" else learnt.error.new_zeros(0)
        return FedNLUpdate(client_gradient(problem, task, sent.theta), learnt.code, error), FedNLMemory(learnt.estimate)

    def server_step(
        self, server: FedNLServer, replies: Replies[Start | FedNLUpdate], cohort: Cohort
    ) -> ServerStep[FedNLServer]:
        if replies.kind is Start:
            known = self.first_known(server.known, replies, cohort)
            return ServerStep(FedNLServer(server.theta, known, torch.tensor(True)), Status.AGAIN)
        n = len(server.theta)
        gradient, hessian = replies.mean("gradient"), unpacked(server.known.mean(), n)
        if self.step == "projection":
            shift, step = 0.0, projected_solution(hessian, gradient, self.mu or MIN_MU)
        else:
            shift = float(replies.scalars("error").mean())
            step = positive_solution(
                hessian + shift * torch.eye(n, dtype=hessian.dtype, device=hessian.device), gradient
            )
        known = self.next_known(server.known, replies, cohort, n)
        return ServerStep(FedNLServer(server.theta - step, known, server.is_started), Status.NEXT, {"shift": shift})

    def uplink_bits(self, reply: Start | FedNLUpdate) -> int:
        if isinstance(reply, Start):
            return super().uplink_bits(reply)
        n, float_bits = len(reply.gradient), 8 * reply.gradient.element_size()
        return (n + reply.error.numel()) * float_bits + self.code_bits(n, float_bits)

    def passes(self, sent: Init | Theta) -> float:
        return hessian_passes(sent.theta) + (0.0 if isinstance(sent, Init) else 1.0)


def smallest_eigenvalue(problem: Problem) -> float:
    """Return the curvature that the problem's ridge guarantees, or a tiny one where there is none."""
    return max(problem.ridge, MIN_MU)

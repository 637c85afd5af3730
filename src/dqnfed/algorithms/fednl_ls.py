"""FedNL-LS: FedNL with a line search, so that it converges from any start."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from dqnfed.algorithms.backtracking import Search, Trial, TrialLoss, after_trial, new_search, no_search
from dqnfed.algorithms.fednl import MIN_MU, smallest_eigenvalue
from dqnfed.algorithms.hessian_learning import NEEDS, HessianLearner, Init, Known
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Status, Theta, check_range
from dqnfed.core.curvature import LOSS_PASSES, client_gradient, hessian_passes, log_full_participation
from dqnfed.core.gradients import client_loss
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.compressors import Code
from dqnfed.maths.symmetric import projected_solution, unpacked


class FedNLLSServer(NamedTuple):
    theta: Tensor  # [n]
    known: Known  # of the clients' estimates
    is_started: Tensor  # [] bool
    search: Search


class FedNLLSMemory(NamedTuple):
    estimate: Tensor  # [T]


class Start(NamedTuple):
    hessian: Tensor  # [T]


class FedNLLSUpdate(NamedTuple):
    gradient: Tensor  # [n]
    code: Code
    loss: Tensor  # []


@dataclass(frozen=True, kw_only=True)
class FedNLLS(HessianLearner[FedNLLSServer, FedNLLSMemory, Start | FedNLLSUpdate | TrialLoss]):
    """FedNL with backtracking line search (Safaryan et al., ICML 2022, Algorithm 3).

    Objective: the mean of the clients' losses, strongly convex; converges from any start.

    Client: as FedNL; then its loss at every trial. No local training: lr, epochs and batch_size are not used.

    Server: p = P_mu(H)^-1 g; the first of the lengths 1, b, b^2, ... at which the mean loss falls by `sufficient`
    times its first-order decrease. Then H moves by alpha mean S_k.

    State: as FedNL, and the search under way.

    Payload: FedNL's, one float for the loss, and one float more in each trial (a phase of its own).

    Evaluation: the global model.

    Differences: none. `sufficient` must be below 1/2, or the unit step is refused near the optimum (the authors'
    Python code sits on 1/2); after 60 failed trials the model stays for this round.

    Reference: arXiv 2106.02969, c = 0.49 and b = 0.5 from arXiv 2410.08760.

    Curvature: exact Hessian.
    """

    info: ClassVar[Info] = Info(
        server=FedNLLSServer,
        memory=FedNLLSMemory,
        messages=(Init, Theta, Trial),
        replies=(Start, FedNLLSUpdate, TrialLoss),
        needs=NEEDS,
        nan_ok_fields=("trial_loss",),
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )
    own_name: ClassVar[str] = "FedNL-LS"

    start: str = "zero"
    mu: float | None = None  # smallest eigenvalue after projection, > 0; None: the problem's ridge
    sufficient: float = 0.49  # share of the first-order decrease that a trial must reach, in (0, 1/2)
    shrink: float = 0.5  # factor between trials, in (0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu is not None:
            check_range(self, "mu", low=0.0, open_low=True)
        check_range(self, "sufficient", low=0.0, high=0.5, open_low=True, open_high=True)
        check_range(self, "shrink", low=0.0, high=1.0, open_low=True, open_high=True)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        log_full_participation("fednl-ls", n_clients, cohort_size)
        prepared = super().prepare(problem, n_clients, cohort_size)
        return prepared if self.mu is not None else replace(prepared, mu=smallest_eigenvalue(problem))

    def init_server(self, problem: Problem, n_clients: int) -> FedNLLSServer:
        theta = problem.theta0.clone()
        known = self.none_known(problem, n_clients)
        return FedNLLSServer(theta, known, torch.tensor(self.start == "zero"), no_search(theta))

    def init_memory(self, problem: Problem, task: Task) -> FedNLLSMemory:
        return FedNLLSMemory(self.first_estimate(problem, task))

    def select(self, server: FedNLLSServer, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        return torch.arange(n_clients)

    def send(self, server: FedNLLSServer) -> Init | Theta | Trial:
        if not bool(server.is_started):
            return Init(server.theta)
        if server.search.is_on:
            return Trial(server.theta - server.search.length * server.search.step)
        return Theta(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Init | Theta | Trial, memory: FedNLLSMemory
    ) -> tuple[Start | FedNLLSUpdate | TrialLoss, FedNLLSMemory]:
        if isinstance(sent, Init):
            return Start(memory.estimate), memory
        if isinstance(sent, Trial):
            return TrialLoss(client_loss(problem, sent.theta, task)), memory
        learnt = self.learn(problem, task, sent.theta, memory.estimate)
        gradient, loss = client_gradient(problem, task, sent.theta), client_loss(problem, sent.theta, task)
        return FedNLLSUpdate(gradient, learnt.code, loss), FedNLLSMemory(learnt.estimate)

    def server_step(
        self, server: FedNLLSServer, replies: Replies[Start | FedNLLSUpdate | TrialLoss], cohort: Cohort
    ) -> ServerStep[FedNLLSServer]:
        if replies.kind is Start:
            known = self.first_known(server.known, replies, cohort)
            return ServerStep(server._replace(known=known, is_started=torch.tensor(True)), Status.AGAIN)
        if replies.kind is TrialLoss:
            trial_loss = float(replies.scalars("trial_loss").mean())
            found = after_trial(server.theta, server.search, trial_loss, self.sufficient, self.shrink)
            return ServerStep(server._replace(theta=found.theta, search=found.search), found.status, found.diagnostics)
        n = len(server.theta)
        gradient = replies.mean("gradient")
        step = projected_solution(unpacked(server.known.mean(), n), gradient, self.mu or MIN_MU)
        known = self.next_known(server.known, replies, cohort, n)
        search = new_search(step, float(replies.scalars("loss").mean()), gradient @ step)
        return ServerStep(server._replace(known=known, search=search), Status.AGAIN)

    def uplink_bits(self, reply: Start | FedNLLSUpdate | TrialLoss) -> int:
        if not isinstance(reply, FedNLLSUpdate):
            return super().uplink_bits(reply)
        n, float_bits = len(reply.gradient), 8 * reply.gradient.element_size()
        return (n + 1) * float_bits + self.code_bits(n, float_bits)

    def passes(self, sent: Init | Theta | Trial) -> float:
        if isinstance(sent, Trial):
            return LOSS_PASSES
        return hessian_passes(sent.theta) + (0.0 if isinstance(sent, Init) else 1.0)

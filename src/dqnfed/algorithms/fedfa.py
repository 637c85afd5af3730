"""FedFa: clients weighted by the information in their accuracy and in how often they took part."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_range, check_used
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class FedFaServer(NamedTuple):
    theta: Tensor  # [n]
    velocity: Tensor  # [n]          running mean of the rounds' steps
    n_rounds: Tensor  # [n_clients]  rounds in which each client took part


class FedFaUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    score: Tensor  # []  training accuracy after the local work


@dataclass(frozen=True, kw_only=True)
class FedFa(LocalWork[FedFaServer, Empty, FedFaUpdate]):
    """FedFa: information-weighted averaging with momentum on both sides.

    Objective: the mean loss; clients with a low accuracy and frequent participants count more.

    Client: makes `epochs` of SGD from theta with momentum 0.9 by default; sends the update delta_k and its training
    accuracy A_k after that work.

    Server: a_k = -log2(A_k / sum A + 1e-6) and b_k = -log2(1 - f_k / sum f + 1e-5), f_k the rounds in which client k
    took part, this one included; each is normalised to sum 1 over the cohort, and w = (1 - beta) a + beta b. The step
    s = sum_k w_k delta_k enters the velocity v <- `server_momentum` v + (1 - `server_momentum`) s, and theta loses
    s + `lookahead` v, where `lookahead` is the round's local learning rate by default.

    State: theta, the velocity and one counter per client.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: No official code is known. Unlike the code behind the published records of this method, the velocity
    accelerates: there it is applied with the other sign and brakes; `lookahead = -lr` gives those steps. Information
    below zero (a share above one in the logarithm) counts as zero, scores below zero count as zero, and clients weigh
    alike where nobody has any information, so that one client, a cohort without a single hit and regression scores
    are all handled.

    Reference: Huang, Li, Wang, Du, Zhang & Huang, "Fairness and accuracy in horizontal federated learning", Information
    Sciences 2022 (arXiv 2012.10069).
    """

    info: ClassVar[Info] = Info(server=FedFaServer, replies=(FedFaUpdate,), needs=("sum",), clip_fields=("delta",))

    momentum: float = 0.9  # of the local SGD, in [0, 1)
    beta: float = 0.5  # weight of the participation counts, in [0, 1]; the accuracies have 1 - beta
    server_momentum: float = 0.5  # in [0, 1)
    lookahead: float | None = None  # multiple of the velocity that is added to the step; None: the local learning rate

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "beta", low=0.0, high=1.0)
        check_range(self, "server_momentum", low=0.0, high=1.0, open_high=True)
        if self.lookahead is not None:
            check_range(self, "lookahead", low=-inf, high=inf, open_low=True, open_high=True)
        check_used(self, "server_momentum", used=self.lookahead != 0, why="with lookahead = 0: no velocity is added")

    def init_server(self, problem: Problem, n_clients: int) -> FedFaServer:
        theta = problem.theta0.clone()
        return FedFaServer(theta, torch.zeros_like(theta), torch.zeros(n_clients, dtype=torch.long))

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedFaUpdate, Empty]:
        local = self.local_sgd(problem, task, sent.theta)
        score = problem.score(problem.predict(local, task.inputs), task.targets, task.mask)
        return FedFaUpdate(sent.theta - local, score), memory

    def server_step(
        self, server: FedFaServer, replies: Replies[FedFaUpdate], cohort: Cohort
    ) -> ServerStep[FedFaServer]:
        n_rounds = server.n_rounds.clone()
        n_rounds[cohort.clients] += 1
        scores, counts = torch.from_numpy(replies.scalars("score")), n_rounds[cohort.clients].double()
        low_accuracy = -torch.log2(_shares(scores) + 1e-6)
        frequency = -torch.log2(1.0 - _shares(counts) + 1e-5)
        weights = (1.0 - self.beta) * _shares(low_accuracy) + self.beta * _shares(frequency)
        step = replies.combine("delta", weights)
        velocity = self.server_momentum * server.velocity + (1.0 - self.server_momentum) * step
        lookahead = self.lr_at(cohort.round) if self.lookahead is None else self.lookahead
        theta = server.theta - (step + lookahead * velocity)
        return ServerStep(FedFaServer(theta, velocity, n_rounds), diagnostics={"largest_weight": float(weights.max())})


def _shares(values: Tensor) -> Tensor:
    positive = values.clamp(min=0.0)
    total = positive.sum()
    return positive / total if bool(total > 0) else torch.full_like(values, 1.0 / len(values))

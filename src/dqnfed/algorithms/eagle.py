"""EAGLE: an equal loss gap to what every client reaches alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.reweighted import Reweighted, spread_weights
from dqnfed.core.algorithm import Cohort, Info, ServerStep, Status, Theta, check_range
from dqnfed.core.gradients import client_loss
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class EagleServer(NamedTuple):
    theta: Tensor  # [n]
    start: Tensor  # [n] the start model, from which clients train alone
    asks_alone: Tensor  # [] whether the next message asks clients to train alone
    alone_round: Tensor  # [] the last round in which they were asked to; -1: none


class EagleMemory(NamedTuple):
    best: Tensor  # [] the smallest training loss that the client has reached alone; NaN: it has not trained alone yet


class TrainAlone(NamedTuple):
    """The message to clients that have not trained alone yet."""

    start: Tensor  # [n]


class TrainedAlone(NamedTuple):
    done: Tensor  # [] 1: the client has trained alone


class LossGapUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    gap: Tensor  # [] training loss at the theta that was sent minus the smallest reached alone; NaN: not known yet


@dataclass(frozen=True, kw_only=True)
class Eagle(Reweighted[EagleServer, EagleMemory, LossGapUpdate | TrainedAlone]):
    r"""Loss gap parity (Erraji, Perrot & Bellet, 2026): clients as far as each other from their own best.

    Objective: :math:`\min \sum_k p_k F_k + \lambda \sum_k p_k (r_k - \bar r)^2` with the gap :math:`r_k = F_k - F_k^*`,
    the smallest loss F_k^* that client k reaches alone, and :math:`\bar r = \sum_k p_k r_k`. A client with hard data
    has a large loss, but not a large gap.

    Client: in its first round it trains alone from the start model, `alone_rounds` times the local work of a round, and
    keeps the smallest training loss on the way. In every round it sends the gap r_k at theta and the update of `epochs`
    of SGD from theta; its losses stay with it.

    Server: subtracts server_lr times sum_k w_k delta_k, where w_k = p_k (1 + 2 lam (r_k - mean r)); a negative weight
    counts as 0 and the others are scaled to the sum 1. The mean, standard deviation and maximum of the cohort's gaps
    are among the diagnostics.

    State: client, its best loss alone; server, theta and the start model.

    Payload: n + 1 floats up, n down; in a round with a newcomer 2n + 3 up, 3n down, in three phases.

    Evaluation: the global model.

    Differences: no code was found; the weights are derived from the stated objective, and that negative ones count as 0
    is ours. The paper's stopping rule of training alone is not known to us: here it is a number of rounds, each with
    this round's mini-batches. The server learns from a missing gap that a client is new, and then asks the whole cohort
    to train alone; those who did before keep the smaller loss. lam = 0 is FedAvg to the bit.

    Reference: Erraji, Perrot & Bellet, loss gap parity in federated learning, arXiv 2603.29818, 2026.
    """

    info: ClassVar[Info] = Info(
        server=EagleServer,
        memory=EagleMemory,
        messages=(Theta, TrainAlone),
        replies=(LossGapUpdate, TrainedAlone),
        needs=("sum",),
        clip_fields=("delta",),
        bounded_fields=("gap",),
        nan_ok_fields=("gap",),
        theta_fields=("theta", "start"),
    )

    lam: float = 0.1  # weight of the penalty, >= 0; 0: FedAvg
    alone_rounds: int = 20  # local trainings of a client alone, each as long as in a round, >= 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "lam", low=0.0)
        check_range(self, "alone_rounds", low=1)

    @property
    def scalar(self) -> str:
        return "gap"

    def init_server(self, problem: Problem, n_clients: int) -> EagleServer:
        theta0 = problem.theta0
        return EagleServer(theta0.clone(), theta0.clone(), torch.tensor(False), torch.tensor(-1))

    def init_memory(self, problem: Problem, task: Task) -> EagleMemory:
        return EagleMemory(problem.theta0.new_tensor(torch.nan))

    def send(self, server: EagleServer) -> Theta | TrainAlone:
        return TrainAlone(server.start) if bool(server.asks_alone) else Theta(server.theta)

    def client_step(
        self, problem: Problem, task: Task, sent: Theta | TrainAlone, memory: EagleMemory
    ) -> tuple[LossGapUpdate | TrainedAlone, EagleMemory]:
        if isinstance(sent, TrainAlone):
            best = torch.fmin(memory.best, self._best_alone(problem, task, sent.start))  # the number, if one is NaN
            return TrainedAlone(torch.ones_like(best)), EagleMemory(best)
        delta = sent.theta - self.local_sgd(problem, task, sent.theta)
        return LossGapUpdate(delta, client_loss(problem, sent.theta, task) - memory.best), memory

    def _best_alone(self, problem: Problem, task: Task, theta: Tensor) -> Tensor:
        """Return the smallest training loss of a client that trains on its own examples only."""
        best = client_loss(problem, theta, task)
        for _ in range(self.alone_rounds):
            theta = self.local_sgd(problem, task, theta)
            best = torch.fmin(best, client_loss(problem, theta, task))
        return best

    def server_step(
        self, server: EagleServer, replies: Replies[LossGapUpdate | TrainedAlone], cohort: Cohort
    ) -> ServerStep[EagleServer]:
        if replies.kind is TrainedAlone:
            return ServerStep(server._replace(asks_alone=torch.tensor(False)), Status.AGAIN)
        gaps = torch.from_numpy(replies.scalars("gap"))
        if bool(gaps.isnan().any()) and int(server.alone_round) != cohort.round:  # once a round: NaN may come again
            asked = server._replace(asks_alone=torch.tensor(True), alone_round=torch.tensor(cohort.round))
            return ServerStep(asked, Status.AGAIN)
        found = super().server_step(server, replies, cohort)
        known = gaps[~gaps.isnan()]
        spread = {"gap_mean": float(known.mean()), "gap_std": float(known.std(correction=0)), "gap_max": _max(known)}
        return found._replace(diagnostics=found.diagnostics | spread)

    def weights(
        self, losses: Tensor, shares: Tensor, server: EagleServer, cohort: Cohort
    ) -> tuple[Tensor, EagleServer]:
        gaps = torch.where(losses.isnan(), losses.nanmean(), losses).nan_to_num()
        return spread_weights(gaps, shares, self.lam), server

    def passes(self, sent: Theta | TrainAlone) -> float:
        return float(self.epochs * (self.alone_rounds if isinstance(sent, TrainAlone) else 1))


def _max(values: Tensor) -> float:
    return float(values.max()) if len(values) else float("nan")

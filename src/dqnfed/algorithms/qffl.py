"""q-FFL: clients with a larger loss count more, by the q-th power of their loss."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import client_weights
from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_choice, check_range, check_used
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies


class QFFLServer(NamedTuple):
    theta: Tensor  # [n]


class QFFLUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    loss: Tensor  # []  training loss at the theta that was sent


@dataclass(frozen=True, kw_only=True)
class QFFL(LocalWork[QFFLServer, Empty, QFFLUpdate]):
    """q-FFL, solved by q-FedAvg: fair resource allocation through powers of the losses.

    Objective: minimise sum_k p_k F_k^(q+1) / (q+1). q = 0 is the objective of FedAvg; a larger q evens out the losses,
    and in the limit only the largest one counts.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta (by default one full-batch
    step, which is q-FedSGD); sends the update delta_k and F_k.

    Server: with the pseudo-gradient g_k = delta_k / lr and L = 1 / lr of the round, theta loses
    sum_k p_k F_k^q g_k / sum_k p_k (q F_k^(q-1) ||g_k||^2 + L F_k^q). The denominator bounds the curvature of the
    objective, so there is no step size to tune. Powers are taken of F_k / max F, which cancels and cannot overflow.

    State: none beyond theta.

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: Unlike the paper, whose sampling by example counts makes plain sums right, clients are sampled
    uniformly and numerator and denominator carry the weights p_k; `weighting = "uniform"` gives the plain sums.
    Unlike the official code, the mini-batch order changes from epoch to epoch, losses below `floor` count as `floor`
    instead of having 1e-10 added (a vanishing loss with 0 < q < 1 would stop the round), and q = 0 equals FedAvg bit
    for bit.

    Reference: Li, Sanjabi, Beirami & Smith, "Fair resource allocation in federated learning", ICLR 2020.
    """

    info: ClassVar[Info] = Info(server=QFFLServer, replies=(QFFLUpdate,), needs=("sum",), clip_fields=("delta",))

    q: float = 1.0  # >= 0; 0 is FedAvg
    weighting: str = "examples"  # examples | uniform
    floor: float = 1e-8  # losses below this count as this, > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "q", low=0.0, high=inf, open_high=True)
        check_choice(self, "weighting", ("examples", "uniform"))
        check_range(self, "floor", low=0.0, open_low=True)
        check_used(self, "floor", used=self.q > 0, why="with q = 0, where the losses do not count")

    def init_server(self, problem: Problem, n_clients: int) -> QFFLServer:
        return QFFLServer(problem.theta0.clone())

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[QFFLUpdate, Empty]:
        delta = sent.theta - self.local_sgd(problem, task, sent.theta)
        return QFFLUpdate(delta, client_loss(problem, sent.theta, task)), memory

    def server_step(self, server: QFFLServer, replies: Replies[QFFLUpdate], cohort: Cohort) -> ServerStep[QFFLServer]:
        losses = torch.from_numpy(replies.scalars("loss")).clamp(min=self.floor)
        shares = client_weights(self.weighting, cohort)
        weights = shares * (losses / losses.max()) ** self.q
        # the denominator over L: g_k = delta_k / lr turns q ||g||^2 / F + L into L (1 + q ||delta||^2 / (lr F))
        squares = torch.from_numpy(replies.norms("delta")).square()
        curvature = 1.0 + self.q * squares / (self.lr_at(cohort.round) * losses)
        denominator = (weights * curvature).sum()
        shrink = float(weights.sum() / denominator)
        # over the sum of the shares, 1 but for rounding: so that q = 0 has FedAvg's weights to the bit
        step = replies.combine("delta", weights * (shares.sum() / denominator))
        largest = float(weights.max() / weights.sum())
        return ServerStep(QFFLServer(server.theta - step), diagnostics={"shrink": shrink, "largest_weight": largest})

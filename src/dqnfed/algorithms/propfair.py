"""PropFair: proportional fairness, by a logarithm in every client's loss."""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import FedAvg, FedAvgUpdate
from dqnfed.core.algorithm import Empty, Theta, check_range
from dqnfed.core.problem import Problem, Task


@dataclass(frozen=True, kw_only=True)
class PropFair(FedAvg):
    r"""Proportional fairness (Zhang et al., TMLR 2023): the sum of the logarithms of the clients' utilities.

    Objective: :math:`\max \sum_k p_k \log(M - F_k)`, M = `base` a loss that no client should exceed.

    Client: `epochs` of SGD from theta on the transformed loss of each batch, -log(1 - l / M), whose gradient is that of
    l over M - l; a batch with M - l < epsilon has l / M instead (with `huber`, l / epsilon). Sends its update.

    Server: theta - server_lr * sum_k p_k delta_k, as FedAvg.

    State: theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: none from the authors' code. As there the loss jumps at M - l = epsilon; with `huber` its slope does
    not. M = 2 is below ln 10, so training on ten classes starts with the plain loss over M. Rates are those of FedAvg
    over M: lr is to be tuned with M, and M -> infinity is FedAvg with lr / M. The ridge of a problem is inside l.

    Reference: Zhang, Malekmohammadi, Chen & Yu, Proportional Fairness in Federated Learning, TMLR 2023.
    """

    base: float = 2.0  # M, > 0
    epsilon: float = 0.2  # batches with a loss above base - epsilon have no logarithm, in (0, base)
    huber: bool = False  # whether they have the slope 1 / epsilon instead of 1 / base

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "base", low=0.0, high=inf, open_low=True, open_high=True)
        check_range(self, "epsilon", low=0.0, high=self.base, open_low=True, open_high=True)

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedAvgUpdate, Empty]:
        steep = self.epsilon if self.huber else self.base
        inherited = {f.name: getattr(problem, f.name) for f in fields(problem)}
        fair = ProportionalProblem(**inherited, base=self.base, epsilon=self.epsilon, steep=steep)
        return FedAvgUpdate(sent.theta - self.local_sgd(fair, task, sent.theta)), memory


@dataclass(frozen=True)
class ProportionalProblem(Problem):
    """A problem whose mean losses are transformed to minus the logarithm of what is left to `base`."""

    base: float = 1.0
    epsilon: float = 0.1
    steep: float = 1.0

    def loss(self, theta: Tensor, task: Task) -> Tensor:
        return proportional_loss(super().loss(theta, task), self.base, self.epsilon, self.steep)

    def batch_loss(self, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
        return proportional_loss(super().batch_loss(theta, task, batch), self.base, self.epsilon, self.steep)


def proportional_loss(loss: Tensor, base: float, epsilon: float, steep: float) -> Tensor:
    """Return -log(1 - loss / base) where base - loss >= epsilon, else loss / steep."""
    is_small = base - loss >= epsilon
    small = torch.where(is_small, loss, torch.zeros_like(loss))  # the branch that is not taken must stay finite
    return torch.where(is_small, -torch.log1p(-small / base), loss / steep)

"""Methods that weigh the clients' updates by one number of each: what they share."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import client_weights
from dqnfed.core.algorithm import Cohort, Empty, ServerStep, Theta, check_choice, check_range
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies

S = TypeVar("S", bound=tuple[Any, ...])
M = TypeVar("M", bound=tuple[Any, ...])
U = TypeVar("U", bound=tuple[Any, ...])


class ReweightedServer(NamedTuple):
    theta: Tensor  # [n]


class LossUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    loss: Tensor  # []  training loss at the theta that was sent


@dataclass(frozen=True, kw_only=True)
class Reweighted(LocalWork[S, M, U]):
    """A method whose step is a weighted sum of updates, the weights from one number a client: it needs sums alone.

    A subclass gives `weights`, and `scalar`, the field of the reply that they are made from. q-FFL and AFL do not stand
    on it: q-FFL's step needs the lengths of the updates and has no server rate, and AFL's weights are those of the
    round before, belong to clients whatever their examples, and its model is the mean of its iterates.
    """

    server_lr: float = 1.0  # > 0
    weighting: str = "examples"  # examples | uniform: the shares that the weights start from

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "server_lr", low=0.0, open_low=True)
        check_choice(self, "weighting", ("examples", "uniform"))

    @property
    def scalar(self) -> str:
        """The field of the reply that the weights are made from."""
        return "loss"

    @abstractmethod
    def weights(self, losses: Tensor, shares: Tensor, server: S, cohort: Cohort) -> tuple[Tensor, S]:
        """Return the weights of the updates [K], and the server's state with what it keeps about the clients.

        `losses` are the clients' numbers [K], float64 on the host; `shares` [K] are non-negative and sum to 1.
        """

    def init_server(self, problem: Problem, n_clients: int) -> S:
        return ReweightedServer(problem.theta0.clone())  # type: ignore[return-value]

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: M) -> tuple[U, M]:
        delta = sent.theta - self.local_sgd(problem, task, sent.theta)
        return LossUpdate(delta, client_loss(problem, sent.theta, task)), memory  # type: ignore[return-value]

    def server_step(self, server: S, replies: Replies[U], cohort: Cohort) -> ServerStep[S]:
        losses = torch.from_numpy(replies.scalars(self.scalar))
        weights, kept = self.weights(losses, client_weights(self.weighting, cohort), server, cohort)
        theta = kept.theta - self.server_lr * replies.combine("delta", weights)  # type: ignore[attr-defined]
        found = {"largest_weight": float(weights.max()), "weight_sum": float(weights.sum())}
        return ServerStep(kept._replace(theta=theta), diagnostics=found)  # type: ignore[attr-defined]


StatelessReweighted = Reweighted[ReweightedServer, Empty, LossUpdate]


def normalised(raw: Tensor, shares: Tensor) -> Tensor:
    """Return the weights scaled to the sum of the shares, negative ones as zero; the shares where all are zero.

    Raw weights that are the shares come back to the bit.
    """
    positive = raw.clamp(min=0.0)
    total = positive.sum()
    return positive * (shares.sum() / total) if bool(total > 0) else shares


def spread_weights(values: Tensor, shares: Tensor, strength: float) -> Tensor:
    """Return the slope of sum_k p_k v_k + strength sum_k p_k (v_k - mean)^2 by the values, as weights."""
    return normalised(shares * (1.0 + 2.0 * strength * (values - shares @ values)), shares)

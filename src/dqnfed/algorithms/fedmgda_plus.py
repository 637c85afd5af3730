"""FedMGDA+: the shortest vector in a part of the convex hull of the clients' unit updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.fedavg import client_weights
from dqnfed.core.algorithm import (
    RATE_SCHEDULE,
    Cohort,
    Empty,
    Info,
    ServerStep,
    Status,
    Theta,
    check_choice,
    check_range,
    check_used,
)
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.solvers import FloatArray, min_norm_box_weights, unit_gramian


class FedMGDAPlusServer(NamedTuple):
    theta: Tensor  # [n]


class FedMGDAPlusUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it


@dataclass(frozen=True, kw_only=True)
class FedMGDAPlus(LocalWork[FedMGDAPlusServer, Empty, FedMGDAPlusUpdate]):
    """FedMGDA+: MGDA on normalised updates, with weights held near a prior.

    Objective: Pareto stationarity of (F_1, ..., F_K) among weightings within `eps` of the prior.

    Client: makes `epochs` of SGD from theta; sends the update delta_k.

    Server: u_k = delta_k / ||delta_k||; w minimises ||sum_k w_k u_k||^2 over the simplex with |w_k - prior_k| <= eps;
    theta loses `server_lr` times sum_k w_k u_k. eps = 0 keeps the prior, eps = 1 is plain MGDA on unit vectors and
    alone guarantees that no client's loss rises to first order. The step has a length of at most `server_lr` however
    small the updates are, so `server_lr` is the delicate knob: by default it is the round's local learning rate;
    `server_lr_decay` shrinks it every round. With `rescale = "mean"` the step is multiplied by the length of the prior
    mean of the updates instead, as FedAvg's would be, and `server_lr` is 1 by default.

    State: none beyond theta.

    Payload: n floats up, n down.

    Evaluation: the global model.

    Differences: No official code is known; ports differ in the prior (example counts or uniform) and in the server's
    step (local learning rate, or 1), hence the fields. A client whose update is zero has no direction and gets weight
    0, and the prior is shared among the others.

    Reference: Hu, Shaloudegi, Zhang & Yu, "Federated learning meets multi-objective optimization", IEEE TNSE 2022.
    """

    info: ClassVar[Info] = Info(
        server=FedMGDAPlusServer, replies=(FedMGDAPlusUpdate,), needs=("gram",), clip_fields=("delta",)
    )

    eps: float = 0.1  # largest distance of a weight from its prior, in [0, 1]
    weighting: str = "examples"  # the prior: examples | uniform
    server_lr: float | None = None  # > 0; None: the local learning rate, or 1 with rescale = "mean"
    server_lr_decay: float = 1.0  # factor on the server's step every round, in (0, 1]
    rescale: str = "none"  # none | mean

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "eps", low=0.0, high=1.0)
        check_choice(self, "weighting", ("examples", "uniform"))
        if self.server_lr is not None:
            check_range(self, "server_lr", low=0.0, open_low=True)
        check_range(self, "server_lr_decay", low=0.0, high=1.0, open_low=True)
        check_choice(self, "rescale", ("none", "mean"))
        has_prior = self.eps < 1 or self.rescale == "mean"
        check_used(self, "weighting", used=has_prior, why='with eps = 1 and rescale = "none", where no prior is used')

    def unused(self) -> frozenset[str]:
        one_step = self.epochs == 1 and self.batch_size is None
        if one_step and self.server_lr is not None and self.rescale == "none":  # then lr is a factor of the updates
            return super().unused() | {"lr", *RATE_SCHEDULE}
        return super().unused()

    def init_server(self, problem: Problem, n_clients: int) -> FedMGDAPlusServer:
        return FedMGDAPlusServer(problem.theta0.clone())

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedMGDAPlusUpdate, Empty]:
        return FedMGDAPlusUpdate(sent.theta - self.local_sgd(problem, task, sent.theta)), memory

    def server_step(
        self, server: FedMGDAPlusServer, replies: Replies[FedMGDAPlusUpdate], cohort: Cohort
    ) -> ServerStep[FedMGDAPlusServer]:
        unit = unit_gramian(replies.gram("delta"))
        prior = client_weights(self.weighting, cohort).numpy() * unit.live
        if not prior.any():
            return ServerStep(server, Status.HOLD)
        prior = prior / prior.sum()
        lower, upper = np.clip(prior - self.eps, 0.0, 1.0), np.clip(prior + self.eps, 0.0, 1.0)
        weights = np.zeros_like(prior)
        live = unit.live
        weights[live] = min_norm_box_weights(unit.matrix[np.ix_(live, live)], lower[live], upper[live])
        direction = replies.combine("delta", weights / unit.lengths)
        diagnostics = {"norm": float(direction.norm())}
        if diagnostics["norm"] <= 10 * torch.finfo(direction.dtype).eps:  # Pareto-stationary for this cohort
            return ServerStep(server, Status.HOLD, diagnostics)
        length = self._step_length(replies, prior, cohort.round)
        return ServerStep(FedMGDAPlusServer(server.theta - length * direction), diagnostics=diagnostics)

    def _step_length(self, replies: Replies[FedMGDAPlusUpdate], prior: FloatArray, round: int) -> float:
        decay = self.server_lr_decay**round
        if self.rescale == "mean":
            return (self.server_lr or 1.0) * decay * float(replies.combine("delta", prior).norm())
        return (self.server_lr or self.lr_at(round)) * decay

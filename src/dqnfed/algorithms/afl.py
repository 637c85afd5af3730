"""AFL: the model that is best for the worst mixture of clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Theta, check_range
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.solvers import simplex_projection


class AFLServer(NamedTuple):
    theta: Tensor  # [n]          the last iterate
    average: Tensor  # [n]          mean of the iterates from round `average_from` on
    n_averaged: Tensor  # []           iterates in the average
    weights: Tensor  # [n_clients]  lambda, a point of the simplex; float64 on the host
    losses: Tensor  # [n_clients]  last known ones; NaN: not seen yet; float64 on the host


class AFLUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    loss: Tensor  # []  training loss at the theta that was sent


@dataclass(frozen=True, kw_only=True)
class AFL(LocalWork[AFLServer, Empty, AFLUpdate]):
    """AFL, agnostic federated learning: minimax over mixtures of clients.

    Objective: minimise over theta the maximum over lambda in the simplex of sum_k lambda_k F_k.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta (by default one full-batch
    gradient step, as in the paper); sends the update delta_k and F_k.

    Server: theta loses sum_k lambda_k delta_k; then lambda becomes the exact projection of lambda + `lambda_lr` F on
    the simplex. If m of C clients take part, the lambdas of those present are multiplied by C / m, but never to a sum
    above 1, and absent clients are represented by their last known losses.

    State: theta, the running mean of the iterates, and one lambda (1 / C at the start) and one loss per client.

    Payload: n + 1 floats up, n down.

    Evaluation: the averaged iterate, for which the guarantee holds; the last one is reported beside it. The average of
    a network's early iterates is a poor model: `average_from` leaves the rounds before it out.

    Differences: Unlike the paper, where everybody takes part, a cohort is sampled uniformly: the sum over those present
    is unbiased as long as they hold not more than their share of lambda, and otherwise a convex combination, since
    multiples of an update diverge; a client not seen yet counts with the mean of the known losses. Unlike the paper,
    theta is not projected on a ball, and clients may train for several steps. Unlike the widely used port, the
    projection sums to 1 ((1.8, 0.6) becomes (1, 0), not (1.1, 0)), lambda is used under every sampling scheme, and it
    belongs to the client, not to its place in the cohort.

    Reference: Mohri, Sivek & Suresh, "Agnostic federated learning", ICML 2019.
    """

    # no `clip_fields`: a client without a gradient still has a loss, and dropping it would hide that from lambda
    info: ClassVar[Info] = Info(
        server=AFLServer, replies=(AFLUpdate,), needs=("sum",), theta_fields=("theta", "average")
    )

    lambda_lr: float = 0.1  # step of the clients' weights, >= 0; 0 is uniform FedSGD
    average_from: int = 0  # first round whose result enters the average, >= 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "lambda_lr", low=0.0)
        check_range(self, "average_from", low=0)

    def init_server(self, problem: Problem, n_clients: int) -> AFLServer:
        return AFLServer(
            theta=problem.theta0.clone(),
            average=problem.theta0.clone(),
            n_averaged=torch.tensor(0),
            weights=torch.full((n_clients,), 1.0 / n_clients, dtype=torch.float64),
            losses=torch.full((n_clients,), torch.nan, dtype=torch.float64),
        )

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[AFLUpdate, Empty]:
        delta = sent.theta - self.local_sgd(problem, task, sent.theta)
        return AFLUpdate(delta, client_loss(problem, sent.theta, task)), memory

    def server_step(self, server: AFLServer, replies: Replies[AFLUpdate], cohort: Cohort) -> ServerStep[AFLServer]:
        losses = server.losses.index_copy(0, cohort.clients, torch.from_numpy(replies.scalars("loss")))
        present = server.weights[cohort.clients]
        factor = min(cohort.n_clients / len(present), 1.0 / max(float(present.sum()), 1e-300))
        theta = server.theta - replies.combine("delta", factor * present)
        raised = server.weights + self.lambda_lr * torch.where(losses.isnan(), losses.nanmean(), losses)
        weights = torch.from_numpy(simplex_projection(raised.numpy()))
        n_averaged = server.n_averaged + (1 if cohort.round >= self.average_from else 0)
        average = server.average + (theta - server.average) / n_averaged.clamp(min=1).to(theta.device)
        return ServerStep(
            AFLServer(theta, average, n_averaged, weights, losses), diagnostics={"largest_weight": float(weights.max())}
        )

    def models(self, server: AFLServer, memory: Empty) -> dict[str, Tensor]:
        return {"averaged": server.average, "global": server.theta}

"""FedFV: conflicts between clients' updates are projected away before they are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Status, Theta, check_range
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.gramian import combine, gramian
from dqnfed.maths.solvers import BoolArray, FloatArray

IntArray = NDArray[np.intp]


class FedFVServer(NamedTuple):
    theta: Tensor  # [n]
    history: Tensor  # [n_clients, n]  every client's last update; no rows if tau = 0
    last_round: Tensor  # [n_clients]     when it was sent; -1: never


class FedFVUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    loss: Tensor  # []  training loss at the theta that was sent


@dataclass(frozen=True, kw_only=True)
class FedFV(LocalWork[FedFVServer, Empty, FedFVUpdate]):
    """FedFV, federated fair averaging: updates are freed of conflicts before they are averaged.

    Objective: the mean loss, along steps that conflict with as few clients as possible.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta; sends the update delta_k
    and F_k.

    Server: sorts the clients by loss, ascending, and leaves the updates of the share `alpha` with the largest losses as
    they are. Every other update is projected off each original delta_j that it conflicts with (negative product), j in
    that order; the results are averaged. Then, for the rounds t - tau, ..., t - 1, oldest first, the stored updates of
    clients last seen in that round that conflict with the average are summed, and the average is projected off the sum.
    The step has the length of the plain mean of the updates.

    State: theta, and every client's last update and its round (C n floats; none if tau = 0).

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: None from the code behind the paper's experiments; unlike its successor, which counts the present
    round as one of the tau, only absent clients are external. If nothing is left of the average, which the code
    divides by its length, the model stays.

    Reference: Wang, Fan, Qi, Wen, Wang & Yu, "Federated learning with fair averaging", IJCAI 2021.
    """

    info: ClassVar[Info] = Info(
        server=FedFVServer, replies=(FedFVUpdate,), needs=("rows", "gram where tau = 0"), clip_fields=("delta",)
    )

    alpha: float = 0.1  # share of the clients, those with the largest losses, whose updates are kept, in [0, 1]
    tau: int = 1  # past rounds whose absent clients count, >= 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "alpha", low=0.0, high=1.0)
        check_range(self, "tau", low=0)

    @property
    def needs(self) -> str:
        return "rows" if self.tau else "gram"  # the history holds rows

    def init_server(self, problem: Problem, n_clients: int) -> FedFVServer:
        rows = n_clients if self.tau else 0
        history = problem.theta0.new_zeros(rows, problem.n_parameters)
        return FedFVServer(problem.theta0.clone(), history, torch.full((rows,), -1))

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedFVUpdate, Empty]:
        delta = sent.theta - self.local_sgd(problem, task, sent.theta)
        return FedFVUpdate(delta, client_loss(problem, sent.theta, task)), memory

    def server_step(
        self, server: FedFVServer, replies: Replies[FedFVUpdate], cohort: Cohort
    ) -> ServerStep[FedFVServer]:
        n_present = len(replies)
        server = self._remembered(server, replies, cohort)
        absent, ages = self._external(server, cohort)
        past = server.history[absent.to(server.history.device)]
        M = _stacked_gramian(replies, past)
        order = ascending_losses(replies.scalars("loss"), cohort.clients)
        kept = kept_clients(order, self.alpha)
        projected = internal_projection(M[:n_present, :n_present], kept, order)
        plain = np.append(np.full(n_present, 1.0 / n_present), np.zeros(len(past)))
        weights = np.append(projected.mean(axis=0), np.zeros(len(past)))
        for age in range(self.tau, 0, -1):
            weights = external_projection(M, weights, np.append(np.zeros(n_present, bool), ages == age))
        squared = float(weights @ M @ weights)
        if squared <= torch.finfo(server.theta.dtype).eps * float(M.diagonal()[:n_present].max()):
            return ServerStep(server, Status.HOLD)  # the projections left nothing but rounding
        weights = weights * np.sqrt(max(float(plain @ M @ plain), 0.0) / squared)
        step = replies.combine("delta", weights[:n_present])
        if len(past):
            step = step + combine(torch.from_numpy(weights[n_present:]), past)
        return ServerStep(
            server._replace(theta=server.theta - step),
            diagnostics={"n_kept": float(kept.sum()), "n_external": float(len(past))},
        )

    def _remembered(self, server: FedFVServer, replies: Replies[FedFVUpdate], cohort: Cohort) -> FedFVServer:
        if not self.tau:
            return server
        history = replies.put("delta", torch.arange(len(replies)), server.history, cohort.clients)
        last_round = server.last_round.index_fill(0, cohort.clients.to(server.last_round.device), cohort.round)
        return FedFVServer(server.theta, history, last_round)

    def _external(self, server: FedFVServer, cohort: Cohort) -> tuple[Tensor, FloatArray]:
        """Return the clients last seen one to tau rounds ago, and how long ago; nobody before round tau."""
        last_round = server.last_round.cpu()
        ages = cohort.round - last_round
        is_external = (last_round >= 0) & (ages >= 1) & (ages <= self.tau) & (cohort.round >= self.tau)
        absent = is_external.nonzero().flatten()
        return absent, ages[absent].double().numpy()


def ascending_losses(losses: FloatArray, clients: Tensor) -> IntArray:
    """Return the cohort's positions by loss in single precision, equal ones by client: rounding decides nothing."""
    return np.lexsort((clients.numpy(), losses.astype(np.float32)))


def kept_clients(order: IntArray, alpha: float) -> BoolArray:
    """Return which clients keep their updates: the last ones of the order by loss, nobody if alpha = 0."""
    kept = np.zeros(len(order), dtype=np.bool_)
    if alpha > 0:
        kept[order[ceil((len(order) - 1) * (1.0 - alpha)) :]] = True
    return kept


def internal_projection(M: FloatArray, kept: BoolArray, order: IntArray) -> FloatArray:
    """Return the projected updates' coefficients [K, K] in terms of the original ones, whose Gramian is M.

    Every update that is not kept is compared with the others in the given order and loses its part along each one that
    it conflicts with.
    """
    coefficients = np.eye(len(M))
    for j in order:
        products = coefficients @ M[:, j]
        conflicting = (products < 0.0) & ~kept
        conflicting[j] = False
        if M[j, j] > 0.0:
            coefficients[conflicting, j] -= products[conflicting] / M[j, j]
    return coefficients


def external_projection(M: FloatArray, weights: FloatArray, candidates: BoolArray) -> FloatArray:
    """Return the weights after projecting weights @ rows off the sum of those candidate rows that it conflicts with."""
    products = M @ weights
    conflicting = (candidates & (products < 0.0)).astype(np.float64)
    squared = float(conflicting @ M @ conflicting)
    if not squared > 0.0:
        return weights
    return np.asarray(weights - float(products @ conflicting) / squared * conflicting)


def _stacked_gramian(replies: Replies[FedFVUpdate], past: Tensor) -> FloatArray:
    if not len(past):
        return replies.gram("delta")
    top = replies.gram("delta", past)
    return np.block([[top], [top[:, len(replies) :].T, gramian(past).numpy()]])

"""FedLF: a fair common descent direction for every layer of its own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import (
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
from dqnfed.core.gradients import client_loss
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import Layout
from dqnfed.maths.gramian import combine, gramian
from dqnfed.maths.solvers import FloatArray, min_norm_weights


class FedLFServer(NamedTuple):
    theta: Tensor  # [n]
    history: Tensor  # [n_clients, n]  every client's last update; no rows without history
    last_round: Tensor  # [n_clients]     when it was sent; -1: never
    sizes: Tensor  # [n_layers]      entries of each layer


class FedLFUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    loss: Tensor  # []  training loss at the theta that was sent


@dataclass(frozen=True, kw_only=True)
class FedLF(LocalWork[FedLFServer, Empty, FedLFUpdate]):
    """FedLF: layer-wise fair federated learning.

    Objective: Pareto stationarity of (F_1, ..., F_m, P), where P = -cos(F, 1) is minus the cosine between the losses
    and the direction in which all are equal.

    Client: computes its training loss F_k at theta, then makes `epochs` of SGD from theta; sends the update delta_k
    and F_k. The default, one full-batch step, is the gradient of the paper times the learning rate.

    Server: h = -d cos / d F weighs the fair objective. In every layer the clients' slices are scaled to their mean
    length; beside them stand the fair row sum_k h_k slice_k and the last slices of clients absent now but seen within
    the last floor(A / m) rounds (A clients ever seen before, m present), all scaled to the same length. The layer's
    direction is the shortest vector in their convex hull: no layer of it conflicts with any of these clients. The
    directions are joined, scaled to the length of the plain mean of the updates and subtracted, times `server_lr`.

    State: theta, and every client's last update and its round (C n floats; none with `history = false`).

    Payload: n + 1 floats up, n down.

    Evaluation: the global model.

    Differences: Unlike the paper, clients may train for several local steps. Unlike the official code, the fair row is
    left out where the losses are equal or its slice vanishes, and rows of no length are left out of their layer (both
    are 0/0 there); one client alone is no special case; losses are taken without dropout; there is no halving of the
    step after the exact solve, whose products with the clients' updates cannot be negative but for rounding
    (diagnostic `least_product`). A tensor with fewer entries than there are rows often has zero in its hull and then
    never moves: `layers = "module"` joins the tensors of a module, weights and biases.

    Reference: Pan, Li, Yu, Wang, Wang, Tang & Zhao, "FedLF: layer-wise fair federated learning", AAAI 2024.
    """

    info: ClassVar[Info] = Info(
        server=FedLFServer,
        replies=(FedLFUpdate,),
        needs=("rows",),  # of every layer apart, and of clients that are absent later
        clip_fields=("delta",),
    )

    layers: str = "tensor"  # tensor | module
    history: bool = True  # whether the step also serves clients that took part a few rounds ago
    server_lr: float = 1.0  # > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "layers", ("tensor", "module"))
        check_range(self, "server_lr", low=0.0, open_low=True)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        joined, apart = (layer_sizes(problem.layout, join_modules=join) for join in (True, False))
        check_used(self, "layers", used=joined != apart, why="on a model whose modules have one tensor each")
        return self

    def init_server(self, problem: Problem, n_clients: int) -> FedLFServer:
        rows = n_clients if self.history else 0
        return FedLFServer(
            theta=problem.theta0.clone(),
            history=problem.theta0.new_zeros(rows, problem.n_parameters),
            last_round=torch.full((rows,), -1),
            sizes=torch.tensor(layer_sizes(problem.layout, join_modules=self.layers == "module")),
        )

    def client_step(self, problem: Problem, task: Task, sent: Theta, memory: Empty) -> tuple[FedLFUpdate, Empty]:
        local = self.local_sgd(problem, task, sent.theta)
        return FedLFUpdate(sent.theta - local, client_loss(problem, sent.theta, task)), memory

    def server_step(
        self, server: FedLFServer, replies: Replies[FedLFUpdate], cohort: Cohort
    ) -> ServerStep[FedLFServer]:
        delta, past = replies.rows("delta"), recent_updates_of_absent(server, cohort)
        h = fair_weights(replies.scalars("loss"), tolerance=100 * torch.finfo(delta.dtype).eps)
        sizes = server.sizes.tolist()
        direction = torch.cat(
            [
                layer_direction(slices, olds, h)
                for slices, olds in zip(delta.split(sizes, dim=1), past.split(sizes, dim=1), strict=True)
            ]
        )
        server = self._with_history(server, replies, cohort)
        length, wanted = float(direction.norm()), float(delta.mean(0).norm())
        if not length > 0.0:
            return ServerStep(server, Status.HOLD)  # Pareto-stationary in every layer
        step = direction * (wanted / length)
        products = (delta @ direction).double() / (delta.norm(dim=1).double() * length).clamp(min=1e-300)
        return ServerStep(
            server._replace(theta=server.theta - self.server_lr * step),
            diagnostics={"least_product": float(products.min()), "n_past": float(len(past))},
        )

    def _with_history(self, server: FedLFServer, replies: Replies[FedLFUpdate], cohort: Cohort) -> FedLFServer:
        if not self.history:
            return server
        history = replies.put("delta", torch.arange(len(replies)), server.history, cohort.clients)
        last_round = server.last_round.index_fill(0, cohort.clients.to(server.last_round.device), cohort.round)
        return server._replace(history=history, last_round=last_round)


def layer_sizes(layout: Layout, *, join_modules: bool) -> list[int]:
    """Return the entries of each layer: every named tensor, or all neighbouring tensors of one module together."""
    if not join_modules:
        return [shape.numel() for _, shape in layout]
    modules = groupby(layout, key=lambda item: item[0].rpartition(".")[0])
    return [sum(shape.numel() for _, shape in tensors) for _, tensors in modules]


def fair_weights(losses: FloatArray, *, tolerance: float = 1e-14) -> FloatArray:
    """Return -d cos(F, 1) / dF, the gradient of the fair objective; exactly zero where the losses are equal.

    Its length is sin(F, 1) / ||F||, so losses count as equal when that sine is below the tolerance.
    """
    length = float(np.linalg.norm(losses))
    if length == 0.0:
        return np.zeros_like(losses)
    even = np.full(len(losses), 1.0 / np.sqrt(len(losses)))
    unit = losses / length
    weights = (even @ unit) * unit - even
    return weights / length if np.linalg.norm(weights) > tolerance else np.zeros_like(losses)


def recent_updates_of_absent(server: FedLFServer, cohort: Cohort) -> Tensor:
    """Return the last updates of clients absent now that took part not more than floor(A / m) rounds ago."""
    last_round = server.last_round.cpu()
    n_seen, n_present = int((last_round >= 0).sum()), len(cohort.clients)
    is_recent = (last_round >= 0) & (cohort.round - last_round <= n_seen // n_present)
    if len(is_recent):
        is_recent[cohort.clients] = False
    if n_seen <= n_present:
        is_recent[:] = False
    return server.history[is_recent.nonzero().flatten().to(server.history.device)]


def layer_direction(slices: Tensor, past: Tensor, h: FloatArray) -> Tensor:
    """Return one layer's direction: the shortest vector in the hull of the clients', fair and past rows.

    Everything but the final combination happens on the float64 Gramian of [slices; past]: rows are coefficients.
    Squared lengths below the precision of its entries are rounding; the step is scaled up later, so they count as zero.
    """
    K, rounding = len(slices), torch.finfo(slices.dtype).eps
    M = gramian(torch.cat([slices, past])).numpy()
    lengths = np.sqrt(np.clip(M.diagonal(), 0.0, None))
    common = float(lengths[:K].mean())
    live = lengths > 1e-12 * lengths.max(initial=0.0)
    if common == 0.0:
        return torch.zeros_like(slices[0])
    scaled = np.diag(np.where(live, common / np.where(live, lengths, 1.0), 0.0))
    fair = h @ scaled[:K]
    fair_squared = float(fair @ M @ fair)
    rows = scaled[live]
    if fair_squared > rounding * (common * float(np.abs(h).sum())) ** 2:
        rows = np.vstack([rows, fair * (common / np.sqrt(fair_squared))])
    coefficients = min_norm_weights(rows @ M @ rows.T) @ rows
    if coefficients @ M @ coefficients <= rounding * common**2:
        return torch.zeros_like(slices[0])
    weights = torch.from_numpy(coefficients)
    direction = combine(weights[:K], slices)
    return direction + combine(weights[K:], past) if len(past) else direction

"""FCFL: min-max losses under a bound on every client's disparity, then on to a Pareto point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.func import grad_and_value

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
from dqnfed.maths.gramian import combine, gramian
from dqnfed.maths.solvers import FloatArray, min_norm_weights

SHARPNESS = 10.0  # of the sigmoid that stands for the hard decision
COLDEST = 1e-4  # temperatures above it are still lowered
COOLING = 0.01  # factor of one lowering


class FCFLServer(NamedTuple):
    theta: Tensor  # [n]
    loss_temperature: Tensor  # []      of the softmax over the clients' losses
    disparity_temperature: Tensor  # [] of the softmax over their disparities


class FCFLUpdate(NamedTuple):
    delta: Tensor  # [n] theta before the local work minus theta after it
    loss: Tensor  # []  training loss at the theta that was sent


class ConstrainedUpdate(NamedTuple):
    delta: Tensor  # [n]
    loss: Tensor  # []
    disparity_gradient: Tensor  # [n] at the theta that was sent
    disparity: Tensor  # []  in [0, 1]


@dataclass(frozen=True, kw_only=True)
class FCFL(LocalWork[FCFLServer, Empty, FCFLUpdate | ConstrainedUpdate]):
    r"""Fair and consistent federated learning (Cui et al., NeurIPS 2021): min-max first, then Pareto.

    Objective: minimise max_k F_k subject to a disparity of at most `max_disparity` on every client, and from there
    reach a Pareto point of (F_1, ..., F_K). The disparity is the gap between two groups in the mean decision, over all
    examples (`parity`) or those of class 1 (`opportunity`); the groups are the signs of input column `sensitive`.
    Without `sensitive` there is no constraint.

    Client: `epochs` of SGD from theta (by default one full-batch gradient step); sends its update and its loss at
    theta; with `sensitive` also the disparity and its gradient, the hard decision smoothed by a sigmoid.

    Server: stage 1, the first `minmax_rounds` rounds: the smoothed maxima l = sum_k softmax(F / T)_k delta_k and, of
    the disparities, h likewise; theta - (x l + y h), x + y = 1, chosen to lower the disparity fastest without raising
    the loss while the bound is broken, else to lower the loss fastest. Stage 2: among the convex combinations v of the
    clients' updates (and of h while the bound is broken) that oppose none of them, the one with the largest inner
    product with the mean update, from a linear program; theta - server_lr * v.

    State: theta and the two temperatures; a temperature above 1e-4 falls to a hundredth when a tenth of its gradient's
    norm is below it.

    Payload: n + 1 floats up, n down; 2n + 2 up with `sensitive`.

    Evaluation: the global model.

    Differences: without `sensitive`, stage 1 is TERM with t = 1 / temperature and equal prior weights. As in the
    official code the softmax weights are constants of the gradient. Unlike the paper, clients may train for several
    steps, whose update then stands for the gradient; and where rounding makes the linear program infeasible the
    min-norm combination is used, which opposes no row. At low temperatures stage 1 follows the worst client, whose
    loss is more curved than the mean of all: lr must be smaller than FedAvg's.

    Reference: Cui, Pan, Liang, Zhang & Wang, Addressing Algorithmic Disparity and Performance Inconsistency in
    Federated Learning, NeurIPS 2021.
    """

    info: ClassVar[Info] = Info(
        server=FCFLServer,
        replies=(FCFLUpdate, ConstrainedUpdate),
        needs=("gram", "sum in stage 1"),
        clip_fields=("delta",),
        reads_inputs=True,  # for `sensitive`
    )

    minmax_rounds: int = 50  # rounds of stage 1, >= 0
    temperature: float = 0.5  # at the start, of both softmaxes, > 0
    sensitive: int | None = None  # column of the flattened inputs whose sign is the group, >= 0; None: no constraint
    disparity: str = "parity"  # parity | opportunity
    max_disparity: float = 0.05  # in [0, 1]
    server_lr: float = 1.0  # > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "minmax_rounds", low=0)
        check_range(self, "temperature", low=0.0, open_low=True)
        if self.sensitive is not None:
            check_range(self, "sensitive", low=0)
        check_choice(self, "disparity", ("parity", "opportunity"))
        check_range(self, "max_disparity", low=0.0, high=1.0)
        check_range(self, "server_lr", low=0.0, open_low=True)
        is_constrained, has_stage_1 = self.sensitive is not None, self.minmax_rounds > 0
        check_used(self, "disparity", used=is_constrained, why="without `sensitive`")
        check_used(self, "max_disparity", used=is_constrained, why="without `sensitive`")
        why = "without `sensitive` and with minmax_rounds=0"
        check_used(self, "temperature", used=is_constrained or has_stage_1, why=why)

    def init_server(self, problem: Problem, n_clients: int) -> FCFLServer:
        temperature = torch.tensor(self.temperature, dtype=torch.float64)
        return FCFLServer(problem.theta0.clone(), temperature, temperature.clone())

    def client_step(
        self, problem: Problem, task: Task, sent: Theta, memory: Empty
    ) -> tuple[FCFLUpdate | ConstrainedUpdate, Empty]:
        local = self.local_sgd(problem, task, sent.theta)
        delta, loss = sent.theta - local, client_loss(problem, sent.theta, task)
        if self.sensitive is None:
            return FCFLUpdate(delta, loss), memory
        gradient, value = grad_and_value(self.smooth_disparity, argnums=1)(problem, sent.theta, task)
        return ConstrainedUpdate(delta, loss, gradient, value), memory

    def smooth_disparity(self, problem: Problem, theta: Tensor, task: Task) -> Tensor:
        """Return the gap between the groups' mean decisions, in [0, 1]; 0 where a group is empty."""
        decisions = torch.sigmoid(SHARPNESS * _margins(problem.predict(theta, task.inputs)))
        counted = task.mask * (task.targets == 1) if self.disparity == "opportunity" else task.mask
        first = counted * (task.inputs.flatten(1)[:, self.sensitive] > 0)
        second = counted - first
        gap = (decisions * first).sum() / first.sum().clamp(min=1) - (decisions * second).sum() / second.sum().clamp(
            min=1
        )
        return torch.where((first.sum() > 0) & (second.sum() > 0), gap, 0.0).abs()

    def server_step(
        self, server: FCFLServer, replies: Replies[FCFLUpdate | ConstrainedUpdate], cohort: Cohort
    ) -> ServerStep[FCFLServer]:
        lr = self.lr_at(cohort.round)
        loss_step = replies.combine("delta", softmax_weights(replies.scalars("loss"), server.loss_temperature))
        diagnostics = {"loss_temperature": float(server.loss_temperature)}
        server = server._replace(loss_temperature=cooled(server.loss_temperature, loss_step / lr))
        disparity_step, is_broken = None, False
        if replies.kind is ConstrainedUpdate:
            disparities = replies.scalars("disparity")
            weights = softmax_weights(disparities, server.disparity_temperature)
            disparity_step = lr * replies.combine("disparity_gradient", weights)
            is_broken = float(disparities.max()) > self.max_disparity
            diagnostics |= {"largest_disparity": float(disparities.max())}
            server = server._replace(disparity_temperature=cooled(server.disparity_temperature, disparity_step / lr))
        if cohort.round < self.minmax_rounds:
            step = minmax_step(loss_step, disparity_step, is_broken=is_broken)
        else:
            step, worst = pareto_step(replies, disparity_step if is_broken else None)
            diagnostics |= {"worst_slope": worst}
        status = Status.NEXT if bool((step != 0).any()) else Status.HOLD
        return ServerStep(server._replace(theta=server.theta - self.server_lr * step), status, diagnostics)

    def passes(self, sent: Any) -> float:
        return float(self.epochs) + (self.sensitive is not None)


def softmax_weights(values: FloatArray, temperature: Tensor) -> Tensor:
    """Return the weights of the smoothed maximum of the values [K], in float64 on the host."""
    return torch.softmax(torch.from_numpy(values) / temperature.cpu(), dim=0)


def cooled(temperature: Tensor, gradient: Tensor) -> Tensor:
    """Return the next round's temperature: lower, if the smoothed maximum is nearly stationary at this one."""
    is_stationary = 0.1 * float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) <= float(temperature)
    return temperature * COOLING if float(temperature) > COLDEST and is_stationary else temperature


def minmax_step(loss_step: Tensor, disparity_step: Tensor | None, *, is_broken: bool) -> Tensor:
    """Return the step of stage 1: the best convex combination x l + y h of the two smoothed maxima.

    With the bound kept it maximises (x l + y h).l, a vertex. With the bound broken it maximises (x l + y h).h subject
    to (x l + y h).l >= 0: as much h as the losses bear.
    """
    if disparity_step is None:
        return loss_step
    pair = torch.stack([loss_step, disparity_step])
    (ll, lh), (_, hh) = gramian(pair).tolist()
    if not is_broken:
        return loss_step if ll >= lh else disparity_step
    if hh <= lh:
        return loss_step
    y = 1.0 if lh >= 0 else ll / (ll - lh)
    return combine(torch.tensor([1.0 - y, y], dtype=torch.float64), pair)


def pareto_step(replies: Replies[Any], disparity_step: Tensor | None) -> tuple[Tensor, float]:
    """Return the step of stage 2, and its smallest inner product with a row as a share of the longest row's square."""
    K = len(replies)
    M = products(replies, disparity_step)
    largest = float(M.diagonal().max())
    mean = np.zeros(len(M))
    mean[:K] = 1.0 / K
    if not largest > 0:
        return replies.combine("delta", 0.0 * mean[:K]), 0.0
    weights = common_descent_weights(M / largest, mean)
    step = replies.combine("delta", weights[:K])
    if disparity_step is not None:
        step = step + float(weights[K]) * disparity_step
    return step, float((M @ weights).min() / largest)


def products(replies: Replies[Any], disparity_step: Tensor | None) -> FloatArray:
    """Return the Gramian of the clients' updates and, if given, of the disparity step behind them."""
    if disparity_step is None:
        return replies.gram("delta")
    row = disparity_step[None]
    above = replies.gram("delta", extra=row)
    K = len(above)
    return np.vstack([above, np.append(above[:, K], gramian(row).numpy())])


def common_descent_weights(M: FloatArray, target: FloatArray, *, tolerance: float = 1e-9) -> FloatArray:
    """Return convex weights whose combination opposes no row and has the largest inner product with target @ rows.

    A linear program in the Gramian M, scaled to a largest diagonal of one. The min-norm weights are always feasible;
    they are used where the solver's answer is not.
    """
    from scipy.optimize import linprog

    K = len(M)
    found = linprog(
        -(M @ target),
        A_ub=-M,
        b_ub=np.zeros(K),
        A_eq=np.ones((1, K)),
        b_eq=np.ones(1),
        bounds=(0.0, 1.0),
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if found.success and float((M @ found.x).min()) >= -tolerance:
        return np.asarray(found.x, dtype=np.float64)
    return min_norm_weights(M)


def _margins(outputs: Tensor) -> Tensor:
    """Return how far each example [N] is on the side of class 1."""
    if outputs.dim() == 2 and outputs.shape[1] == 2:
        return outputs[:, 1] - outputs[:, 0]
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        return outputs.reshape(-1)
    raise ValueError(
        f"FCFL: a disparity needs a binary decision, but the model has {outputs.shape[1]} outputs; "
        "use a model with one or two, or leave out `sensitive`."
    )

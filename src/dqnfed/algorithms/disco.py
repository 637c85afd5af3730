"""DiSCO: damped Newton steps by distributed conjugate gradients, one product a phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Empty, Info, ServerStep, Status, Theta, check_range
from dqnfed.core.curvature import PRODUCT_PASSES, client_gradient, hessian_product
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.conjugate_gradient import CG, cg_next, cg_start


class DiSCOServer(NamedTuple):
    theta: Tensor  # [n]
    solve: CG  # of H v = g
    enough: Tensor  # [] residual norm at which the solve ends
    n_products: Tensor  # [] int64 so far in this solve; -1 when no solve is under way


class Multiply(NamedTuple):
    """A vector to be multiplied by the client's Hessian at theta."""

    theta: Tensor  # [n]
    vector: Tensor  # [n]


class Slope(NamedTuple):
    gradient: Tensor  # [n]


class Product(NamedTuple):
    product: Tensor  # [n]


@dataclass(frozen=True, kw_only=True)
class DiSCO(LocalWork[DiSCOServer, Empty, Slope | Product]):
    """Distributed self-concordant optimisation (Zhang & Xiao, ICML 2015).

    Objective: the mean of the clients' losses, self-concordant and convex.

    Client: its gradient; then one product of its Hessian with a vector in every phase. No local training: lr,
    epochs and batch_size are not used.

    Server: conjugate gradients on H v = g until the residual is `rtol` ||g|| (or `max_products`); with delta =
    sqrt(v'Hv), subtracts v / (1 + delta): a damped step that becomes a unit step near the optimum.

    State: none between rounds.

    Payload: n floats up and 2 n down in each of 1 + (products) phases.

    Evaluation: the global model.

    Differences: no preconditioner, which in the paper is the server's own data; here the server has none.

    Reference: PMLR 37:362.

    Curvature: exact Hessian, by products.
    """

    info: ClassVar[Info] = Info(
        server=DiSCOServer,
        messages=(Theta, Multiply),
        replies=(Slope, Product),
        needs=("sum",),
        local_work=frozenset(),
        problem_kinds=frozenset({"convex"}),
    )

    rtol: float = 1e-4  # of the gradient's norm, in (0, 1)
    max_products: int = 150  # a round, 1 to 190: the engine allows 200 phases

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "rtol", low=0.0, high=1.0, open_low=True, open_high=True)
        check_range(self, "max_products", low=1, high=190)

    def init_server(self, problem: Problem, n_clients: int) -> DiSCOServer:
        theta = problem.theta0.clone()
        return DiSCOServer(theta, cg_start(torch.zeros_like(theta)), theta.new_zeros(()), torch.tensor(-1))

    def send(self, server: DiSCOServer) -> Theta | Multiply:
        return Theta(server.theta) if int(server.n_products) < 0 else Multiply(server.theta, server.solve.direction)

    def client_step(
        self, problem: Problem, task: Task, sent: Theta | Multiply, memory: Empty
    ) -> tuple[Slope | Product, Empty]:
        if isinstance(sent, Theta):
            return Slope(client_gradient(problem, task, sent.theta)), memory
        return Product(hessian_product(problem, task, sent.theta, sent.vector)), memory

    def server_step(
        self, server: DiSCOServer, replies: Replies[Slope | Product], cohort: Cohort
    ) -> ServerStep[DiSCOServer]:
        if replies.kind is Slope:
            gradient = replies.mean("gradient")
            enough = self.rtol * gradient.norm()
            return ServerStep(DiSCOServer(server.theta, cg_start(gradient), enough, torch.tensor(0)), Status.AGAIN)
        product = replies.mean("product")
        curved = bool(server.solve.direction @ product > 0)
        solve = cg_next(server.solve, product)
        n_products = server.n_products + 1
        if curved and bool(solve.residual.norm() > server.enough) and int(n_products) < self.max_products:
            return ServerStep(server._replace(solve=solve, n_products=n_products), Status.AGAIN)
        delta = (solve.solution @ solve.product).clamp(min=0.0).sqrt()
        theta = server.theta - solve.solution / (1.0 + delta)
        diagnostics = {"products": float(n_products), "decrement": float(delta)}
        return ServerStep(DiSCOServer(theta, solve, server.enough, torch.tensor(-1)), Status.NEXT, diagnostics)

    def passes(self, sent: Theta | Multiply) -> float:
        return 1.0 if isinstance(sent, Theta) else PRODUCT_PASSES

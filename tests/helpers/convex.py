"""Small convex federations in float64, and runs of them whose every round can be looked at."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.curvature import least_squares_problem
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.core.runners import vectorised
from dqnfed.core.screening import Policy
from dqnfed.core.seeds import seed_for
from dqnfed.experiments.convex_problems import ConvexProblem, solved, synthetic_rows
from dqnfed.sim.rounds import run_round
from dqnfed.sim.setup import cohort_size, fresh_state
from dqnfed.sim.state import Evaluation, Setup
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.numpy_clients import LeastSquares, Logistic, NumpyClient


class Played(NamedTuple):
    """The states of a run: entry t is after t rounds."""

    servers: list[Any]
    memories: list[Any]  # stacked over clients; None before the first round
    records: list[dict[str, Any]]  # of round t

    @property
    def thetas(self) -> list[Tensor]:
        return [server.theta for server in self.servers]


def logistic(n_clients: int = 4, n_each: int = 25, n_features: int = 6, *, seed: int = 0) -> ConvexProblem:
    """Return a small logistic problem whose clients differ."""
    rows = synthetic_rows(n_clients=n_clients, n_each=n_each, n_features=n_features, seed=seed)
    return solved("small", *rows, ridge=1e-2)


def identical_logistic(n_clients: int = 3) -> ConvexProblem:
    """Return a logistic problem whose clients all hold the same rows."""
    A, b, _ = synthetic_rows(n_clients=1, n_each=30, n_features=6)
    return solved("identical", A.repeat(n_clients, 1), b.repeat(n_clients), n_clients, ridge=1e-2)


def least_squares(
    n_clients: int = 4, n_each: int = 15, n_features: int = 6, *, identical: bool = False
) -> ConvexProblem:
    """Return least squares with a ridge: every client a strongly convex quadratic, with the same Hessian if wished."""
    generator = seed_for(0, purpose="least squares")
    one = torch.randn(n_each, n_features, generator=generator, dtype=torch.float64)
    parts = [
        one if identical else torch.randn(n_each, n_features, generator=generator, dtype=torch.float64)
        for _ in range(n_clients)
    ]
    A = torch.cat(parts)
    b = torch.randn(len(A), generator=generator, dtype=torch.float64)
    examples = Examples(A, b, torch.arange(0, len(A) + 1, n_each))
    federation, problem = Federation(examples, examples), least_squares_problem(n_features, ridge=0.1)
    H, c = A.T @ A / len(A) + 0.1 * torch.eye(n_features, dtype=torch.float64), A.T @ b / len(A)
    best = torch.linalg.solve(H, c)
    loss = 0.5 * (A @ best - b).square().mean() + 0.05 * best.square().sum()
    return ConvexProblem("least squares", problem, federation, best, float(loss))


class SumsOnly(Replies[Any]):
    """Replies of which a server can have scalars and weighted sums alone."""

    def rows(self, field: str) -> Tensor:
        raise AssertionError(f"the server asked for the rows of '{field}'")

    def gram(self, field: str, extra: Any = None) -> FloatArray:
        raise AssertionError(f"the server asked for the products of '{field}'")


def played(
    algorithm: AnyAlgorithm,
    convex: ConvexProblem,
    rounds: int,
    *,
    participation: float = 1.0,
    seed: int = 0,
    replies: Callable[[Any], Replies[Any]] = Replies,
) -> Played:
    """Return the states of a run of the real engine."""
    problem, federation = convex.problem, convex.federation
    size = cohort_size(participation, federation.n_clients)
    prepared = algorithm.prepare(problem, federation.n_clients, size)
    setup = Setup(
        prepared,
        problem,
        federation,
        rounds + 1,
        size,
        seed,
        vectorised(),
        Evaluation(every=rounds + 2, participants=False),
        Policy(max_update_norm=math.inf),
        TaskBuilder(federation, problem, prepared, seed),
        replies=replies,
    )
    state = fresh_state(setup)
    servers, memories, records = [state.server], [None], []
    for _ in range(rounds):
        record, _rows = run_round(setup, state)
        servers.append(state.server)
        memories.append(state.memory.rows)
        records.append(record)
    return Played(servers, memories, records)


def numpy_clients(convex: ConvexProblem) -> list[NumpyClient]:
    """Return the clients in plain NumPy: an oracle that shares nothing with the package."""
    train, starts = convex.federation.train, convex.federation.train.starts.tolist()
    A, b, ridge = train.inputs.numpy(), train.targets.numpy(), convex.problem.ridge
    kind = LeastSquares if convex.problem.score_name == "negative squared error" else Logistic
    return [kind(A[start:end], b[start:end], ridge) for start, end in pairwise(starts)]


def gradients(convex: ConvexProblem, theta: Tensor) -> Tensor:
    """Return every client's gradient [K, n]."""
    return torch.from_numpy(np.stack([client.gradient(theta.numpy()) for client in numpy_clients(convex)]))


def hessians(convex: ConvexProblem, theta: Tensor) -> Tensor:
    """Return every client's Hessian [K, n, n]."""
    return torch.from_numpy(np.stack([client.hessian(theta.numpy()) for client in numpy_clients(convex)]))


def losses(convex: ConvexProblem, theta: Tensor) -> Tensor:
    """Return every client's loss [K]."""
    return torch.tensor([client.loss(theta.numpy()) for client in numpy_clients(convex)], dtype=torch.float64)


def newton_step(convex: ConvexProblem, theta: Tensor) -> Tensor:
    """Return the step of Newton's method on the mean loss."""
    step: Tensor = torch.linalg.solve(hessians(convex, theta).mean(0), gradients(convex, theta).mean(0))
    return step

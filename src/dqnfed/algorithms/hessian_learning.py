"""What the FedNL family shares: clients learn their Hessian from compressed differences, and send these.

Not a method of its own; `fednl`, `fednl-pp`, `fednl-ls` and `fednl-cr` are built from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort, check_choice, check_range, check_used
from dqnfed.core.curvature import client_hessian, refuse_if_too_large
from dqnfed.core.local_work import LocalWork
from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.maths.compressors import KINDS, Code, Compressor, compressed, compressor, mean_expanded, moved_by
from dqnfed.maths.symmetric import n_packed, packed, packed_norm

S = TypeVar("S", bound=tuple[Any, ...])
M = TypeVar("M", bound=tuple[Any, ...])
U = TypeVar("U", bound=tuple[Any, ...])

NEEDS = ("rows", 'sum with `compressor = "identity"`')  # a code has to be expanded before it can be added to others


class Init(NamedTuple):
    """The model, in the first phase of all: clients reply with what their estimates start from."""

    theta: Tensor  # [n]


class Learnt(NamedTuple):
    """One step of Hessian learning."""

    code: Code  # what is sent
    error: Tensor  # [] ||H - estimate||_F before the step
    estimate: Tensor  # [T] after it
    hessian: Tensor  # [T] the true one, here and now


class Known(NamedTuple):
    """The server's copy of the sum of the clients' estimates, over those whose first estimate it has."""

    total: Tensor  # [T] sum of the estimates
    clients: Tensor  # [C] bool, included in the sum

    def mean(self) -> Tensor:
        """Return the mean estimate [T]; zero before any client is included."""
        return self.total / self.clients.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class HessianLearner(LocalWork[S, M, U]):
    """The fields and the client work that the FedNL family shares."""

    own_name: ClassVar[str] = "FedNL"

    compressor: str = "rank"  # rank | top | random | identity
    size: int = 1  # eigenpairs (rank) or entries of the upper triangle (top, random) that are sent, >= 1
    alpha: float | None = None  # Hessian learning rate in (0, 1]; None: 1, or 1 / (w + 1) for the random compressor
    start: str = "hessian"  # hessian: estimates start at the true Hessian of theta0, sent once | zero

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "compressor", KINDS)
        check_choice(self, "start", ("hessian", "zero"))
        check_range(self, "size", low=1)
        check_used(self, "size", used=self.compressor != "identity", why='with `compressor = "identity"`')
        if self.alpha is not None:
            check_range(self, "alpha", low=0.0, high=1.0, open_low=True)

    @property
    def needs(self) -> str:
        return "sum" if self.compressor == "identity" else "rows"

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        refuse_if_too_large(problem, n_clients, self.own_name, "fednl-diag or fednl-head")
        how = compressor(self.compressor, self.size, problem.n_parameters)
        return self if self.alpha is not None else replace(self, alpha=how.default_alpha)

    def how(self, n: int) -> Compressor:
        """Return the compressor of n x n matrices."""
        return compressor(self.compressor, self.size, n)

    def noise(self, problem: Problem, generator: torch.Generator) -> Tensor:
        n = n_packed(problem.n_parameters) if self.compressor == "random" else 0
        return torch.rand(n, generator=generator, dtype=torch.float64).to(problem.theta0.dtype)

    def first_estimate(self, problem: Problem, task: Task) -> Tensor:
        """Return the estimate before the first round [T]."""
        if self.start == "hessian":
            return packed(client_hessian(problem, task, problem.theta0))
        return problem.theta0.new_zeros(n_packed(problem.n_parameters))

    def learn(self, problem: Problem, task: Task, theta: Tensor, estimate: Tensor) -> Learnt:
        """Return one step of Hessian learning: the compressed difference, its norm, and the moved estimate."""
        how = self.how(len(theta))
        hessian = packed(client_hessian(problem, task, theta))
        difference = hessian - estimate
        code = compressed(how, difference, task.noise)
        moved = moved_by(how, estimate, code, self.learning_rate(how))
        return Learnt(code, packed_norm(difference, how.d), moved, hessian)

    def none_known(self, problem: Problem, n_clients: int) -> Known:
        """Return the sum of no estimates."""
        return Known(problem.theta0.new_zeros(n_packed(problem.n_parameters)), torch.zeros(n_clients).bool())

    def first_known(self, known: Known, replies: Replies[Any], cohort: Cohort) -> Known:
        """Return the sum with the clients' first estimates, their `hessian` [T], or [0] where these are zero."""
        first = replies.combine("hessian", torch.ones(len(replies))) if self.start == "hessian" else 0.0
        return Known(known.total + first, _with(known.clients, cohort.clients))

    def next_known(self, known: Known, replies: Replies[Any], cohort: Cohort, n: int) -> Known:
        """Return the sum moved by the clients' codes."""
        clients, how = cohort.clients, self.how(n)
        if self.start == "hessian":  # a first estimate of zero, in contrast, is there without a message
            replies, clients = included(known, replies, clients)
        if self.compressor == "identity":
            change = replies.combine("code.values", torch.ones(len(replies)))
        else:
            change = mean_expanded(how, Code(replies.rows("code.values"), replies.rows("code.places")), 1)
        return Known(known.total + self.learning_rate(how) * change, _with(known.clients, clients))

    def learning_rate(self, how: Compressor) -> float:
        return how.default_alpha if self.alpha is None else self.alpha

    def code_bits(self, n: int, float_bits: int) -> int:
        """Return the size of one client's code, indices included."""
        return self.how(n).bits(float_bits)


def included(known: Known, replies: Replies[Any], clients: Tensor) -> tuple[Replies[Any], Tensor]:
    """Return the replies of the clients that are included in the sum, and these clients: no others can be used."""
    is_included = known.clients[clients.to(known.clients.device)].cpu()
    if bool(is_included.all()):
        return replies, clients
    places = is_included.nonzero().flatten()
    return replies.take(places), clients[places]


def _with(is_included: Tensor, clients: Tensor) -> Tensor:
    return is_included.index_fill(0, clients.to(is_included.device), True)

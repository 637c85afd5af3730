"""What the FedNL family shares: clients that learn their Hessian from compressed differences, and tell the server.

Not a method of its own; `fednl`, `fednl-pp`, `fednl-ls` and `fednl-cr` are built from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from dqnfed.core.algorithm import Algorithm, Cohort, check_choice, check_range
from dqnfed.core.curvature import client_hessian, refuse_if_too_large
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import gather
from dqnfed.maths.compressors import KINDS, Code, Compressor, compressed, compressor, mean_expanded, moved_by
from dqnfed.maths.symmetric import n_packed, packed, packed_norm

S = TypeVar("S", bound=tuple[Any, ...])
M = TypeVar("M", bound=tuple[Any, ...])
U = TypeVar("U", bound=tuple[Any, ...])


class Begin(NamedTuple):
    """The model, and a wish for what the clients' Hessians start from."""

    theta: Tensor  # [n]


class Learnt(NamedTuple):
    """One step of Hessian learning."""

    code: Code  # what is sent
    error: Tensor  # [] ||H - estimate||_F before the step
    estimate: Tensor  # [T] after it
    hessian: Tensor  # [T] the true one, here and now


class Known(NamedTuple):
    """What the server knows of the clients' estimates: their sum, over those it has heard of."""

    total: Tensor  # [T] sum of the estimates
    clients: Tensor  # [C] bool, heard of

    def mean(self) -> Tensor:
        """Return the mean estimate [T]; zero before anybody was heard of."""
        return self.total / self.clients.sum().clamp(min=1)


@dataclass(frozen=True, kw_only=True)
class HessianLearner(Algorithm[S, M, U]):
    """The fields and the client work that the FedNL family shares."""

    suits: ClassVar[frozenset[str]] = frozenset({"convex"})
    own_name: ClassVar[str] = "FedNL"

    compressor: str = "rank"  # rank | top | random | identity
    size: int = 1  # eigenpairs (rank) or entries of the upper triangle (top, random) that travel, >= 1
    alpha: float | None = None  # Hessian learning rate in (0, 1]; None: 1, or 1 / (w + 1) for the random compressor
    start: str = "hessian"  # hessian: estimates start at the true Hessian of theta0, sent once | zero

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "compressor", KINDS)
        check_choice(self, "start", ("hessian", "zero"))
        check_range(self, "size", low=1)
        if self.alpha is not None:
            check_range(self, "alpha", low=0.0, high=1.0, open_low=True)

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
        """Return what the server knows before the first message."""
        return Known(problem.theta0.new_zeros(n_packed(problem.n_parameters)), torch.zeros(n_clients).bool())

    def first_known(self, known: Known, hessians: Tensor, cohort: Cohort) -> Known:
        """Return what the server knows once the clients' first estimates [K, T], or nothing [K, 0], have come."""
        total = known.total + hessians.sum(0) if hessians.shape[1] else known.total
        return Known(total, _with(known.clients, cohort.clients))

    def next_known(self, known: Known, codes: Code, cohort: Cohort, n: int) -> Known:
        """Return what the server knows after the clients' codes; those of clients it never heard of cannot be used."""
        clients, is_heard_of = known.clients, known.clients[cohort.clients.to(known.clients.device)]
        if self.start == "zero":  # an estimate of zero needs no introduction
            clients, is_heard_of = _with(clients, cohort.clients), torch.ones_like(is_heard_of)
        how = self.how(n)
        usable = codes if bool(is_heard_of.all()) else gather(codes, is_heard_of.nonzero().flatten())
        return Known(known.total + self.learning_rate(how) * mean_expanded(how, usable, 1), clients)

    def learning_rate(self, how: Compressor) -> float:
        return how.default_alpha if self.alpha is None else self.alpha

    def code_bits(self, n: int, float_bits: int) -> int:
        """Return the size of one client's code, indices included."""
        return self.how(n).bits(float_bits)


def _with(heard_of: Tensor, clients: Tensor) -> Tensor:
    return heard_of.index_fill(0, clients.to(heard_of.device), True)

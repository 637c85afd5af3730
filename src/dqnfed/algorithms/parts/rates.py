"""Rates: the first-order decrease d_k that client k asks the next step for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from dqnfed.core.curvature import newton_direction
from dqnfed.core.gradients import loss_gradient
from dqnfed.core.problem import Problem, Task
from dqnfed.maths import quasi_newton as qn

RULES = ("bfgs", "cauchy", "identity", "loss", "hessian")
MAX_HESSIAN = 5000  # parameters; an exact Hessian per client is n x n


class RateMemory(NamedTuple):
    """What a client keeps of its secant pairs."""

    pairs: qn.Pairs  # [m, n], or [0, n]
    scale: Tensor  # []  s'y / y'y of its newest pair, where it keeps no more of it; 0: none yet


class Here(NamedTuple):
    """A model with the client's gradient and loss there."""

    theta: Tensor  # [n]
    gradient: Tensor  # [n]
    loss: Tensor  # []


@dataclass(frozen=True)
class Rates:
    """How a client computes its rate, after its gradient and loss are known."""

    rule: str = "bfgs"
    memory: int = 1  # pairs of "bfgs"
    power: float = 1.0  # of "loss"

    def init(self, theta: Tensor) -> RateMemory:
        """Return what a client keeps before its first round; with one pair nothing n-long."""
        keeps_pairs = self.rule == "bfgs" and self.memory > 1
        pairs = (
            qn.empty_pairs(self.memory, len(theta), theta.dtype, theta.device) if keeps_pairs else qn.no_pairs(theta)
        )
        return RateMemory(pairs, theta.new_zeros(()))

    def first(self, problem: Problem, task: Task, here: Here) -> Tensor:
        """Return the rate of a client without a secant pair, []."""
        theta, g, loss = here
        if self.rule == "identity":
            return g.square().sum()
        if self.rule == "loss":
            return (loss - problem.loss_floor).clamp(min=0.0) ** self.power
        if self.rule == "hessian":  # the Newton decrement g'H^-1 g
            return g @ newton_direction(problem, task, theta, g)
        length = qn.probe_length(theta, g)  # ||g||^2 / c, c the curvature along g, from one more gradient nearby
        return qn.cauchy_rate(g, loss_gradient(problem, theta - length * g, task), length)[0]

    def next(
        self, problem: Problem, task: Task, here: Here, memory: RateMemory, s: Tensor, y: Tensor
    ) -> tuple[Tensor, RateMemory]:
        """Return the rate after a step, and what the client keeps; NaN if it has never had a usable pair.

        "bfgs": g'Hg with H from limited-memory inverse BFGS on the client's newest pairs.
        """
        if self.rule != "bfgs":
            return self.first(problem, task, here), memory
        if self.memory == 1:
            rate, scale = qn.one_pair_rate(s, y, here.gradient, memory.scale)
            return rate, memory._replace(scale=scale)
        pairs = qn.remembered(memory.pairs, s, y)
        rate = torch.where(pairs.n_pairs > 0, qn.lbfgs_rate(pairs, here.gradient), torch.nan)
        return rate, memory._replace(pairs=pairs)

    def passes(self, *, is_first: bool) -> float:
        """Return the gradients that the rate takes beside the client's own."""
        return float(self.rule == "cauchy" or (self.rule == "bfgs" and is_first))

"""How far the server goes along its step u: theta - alpha u."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.parts.metric import Mean
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.maths import step_length
from dqnfed.maths.solvers import BoolArray

RULES = ("auto", "curvature", "line-search", "match", "fixed", "diminishing", "paper")


class Search(NamedTuple):
    """A step whose length is sought in phases of its own; `trials` is 0 when there is none."""

    direction: Tensor  # [n] or [0]
    norm: Tensor  # []              its length
    mean: Mean  # the cohort's mean gradient, for the metric if the step is made
    losses: Tensor  # [C] or [0]    at theta, by client number
    slopes: Tensor  # [C] or [0]    first-order decreases g_k'u, by client number; NaN: does not count
    length: Tensor  # []            the candidate alpha
    trials: Tensor  # []            PROBING while the first step's curvature is measured


@dataclass(frozen=True)
class Length:
    """A rule for alpha."""

    rule: str  # curvature | line-search | match | fixed | diminishing | paper
    step_size: float = 1.0  # eta of fixed and diminishing; the multiple of FedAvg's length for match
    growth: float = 2.0  # a step is at most this many times the last one (curvature, line-search)

    @property
    def uses_curvature(self) -> bool:
        """Whether the length comes from the clients' curvatures."""
        return self.rule in ("curvature", "line-search")

    def no_search(self, theta: Tensor) -> Search:
        """Return the state between searches."""
        empty, mean = torch.zeros(0, dtype=torch.float64), Mean(theta.new_zeros(0), torch.zeros(0, dtype=torch.bool))
        zero = torch.zeros((), dtype=torch.float64)
        return Search(theta.new_zeros(0), zero, mean, empty, empty, zero, zero.long())

    def by_rule(self, norm: float, mean_norm: float, round: int) -> float:
        """Return alpha without curvature; `mean_norm` is the length of the mean update."""
        if self.rule == "paper":
            return step_length.paper_length()
        if self.rule == "fixed":
            return step_length.fixed_length(self.step_size, norm**2)
        if self.rule == "diminishing":
            return step_length.diminishing_length(self.step_size, norm**2, round)
        return step_length.match_length(norm, mean_norm, ratio=self.step_size)

    def by_curvature(self, slopes: FloatArray, curvature: FloatArray, norm: float, last_norm: float | None) -> float:
        """Return the longest alpha that no client's curvature and no growth limit forbid; a search starts at twice."""
        trusted = step_length.floored_curvature(curvature)
        growth = 1.0 if np.isnan(trusted).all() else self.growth  # nothing is known: as long as the last step
        alpha = step_length.curvature_length(slopes, trusted, norm**2)
        if self.rule == "line-search":
            alpha = step_length.line_search_start(alpha)
        return max(0.0, min(alpha, step_length.growth_limit(norm, last_norm, growth=growth)))

    def accepts(self, search: Search, replies: Replies[Any], cohort: Cohort, asked: BoolArray) -> bool:
        """Return whether the losses at the candidate are low enough for every client that is asked (Armijo)."""
        return step_length.armijo_holds(
            search.losses[cohort.clients].numpy()[asked],
            replies.scalars("trial_loss")[asked],
            search.slopes[cohort.clients].nan_to_num().numpy()[asked],
            float(search.length),
            rounding=torch.finfo(replies.dtype("trial_loss")).eps,
        )

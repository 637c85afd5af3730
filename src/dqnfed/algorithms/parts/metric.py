"""The metric in which the server's step is shortest: L-BFGS of the mean loss, or the identity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.maths import quasi_newton as qn
from dqnfed.maths.gramian import cross_products, gramian


class Mean(NamedTuple):
    """A mean gradient and whose it is; nothing where the metric does not need it."""

    gradient: Tensor  # [n] or [0]
    members: Tensor  # [C] or [0]


class MetricState(NamedTuple):
    """The metric's pairs and, where they come from mean gradients of one cohort, the one at the model before."""

    pairs: qn.Pairs  # [m, n], or [0, n] for the identity
    before: Mean


@dataclass(frozen=True)
class Metric:
    """W from `memory` damped secant pairs of the mean loss; 0: the identity.

    The change of the mean gradient comes from the server's own means (`keeps_mean`: the same cohort in every round) or
    from the clients, who then send the change of their gradients.
    """

    memory: int
    keeps_mean: bool = False

    def init(self, theta: Tensor) -> MetricState:
        """Return the state before the first step."""
        none = Mean(theta.new_zeros(0), torch.zeros(0, dtype=torch.bool))
        if not self.memory:
            return MetricState(qn.no_pairs(theta), none)
        return MetricState(qn.empty_pairs(self.memory, len(theta), theta.dtype, theta.device), none)

    def change(self, state: MetricState, replies: Replies[Any], cohort: Cohort) -> Tensor | None:
        """Return how the mean gradient has changed over the last step; None where that is not known."""
        if not self.memory:
            return None
        if not self.keeps_mean:
            return replies.mean("gradient_change")
        members = state.before.members
        again = members[cohort.clients] if len(members) else members
        if not 0 < int(members.sum()) == int(again.sum()):  # the mean before was over other clients
            return None
        return replies.mean("gradient", again.double()) - state.before.gradient

    def learn(self, state: MetricState, move: Tensor, change: Tensor | None) -> MetricState:
        """Return the state with the pair of the last step, where the change is known."""
        return state if change is None else state._replace(pairs=qn.server_remembered(state.pairs, move, change))

    def mean(self, state: MetricState, replies: Replies[Any], cohort: Cohort, kept: Tensor, n_clients: int) -> Mean:
        """Return the kept clients' mean gradient, `MetricState.before` once a step was made."""
        if not (self.memory and self.keeps_mean):
            return state.before
        members = torch.zeros(n_clients, dtype=torch.bool).index_copy(0, cohort.clients, kept)
        return Mean(replies.mean("gradient", kept.double()), members)

    def gram(self, state: MetricState, GG: FloatArray, on_pairs: FloatArray, cached: Tensor, absent: Any) -> FloatArray:
        """Return G W^-1 G' from G G' (of replies, then of absent clients) and the replies' products with the pairs."""
        if not self.memory:
            return GG
        pairs = torch.cat([state.pairs.s, state.pairs.y])
        if len(absent):
            on_pairs = np.concatenate([on_pairs, cross_products(cached, pairs).numpy()[absent]])
        return qn.metric_gramian(GG, on_pairs, qn.compact_inverse(gramian(pairs).numpy(), int(state.pairs.n_pairs)))

    def apply(self, state: MetricState, v: Tensor) -> Tensor:
        """Return W^-1 v."""
        return qn.lbfgs_inverse_product(state.pairs, v) if self.memory else v

"""The rows that a step is made for, and the metric in which it is shortest: L-BFGS of the mean loss, or identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.parts.cache import IntArray
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.maths import quasi_newton as qn
from dqnfed.maths.gramian import bordered, cross_products, gramian
from dqnfed.maths.solvers import Common

if TYPE_CHECKING:
    from dqnfed.algorithms.parts.length import Parts
    from dqnfed.algorithms.parts.messages import DescentServer

WantedRates = Callable[[Replies[Any], FloatArray, FloatArray, FloatArray], FloatArray]


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

    def gram(self, state: MetricState, GG: FloatArray, on_pairs: FloatArray) -> FloatArray:
        """Return G W^-1 G' from G G' and the products of the same rows with the pairs."""
        if not self.memory:
            return GG
        pairs = torch.cat([state.pairs.s, state.pairs.y])
        return qn.metric_gramian(GG, on_pairs, qn.compact_inverse(gramian(pairs).numpy(), int(state.pairs.n_pairs)))

    def gram_of_padded(self, state: MetricState, GG: FloatArray, replies: Replies[Any]) -> FloatArray:
        """Return the same of replies whose products with the pairs, most of what is to know of a row, stay hidden."""
        if not self.memory:
            return GG
        pairs = torch.cat([state.pairs.s, state.pairs.y])
        inverse = qn.compact_inverse(gramian(pairs).numpy(), int(state.pairs.n_pairs))
        return inverse.scale * GG + replies.form("gradient", pairs, inverse.middle)

    def apply(self, state: MetricState, v: Tensor) -> Tensor:
        """Return W^-1 v."""
        return qn.lbfgs_inverse_product(state.pairs, v) if self.memory else v


class Rows(NamedTuple):
    """K replies, then the cached rows of A absent clients."""

    K: int
    GG: FloatArray  # [K + A, K + A]
    gram: FloatArray  # [K + A, K + A] in the metric
    rates: FloatArray  # [K + A]
    losses: FloatArray  # [K + A]
    absent: IntArray  # [A] slots of the cache
    on_cache: FloatArray  # [K, K + S] products of the replies with each other and with the rows of all slots
    along: FloatArray  # [K] products with the last step


def gathered_rows(
    parts: Parts,
    server: DescentServer,
    replies: Replies[Any],
    cohort: Cohort,
    losses: FloatArray,
    wanted_rates: WantedRates,
) -> Rows:
    """Return the rows that the step is made for; what the replies ask for is `wanted_rates` of them."""
    if replies.are_padded:
        return _of_padded(parts, server, replies, losses, wanted_rates)
    cache, pairs, K = server.cache, server.metric.pairs, len(replies)
    n_beside, last = K + len(cache.rows), server.theta_before - server.theta
    products = replies.gram("gradient", (cache.rows, last[None], pairs.s, pairs.y))
    on_cache, along, on_pairs = np.split(products, [n_beside, n_beside + 1], axis=1)
    GG, absent = on_cache[:, :K], np.zeros(0, dtype=np.int64)
    left = others = np.zeros(0)
    if parts.cache.size:
        absent = parts.cache.absent(cache, cohort)
        left = parts.cache.rates(cache, absent)
        among = cache.products.numpy()[np.ix_(absent, absent)]
        GG = bordered(GG, on_cache[:, K + absent], among)
        others = cache.rate.numpy()[absent] / np.maximum(np.diagonal(among), np.finfo(np.float64).tiny)
        if len(pairs.s):
            of_cached = cross_products(cache.rows, torch.cat([pairs.s, pairs.y])).numpy()
            on_pairs = np.concatenate([on_pairs, of_cached[absent]])
    rates = wanted_rates(replies, np.diagonal(GG)[:K], others, losses - float(server.votes.floor))
    return Rows(
        K,
        GG,
        parts.metric.gram(server.metric, GG, on_pairs),
        np.concatenate([rates, left]),
        np.concatenate([losses, cache.loss.numpy()[absent]]),
        absent,
        on_cache,
        along[:, 0],
    )


def _of_padded(
    parts: Parts, server: DescentServer, replies: Replies[Any], losses: FloatArray, wanted_rates: WantedRates
) -> Rows:
    """Return the rows from replies of which single products are asked for by votes alone; none are cached."""
    K, last = len(replies), (server.theta_before - server.theta)[None]
    products = replies.gram("gradient", last if parts.length.rule == "votes" else None)
    GG, along = products[:, :K], products[:, K:].sum(1)
    rates = wanted_rates(replies, np.diagonal(GG), np.zeros(0), losses - float(server.votes.floor))
    gram, nobody = parts.metric.gram_of_padded(server.metric, GG, replies), np.zeros(0, dtype=np.int64)
    return Rows(K, GG, gram, rates, losses, nobody, GG, along)


def step_notes(rows: Rows, found: Common, norm: float) -> dict[str, float]:
    """Return what is written down about a step with these weights."""
    slopes, asked = rows.gram @ found.weights, (rows.rates > 0) & found.served
    worst = float((slopes[asked] / rows.rates[asked]).min(initial=inf)) if norm > 0 else 0.0
    active, beyond = float(np.count_nonzero(found.weights)), float(found.beyond)
    return {"active": active, "worst_rate_met": worst if isfinite(worst) else 0.0, "beyond": beyond}

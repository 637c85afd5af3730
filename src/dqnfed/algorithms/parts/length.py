"""How far the server goes along its step u, theta - alpha u: rules, and the phases in which a length is sought."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import nan
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.parts.cache import Cache
from dqnfed.algorithms.parts.messages import DescentServer, Search
from dqnfed.algorithms.parts.metric import Mean, Metric
from dqnfed.algorithms.parts.rates import Rates
from dqnfed.algorithms.parts.votes import Votes
from dqnfed.core.algorithm import Cohort, ServerStep, Status
from dqnfed.core.replies import FloatArray, Replies
from dqnfed.core.trust import Trust
from dqnfed.maths import step_length
from dqnfed.maths.gramian import norm_of
from dqnfed.maths.solvers import BoolArray

RULES = ("auto", "votes", "curvature", "line-search", "match", "fixed", "diminishing", "paper")
RESTART = 4.0  # steps are so many times shorter after a return to the start model
MAX_HALVINGS = 40
FEW_HALVINGS = 10  # a step so short is nearly straight: a client whose loss has not fallen by then is inconsistent
STATIONARY = "Pareto-stationary: no step lowers every client's loss"
MEAN_STATIONARY = "stationary: the clients' mean gradient vanishes"
Step = ServerStep[DescentServer]
Notes = dict[str, float]


class Limits(NamedTuple):
    """What limits alpha: one entry for each client that counts."""

    slopes: FloatArray  # g_k'u
    curvature: FloatArray  # NaN: not known
    lengths: FloatArray  # of the gradients


@dataclass(frozen=True)
class Length:
    """A rule for alpha."""

    rule: str  # curvature | line-search | match | fixed | diminishing | paper
    step_size: float = 1.0  # eta of fixed and diminishing; the multiple of FedAvg's length for match
    growth: float = 3.0  # a step is at most this many times the last one (curvature, line-search)
    allowance: float = 0.03  # a client may lose half this share of the mean gain by the step's length
    least: float = 0.0  # share of the median client's length that no client can forbid

    @property
    def uses_curvature(self) -> bool:
        """Whether the length comes from the clients' curvatures."""
        return self.rule in ("curvature", "line-search")

    def no_search(self, theta: Tensor) -> Search:
        """Return the state between searches."""
        return _no_search(theta.dtype, theta.device)

    def by_rule(self, norm: float, mean_norm: float, round: int) -> float:
        """Return alpha without curvature; `mean_norm` is the length of the mean update."""
        if self.rule == "paper":
            return step_length.paper_length()
        if self.rule == "fixed":
            return step_length.fixed_length(self.step_size, norm**2)
        if self.rule == "diminishing":
            return step_length.diminishing_length(self.step_size, norm**2, round)
        return step_length.match_length(norm, mean_norm, ratio=self.step_size)

    def by_curvature(self, limits: Limits, norm: float, last_norm: float | None, last_alpha: float) -> float:
        """Return the longest alpha that no client's curvature and no growth limit forbid; a search starts at twice."""
        slopes, curvature, lengths = limits
        trusted = step_length.floored_curvature(curvature, lengths)
        growth = 1.0 if np.isnan(trusted).all() else self.growth  # nothing is known: as long as the last step
        alpha = step_length.curvature_length(slopes, trusted, norm**2, allowance=self.allowance, least=self.least)
        if self.rule == "line-search":
            alpha = step_length.line_search_start(alpha)
        longest = step_length.growth_limit(norm, last_norm, growth=growth)
        if last_alpha > 0.0:
            longest = min(longest, self.growth * last_alpha)
        return max(0.0, min(alpha, longest))

    def accepts(self, search: Search, replies: Replies[Any], cohort: Cohort, asked: BoolArray) -> bool:
        """Return whether the losses at the candidate are low enough for every client that is asked (Armijo)."""
        return step_length.armijo_holds(
            search.losses[cohort.clients].numpy()[asked],
            replies.scalars("trial_loss")[asked],
            search.slopes[cohort.clients].nan_to_num().numpy()[asked],
            float(search.length),
            rounding=torch.finfo(replies.dtype("trial_loss")).eps,
        )


class Parts(NamedTuple):
    """The rules that the method is composed of."""

    rates: Rates
    metric: Metric
    length: Length
    cache: Cache
    trust: Trust
    votes: Votes
    goes_beyond: bool  # whether a step may lower the mean where none serves everybody
    keeps_model: bool  # whether clients keep the model of their last reply and their gradient there


@lru_cache(maxsize=8)  # asked for in every round
def _no_search(dtype: torch.dtype, device: torch.device) -> Search:
    nothing, empty = torch.zeros(0, dtype=dtype, device=device), torch.zeros(0, dtype=torch.float64)
    zero, mean = torch.zeros((), dtype=torch.float64), Mean(nothing, torch.zeros(0, dtype=torch.bool))
    return Search(nothing, zero, mean, empty, empty, empty, zero, zero.long())


def searching(server: DescentServer, length: float, trials: int, notes: Notes) -> Step:
    """Return the step that asks clients about a candidate length."""
    candidate = torch.tensor(length, dtype=torch.float64)
    search = server.search._replace(length=candidate, trials=torch.tensor(trials))
    return ServerStep(server._replace(search=search), Status.AGAIN, notes)


def probed(parts: Parts, server: DescentServer, replies: Replies[Any], cohort: Cohort) -> Step:
    """Make the first step as long as the curvatures measured along it allow."""
    search, slopes = server.search, server.search.slopes[cohort.clients].numpy()
    trust = parts.trust.check_ahead(server.trust, replies, "probed_loss", cohort, float(search.length))
    if trust is not None:  # inconsistent clients had a part in the direction
        return ServerStep(_between_steps(parts, server._replace(trust=trust), nan), Status.AGAIN)
    measured, counted = float(search.norm) * replies.scalars("probed_slope"), ~np.isnan(slopes)
    slopes = np.where(measured > 0.0, measured, slopes)  # a false slope of one client shall not stop the others
    limits = slopes, replies.scalars("probed_curvature"), search.lengths[cohort.clients].numpy()
    return lengthened(parts, server, Limits(*(values[counted] for values in limits)), cohort, {})


def lengthened(parts: Parts, server: DescentServer, limits: Limits, cohort: Cohort, notes: Notes) -> Step:
    """Return the step whose length curvatures and the last step allow, or the search that starts there."""
    last_norm = float(server.step_norm) if int(server.n_steps) else None
    alpha = parts.length.by_curvature(limits, float(server.search.norm), last_norm, float(server.votes.alpha))
    if parts.length.rule == "curvature" or alpha == 0.0:
        return moved(parts, server, alpha, cohort, notes)
    return searching(server, alpha, 1, notes)


def tried(parts: Parts, server: DescentServer, replies: Replies[Any], cohort: Cohort) -> Step:
    """Accept the candidate if everybody's loss fell enough, else halve the step."""
    search, alpha, trials = server.search, float(server.search.length), int(server.search.trials)
    notes = {"alpha": alpha, "trials": float(trials)}
    if parts.length.accepts(search, replies, cohort, parts.trust.trusted(server.trust, cohort)):
        return moved(parts, server, alpha, cohort, notes)
    if trials > MAX_HALVINGS:
        return stationary(parts, server, cohort, notes)
    trust = parts.trust.check_ahead(server.trust, replies, "trial_loss", cohort, alpha)
    if trials == FEW_HALVINGS and trust is not None:  # the next round is without inconsistent clients
        return ServerStep(_between_steps(parts, server._replace(trust=trust), nan), Status.HOLD, notes)
    return searching(server, alpha / 2, trials + 1, notes)


def moved(parts: Parts, server: DescentServer, alpha: float, cohort: Cohort, notes: Notes) -> Step:
    """Return theta - alpha u; the end, if u is zero or everybody must gain by it and it is lost in theta's own size."""
    norm = float(server.search.norm)
    notes = {**notes, "alpha": alpha, "step_norm": alpha * norm}
    if norm == 0.0 or (not parts.goes_beyond and step_length.is_stationary(alpha, norm, norm_of(server.theta))):
        return stationary(parts, server, cohort, notes)
    after = _between_steps(parts, server, alpha)._replace(
        theta=server.theta - alpha * server.search.direction,
        theta_before=server.theta,
        step_norm=torch.tensor(alpha * norm, dtype=torch.float64),
        n_steps=server.n_steps + 1,
        metric=server.metric._replace(before=server.search.mean),
        votes=server.votes._replace(
            alpha=torch.tensor(alpha, dtype=torch.float64), is_back=torch.tensor(False), depth=server.votes.depth + 1
        ),
    )
    return ServerStep(after, Status.NEXT, notes)


def retreated(parts: Parts, server: DescentServer, mean: Mean, factor: float) -> Step:
    """Take the last step back: it made the clients' losses jump; the next one is shorter by the factor."""
    after = _between_steps(parts, server, nan)._replace(
        theta=server.theta_before,
        theta_before=server.theta,
        step_norm=server.step_norm / factor,
        metric=server.metric._replace(before=mean),
        cache=parts.cache.moved_by(server.cache, server.theta_before - server.theta),
        votes=parts.votes.shortened(server.votes, factor),
    )
    return ServerStep(after, Status.NEXT, {"retreat": factor})


def restarted(parts: Parts, server: DescentServer) -> Step:
    """Go back to the start model, where the clients' losses were lower, and make shorter steps from there."""
    votes = parts.votes.shortened(server.votes, RESTART)
    after = _between_steps(parts, server, nan)._replace(
        theta=server.theta_start,
        theta_before=server.theta,
        step_norm=server.step_norm / RESTART,
        cache=parts.cache.emptied(server.cache),
        votes=votes._replace(losses=votes.losses * nan, depth=0 * votes.depth, depths=0 * votes.depths),
    )
    return ServerStep(after, Status.NEXT, {"restart": RESTART})


def stationary(parts: Parts, server: DescentServer, cohort: Cohort, notes: Notes) -> Step:
    """No common descent is left for this cohort: the end if it is everybody, else a round without a step."""
    server = _between_steps(parts, server, nan)
    if len(cohort.clients) < cohort.n_clients:
        return ServerStep(server, Status.HOLD, notes)
    return ServerStep(server, Status.STOP, notes, MEAN_STATIONARY if parts.goes_beyond else STATIONARY)


def _between_steps(parts: Parts, server: DescentServer, alpha: float) -> DescentServer:
    """Return the server after theta - alpha u, or after a search without a step (NaN)."""
    trust = server.trust._replace(slopes=alpha * server.trust.slopes)
    return server._replace(search=parts.length.no_search(server.theta), trust=trust)

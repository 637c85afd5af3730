"""How far a common descent goes along its step: by a rule, by the clients' curvatures, or by trying.

A search takes phases of its own; what it must remember meanwhile is in the server's `Search`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan, nan
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.algorithms.common_descent_messages import (
    DescentServer,
    ProbeUpdate,
    Search,
    TrialUpdate,
)
from dqnfed.algorithms.common_descent_settings import DescentSettings
from dqnfed.algorithms.testimony import BELIEVED, Testimony, acted_on, measured, n_disbelieved
from dqnfed.core.algorithm import Cohort, ServerStep, Status
from dqnfed.core.digest import Digest, field_numbers
from dqnfed.maths import step_length
from dqnfed.maths.directions import mean_step

FloatArray = NDArray[np.float64]
MAX_HALVINGS = 40
FEW_HALVINGS = 10  # a step so short is nearly straight: who has not won by then has misled the server
PROBING = -1


class Norms(NamedTuple):
    """How long a step is, and the model that it changes."""

    step: float
    theta: float


@dataclass(frozen=True, kw_only=True)
class DescentLength(DescentSettings):
    """The length of a common descent's step, and the phases in which it is sought."""

    def _free_length(self, updates: Any, cohort: Cohort, norm: float) -> float:
        """Return alpha under the rules that do not ask for curvature."""
        if self.step == "paper":
            return step_length.paper_length()
        if self.step == "fixed":
            return step_length.fixed_length(self.step_size, norm**2)
        if self.step == "diminishing":
            return step_length.diminishing_length(self.step_size, norm**2, cohort.round)
        mean_norm = float(torch.linalg.vector_norm(mean_step(updates.gradient), dtype=torch.float64))
        return step_length.match_length(norm, mean_norm, ratio=self.step_size)

    def _lengthened(
        self,
        server: DescentServer,
        sought: Search,
        curvature: FloatArray,
        slopes: FloatArray,
        norms: Norms,
        cohort: Cohort,
        diagnostics: dict[str, float],
    ) -> ServerStep[DescentServer]:
        """Return the step whose length the clients' curvatures and the last step allow, or the search for it."""
        norm, previous = norms.step, float(server.step_norm) if int(server.n_steps) else None
        limit = step_length.growth_limit(norm, previous, growth=self.growth)
        trusted = step_length.floored_curvature(curvature)
        if np.isnan(trusted).all():
            limit = min(limit, step_length.growth_limit(norm, previous, growth=1.0))  # nothing known: as long as before
        alpha = step_length.curvature_length(slopes, trusted, norm**2)
        if self.step == "curvature":
            return self._stepped(server, sought, max(0.0, min(alpha, limit)), norms, cohort, diagnostics)
        start = max(0.0, min(step_length.line_search_start(alpha), limit))
        if start == 0.0:
            return self._stationary(server, cohort, diagnostics)
        return ServerStep(with_search(server, sought, start, 1), Status.AGAIN, diagnostics)

    def _stepped(
        self,
        server: DescentServer,
        sought: Search,
        alpha: float,
        norms: Norms,
        cohort: Cohort,
        diagnostics: dict[str, float],
    ) -> ServerStep[DescentServer]:
        """Return the step of the given length, unless it is lost in the model's own size."""
        diagnostics = {**diagnostics, "alpha": alpha, "step_norm": alpha * norms.step}
        if step_length.is_stationary(alpha, norms.step, norms.theta):
            return self._stationary(server, cohort, diagnostics)
        moved = self._moved(server, sought, alpha, alpha * norms.step)
        bound = norms.theta + max(alpha, 1.0) * norms.step  # of the whole step: a short share of infinity is no number
        return ServerStep(moved, Status.NEXT, diagnostics, norm_bound=bound)

    def _moved(self, server: DescentServer, sought: Search, alpha: float, norm: float) -> DescentServer:
        return server._replace(
            theta=server.theta.sub(sought.direction, alpha=alpha),
            theta_before=server.theta,
            step_norm=torch.from_numpy(np.array(norm)),  # in a third of the time that torch.tensor takes
            n_steps=server.n_steps + 1,
            gradient_before=sought.gradient if server.gradient_before.numel() else server.gradient_before,
            answered_before=sought.members,
            search=_idle(server.search),
            testimony=acted_on(server.testimony, alpha),
        )

    def _stationary(
        self, server: DescentServer, cohort: Cohort, diagnostics: dict[str, float]
    ) -> ServerStep[DescentServer]:
        """No common descent is left for this cohort: the end if it is everybody, else a round without a step."""
        server = server._replace(search=_idle(server.search), testimony=acted_on(server.testimony, nan))
        if len(cohort.clients) == cohort.n_clients:
            reason = "Pareto-stationary: no step lowers every client's loss"
            return ServerStep(server, Status.STOP, diagnostics, reason)
        return ServerStep(server, Status.HOLD, diagnostics)

    def _sought(
        self,
        server: DescentServer,
        updates: Any,
        cohort: Cohort,
        u: Tensor,
        slopes: FloatArray,
        counted: NDArray[np.bool_],
        kept: NDArray[np.bool_],
    ) -> Search:
        """Return the step u with what the search for its length needs; clients that do not count have no slope."""
        losses, per_client = server.search.losses, server.search.slopes
        if self.step == "line-search" or (self.seeks_length and int(server.n_steps) == 0):  # a phase of its own
            losses, per_client = torch.full_like(losses, torch.nan), torch.full_like(losses, torch.nan)
            losses[cohort.clients] = torch.from_numpy(field_numbers(updates.loss, cohort.digest, "loss"))
            per_client[cohort.clients] = torch.from_numpy(np.where(counted, slopes, np.nan))
        gradient, members = server.search.gradient, server.search.members
        if server.gradient_before.numel():
            gradient, members = mean_step(updates.gradient, torch.from_numpy(kept)), torch.zeros_like(members)
            members[cohort.clients] = torch.from_numpy(kept)
        return server.search._replace(direction=u, gradient=gradient, members=members, losses=losses, slopes=per_client)

    def _probed(self, server: DescentServer, updates: ProbeUpdate, cohort: Cohort) -> ServerStep[DescentServer]:
        """Make the first step as long as the curvatures along it allow."""
        search = server.search
        slopes = search.slopes[cohort.clients].numpy()
        counted = ~np.isnan(slopes)
        curvature = field_numbers(updates.probed_curvature, cohort.digest, "probed_curvature")
        norms = step_norms(server.theta, search.direction)
        slope_along = field_numbers(updates.probed_slope, cohort.digest, "probed_slope")
        probed = norms.step * slope_along  # not clipped, as the curvature is not
        if self.drop_share > 0.0:
            record = self._measured(server, cohort, updates.probed_loss)
            if n_disbelieved(record) > n_disbelieved(server.testimony):  # they had a part in the direction
                begun_anew = server._replace(search=_idle(search), testimony=acted_on(record, nan))
                return ServerStep(begun_anew, Status.AGAIN)
        slopes = np.where(probed > 0.0, probed, slopes)  # who contradicts its own gradient shall not stop the others
        return self._lengthened(server, search, curvature[counted], slopes[counted], norms, cohort, {})

    def _tried(self, server: DescentServer, updates: TrialUpdate, cohort: Cohort) -> ServerStep[DescentServer]:
        """Accept the candidate if everybody's loss fell enough, else halve the step."""
        search, alpha = server.search, float(server.search.length)
        slopes = search.slopes[cohort.clients].nan_to_num().numpy()
        losses = search.losses[cohort.clients].numpy()
        diagnostics = {"alpha": alpha, "trials": float(search.trials)}
        trial = field_numbers(updates.trial_loss, cohort.digest, "trial_loss")
        rounding = torch.finfo(updates.trial_loss.dtype).eps
        asked = np.ones(len(trial), dtype=np.bool_)
        if self.drop_share > 0.0:
            asked = (server.testimony.verdicts[cohort.clients] == BELIEVED).numpy()
        if step_length.armijo_holds(losses[asked], trial[asked], slopes[asked], alpha, rounding=rounding):
            norms = step_norms(server.theta, search.direction)
            return self._stepped(server, search, alpha, norms, cohort, diagnostics)
        if int(search.trials) > MAX_HALVINGS:
            return self._stationary(server, cohort, diagnostics)
        if self.drop_share > 0.0 and int(search.trials) == FEW_HALVINGS:
            record = self._measured(server, cohort, updates.trial_loss)
            if n_disbelieved(record) > n_disbelieved(server.testimony):  # the next round does without them
                held = server._replace(search=_idle(search), testimony=acted_on(record, nan))
                return ServerStep(held, Status.HOLD, diagnostics)
        return ServerStep(with_search(server, search, alpha / 2, int(search.trials) + 1), Status.AGAIN, diagnostics)

    def _measured(self, server: DescentServer, cohort: Cohort, losses: Tensor) -> Testimony:
        """Return the verdicts after clients measured their losses where the search has got to."""
        length, may_drop = float(server.search.length), self._may_drop(cohort)
        return measured(server.testimony, cohort.clients, losses, length=length, may_drop=may_drop)

    def _may_drop(self, cohort: Cohort) -> int:
        return int(self.drop_share * len(cohort.clients) + 1e-9)


def step_norms(theta: Tensor, step: Tensor, digest: Digest | None = None, norm: float = nan) -> Norms:
    """Return both norms; what the host knows is not measured again, the rest comes from a GPU in one transfer.

    `digest` is of the answers to this very theta, `norm` the step's; NaN: not known.
    """
    known = Norms(norm, nan if digest is None else digest.theta_norm)
    wanted = [v for v, length in zip((step, theta), known, strict=True) if isnan(length)]
    if not wanted:
        return known
    found = iter(torch.stack([torch.linalg.vector_norm(v, dtype=torch.float64) for v in wanted]).tolist())
    return Norms(*(next(found) if isnan(length) else length for length in known))


def with_search(server: DescentServer, search: Search, length: float, trials: int) -> DescentServer:
    """Return the server while it seeks the length of a step, the next candidate being so long."""
    sought = search._replace(
        length=torch.tensor(length, dtype=torch.float64), trials=torch.tensor(trials, dtype=torch.int64)
    )
    return server._replace(search=sought)


def _idle(search: Search) -> Search:
    """Return no search: what clients said in the last one is forgotten."""
    if int(search.trials) == 0:
        return search
    nothing = torch.zeros_like(search.losses)
    return search._replace(losses=nothing, slopes=nothing.clone(), trials=torch.zeros((), dtype=torch.int64))

"""A step length that is learnt: clients vote on the last step, and their losses guard it."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, isfinite, log, nan, sqrt
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray
from dqnfed.maths.step_length import loss_ratio, votes_for_longer

GAIN = 0.3  # of log m by the votes, 1 / t after step t < 4: a factor of e^0.15 a round if all agree
LIMIT = 9.0  # of |log m|
RISE = 1.3  # of the losses of clients that were here before: above it m is halved
FEW = 10  # clients, or all: until so many are known m does not rise above its start


class VotesState(NamedTuple):
    """What is known of the clients' losses, and the length learnt from them."""

    log_m: Tensor  # []      log of the step's length over the length of the clients' mean step
    alpha: Tensor  # []      of the last step; 0: none yet
    is_back: Tensor  # []    whether that step was taken back
    losses: Tensor  # [C]    above the floor, at the model of the client's last reply; NaN: no reply yet
    rounds: Tensor  # [C]    of that reply
    start: Tensor  # []      mean loss in the first round; NaN: none yet
    floor: Tensor  # []      no loss is below it


@dataclass(frozen=True)
class Votes:
    """m goes up by votes of clients that gain along the last step, and down by those that do not.

    A client votes for longer steps if its row still has a positive product with the last step and its loss has not
    risen since its last reply.
    """

    start: float = 1.0  # m before the first vote
    slow_start: bool = False  # whether steps are shorter while few clients are known
    robust: bool = False  # whether a single client's loss may matter only so much
    retreat: float = 2.0  # losses that rise by this factor, less one, a round since they were known: a step back

    def init(self, n_clients: int, floor: float) -> VotesState:
        """Return the state before the first round."""
        zero, unknown = torch.zeros((), dtype=torch.float64), torch.full((n_clients,), nan, dtype=torch.float64)
        rounds = torch.zeros(n_clients, dtype=torch.int64)
        return VotesState(
            zero, zero, zero.bool(), unknown, rounds, zero + nan, torch.tensor(floor, dtype=torch.float64)
        )

    def can_vote(self, state: VotesState) -> bool:
        """Return whether there was a last step."""
        return float(state.alpha) > 0.0 and not bool(state.is_back)

    def record(self, state: VotesState, losses: FloatArray, cohort: Cohort) -> VotesState:
        """Return the state with the losses of this round."""
        values, here = torch.from_numpy(losses) - state.floor, cohort.clients
        return state._replace(
            losses=state.losses.index_copy(0, here, values),
            rounds=state.rounds.index_fill(0, here, cohort.round),
            start=values.mean() if bool(state.start.isnan()) else state.start,
        )

    def retreat_by(self, state: VotesState, losses: FloatArray, cohort: Cohort) -> float:
        """Return by which factor steps must be shorter if the last one is to be taken back; 1: it is not."""
        if not self.can_vote(state):
            return 1.0
        known, usual = state.losses[cohort.clients].numpy(), float(state.losses.nanmean())
        is_known, age = np.isfinite(known), cohort.round - state.rounds[cohort.clients].numpy()
        before = np.where(is_known, known, max(usual, float(state.start)))
        ratio = loss_ratio(losses - float(state.floor), before, least=usual, robust=self.robust)
        age = np.where(is_known, age, cohort.round).mean()
        if ratio <= 1.0 + (self.retreat - 1.0) * age:
            return 1.0
        return min(max(2.0, sqrt(ratio)), 100.0) if isfinite(ratio) else 100.0

    def shortened(self, state: VotesState, factor: float) -> VotesState:
        """Return the state after the last step was taken back."""
        return state._replace(
            log_m=(state.log_m - log(factor)).clamp(min=-LIMIT), is_back=torch.ones_like(state.is_back)
        )

    def counted(
        self, state: VotesState, along: FloatArray, losses: FloatArray, cohort: Cohort, n_steps: int, n_known: int
    ) -> tuple[VotesState, float]:
        """Return the state after the votes on the last step, and the share of those for longer ones (NaN: no vote)."""
        if not self.can_vote(state):
            return state, nan
        known, now = state.losses[cohort.clients].numpy(), losses - float(state.floor)
        share, again = votes_for_longer(along, now, known), np.isfinite(known)
        log_m = float(state.log_m) + max(GAIN, 1.0 / n_steps) * (share - 0.5)
        if again.any() and not loss_ratio(now[again], known[again], robust=self.robust) <= RISE:
            log_m -= log(2.0)
        highest = LIMIT if n_known >= min(cohort.n_clients, FEW) else 0.0
        return state._replace(log_m=torch.tensor(min(max(log_m, -LIMIT), highest), dtype=torch.float64)), share

    def length(
        self, state: VotesState, ratio: float, *, beyond: bool, n_steps: int, n_known: int, cohort: Cohort
    ) -> float:
        """Return alpha; `ratio` is the length of the clients' mean step over that of u."""
        alpha, last = self.start * exp(float(state.log_m)) * ratio, float(state.alpha)
        enough = min(cohort.n_clients, FEW)
        if self.slow_start and n_known < enough:  # the second factor: the same clients were asked again
            alpha *= n_known / enough * min(1.0, n_known / (len(cohort.clients) * (n_steps + 1)))
        return min(alpha, 2.0 * last) if beyond and last > 0.0 else alpha

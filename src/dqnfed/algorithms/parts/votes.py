"""A step length that is learnt: clients vote on the last step, and their losses say when to go back."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, isfinite, isnan, log, nan, sqrt

import numpy as np
import torch
from torch import Tensor

from dqnfed.algorithms.parts.cache import IntArray
from dqnfed.algorithms.parts.messages import VotesState
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import FloatArray
from dqnfed.maths.step_length import loss_ratio, votes_for_longer

GAIN = 0.3  # of log m by the votes, 1 / t after step t < 4: a factor of e^0.15 a round if all agree
LIMIT = 9.0  # of |log m|
RISE = 1.3  # of the losses of clients that were here before: above it m is halved
RISE_ALL = 1.1  # if all clients are here, with gradients
JUMP = 2.0  # of the losses by one step: above it the step is taken back; another draw of clients raises losses too
JUMP_ALL = 1.2  # if all clients are here, with gradients or where replies may be false
JUMP_EXACT = 1.05  # and their rows are gradients: nothing but the step has raised the losses
GROWTH = 3.0  # of a step by its successor at most, with all clients and gradients
GROWTH_ROBUST = 1.25  # where replies may be false, after the first steps: who comes and goes shall not stretch it
MAX_KEPT = 10_000  # clients whose numbers are kept: of more, the newest
NOBODY = -1  # a client's number
FEW = 10  # clients, or three quarters of them: until so many are known m does not rise above its start


def enough_clients(n_clients: int) -> int:
    """Return how many clients must be known before m may rise; not all, since some may never reply."""
    return min(n_clients - n_clients // 4, FEW)


@dataclass(frozen=True)
class Votes:
    """m goes up by votes of clients that gain along the last step, and down by those that do not.

    A client votes for longer steps if its row still has a positive product with the last step and its loss has not
    risen since its last reply.
    """

    first_m: float = 1.0  # before the first vote
    gradients: bool = False  # whether rows are gradients; steps are then shorter while few clients are known
    robust: bool = False  # whether a single client's loss may matter only so much

    def init(self, n_clients: int, floor: float) -> VotesState:
        """Return the state before the first round."""
        clients = torch.full((int(n_clients > MAX_KEPT),), NOBODY)
        n_places = len(clients) or n_clients
        zero, unknown = torch.zeros((), dtype=torch.float64), torch.full((n_places,), nan, dtype=torch.float64)
        depths, lowest = torch.zeros(n_places, dtype=torch.int64), torch.tensor(floor, dtype=torch.float64)
        return VotesState(zero, zero, zero.bool(), unknown, zero.long(), depths, unknown, lowest, clients)

    def with_places(self, state: VotesState, cohort: Cohort) -> VotesState:
        """Return the state of very many clients with places for the cohort's numbers; those with old ones lose theirs.

        Numbers at the start model are kept longest. Of fewer clients everybody has a place.
        """
        if not len(state.clients):
            return state
        new = cohort.clients[~torch.isin(cohort.clients, state.clients)]
        is_old = ~torch.isin(state.clients, cohort.clients)
        age = torch.where(state.starts.isfinite() | ~is_old, inf, state.depths.double())
        stay = age.argsort(stable=True)[max(0, len(age) + len(new) - MAX_KEPT) :]
        clients, order = torch.cat([state.clients[stay], new]).sort()

        def moved(values: Tensor, empty: float) -> Tensor:
            return torch.cat([values[stay], values.new_full((len(new),), empty)])[order]

        losses, starts, depths = moved(state.losses, nan), moved(state.starts, nan), moved(state.depths, 0)
        return state._replace(losses=losses, depths=depths, starts=starts, clients=clients)

    def places(self, state: VotesState, cohort: Cohort) -> IntArray:
        """Return where the numbers of a cohort with places are."""
        here, kept = cohort.clients.numpy(), state.clients.numpy()
        return np.searchsorted(kept, here) if len(kept) else here

    def n_known(self, state: VotesState, cohort: Cohort) -> int:
        """Return of how many clients there is a reply, those of the cohort included."""
        known = np.isfinite(state.losses.numpy())
        known[self.places(state, cohort)] = True
        return int(np.count_nonzero(known))

    def record(self, state: VotesState, losses: FloatArray, cohort: Cohort) -> VotesState:
        """Return the state with the losses of this round."""
        values, here = torch.from_numpy(losses) - state.floor, torch.from_numpy(self.places(state, cohort))
        return state._replace(
            losses=state.losses.index_copy(0, here, values),
            depths=state.depths.index_fill(0, here, int(state.depth)),
            starts=state.starts if int(state.depth) else state.starts.index_copy(0, here, values),
        )

    def tells_all(self, cohort: Cohort) -> bool:
        """Return whether a small rise of the losses is taken as the last step's fault: all clients are here.

        Not with local training, whose mini-batches raise losses now and then, unless replies may be false.
        """
        return len(cohort.clients) == cohort.n_clients and (self.gradients or self.robust)

    def retreat_by(self, state: VotesState, losses: FloatArray, cohort: Cohort) -> float:
        """Return by which factor steps must be shorter if the last one is to be taken back; 1: it is not."""
        if float(state.alpha) == 0.0 or bool(state.is_back):
            return 1.0
        exact = self.gradients and not self.robust  # robust losses do not tell a rise by less than JUMP_ALL
        jump = (JUMP_EXACT if exact else JUMP_ALL) if self.tells_all(cohort) else JUMP
        here, all_losses = self.places(state, cohort), state.losses.numpy()
        known, steps = all_losses[here], int(state.depth) - state.depths.numpy()[here]
        usual, is_known = float(state.losses.nanmean()), np.isfinite(known)
        before = np.where(is_known, known, max(usual, float(state.starts.nanmean())))
        ratio = loss_ratio(losses - float(state.floor), before, least=usual, robust=self.robust)
        since = max(1.0, float(np.where(is_known, steps, int(state.depth)).mean()))  # 0 after a held round
        if ratio <= 1.0 + (jump - 1.0) * since:
            return 1.0
        return min(max(2.0, sqrt(ratio)), 100.0) if isfinite(ratio) else 100.0

    def is_above_start(self, state: VotesState, losses: FloatArray, cohort: Cohort) -> bool:
        """Return whether losses now and at the last replies are clearly above the same clients' at the start model.

        Where they were low until the last step, it is enough to take that step back. While few clients are known one
        that is asked for the first time counts with the largest loss that is known of the start model.
        """
        all_starts, all_losses, here = state.starts.numpy(), state.losses.numpy(), self.places(state, cohort)
        starts, before, known = all_starts[here], all_losses[here], all_starts[np.isfinite(all_starts)]
        if float(state.alpha) == 0.0 or bool(state.is_back) or not len(known):
            return False
        if np.count_nonzero(np.isfinite(all_losses)) < enough_clients(cohort.n_clients):
            starts = np.where(np.isfinite(starts) | np.isfinite(before), starts, float(known.max()))
        counts = np.isfinite(starts)
        lower = np.fmin(losses - float(state.floor), before)[counts]  # NaN: no reply since the last restart
        jump = JUMP_ALL if len(cohort.clients) == cohort.n_clients else JUMP
        return bool(counts.any()) and not loss_ratio(lower, starts[counts], robust=self.robust) <= jump

    def shortened(self, state: VotesState, factor: float) -> VotesState:
        """Return the state after the last step was taken back."""
        return state._replace(
            log_m=(state.log_m - log(factor)).clamp(min=-LIMIT),
            is_back=torch.ones_like(state.is_back),
            depth=state.depth - 1,
        )

    def counted(
        self, state: VotesState, along: FloatArray, losses: FloatArray, cohort: Cohort, n_steps: int, n_known: int
    ) -> tuple[VotesState, float]:
        """Return the state after the votes on the last step, and the share of those for longer ones (NaN: no vote)."""
        if float(state.alpha) == 0.0 or bool(state.is_back):
            return state, nan
        known, now = state.losses.numpy()[self.places(state, cohort)], losses - float(state.floor)
        share, again = votes_for_longer(along, now, known), np.isfinite(known)
        log_m = float(state.log_m) + max(GAIN, 1.0 / n_steps) * (share - 0.5)
        rise = RISE_ALL if self.tells_all(cohort) and not self.robust else RISE
        if again.any() and not loss_ratio(now[again], known[again], robust=self.robust) <= rise:
            log_m -= log(2.0)
        highest = LIMIT if n_known >= enough_clients(cohort.n_clients) else 0.0
        return state._replace(log_m=torch.tensor(min(max(log_m, -LIMIT), highest), dtype=torch.float64)), share

    def longest(self, state: VotesState, share: float, cohort: Cohort, n_steps: int) -> float:
        """Return how many times the last step the next may be; inf: there was none, or it says nothing.

        With part of the clients, or local training, a longer step may have other reasons than a bad one before.
        """
        if bool(state.is_back):
            return 1.0
        if isnan(share) or not self.tells_all(cohort):
            return inf
        growth = max(GROWTH_ROBUST, exp(0.5 / n_steps)) if self.robust and not self.gradients else GROWTH
        return share + 0.5 if share < 0.5 else growth

    def length(
        self, state: VotesState, ratio: float, *, beyond: bool, n_steps: int, n_known: int, cohort: Cohort
    ) -> float:
        """Return alpha; `ratio` is the length of the clients' mean step over that of u."""
        m, last = self.first_m * exp(float(state.log_m)), float(state.alpha)
        alpha = (min(m, 1.0) if beyond else m) * ratio
        enough = enough_clients(cohort.n_clients)
        if self.gradients and n_known < enough:  # the second factor: the same clients were asked again
            alpha *= n_known / enough * min(1.0, n_known / (len(cohort.clients) * (n_steps + 1)))
        return min(alpha, 2.0 * last) if beyond and last > 0.0 else alpha

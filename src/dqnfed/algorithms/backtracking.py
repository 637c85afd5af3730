"""A line search on the mean loss, one trial a phase: the server sends a model, every client replies with its loss.

Not a method of its own; `fednl-ls`, `shed`, `fedns` and the network forms use it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dqnfed.core.algorithm import Status

ROUNDING = 10.0  # in units of the loss's last digit: an increase smaller than this is none
MAX_TRIALS = 60


class Trial(NamedTuple):
    """A candidate for the next model; clients reply with their loss there."""

    theta: Tensor  # [n]


class TrialLoss(NamedTuple):
    """A client's loss at the candidate; not finite: the trial went too far, which is no fault."""

    trial_loss: Tensor  # []


class Search(NamedTuple):
    """The line search that is under way; `n_trials` is 0 when none is."""

    step: Tensor  # [n] the whole step; the trial is theta - length * step
    loss: Tensor  # [] at theta
    slope: Tensor  # [] first-order decrease along the whole step, positive
    length: Tensor  # []
    n_trials: Tensor  # [] int64

    @property
    def is_on(self) -> bool:
        return bool(self.n_trials > 0)


def no_search(theta: Tensor) -> Search:
    """Return the state in which no search is under way."""
    zero = theta.new_zeros(())
    return Search(torch.zeros_like(theta), zero, zero.clone(), zero.clone(), torch.zeros((), dtype=torch.long))


def new_search(step: Tensor, loss: float, slope: Tensor) -> Search:
    """Return the search that tries the whole step first; `loss` is the mean loss at theta."""
    return Search(step, step.new_tensor(loss), slope, torch.ones_like(slope), torch.ones((), dtype=torch.long))


def is_accepted(search: Search, trial_loss: float, sufficient: float) -> bool:
    """Return whether the mean loss falls by `sufficient` of its first-order decrease, up to rounding."""
    rounding = ROUNDING * torch.finfo(search.loss.dtype).eps * search.loss.abs()
    return bool(trial_loss <= search.loss - sufficient * search.length * search.slope + rounding)


def shortened(search: Search, factor: float) -> Search:
    """Return the search with its next, shorter trial."""
    return search._replace(length=search.length * factor, n_trials=search.n_trials + 1)


class Outcome(NamedTuple):
    """The server's state after a trial."""

    theta: Tensor  # [n] the accepted model, or the one before
    search: Search  # over, or with its next trial
    status: Status
    diagnostics: dict[str, float]


def after_trial(theta: Tensor, search: Search, trial_loss: float, sufficient: float, shrink: float) -> Outcome:
    """Return the next model if the trial is accepted, the next trial if not, or theta itself after the last one."""
    diagnostics = {"length": float(search.length), "trials": float(search.n_trials)}
    if is_accepted(search, trial_loss, sufficient):
        return Outcome(theta - search.length * search.step, no_search(theta), Status.NEXT, diagnostics)
    if int(search.n_trials) >= MAX_TRIALS:
        return Outcome(theta, no_search(theta), Status.HOLD, diagnostics)
    return Outcome(theta, shortened(search, shrink), Status.AGAIN, {})

"""How a run ended: by its plan, by its method, by Ctrl-C, or with a loss that says that training went wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dqnfed.sim.state import Record, State

DIVERGED = "diverged"
FACTOR = 2.0  # a mean training loss above so many times its start is no training
ROUNDING = 1e-6  # by which a loss that starts at its least value may rise
NOT_FINITE = "the model is not finite after round"


def ended(state: State, history: Sequence[Record], rounds: int) -> tuple[str, str]:
    """Return the status of a run after its last round, and the reason where it is not "finished"."""
    if not state.stopped and state.round < rounds:
        return "interrupted", ""
    if why := divergence(history):
        return DIVERGED, f"{state.stopped}; {why}" if state.stopped else why
    if state.stopped.startswith(NOT_FINITE):
        return DIVERGED, state.stopped
    return ("stopped", state.stopped) if state.stopped else ("finished", "")


def divergence(history: Sequence[Record]) -> str:
    """Return why the run diverged by its mean training loss at the start and at the end, or nothing."""
    losses = [record["train_loss"]["mean"] for record in history if record["train_loss"] is not None]
    if len(losses) < 2:
        return ""
    first, last = (math.nan if loss is None else float(loss) for loss in (losses[0], losses[-1]))
    if not math.isfinite(last):
        return "the mean training loss is not finite at the end"
    if math.isfinite(first) and last > first + (FACTOR - 1) * abs(first) + ROUNDING:
        return f"the mean training loss rose from {first:.4g} to {last:.4g}, above {FACTOR:g} times its start"
    return ""

"""A run does not end with a model that is worse than its start: it keeps the best that was evaluated.

Worse for the clients together, as they evaluated it; no single client's word decides. It is for clients that are not
known to be honest, so on Flower by default; in simulation a run that went wrong is shown as it is.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from dqnfed.sim.state import Record, Setup, State

logger = logging.getLogger("dqnfed")
MANY = 5  # clients; among fewer there is no majority against a false loss


def mean_change(losses: Tensor, start: Tensor) -> float:
    """Return the clients' mean change of loss since the start, such that no single client decides on its sign.

    The largest gain does not count, and no change counts for more than half as many medians as there are clients;
    of fewer than five clients everybody's counts, for one median at most.
    """
    change = (losses - start)[losses.isfinite() & start.isfinite()]
    if not len(change):
        return 0.0
    many = len(change) >= MANY
    most = (0.5 * len(change) if many else 1.0) * float(change.abs().median())
    counted = change.sort()[0][1:] if many else change
    return float(counted.clamp(-most, most).mean())


def watch_end(setup: Setup, state: State, theta: Tensor) -> None:
    """Keep the present model if it is the best that was evaluated, the start model first."""
    if setup.algorithm.info.training != "federated":
        return
    if not state.guard:
        known, zero = state.losses, torch.zeros((), dtype=torch.float64)
        state.guard = {"clients": known.clients.clone(), "start": known.values.clone(), "best": zero, "last": zero}
        state.guard |= {"theta": theta.detach().clone(), "round": torch.tensor(-1)}
        return
    last = mean_change(state.losses.at(state.guard["clients"]), state.guard["start"])
    state.guard = {**state.guard, "last": torch.tensor(last, dtype=torch.float64)}
    if last < float(state.guard["best"]):
        new = {"best": state.guard["last"], "theta": theta.detach().clone(), "round": torch.tensor(state.round)}
        state.guard = {**state.guard, **new}


def ends_worse(state: State) -> bool:
    """Return whether the last model is worse than the start, and a better one is kept."""
    return bool(state.guard) and float(state.guard["last"]) > 0.0


def guarded_facts(state: State) -> Record:
    """Return what the summary says about a model that was kept for that."""
    round = int(state.guard["round"])
    which = "the start model" if round < 0 else f"the model of round {round}"
    why = f"the clients' losses are above those of the start at the end: {which} is kept (`policy.on_worse`)"
    logger.warning("%s", why)
    return {"kept_round": round, "kept_because": why}

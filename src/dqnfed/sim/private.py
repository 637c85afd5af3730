"""Noise and its budget in a run: what cannot work together, when the budget is spent, what the summary says."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dqnfed.secure.accounting import BudgetSpent, Ledger, SpentFile, check_accountant, sampling_share
from dqnfed.secure.records import check_memory, check_reads_gradients

if TYPE_CHECKING:
    from dqnfed.sim.state import Record, Setup, State

logger = logging.getLogger("dqnfed")
SPENT_FILE = "privacy.json"  # of a run's folder
WITH_PADS = (
    "`privacy.noise` = 'central' is for a server that is trusted with the exact sums, and with `privacy.secure` it is "
    "not; use 'distributed' or 'local' noise."
)
WITHOUT_PADS = (
    "`privacy.noise` = 'distributed' gives every client a share of the noise, which hides no reply by itself; it needs "
    "`privacy.secure` = true."
)


def ledger_of(setup: Setup, state: State) -> Ledger | None:
    """Return the account of a run so far; None without noise."""
    if setup.privacy is None:
        return None
    return Ledger(setup.privacy, int(state.totals["releases"]), share_of(setup), state.spent_file)


def share_of(setup: Setup) -> float:
    """Return the share by which sampling amplifies; above 0 and below 1 the cohorts are drawn in secret."""
    if setup.privacy is None:
        return 1.0
    return sampling_share(setup.privacy, setup.sampling.rule, setup.participation, setup.federation.n_clients)


def go_on_counting(folder: Path, setup: Setup, state: State, *, resume: bool) -> None:
    """Count in a file of the run's folder, which goes on with what a killed run has spent since its checkpoint."""
    if setup.privacy is None:
        return
    state.spent_file = SpentFile(folder / SPENT_FILE)
    spent, known = state.spent_file.read() if resume else 0, int(state.totals["releases"])
    if spent > known:
        logger.warning("%d releases of rounds that were lost with a killed process are counted too", spent - known)
        state.totals["releases"] = spent
    state.spent_file.write(int(state.totals["releases"]))


def check_privacy(setup: Setup) -> None:
    """Refuse noise that the method, the policy or secure aggregation makes meaningless."""
    privacy = setup.privacy
    if privacy is None:
        return
    check_accountant()
    privacy.check_method(setup.algorithm)
    if privacy.unit == "record":
        check_reads_gradients(setup.algorithm)
        if setup.clients.memory_kind is None:
            check_memory(setup.algorithm, setup.problem, setup.tasks.per_client(torch.arange(1), 0)[0], privacy)
    if privacy.noise == "local":
        return
    if setup.clients.is_secure != (privacy.noise == "distributed"):
        raise ValueError(WITHOUT_PADS if privacy.noise == "distributed" else WITH_PADS)
    bound = setup.policy.max_update_norm
    if bound != float("inf"):
        raise ValueError(
            f"`policy.max_update_norm` = {bound:g} clips a reply by what is usual among the others, which "
            f"`privacy.noise` = '{privacy.noise}' does not count; set it to inf, since `privacy.clip` bounds every "
            "reply."
        )


def overspent(ledger: Ledger, n_releases: int = 1) -> str | None:
    """Count what clients release with local noise; return why it cannot be sent any more, or nothing."""
    if ledger.privacy.noise != "local":
        return None
    try:
        ledger.spend(n_releases)
    except BudgetSpent as spent:
        return str(spent)
    return None


def privacy_facts(setup: Setup, state: State) -> Record:
    """Return what the summary says about the noise."""
    ledger = ledger_of(setup, state)
    if ledger is None:
        return {}
    privacy, epsilon = ledger.privacy, ledger.epsilon if ledger.epsilon != float("inf") else None
    return {
        "privacy": {
            "epsilon": epsilon,
            "delta": privacy.delta,
            "noise_multiplier": privacy.noise_multiplier,
            "noise": privacy.noise,
            "unit": privacy.unit,
            "releases": ledger.n_releases,
            "sampling_share": ledger.share,
        }
    }

"""Noise and its budget in a run: what cannot work together, when the budget is spent, what the summary says."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dqnfed.secure.accounting import BudgetSpent, Ledger, check_accountant

if TYPE_CHECKING:
    from dqnfed.sim.state import Record, Setup, State


def check_privacy(setup: Setup) -> None:
    """Refuse noise that the method, the policy or secure aggregation makes meaningless."""
    privacy = setup.privacy
    if privacy is None:
        return
    check_accountant()
    privacy.check_method(setup.algorithm)
    if privacy.noise == "local":
        return
    if setup.clients.is_secure:
        raise ValueError(
            "`privacy.noise` = 'central' is for a server that is trusted with the exact sums, and with "
            "`privacy.secure` it is not; use 'local' noise."
        )
    bound = setup.policy.max_update_norm
    if bound != float("inf"):
        raise ValueError(
            f"`policy.max_update_norm` = {bound:g} clips a reply by what is usual among the others, which "
            "`privacy.noise` = 'central' does not count; set it to inf, since `privacy.clip` bounds every reply."
        )


def overspent(ledger: Ledger) -> str | None:
    """Count a message to clients with local noise; return why it cannot be sent any more, or nothing."""
    if ledger.privacy.noise != "local":
        return None
    try:
        ledger.spend()
    except BudgetSpent as spent:
        return str(spent)
    return None


def privacy_facts(setup: Setup, state: State) -> Record:
    """Return what the summary says about the noise."""
    if setup.privacy is None:
        return {}
    ledger = Ledger(setup.privacy, int(state.totals["releases"]))
    epsilon = ledger.epsilon if ledger.epsilon != float("inf") else None
    return {
        "privacy": {
            "epsilon": epsilon,
            "delta": setup.privacy.delta,
            "noise_multiplier": setup.privacy.noise_multiplier,
            "noise": setup.privacy.noise,
            "unit": "client",
        }
    }

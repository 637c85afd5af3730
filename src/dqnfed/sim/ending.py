"""How a run ended: by its plan, by its method, by Ctrl-C, or with a loss that says that training went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dqnfed.core.algorithm import AnyAlgorithm, default_of
from dqnfed.core.local_work import LocalWork
from dqnfed.core.result import RunResult, model_metadata
from dqnfed.core.screening import UPDATE_NOT_FINITE
from dqnfed.core.tensors import named_parameters
from dqnfed.sim.journal import Journal
from dqnfed.sim.measure import divergence, model_columns
from dqnfed.sim.private import privacy_facts
from dqnfed.sim.selection import kept_facts, kept_model, kept_outputs, kept_record
from dqnfed.sim.state import Record, Setup, State
from dqnfed.sim.sums import NOT_KNOWN

DIVERGED = "diverged"
NOT_FINITE = "the model is not finite after round"
LOST = 3  # rounds at the end in which no client has sent a number: what it keeps is broken, and will stay so


def ended(state: State, history: Sequence[Record], rounds: int) -> tuple[str, str]:
    """Return the status of a run after its last round, and the reason where it is not "finished"."""
    if not state.stopped and state.round < rounds:
        return "interrupted", ""
    if why := divergence(history):
        return DIVERGED, f"{state.stopped}; {why}" if state.stopped else why
    if state.stopped.startswith(NOT_FINITE):
        return DIVERGED, state.stopped
    if (n := rounds_without_numbers(history)) >= LOST:
        return DIVERGED, f"no client has sent a finite update in the last {n} rounds"
    return ("stopped", state.stopped) if state.stopped else ("finished", "")


def rounds_without_numbers(history: Sequence[Record]) -> int:
    """Return in how many rounds before the end no client has sent a finite update."""
    n = 0
    for record in reversed(history):
        lost = {drop["client"] for drop in record.get("dropped", ()) if drop["why"] == UPDATE_NOT_FINITE}
        if not record["clients"] or lost != set(record["clients"]):
            break
        n += 1
    return n


def idle_rounds(history: Sequence[Record]) -> int:
    """Return in how many rounds no client's reply was used, whether nobody was asked or all were left out."""
    trained = [record for record in history if record["round"] >= 0]
    return sum(not set(r["clients"]) - {drop["client"] for drop in r.get("dropped", ())} for r in trained)


def finished(setup: Setup, state: State, journal: Journal, settings: dict[str, Any]) -> RunResult:
    """Return the result, after writing the model and the summary to the run's folder."""
    problem = setup.problem
    evaluated = kept_record(state, journal.history)
    status, reason = ended(state, journal.history, setup.rounds)
    summary: Record = {
        "name": settings.get("name", "run"),
        "algorithm": settings.get("algorithm", {}).get("name", type(setup.algorithm).__name__),
        "seed": setup.seed,
        "version": journal.environment["dqnfed"],
        "rounds": state.round,
        "status": status,
        "reason": reason,
        "score": problem.score_name,
        **kept_facts(setup, state),
        "accuracy": evaluated["accuracy"],
        "train_loss": evaluated["train_loss"],
        "models": evaluated.get("models", {}),
        "start": state.start,
        "rho_mean": state.rho_sum / state.rho_n if state.rho_n else None,
        "totals": state.totals,
        "n_dropped": state.n_dropped,
        **({"idle_rounds": n_idle} if (n_idle := idle_rounds(journal.history)) else {}),
        "n_clipped": state.n_clipped,
        "unused": unused_settings(setup.algorithm),
        "mode": setup.algorithm.mode,
        "untested": len(setup.federation.untested),
        **({} if len(setup.evaluated) == setup.federation.n_clients else {"evaluated": len(setup.evaluated)}),
        **gpu_facts(problem.theta0.device),
        **privacy_facts(setup, state),
        **({} if setup.summing is None else {"summed": NOT_KNOWN}),
    }
    theta, layout = kept_model(setup, state).detach().cpu(), problem.layout
    if setup.algorithm.info.training != "federated":
        summary["training"] = setup.algorithm.info.training
    if setup.algorithm.info.own_part:
        summary["own_part"] = setup.algorithm.info.own_part
    if setup.algorithm.info.training == "alone":  # every client has its own, and the server's was never trained
        theta, layout = theta[:0], ()
    if journal.folder is not None:
        journal.folder.write_model(named_parameters(theta, layout), model_metadata(layout, problem.model_spec))
    if setup.complete is not None:
        summary.update(setup.complete(lambda: kept_outputs(setup, state)))
    if journal.folder is not None:
        journal.folder.finish(summary)
    return RunResult(
        theta=theta,
        layout=layout,
        summary=summary,
        history=journal.history,
        client_rows=journal.all_rows(),
        columns=model_columns(setup),
        config=settings,
        clients=journal.clients,
        environment=journal.environment,
        module=problem.module,
        model_spec=problem.model_spec,
    )


def gpu_facts(device: torch.device) -> Record:
    """Return the most bytes of a GPU's memory that torch held for this process since the run began."""
    return {"gpu_bytes": torch.cuda.max_memory_reserved(device)} if device.type == "cuda" else {}


def unused_settings(algorithm: AnyAlgorithm) -> list[str]:
    """Return the shared settings that differ from their default and have no effect on this prepared method."""
    if not isinstance(algorithm, LocalWork):
        return []
    return sorted(name for name in algorithm.unused() if getattr(algorithm, name) != default_of(algorithm, name))

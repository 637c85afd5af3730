"""The engine's state on disk: written whole or not at all, read back to the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.consistency import ConsistencyState
from dqnfed.core.run_folder import clear_disk_errors, json_text, load_tensors, save_tensors, write_atomically
from dqnfed.core.tensors import from_named_tensors, map_tensors, named_tensors
from dqnfed.sim.choice import Choice
from dqnfed.sim.state import Record, State

CLAIMS = "claims."  # before those of the consistency check
KEPT = "kept."  # before the names of the tensors of the best model


def save_checkpoint(folder: Path, state: State, identity: Record) -> None:
    """Write the state; the small JSON file is replaced last, so a kill leaves the previous checkpoint in force."""
    named = named_tensors(state.server, "server.")
    named["losses"] = state.losses
    named.update(state.memory.named())
    if state.claims is not None:
        named.update(named_tensors(state.claims, CLAIMS))
    named.update({f"{KEPT}{name}": tensor for name, tensor in state.kept.items()})
    tensor_file = f"state-{state.round}.safetensors"
    facts = {
        "identity": identity,
        "round": state.round,
        "tensors": tensor_file,
        "totals": state.totals,
        "rho": [state.rho_sum, state.rho_n],
        "n_dropped": state.n_dropped,
        "n_clipped": state.n_clipped,
        "start": state.start,
        "stopped": state.stopped,
        "best": state.best,
        "choice": state.choice._asdict(),
    }
    with clear_disk_errors(folder.parent):
        folder.mkdir(parents=True, exist_ok=True)
        save_tensors(folder / tensor_file, named, {"round": state.round})
        write_atomically(folder / "checkpoint.json", json_text(facts))
        for old in folder.glob("state-*"):
            if old.name != tensor_file:
                old.unlink()


def load_checkpoint(folder: Path, state: State, algorithm: AnyAlgorithm, identity: Record) -> bool:
    """Fill the state from the folder; return False where there is no checkpoint yet."""
    facts_file = folder / "checkpoint.json"
    if not facts_file.is_file():
        return False
    facts: Record = json.loads(facts_file.read_text(encoding="utf-8"))
    for name, stored in facts["identity"].items():
        if stored != identity[name]:
            raise ValueError(
                f"the run in {folder.parent} was started with {name} {stored} and cannot go on with {identity[name]}; "
                "resume it with the same settings, or start a new run in another folder."
            )
    named, _ = load_tensors(folder / facts["tensors"])

    def placed(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return t.to(like.device)

    state.server = map_tensors(placed, from_named_tensors(algorithm.info.server, named, "server."), state.server)
    state.losses = named["losses"]
    if any(name.startswith(CLAIMS) for name in named):
        claims = from_named_tensors(ConsistencyState, named, CLAIMS)
        state.claims = claims._replace(theta=claims.theta.to(state.server.theta.device))
    state.memory.load(named, state.server.theta.device)
    state.round = facts["round"]
    state.totals = facts["totals"]
    state.rho_sum, state.rho_n = facts["rho"]
    state.n_dropped, state.n_clipped = facts["n_dropped"], facts["n_clipped"]
    state.start, state.stopped, state.best = facts["start"], facts["stopped"], facts["best"]
    choice = facts.get("choice", {})  # not in checkpoints of earlier versions
    state.choice = Choice(**{**choice, "recent": tuple(choice.get("recent", ()))})
    kept = {name.removeprefix(KEPT): tensor for name, tensor in named.items() if name.startswith(KEPT)}
    state.kept = {name: tensor.to(state.server.theta.device) for name, tensor in kept.items()}
    return True

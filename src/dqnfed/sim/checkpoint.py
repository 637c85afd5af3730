"""The engine's state on disk: written whole or not at all, read back to the same bits or named as damaged."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.checksums import checked_facts, damage_line, is_intact, with_checksum
from dqnfed.core.consistency import ConsistencyState
from dqnfed.core.run_folder import clear_disk_errors, json_text, load_tensors, save_tensors, write_atomically
from dqnfed.core.tensors import from_named_tensors, map_tensors, named_tensors
from dqnfed.sim.choice import Choice
from dqnfed.sim.state import Known, Record, State

logger = logging.getLogger("dqnfed")
CLAIMS = "claims."  # before those of the consistency check
LOSSES = "losses."  # before the known training losses at the present model
GUARD = "guard."  # before those of the model that a run falls back to
KEPT = "kept."  # before the names of the tensors of the best model
N_KEPT = 2  # checkpoints: one may be damaged


def save_checkpoint(run: Path, state: State, identity: Record, lengths: Mapping[str, Any]) -> None:
    """Write the state; its small JSON file is written last, so a kill leaves the checkpoints before it in force."""
    named = named_tensors(state.server, "server.")
    named.update(named_tensors(state.losses, LOSSES))
    named.update(state.memory.named())
    if state.claims is not None:
        named.update(named_tensors(state.claims, CLAIMS))
    named.update({f"{GUARD}{name}": tensor for name, tensor in state.guard.items()})
    named.update({f"{KEPT}{name}": tensor for name, tensor in state.kept.items()})
    folder, tensor_file = run / "checkpoint", f"state-{state.round}.safetensors"
    facts = {
        "identity": identity,
        "round": state.round,
        "lines": lengths,  # of the files of lines: bytes and SHA-256
        "totals": state.totals,
        "rho": [state.rho_sum, state.rho_n],
        "n_dropped": state.n_dropped,
        "n_clipped": state.n_clipped,
        "start": state.start,
        "stopped": state.stopped,
        "best": state.best,
        "choice": state.choice._asdict(),
    }
    with clear_disk_errors(run):
        folder.mkdir(parents=True, exist_ok=True)
        checksum = save_tensors(folder / tensor_file, named, {"round": state.round})
        facts["tensors"] = [tensor_file, checksum]
        write_atomically(folder / f"checkpoint-{state.round}.json", with_checksum(facts, json_text))
        _remove_all_but(folder, checkpoint_rounds(run)[:N_KEPT])


def checkpoint_rounds(run: Path) -> list[int]:
    """Return after how many rounds each checkpoint of a run was made, the newest first."""
    numbers = [path.stem.removeprefix("checkpoint-") for path in (run / "checkpoint").glob("checkpoint-*.json")]
    return sorted((int(number) for number in numbers if number.isdigit()), reverse=True)


def newest_state(run: Path) -> Path | None:
    """Return the file with the tensors of the newest checkpoint; None where there is none."""
    rounds = checkpoint_rounds(run)
    return run / "checkpoint" / f"state-{rounds[0]}.safetensors" if rounds else None


def load_checkpoint(run: Path, state: State, algorithm: AnyAlgorithm, identity: Record) -> bool:
    """Fill the state from the newest intact checkpoint; return False where there is none yet.

    Every file is checked first, and each damaged one is named.
    """
    if (run / "checkpoint" / "checkpoint.json").is_file():
        raise ValueError(
            f"the run in {run} was started by an earlier version, whose checkpoints have no checksums; finish it with "
            "that version, or start a new run in another folder."
        )
    rounds = checkpoint_rounds(run)
    damaged = {number: _damage(run, number) for number in rounds}
    named_once = list(dict.fromkeys(name for names in damaged.values() for name in names))
    for name in named_once:
        logger.error("%s", damage_line(name))
    intact = [number for number in rounds if not damaged[number]]
    if not rounds:
        return False
    if not intact:
        raise ValueError(
            f"{run} has no intact checkpoint: {'; '.join(map(damage_line, named_once))}. Put the files back from a "
            f"copy, or run it anew in another folder with `dqnfed run {run / 'config.toml'}`."
        )
    facts = checked_facts(run / "checkpoint" / f"checkpoint-{intact[0]}.json")
    assert facts is not None
    refuse_other_run(run, facts["identity"], identity)
    if intact[0] != rounds[0]:
        logger.warning("going on from the newest intact checkpoint, after %d rounds", intact[0])
    _fill(state, facts, load_tensors(run / "checkpoint" / facts["tensors"][0])[0], algorithm)
    with clear_disk_errors(run):
        _remove_all_but(run / "checkpoint", intact)
    return True


def refuse_other_run(run: Path, stored: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise where a checkpoint is of another run than the one that is to go on, and say what differs."""
    differs = [name for name in {**stored, **identity} if stored.get(name) != identity.get(name)]
    if not differs:
        return
    facts = [
        f"{name} {stored.get(name)} and cannot go on with {identity.get(name)}" for name in differs if name != "data"
    ]
    if "data" in differs:
        old, new = (given.get("data") or {} for given in (stored, identity))
        parts = [part for part in {**old, **new} if old.get(part) != new.get(part)]
        facts.append(f"other data and cannot go on with these, which differ in: {', '.join(parts)}")
    raise ValueError(
        f"the run in {run} was started with {'; with '.join(facts)}. Resume it with the same settings, data and "
        "version, or start a new run in another folder."
    )


def _damage(run: Path, number: int) -> list[str]:
    """Return the names of the files without which a checkpoint is not intact, where they are damaged."""
    name = f"checkpoint/checkpoint-{number}.json"
    facts = checked_facts(run / name)
    if facts is None:
        return [name]
    tensor_file, checksum = facts["tensors"]
    found = [] if is_intact(run / "checkpoint" / tensor_file, checksum) else [f"checkpoint/{tensor_file}"]
    return found + [file for file, (n, digest) in facts["lines"].items() if not is_intact(run / file, digest, n)]


def _remove_all_but(folder: Path, rounds: list[int]) -> None:
    """Remove the checkpoints of other rounds; JSON files first, so that a kill leaves no checkpoint without tensors."""
    kept = {f"{kind}-{number}" for kind in ("checkpoint", "state") for number in rounds}
    for pattern in ("checkpoint-*.json", "state-*"):
        for path in folder.glob(pattern):
            if path.name.partition(".")[0] not in kept:
                path.unlink()


def _fill(state: State, facts: Record, named: dict[str, torch.Tensor], algorithm: AnyAlgorithm) -> None:
    def placed(t: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return t.to(like.device)

    state.server = map_tensors(placed, from_named_tensors(algorithm.info.server, named, "server."), state.server)
    state.losses = from_named_tensors(Known, named, LOSSES)
    if any(name.startswith(CLAIMS) for name in named):
        claims = from_named_tensors(ConsistencyState, named, CLAIMS)
        state.claims = claims._replace(theta=claims.theta.to(state.server.theta.device))
    state.memory.load(named, state.server.theta.device)
    state.round = facts["round"]
    state.totals = facts["totals"]
    state.rho_sum, state.rho_n = facts["rho"]
    state.n_dropped, state.n_clipped = facts["n_dropped"], facts["n_clipped"]
    state.start, state.stopped, state.best = facts["start"], facts["stopped"], facts["best"]
    choice = facts["choice"]
    state.choice = Choice(**{**choice, "recent": tuple(choice["recent"])})
    state.guard = {name.removeprefix(GUARD): tensor for name, tensor in named.items() if name.startswith(GUARD)}
    kept = {name.removeprefix(KEPT): tensor for name, tensor in named.items() if name.startswith(KEPT)}
    state.kept = {name: tensor.to(state.server.theta.device) for name, tensor in kept.items()}

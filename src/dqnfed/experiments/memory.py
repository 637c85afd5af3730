"""`run.memory`: how much of a GPU's memory a run may take; and what a run chose for its machine."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.run_folder import json_text
from dqnfed.experiments.config import ConfigError
from dqnfed.sim import accelerate

MACHINE_FILE = "machine.json"
USUAL_SHARE = 0.8  # of what is free
UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class Chosen(NamedTuple):
    """What a run does at once; it is written down, and a run that goes on does the same."""

    threads: int
    evaluated: int | None = None  # examples; None: the plain form's
    streams: int | None = None
    chunk: int | None = None  # clients of a vectorised cohort

    def text(self) -> str:
        """Return the file of a run's folder."""
        return json_text({name: value for name, value in self._asdict().items() if value is not None})


NOTHING_CHOSEN = Chosen(0)


def allowed_bytes(memory: str | float | None, free: int) -> int:
    """Return the bytes that `run.memory` allows: "4GiB", or a share in (0, 1] of what is free."""
    if isinstance(memory, str):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)\s*", memory)
        if found is None or not float(found[1]):
            raise ConfigError(
                f"run.memory is '{memory}', but is a size such as '4GiB' or '800MB', or a share in (0, 1]."
            )
        return int(float(found[1]) * UNITS[found[2]])
    share = USUAL_SHARE if memory is None else memory
    if isinstance(share, bool) or not 0 < share <= 1:
        raise ConfigError(
            f"run.memory is {memory!r}, but is a size such as '4GiB', or a share in (0, 1] of what is free."
        )
    return int(share * free)


def chosen_before(folder: Path | None) -> Chosen | None:
    """Return what the run in the folder chose; None where that is not known."""
    if folder is None or not (folder / MACHINE_FILE).is_file():
        return None
    try:
        found: dict[str, Any] = json.loads((folder / MACHINE_FILE).read_text(encoding="utf-8"))
        chosen = Chosen(**found)
    except (ValueError, TypeError):
        return None
    return chosen if all(type(n) is int and n > 0 for n in chosen if n is not None) else None


def chosen_again(before: Chosen, memory: str | float | None, device: torch.device) -> Chosen:
    """Return what a run that goes on does at once: what it did before, within the memory that it may take."""
    held_bytes(memory, device)
    return before if device.type == "cuda" else Chosen(before.threads, chunk=before.chunk)


def held_bytes(memory: str | float | None, device: torch.device) -> int | None:
    """Return the bytes of the device that a run may take, and have torch hold no more where that is asked for; None:
    it is no GPU.
    """
    if device.type != "cuda":
        if memory is not None:
            raise ConfigError(f"run.memory is a GPU's, but the device is '{device}'; leave it out.")
        return None
    free, total = torch.cuda.mem_get_info(device)
    budget = allowed_bytes(memory, free + torch.cuda.memory_reserved(device))
    # what is asked for is held: torch gives unused memory back before it takes more
    torch.cuda.set_per_process_memory_fraction(1.0 if memory is None else min(1.0, budget / total), device)
    return budget


def chosen_now(
    memory: str | float | None,
    problem: Problem,
    federation: Federation,
    algorithm: AnyAlgorithm,
    cohort_size: int,
    *,
    on_streams: bool,
) -> Chosen:
    """Return what fits into the memory that the run may take; on a CPU there is nothing to choose but threads."""
    device, threads = problem.theta0.device, torch.get_num_threads()
    budget = held_bytes(memory, device)
    if budget is None:
        return Chosen(threads)
    try:
        plan = accelerate.memory_plan(budget, problem, federation, algorithm, cohort_size, on_streams=on_streams)
    except (RuntimeError, NotImplementedError) as error:  # a model of somebody else's that can be tried in no such way
        if memory is not None:
            raise ConfigError(
                f"what the model takes of a GPU cannot be measured ({error}); leave run.memory out."
            ) from error
        return Chosen(threads)
    return Chosen(threads, plan.evaluated, plan.streams, plan.chunk)

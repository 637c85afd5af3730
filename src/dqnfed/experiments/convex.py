"""The convex workbench: how many rounds, bits, gradient passes and seconds each method needs to a given gap."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.algorithms import REGISTRY
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.curvature import client_hessian
from dqnfed.core.problem import Problem, Task
from dqnfed.core.runners import CohortRunner, vectorised
from dqnfed.core.screening import Policy
from dqnfed.core.tensors import map_tensors, n_rows, row
from dqnfed.experiments.convex_problems import ConvexProblem, client_losses, convex_problem, pareto_distance
from dqnfed.maths.fairness import improved_share
from dqnfed.sim.rounds import run_round
from dqnfed.sim.setup import cohort_size, fresh_state
from dqnfed.sim.state import Evaluation, Setup
from dqnfed.sim.tasks import TaskBuilder

TOLERANCES = (1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-12)
MAX_ROUNDS = 250
STALL = 40  # rounds without 1 % less gap after which a method has ended
DIVERGED = 1e3  # times the start's loss


class Entry(NamedTuple):
    """A method with its setting on the workbench."""

    algorithm: AnyAlgorithm
    participation: float = 1.0
    max_rounds: int = MAX_ROUNDS


@dataclass(frozen=True)
class Trace:
    """What one method did; entry t of every list is after t model updates."""

    algorithm: str
    gaps: list[float] = field(repr=False)  # mean loss minus the best mean loss
    bits: list[int] = field(repr=False)  # sent up by a client so far, 32 a float, index bits and extra phases included
    passes: list[float] = field(repr=False)  # gradient passes of a client so far
    seconds: list[float] = field(repr=False)
    phases: list[int] = field(repr=False)
    mean_loss: float
    worst_loss: float  # of the client that is worst off
    mean_decrease: float  # of a client's loss, from start to end
    least_decrease: float  # of the client that gained least; negative: it lost
    improved_share: float  # of the clients, mean over rounds: loss not higher after the round
    pareto_distance: float
    status: str  # reached | stalled | diverged | out of rounds

    @property
    def gap_factor(self) -> float:
        """The mean factor by which the gap shrank in a round, over the second half of the rounds."""
        half = len(self.gaps) // 2
        first, last = max(self.gaps[half], 1e-300), max(self.gaps[-1], 1e-300)
        return float((last / first) ** (1.0 / max(len(self.gaps) - 1 - half, 1)))

    def rounds_to(self, tolerance: float) -> int | None:
        """Return the first round with a gap at or below the tolerance; None if there is none."""
        return next((t for t, gap in enumerate(self.gaps) if gap <= tolerance), None)


class Meter:
    """A cohort runner that counts the bits of the replies, with 32-bit floats."""

    def __init__(self, runner: CohortRunner) -> None:
        self._runner, self.bits, self.phases = runner, 0, 0

    def __call__(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any
    ) -> tuple[Any, Any]:
        updates, kept = self._runner(algorithm, problem, tasks, sent, memory)
        self.bits += algorithm.uplink_bits(map_tensors(_single, row(updates, 0))) * n_rows(updates)
        self.phases += 1
        return updates, kept


def workbench(
    name: str,
    algorithms: Sequence[str] = (),
    data_dir: Path | None = None,
    *,
    seed: int = 0,
    max_rounds: int | None = None,
) -> list[Trace]:
    """Return the traces of the named methods (by default `all_entries`) on a convex problem, all from theta = 0."""
    convex = convex_problem(name, data_dir)
    return [traced(convex, which, entry, seed=seed) for which, entry in chosen(convex, algorithms, max_rounds).items()]


def chosen(convex: ConvexProblem, algorithms: Sequence[str], max_rounds: int | None = None) -> dict[str, Entry]:
    """Return the entries of these names; a registered method that has no entry runs with its defaults."""
    known = all_entries(convex)
    entries: dict[str, Entry] = {}
    for name in algorithms or known:
        if name not in known and name not in REGISTRY:
            raise ValueError(
                f"the workbench has no method '{name}'; it has {', '.join(known)}, and every other method."
            )
        entry = known[name] if name in known else Entry(REGISTRY[name]())
        entries[name] = entry if max_rounds is None else entry._replace(max_rounds=max_rounds)
    return entries


def all_entries(convex: ConvexProblem) -> dict[str, Entry]:
    """Return every second-order method, with the settings of the literature in square brackets, and DQN-Fed."""
    n = convex.problem.n_parameters
    regularised: dict[str, Any] = {"step": "regularisation", "start": "zero"}
    make: dict[str, Any] = dict(REGISTRY)
    return {
        "newton": Entry(make["newton"]()),
        "newton[once]": Entry(make["newton"](renew="once")),
        "fedavg[gd]": Entry(make["fedavg"](lr=1.0 / largest_curvature(convex), weighting="uniform")),
        "fednl": Entry(make["fednl"]()),
        "fednl[rank1-zero]": Entry(make["fednl"](**regularised)),
        "fednl[top8n-zero]": Entry(make["fednl"](compressor="top", size=min(8 * n, n * (n + 1) // 2), **regularised)),
        "fednl[random8n-zero]": Entry(
            make["fednl"](compressor="random", size=min(8 * n, n * (n + 1) // 2), **regularised)
        ),
        "fednl[identity]": Entry(make["fednl"](compressor="identity", step="regularisation")),
        "fednl-pp": Entry(make["fednl-pp"]()),
        "fednl-pp[half]": Entry(make["fednl-pp"](compressor="identity", start="zero"), participation=0.5),
        "fednl-ls": Entry(make["fednl-ls"]()),
        "fednl-cr": Entry(make["fednl-cr"]()),
        "fednew": Entry(make["fednew"]()),
        "q-fednew": Entry(make["q-fednew"]()),
        "distributed-newton": Entry(make["distributed-newton"]()),
        "giant": Entry(make["giant"]()),
        "local-newton": Entry(make["local-newton"]()),
        "local-newton[3]": Entry(make["local-newton"](local_steps=3)),
        "shed": Entry(make["shed"]()),
        "shed[3]": Entry(make["shed"](pairs=3)),
        "fedns": Entry(make["fedns"]()),
        "fedns[60]": Entry(make["fedns"](rows=60)),
        "disco": Entry(make["disco"]()),
        "dqn-fed": Entry(make["dqn-fed"](), max_rounds=100),
        "dqn-fed[line-search]": Entry(make["dqn-fed"](step="line-search"), max_rounds=100),
        "dqn-fed-literal": Entry(make["dqn-fed-literal"](), max_rounds=100),
        "dqn-fed-literal[hessian]": Entry(make["dqn-fed-literal"](form="hessian"), max_rounds=100),
        "server-lbfgs": Entry(make["server-lbfgs"](), max_rounds=100),
    }


def traced(convex: ConvexProblem, name: str, entry: Entry, *, seed: int = 0) -> Trace:
    """Return the trace of one method, until the smallest gap is reached, it stalls, diverges or runs out of rounds."""
    problem, federation = convex.problem, convex.federation
    size = cohort_size(entry.participation, federation.n_clients)
    algorithm = entry.algorithm.prepare(problem, federation.n_clients, size)
    meter = Meter(vectorised())
    setup = Setup(
        algorithm,
        problem,
        federation,
        entry.max_rounds + 1,  # one more, so that no round is the last and evaluated by the engine
        size,
        seed,
        meter,
        Evaluation(every=entry.max_rounds + 2, participants=False, part="train"),
        Policy(max_update_norm=math.inf),
        TaskBuilder(federation, problem, algorithm, seed),
    )
    state = fresh_state(setup)
    losses = [client_losses(problem, federation, problem.theta0)]
    bits, passes, seconds, phases = [0], [0.0], [0.0], [0]
    while not (status := _ended(convex, losses, entry.max_rounds)):
        run_round(setup, state)
        losses.append(client_losses(problem, federation, state.server.theta))
        bits.append(meter.bits // federation.n_clients)
        passes.append(state.totals["passes"] / federation.n_clients)
        seconds.append(state.totals["seconds"])
        phases.append(meter.phases)
        if state.stopped and not bool(torch.isfinite(losses[-1]).all()):
            status = "diverged"
            break
        if state.stopped:
            status = "stalled"
            break
    shares = [improved_share(before, after) for before, after in pairwise(losses)]
    decrease = losses[0] - losses[-1]
    is_lost = status == "diverged"
    return Trace(
        algorithm=name,
        gaps=[float(at.mean()) - convex.best_loss for at in losses],
        bits=bits,
        passes=passes,
        seconds=seconds,
        phases=phases,
        mean_loss=float(losses[-1].mean()),
        worst_loss=float(losses[-1].max()),
        mean_decrease=float(decrease.mean()),
        least_decrease=float(decrease.min()),
        improved_share=sum(shares) / max(len(shares), 1),
        pareto_distance=math.nan if is_lost else pareto_distance(convex, state.server.theta),
        status=status,
    )


def largest_curvature(convex: ConvexProblem) -> float:
    """Return the largest eigenvalue of the mean Hessian at the start: 1 / it is gradient descent's usual step."""
    theta = convex.problem.theta0
    hessians = vmap(lambda task: client_hessian(convex.problem, task, theta))(convex.tasks)
    return float(torch.linalg.eigvalsh(hessians.mean(0))[-1])


def as_records(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Return what `--json` writes: for every method the cost of each gap, null where it was not reached."""
    return [_record(trace) for trace in traces]


def write_json(traces: Sequence[Trace], path: Path) -> None:
    """Write the traces' records as a JSON list."""
    path.write_text(json.dumps(as_records(traces), indent=1) + "\n", encoding="utf-8")


def text_table(traces: Sequence[Trace]) -> str:
    """Return the rounds to every gap, the kilobits and passes to the smallest gap reached, and where clients ended."""
    head = ["method", *(f"{tol:.0e}" for tol in TOLERANCES), "kbit", "passes", "seconds", "gap", "worst", "improved"]
    rows = [head]
    for trace in traces:
        reached = [trace.rounds_to(tol) for tol in TOLERANCES]
        last = max((t for t in reached if t is not None), default=len(trace.gaps) - 1)
        gap = min(trace.gaps)
        rows.append(
            [
                trace.algorithm,
                *("-" if t is None else str(t) for t in reached),
                f"{trace.bits[last] / 1000:.0f}",
                f"{trace.passes[last]:.0f}",
                f"{trace.seconds[last]:.2f}",
                trace.status if trace.status == "diverged" else f"{max(gap, 0.0):.1e}",
                f"{trace.worst_loss:.3f}" if math.isfinite(trace.worst_loss) else "-",
                f"{100 * trace.improved_share:.0f} %",
            ]
        )
    widths = [max(len(row[c]) for row in rows) for c in range(len(head))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def _record(trace: Trace) -> dict[str, Any]:
    reached = {f"{tol:.0e}": trace.rounds_to(tol) for tol in TOLERANCES}

    def at(costs: Sequence[float]) -> dict[str, float | None]:
        return {key: None if t is None else costs[t] for key, t in reached.items()}

    return {
        "algorithm": trace.algorithm,
        "rounds": reached,
        "bits": at(trace.bits),
        "backprops": at(trace.passes),
        "seconds": at(trace.seconds),
        "phases": at(trace.phases),
        "smallest_gap": _finite(min(trace.gaps)),
        "gap_factor": _finite(trace.gap_factor),
        "mean_loss": _finite(trace.mean_loss),
        "worst_client_loss": _finite(trace.worst_loss),
        "mean_decrease": _finite(trace.mean_decrease),
        "least_decrease": _finite(trace.least_decrease),
        "improved_share": _finite(trace.improved_share),
        "pareto_distance": _finite(trace.pareto_distance),
        "status": trace.status,
        "gaps": [_finite(gap) for gap in trace.gaps],
        "bits_so_far": trace.bits,
    }


def _ended(convex: ConvexProblem, losses: Sequence[Tensor], max_rounds: int) -> str:
    gaps = [float(at.mean()) - convex.best_loss for at in losses[-STALL - 1 :]]
    if not math.isfinite(gaps[-1]) or gaps[-1] > DIVERGED * float(losses[0].mean()):
        return "diverged"
    if gaps[-1] <= TOLERANCES[-1]:
        return "reached"
    if len(gaps) > STALL and min(gaps[1:]) > 0.99 * gaps[0]:
        return "stalled"
    return "out of rounds" if len(losses) > max_rounds else ""


def _single(t: Tensor) -> Tensor:
    return t.to(torch.float32) if t.is_floating_point() else t


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

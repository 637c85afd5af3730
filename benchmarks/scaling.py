"""How the time of a round grows with clients, examples and parameters, next to growth in proportion.

python benchmarks/scaling.py --json scaling.json     # about two minutes
python benchmarks/scaling.py --overhead-only         # the engine alone: 10 parameters, 100 clients
python benchmarks/scaling.py --federations-only      # rounds of 100 among 1,000 to 1,000,000 clients, with pfl

Each curve's exponent is the slope of log time over log size between its largest sizes: 1 is in proportion, and small
sizes are cheaper than that only because a round has fixed costs. Times are the shortest of some rounds; with
`--cpu-time` they are processor time, for busy machines.

Federations are built in processes of their own, which are then asked for rounds in turn, so that what else the machine
does hits all of them alike; pfl is among them where its environment is (`benchmarks/peers/install.sh`).
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from side_by_side import HERE, Contestant, Running

from dqnfed import Evaluation, FedAvg, Federation, Problem
from dqnfed.core.run_folder import RunFolder
from dqnfed.sim.accelerate import automatic
from dqnfed.sim.journal import Journal
from dqnfed.sim.measure import model_columns
from dqnfed.sim.rounds import run_round
from dqnfed.sim.setup import fresh_state, set_up
from dqnfed.sim.state import Setup

N_INPUTS = 64
WARM_UP = 5  # rounds of a federation that do not count
CURVES: dict[str, list[int]] = {
    "clients": [10, 30, 100, 300, 1000],
    "cohort": [1, 5, 20, 100, 500],
    "examples": [30, 100, 300, 1000, 3000],
    "parameters": [10**4, 10**5, 10**6, 10**7, 10**8],
}
FEDERATIONS = [10**3, 10**4, 10**5, 10**6]
FORMS = {
    "FedAvg": ("fedavg", "arrays"),
    "DQN-Fed": ("dqn-fed", "arrays"),
    "FedAvg, from a function": ("fedavg", "function"),
    "pfl": ("pfl",),
}


def network(n_parameters: int) -> nn.Module:
    """Return a dense network of about so many parameters, of one hidden layer or, where that were very wide, two."""
    if n_parameters <= 10**5:
        width = max(1, n_parameters // (N_INPUTS + 10))
        return nn.Sequential(nn.Linear(N_INPUTS, width), nn.ReLU(), nn.Linear(width, 10))
    width = int(math.sqrt(n_parameters))
    return nn.Sequential(
        nn.Linear(N_INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
    )


def federation(n_clients: int, n_examples: int, n_inputs: int = N_INPUTS, n_classes: int = 10) -> Federation:
    """Return clients with random examples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(n_clients, n_examples, n_inputs, generator=generator)
    labels = torch.randint(0, n_classes, (n_clients, n_examples), generator=generator)
    tests = [(inputs[c, :1], labels[c, :1]) for c in range(n_clients)]
    return Federation.from_clients(list(zip(inputs, labels, strict=True)), test=tests)


def prepared(problem: Problem, clients: Federation, share: float, evaluation: Evaluation) -> Setup:
    """Return FedAvg's rounds with one full-batch step."""
    algorithm = FedAvg()
    runner = automatic(algorithm, problem, clients)
    given = {"rounds": 10**9, "participation": share}
    return set_up(algorithm, problem, clients, cohort=runner, evaluation=evaluation, **given)[0]


def shortest(setup: Setup, rounds: int, clock: Callable[[], float], folder: Path | None = None) -> float:
    """Return the shortest time of some rounds, with their lines on disk where there is a folder."""
    state, times = fresh_state(setup), []
    with nullcontext() if folder is None else closing(RunFolder(folder)) as kept:
        journal = Journal(kept, model_columns(setup))
        journal.open({}, setup)
        for _ in range(rounds + 1):
            began = clock()
            journal.add(*run_round(setup, state))
            times.append(clock() - began)
    return min(times[1:])


def case(curve: str, size: int) -> Setup:
    """Return the round at one point of a curve."""
    off = Evaluation(every=10**9, participants=False)
    if curve == "parameters":
        return prepared(Problem.from_module(network(size)), federation(4, 64), 1.0, off)
    problem = Problem.from_module(network(10**5))
    if curve == "examples":
        return prepared(problem, federation(10, size), 1.0, off)
    if curve == "cohort":
        return prepared(problem, federation(500, 50), size / 500, off)
    return prepared(problem, federation(size, 50), 1.0, off)


def overheads(clock: Callable[[], float]) -> dict[str, float]:
    """Return the seconds a round of the engine alone: 10 parameters, 100 clients who all take part."""
    problem, clients = Problem.from_module(nn.Linear(4, 2)), federation(100, 10, 4, 2)
    wanted = {"a round": Evaluation(every=10**9, participants=False), "with an evaluation of everybody": Evaluation()}
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: shortest(prepared(problem, clients, 1.0, evaluation), 200, clock, Path(folder) / f"{k}")
            for k, (name, evaluation) in enumerate(wanted.items())
        }


def federations(sizes: list[int], rounds: int, environments: Path, log: Path) -> dict[str, list[dict[str, float]]]:
    """Return seconds and megabytes to build each federation, and the median seconds of its rounds, taken in turn."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, words in FORMS.items():
        environment = "pfl" if name == "pfl" else ""
        if environment and not (environments / environment / "bin" / "python").is_file():
            continue
        entry = Contestant(environment, "many_clients.py", words)
        running = [Running(name, entry, str(size), environments, log) for size in sizes]
        try:
            built = [one.answer() for one in running]
            for _ in range(WARM_UP + rounds):
                for one in running:
                    if not one.play():
                        raise RuntimeError(f"{name} has ended; {log} says why")
        finally:
            for one in running:
                one.end()
        found[name] = [
            {"clients": size, **facts, "seconds": statistics.median(one.seconds[WARM_UP:])}
            for size, facts, one in zip(sizes, built, running, strict=True)
        ]
    return found


def federation_lines(found: dict[str, list[dict[str, float]]]) -> str:
    """Return the table of the federations."""
    lines = []
    for name, rows in found.items():
        for row in rows:
            lines.append(
                f"{name:24s} {row['clients']:>9,.0f} clients: built in {row['build']:6.2f} s with "
                f"{row['megabytes']:5.0f} MB, a round of 100 {1e3 * row['seconds']:7.2f} ms, "
                f"{row['seconds'] / rows[0]['seconds']:.2f} of the first"
            )
    return "\n".join(lines) + "\n"


def keep(found: dict[str, Any], path: Path | None) -> None:
    """Write what is known so far, if it is wanted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--curves", nargs="*", choices=list(CURVES), default=list(CURVES))
    parser.add_argument("--overhead-only", action="store_true")
    parser.add_argument("--federations-only", action="store_true")
    parser.add_argument(
        "--federations", nargs="*", type=int, default=FEDERATIONS, help="numbers of clients; none: skip"
    )
    parser.add_argument("--federation-rounds", type=int, default=40)
    parser.add_argument("--environments", type=Path, default=HERE / "peers" / ".environments")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    out = sys.stdout.write
    found: dict[str, Any] = {"overhead": {}, "curves": {}}
    if not options.overhead_only and options.federations:
        with tempfile.NamedTemporaryFile(prefix="scaling-", suffix=".log", delete=False) as log:
            given = options.federations, options.federation_rounds, options.environments, Path(log.name)
        found["federations"] = federations(*given)
        out(federation_lines(found["federations"]))
        keep(found, options.json)
    if options.federations_only:
        return
    found["overhead"] = overheads(clock)
    for name, seconds in found["overhead"].items():
        out(f"engine alone, {name}: {1e3 * seconds:.2f} ms\n")
    keep(found, options.json)
    for curve in [] if options.overhead_only else options.curves:
        sizes = CURVES[curve]
        times = [shortest(case(curve, size), options.rounds, clock) for size in sizes]
        exponents = [
            math.log(times[i + 1] / times[i]) / math.log(sizes[i + 1] / sizes[i]) for i in range(len(sizes) - 1)
        ]
        found["curves"][curve] = {"sizes": sizes, "seconds": times, "exponents": exponents}
        out(f"{curve:10s} " + "  ".join(f"{s:g}: {1e3 * t:.2f} ms" for s, t in zip(sizes, times, strict=True)))
        out("   exponents " + " ".join(f"{e:.2f}" for e in exponents) + "\n")
        sys.stdout.flush()
        keep(found, options.json)


if __name__ == "__main__":
    main()

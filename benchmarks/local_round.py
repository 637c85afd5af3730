"""A round of DQN-Fed with local training beside FedAvg's, in one process, a few rounds of each in turn.

OMP_NUM_THREADS=1 python benchmarks/local_round.py            # on a CPU: seconds of processor time
python benchmarks/local_round.py --block 25 --repeat 40       # on a GPU: wall time, its work included
python benchmarks/local_round.py --profile                    # where the time goes, without the clients' threads

Evaluations are left out. The first rounds, in which the cache of absent clients fills and kernels are chosen, are not
timed. A ratio is the median over the repeats of the ratio within a repeat: what slows a machine down for a while slows
both methods down.
"""

import argparse
import cProfile
import json
import pstats
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import build_experiment
from dqnfed.experiments.machine import chosen_cohort
from dqnfed.sim.journal import DeferredLog, Journal
from dqnfed.sim.rounds import run_round
from dqnfed.sim.setup import fresh_state, set_up
from dqnfed.sim.state import Evaluation

METHODS = {
    "fedavg": ("fedavg", []),
    "dqn-fed": ("dqn-fed", []),
    "dqn-fed, no cached rows": ("dqn-fed", ["algorithms.dqn-fed.cached_clients=0"]),
}


class Rounds:
    """A run without a folder that stops after as many rounds as it is asked for, and goes on."""

    def __init__(self, preset: str, name: str, changes: list[str], managed: ExitStack) -> None:
        method, own = METHODS[name]
        experiment = build_experiment(read_config(preset, [*changes, *own]).with_algorithm(method))
        self.setup, faster = set_up(
            experiment.algorithm,
            experiment.problem,
            experiment.federation,
            rounds=10**9,
            participation=experiment.config.train.participation,
            seed=experiment.config.run.seed,
            cohort=chosen_cohort(experiment),
            evaluation=Evaluation(every=10**9, participants=False),
        )
        managed.enter_context(faster.memory())
        self.state, self.log = fresh_state(self.setup), DeferredLog(Journal(None, ()), [])
        self.is_on_gpu = self.setup.problem.theta0.is_cuda

    def go(self, n: int) -> None:
        """Make n rounds, as the engine does."""
        for _ in range(n):
            if self.is_on_gpu:
                self.log.enqueue(*run_round(self.setup, self.state, meanwhile=self.log.flush))
            else:
                run_round(self.setup, self.state)
        if self.is_on_gpu:
            torch.cuda.synchronize()


def timed(contestants: dict[str, Rounds], block: int, repeat: int) -> dict[str, list[float]]:
    """Return the seconds a round of every method, by repeat."""
    found: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeat):
        for name, rounds in contestants.items():
            clock = time.perf_counter if rounds.is_on_gpu else time.process_time
            began = clock()
            rounds.go(block)
            found[name].append((clock() - began) / block)
    return found


def profiled(name: str, rounds: Rounds, n: int, rows: int) -> None:
    """Print where the time of n rounds goes: torch's operations, then the package's functions."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if rounds.is_on_gpu else [])
    with profile(activities=activities, acc_events=True) as seen:
        rounds.go(n)
    events = list(seen.key_averages())
    sys.stdout.write(f"\n{name}: torch operations of {n} rounds\n")
    if rounds.is_on_gpu:
        kernels = [event for event in events if event.device_type is DeviceType.CUDA and not event.is_user_annotation]
        on_gpu = sum(event.self_device_time_total for event in kernels) / n / 1e3
        calls = {event.key: event.count / n for event in events if event.key.startswith("cuda")}
        sys.stdout.write(f"the GPU works {on_gpu:.2f} ms a round; calls a round: ")
        sys.stdout.write(", ".join(f"{key} {count:.1f}" for key, count in sorted(calls.items())) + "\n")
    n_calls = sum(event.count for event in events if event.key.startswith("aten::")) / n
    sys.stdout.write(f"{n_calls:.0f} calls of torch a round, those within others included\n")
    by = "self_device_time_total" if rounds.is_on_gpu else "self_cpu_time_total"
    sys.stdout.write(seen.key_averages().table(sort_by=by, row_limit=rows, max_name_column_width=60) + "\n")
    python = cProfile.Profile()
    python.runcall(rounds.go, n)
    sys.stdout.write(f"{name}: functions, {n} rounds\n")
    pstats.Stats(python, stream=sys.stdout).strip_dirs().sort_stats("cumulative").print_stats(rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cifar10-setup1")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--warm-up", type=int, default=50, help="rounds before the first timed one")
    parser.add_argument("--block", type=int, default=1, help="rounds of one method in a row")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--profile", type=int, nargs="?", const=20, metavar="ROUNDS", help="of each method, afterwards")
    parser.add_argument("--rows", type=int, default=45, help="of a profile's tables")
    parser.add_argument("--set", nargs="*", default=[], dest="changes", metavar="KEY=VALUE")
    parser.add_argument("--json", type=Path, help="where to write the seconds, too")
    options = parser.parse_args()
    out = sys.stdout.write
    with ExitStack() as managed:
        contestants = {name: Rounds(options.preset, name, options.changes, managed) for name in options.methods}
        for rounds in contestants.values():
            rounds.go(options.warm_up)
        found = timed(contestants, options.block, options.repeat)
        first = found[options.methods[0]]
        is_on_gpu = contestants[options.methods[0]].is_on_gpu
        what = "wall time on the GPU" if is_on_gpu else f"processor time, {torch.get_num_threads()} threads"
        out(f"{options.preset}, torch {torch.__version__}, {what}; {options.repeat} times {options.block} rounds\n")
        for name, seconds in found.items():
            ratios = [mine / other for mine, other in zip(seconds, first, strict=True)]
            out(f"{name:26s} median {1e3 * median(seconds):8.2f} ms, least {1e3 * min(seconds):8.2f} ms; ")
            out(f"x {options.methods[0]}: median {median(ratios):.2f}\n")
        sys.stdout.flush()
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=1))
        if options.profile:
            for name, rounds in contestants.items():
                profiled(name, rounds, options.profile, options.rows)


if __name__ == "__main__":
    main()

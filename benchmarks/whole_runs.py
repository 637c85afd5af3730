"""Seconds of whole runs in one process, one after the other, without a run folder: what a GPU's short rounds add up to.

python benchmarks/whole_runs.py cifar10-setup1-full dqn-fed --set eval.every=20 eval.participants=false

A first run of 200 rounds is not timed: it loads libraries and chooses kernels. `start` ends when a run's first round is
told of, the evaluation of the start model included; the median round is one without an evaluation.
"""

import argparse
import sys
import time
from statistics import median
from typing import Any

import torch

from dqnfed.core.screening import Policy
from dqnfed.experiments.config import read_config
from dqnfed.experiments.experiment import Experiment, build_experiment
from dqnfed.experiments.machine import chosen_cohort
from dqnfed.sim.engine import run
from dqnfed.sim.state import Evaluation

FIRST_ROUNDS = 200


class Clock:
    """Notes when every round was over."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def start(self, *_: Any) -> None: ...

    def round(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())

    def end(self, *_: Any) -> None: ...


def timed(experiment: Experiment, rounds: int) -> tuple[float, Clock]:
    """Return when a run of so many rounds began, and when its rounds were over."""
    config, clock = experiment.config, Clock()
    began = time.perf_counter()
    run(
        experiment.algorithm,
        experiment.problem,
        experiment.federation,
        rounds=rounds,
        participation=config.train.participation,
        seed=config.run.seed,
        cohort=chosen_cohort(experiment),
        evaluation=Evaluation(**config.eval.model_dump(exclude={"score"})),
        policy=Policy(**config.policy.model_dump()),
        observers=[clock],
        config=config.as_dict(),
    )
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return began, clock


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("algorithm")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--set", nargs="*", default=[], dest="changes", metavar="KEY=VALUE")
    options = parser.parse_args()
    config = read_config(options.preset, options.changes).with_algorithm(options.algorithm)
    timed(build_experiment(config), min(FIRST_ROUNDS, options.rounds))
    whole = []
    for _ in range(options.repeat):
        began, clock = timed(build_experiment(config), options.rounds)
        whole.append(time.perf_counter() - began)
        lasted = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
        plain = [t for k, t in enumerate(lasted, start=2) if k % config.eval.every]  # the k-th round
        sys.stdout.write(
            f"{whole[-1]:.2f} s, of which start {clock.ends[0] - began:.2f} s; "
            f"a round {1e3 * median(plain or lasted or [0.0]):.2f} ms\n"
        )
        sys.stdout.flush()
    sys.stdout.write(f"median of {options.repeat}: {median(whole):.2f} s\n")


if __name__ == "__main__":
    main()

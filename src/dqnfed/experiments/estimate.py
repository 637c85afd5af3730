"""What a run will cost, measured on its first rounds."""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass

import torch

from dqnfed.core.screening import Policy
from dqnfed.experiments.config import Config
from dqnfed.experiments.experiment import build_experiment, secured
from dqnfed.experiments.machine import chosen_cohort
from dqnfed.experiments.participants import sampling_of, stragglers_of
from dqnfed.experiments.private import privacy_of
from dqnfed.sim.engine import run
from dqnfed.sim.state import Evaluation

TRIAL_ROUNDS = 3


@dataclass(frozen=True)
class Estimate:
    """What `--dry-run` prints."""

    n_parameters: int
    n_clients: int
    cohort_size: int
    seconds_per_round: float
    seconds: float
    peak_megabytes: float
    gpu_megabytes: float | None  # None: on a CPU
    uplink_bytes_per_client: float


def estimate(config: Config) -> Estimate:
    """Return the cost of the whole run from a trial of three rounds; nothing is written."""
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    experiment = build_experiment(config)
    if config.privacy.secure:
        experiment = secured(experiment)
    privacy = privacy_of(config, experiment)
    started = time.perf_counter()
    trial = run(
        experiment.algorithm,
        experiment.problem,
        experiment.federation,
        rounds=min(TRIAL_ROUNDS, config.train.rounds),
        participation=config.train.participation,
        sampling=sampling_of(config),
        stragglers=stragglers_of(config),
        seed=config.run.seed,
        cohort=chosen_cohort(experiment),
        evaluation=Evaluation(**config.eval.model_dump(exclude={"score"})),
        policy=Policy(**config.policy.model_dump()),
        secure=config.privacy.secure,
        privacy=privacy,
    )
    setup_seconds = time.perf_counter() - started - trial.summary["totals"]["seconds"]
    last = trial.history[-1]
    plain = float(trial.history[-2]["seconds"]) if len(trial.history) > 2 else 0.0  # the first round warms up
    evaluating = max(0.0, float(last["seconds"]) - plain)  # the last round evaluates everybody, others only when due
    per_round = plain + evaluating / config.eval.every
    unit = 1024 if sys.platform != "darwin" else 1
    return Estimate(
        n_parameters=experiment.problem.n_parameters,
        n_clients=experiment.federation.n_clients,
        cohort_size=len(last["clients"]),
        seconds_per_round=per_round,
        seconds=setup_seconds + per_round * config.train.rounds,
        peak_megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20,
        gpu_megabytes=trial.summary["gpu_bytes"] / 2**20 if "gpu_bytes" in trial.summary else None,
        uplink_bytes_per_client=last["bytes_up"] / max(1, len(last["clients"])),
    )

"""The core's claims on real data: DQN-Fed does not diverge, and needs a fraction of FedAvg's rounds."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from dqnfed.core.result import RunResult
from dqnfed.experiments.config import Config, read_config
from dqnfed.experiments.experiment import run_experiment
from tests.helpers.quick import every

RATES = (0.1, 0.3, 1.0, 3.0, 10.0)  # what FedAvg's learning rate is tuned over


def trained(preset: str, seed: int, *changes: str, algorithm: str = "dqn-fed") -> RunResult:
    config: Config = read_config(preset, [f"run.seed={seed}", *changes]).with_algorithm(algorithm)
    return run_experiment(config, None)


def losses(result: RunResult) -> list[float]:
    return [record["train_loss"]["mean"] for record in result.history if record["train_loss"] is not None]


def check_no_divergence(preset: str, seed: int, participation: float, epochs: int) -> None:
    result = trained(preset, seed, f"train.participation={participation}", f"train.epochs={epochs}")
    curve = losses(result)
    assert all(math.isfinite(loss) for loss in curve)
    assert max(curve) <= 1.5 * curve[0]
    if preset.startswith("digits"):
        assert curve[-1] <= 0.8 * curve[0]


SAMPLE = [
    ("digits", 0, 1.0, 1),
    ("digits", 1, 0.3, 1),
    ("digits", 2, 1.0, 5),
    ("digits", 3, 0.3, 5),
    ("digits-softmax", 4, 0.3, 1),
    ("digits-softmax", 5, 1.0, 5),
    ("bowls", 6, 1.0, 1),
    ("bowls", 7, 0.3, 5),
]


@pytest.mark.parametrize(("preset", "seed", "participation", "epochs"), every(2, SAMPLE))
def test_the_default_does_not_diverge(preset: str, seed: int, participation: float, epochs: int) -> None:
    check_no_divergence(preset, seed, participation, epochs)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 5])
@pytest.mark.parametrize("participation", [1.0, 0.3])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("preset", ["digits", "digits-softmax", "bowls"])
def test_the_default_never_diverges(preset: str, seed: int, participation: float, epochs: int) -> None:
    check_no_divergence(preset, seed, participation, epochs)


def test_the_literal_method_diverges_on_digits() -> None:
    curve = losses(trained("digits", 0, "train.rounds=60", algorithm="dqn-fed-literal"))
    assert not math.isfinite(curve[-1]) or max(curve) > 10 * curve[0]


@functools.cache
def tuned_fedavg(seed: int) -> RunResult:
    """Return FedAvg after 100 rounds at the learning rate that gives the lowest training loss for this seed."""
    quick = ("eval.every=100", "eval.participants=false")
    runs = [trained("digits", seed, f"train.lr={rate}", *quick, algorithm="fedavg") for rate in RATES]
    return min(runs, key=lambda run: run.summary["train_loss"]["mean"] if math.isfinite(losses(run)[-1]) else math.inf)


def rounds_to(result: RunResult, loss: float) -> float:
    reached = [r["round"] + 1 for r in result.history if r["train_loss"] and r["train_loss"]["mean"] <= loss]
    return min(reached, default=math.inf)


def test_dqn_fed_needs_a_fraction_of_tuned_fedavgs_rounds_and_is_fairer() -> None:
    """Seeds 0 to 4: rounds to tuned FedAvg's final training loss, improved clients until then, spread and tail."""
    seeds = range(5)
    fair = [trained("digits", seed) for seed in seeds]
    plain = [tuned_fedavg(seed) for seed in seeds]
    rounds = [rounds_to(f, p.summary["train_loss"]["mean"]) for f, p in zip(fair, plain, strict=True)]
    assert sum(rounds) / len(rounds) <= 12
    improved = [r["rho"] for f, n in zip(fair, rounds, strict=True) for r in f.history[1 : 1 + int(n)]]
    assert sum(improved) / len(improved) >= 0.99
    assert sum(f.summary["rho_mean"] for f in fair) / len(fair) >= 0.94  # later losses are within roundings of zero

    def mean_of(runs: list[RunResult], key: str) -> float:
        return float(torch.tensor([run.accuracy[key] for run in runs]).mean())

    assert mean_of(fair, "std") <= mean_of(plain, "std")
    assert mean_of(fair, "worst10") >= mean_of(plain, "worst10")

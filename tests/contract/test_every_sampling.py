"""Every method survives rounds with nobody, with one client and with clients that are away or late."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from dqnfed import Evaluation, RunResult, Sampling, Stragglers, run
from dqnfed.algorithms import REGISTRY
from dqnfed.sim.availability import drawn_trace
from tests.contract.cases import METHODS, suited_case

FEW = ("dqn-fed", "fedavg", "scaffold", "ditto", "aaggff", "mifa", "fedmdfg", "fednl")
NAMES = [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in METHODS]


@cache
def sampling() -> Sampling:
    return Sampling(rule="poisson", trace=drawn_trace(6, 20, online=0.8, stay=3, seed=1))


def result(name: str, out: Path | None = None, *, rounds: int = 10, resume: bool = False) -> RunResult:
    case = suited_case(name)
    return run(
        REGISTRY[name](),
        case.problem,
        case.federation,
        rounds=rounds,
        participation=0.3,
        sampling=sampling(),
        stragglers=Stragglers(deadline=1.5, jitter=0.5),
        evaluation=Evaluation(every=3),
        out=out,
        resume=resume,
    )


@pytest.mark.parametrize("name", NAMES)
def test_rounds_of_any_size_are_survived_and_resumed(name: str, tmp_path: Path) -> None:
    whole = result(name)
    assert bool(torch.isfinite(whole.theta).all())
    if REGISTRY[name].select is REGISTRY["fedavg"].select:  # others choose their clients themselves
        assert {0, 1} <= {len(record["clients"]) for record in whole.history[1:]}
    result(name, tmp_path, rounds=4)
    resumed = result(name, tmp_path, resume=True)
    assert torch.equal(resumed.theta, whole.theta)
    assert [r["clients"] for r in resumed.history] == [r["clients"] for r in whole.history]

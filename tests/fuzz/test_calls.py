"""Python calls with any arguments: a result that is a number, or a refusal in words."""

from __future__ import annotations

import math
import random
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dqnfed import Evaluation, FedAvg, Federation, Policy, Problem, run
from dqnfed.algorithms import REGISTRY
from tests.fuzz.harness import ODD, QUICK, odd_value, outcome, slow_seeds

ARRAYS: tuple[Any, ...] = (
    np.ones((6, 3)), np.full((6, 3), np.nan), np.full((6, 3), np.inf), np.ones((6, 3), np.float16), np.ones(6),
    np.ones((6, 0)),
    np.arange(18).reshape(6, 3), np.ones((6, 3)) * 1j, np.array([["a"] * 3] * 6), np.array([[None] * 3] * 6),
    np.ones((0, 3)),
    np.ones((5, 3)), np.array(3.0), torch.rand(6, 3), torch.rand(6, 3).bool(), torch.rand(6, 3, 2),
    [[1.0, 2.0, 3.0]] * 6,
    [[1.0], [2.0, 3.0]] * 3, "abcdef", None, 7, [],
)  # fmt: skip
LABELS: tuple[Any, ...] = (
    np.arange(6) % 2, np.arange(6) % 2 * 2 - 1, np.full(6, -100), np.arange(6) % 2 > 0, np.full(6, 2**40), np.ones(6),
    np.full(6, np.nan), np.array(list("ababab")), np.arange(12).reshape(6, 2), torch.arange(6) % 3, [0, 1, 0, 1, 0, 1],
    np.arange(5), np.array(1), None, "abcdef", torch.rand(6), np.full(6, 255, np.uint8),
)  # fmt: skip
MODULES: tuple[Any, ...] = (
    lambda: nn.Linear(3, 2), lambda: nn.Linear(3, 1), lambda: nn.Linear(4, 2), lambda: nn.Conv2d(1, 1, 1),
    lambda: nn.Linear(3, 2, dtype=torch.float64), nn.Identity,
    lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
    lambda: nn.Embedding(5, 2), lambda: nn.LSTM(3, 2), lambda: "no module",
)  # fmt: skip


def judge(seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    case = f"seed {seed}"
    usual = chance.random() < 0.5
    inputs = [ARRAYS[0] * (k + 1) if usual else chance.choice(ARRAYS) for k in range(3)]
    labels = [LABELS[0] if usual or chance.random() < 0.5 else chance.choice(LABELS) for _ in range(3)]
    shares: dict[str, Any] = {
        "test": chance.choice((0.2, 0.2, odd_value(chance))),
        "validation": chance.choice((0.0, 0.2, odd_value(chance))),
    }
    if chance.random() < 0.7:
        federation, _ = outcome(lambda: Federation.from_clients(list(zip(inputs, labels, strict=True)), **shares), case)
    else:
        owners = chance.choice(([0, 0, 1, 1, 2, 2], ["a"] * 6, [None] * 6, [1, 2], "aabbcc", odd_value(chance)))
        federation, _ = outcome(lambda: Federation.from_arrays(inputs[0], labels[0], owners, **shares), case)
    loss = chance.choice(("cross-entropy", "squared-error", "logistic", odd_value(chance)))
    module = MODULES[0] if usual and chance.random() < 0.7 else chance.choice(MODULES)
    problem, _ = outcome(lambda: Problem.from_module(module(), loss=loss), case)
    if federation is None or problem is None:
        return
    options: dict[str, Any] = {"rounds": 1}
    for key in ("rounds", "participation", "seed", "select", "checkpoint_seconds"):
        if chance.random() < 0.15:
            value = odd_value(chance)
            options[key] = 3 if isinstance(value, int) and value > 3 and key == "rounds" else value
    result, _ = outcome(lambda: run(FedAvg(lr=0.01), problem, federation, **options), f"{case}, {options}")
    if result is not None:
        mean = result.summary["train_loss"]["mean"]
        assert math.isfinite(mean) or result.summary["status"] == "diverged", case
        assert math.isfinite(result.accuracy["mean"]) or result.summary["status"] == "diverged", case


@pytest.mark.parametrize("seed", QUICK)
def test_odd_calls(seed: int, tmp_path: Path) -> None:
    judge(seed, tmp_path)


@pytest.mark.parametrize("seeds", slow_seeds(1500))
def test_many_odd_calls(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        judge(seed, tmp_path)


@pytest.mark.parametrize("name", ["Policy", "Evaluation", *sorted(REGISTRY)])
def test_every_setting_refuses_odd_values(name: str) -> None:
    """Every field of every method, of the policy and of the evaluation, with every odd value: taken, or refused."""
    kind: Any = {"Policy": Policy, "Evaluation": Evaluation}.get(name) or REGISTRY[name]
    for setting in (each for each in fields(kind) if each.init):
        for value in ODD:
            outcome(partial(kind, **{setting.name: value}), f"{name}({setting.name}={value!r})")

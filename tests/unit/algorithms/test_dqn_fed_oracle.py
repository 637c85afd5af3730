"""Whole runs of DQN-Fed against an oracle that shares nothing with it: theta and the status after every round."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from dqnfed import DQNFed, Evaluation, Problem, run
from dqnfed.core.algorithm import Cohort, ServerStep, Status
from tests.helpers.bowls import federation_of
from tests.helpers.dqn_fed_oracle import FloatArray, OracleRun, Settings, ValueAndGradient, oracle_run

CACHED = "cached_clients"
RIDGE = 0.01  # of the softmax regression
DEFAULTS = Settings()


class Case(NamedTuple):
    """Clients, how they are sampled, the settings, and what has to happen in the run."""

    participation: float
    n_clients: int
    rules: tuple[str, ...]
    statuses: tuple[str, ...] = ("next",)
    settings: Settings = DEFAULTS
    rounds: int = 25
    n_inputs: int = 5
    n_classes: int = 3
    n_hidden: int = 0  # tanh units; 0: softmax regression
    spread: float = 1.0  # how much clients differ
    scale: float = 1.0  # of the start
    n_descents: int = 0  # > 0: starts so many steps from zero towards the mean loss' minimum, where clients disagree
    data_seed: int = 0
    cohort_seed: int = 0


OTHER_SETTINGS = Settings(metric_memory=3, growth=1.5, ridge=1e-3, rate_bounds=1.5, cached_clients=7, cap=False)
CASES = {
    "everybody": Case(
        1.0, 6, ("capped", "damped", "damped metric", "forgotten pair", "by curvature", "by growth"), n_hidden=4
    ),
    "everybody, until no step helps": Case(
        1.0, 6, ("capped", "forgotten pair"), ("next", "stop"), rounds=40, spread=0.5, data_seed=12
    ),
    "half": Case(
        0.5,
        8,
        ("absent served", "by floored curvature", "damped", "damped metric", "no pair", "too old"),
        n_inputs=3,
        n_hidden=3,
        scale=2.5,
        data_seed=6,
    ),
    "half, with a loss floor": Case(0.5, 8, ("absent served", "capped", "too old"), settings=Settings(floor=0.1)),
    "half, other settings": Case(
        0.5,
        10,
        ("bounded", "by growth", "evicted", "forgotten pair"),
        settings=OTHER_SETTINGS,
        n_hidden=4,
    ),
    "half, held rounds": Case(  # the first round is one of them, and the cache has room for fewer than take part
        0.5,
        12,
        ("absent left out", "absent served", "not cached"),
        ("hold", "next"),
        settings=Settings(cached_clients=2),
        n_inputs=4,
        n_classes=2,
        n_descents=10,
        cohort_seed=6,
    ),
    "a quarter": Case(
        0.25,
        12,
        ("absent left out", "absent served", "damped metric"),
        ("hold", "next"),
        rounds=30,
        n_inputs=2,
        n_classes=2,
        spread=1.5,
        data_seed=4,
    ),
    "a fifth, held rounds": Case(
        0.2, 20, ("absent left out",), ("hold", "next"), n_inputs=2, n_classes=2, n_descents=10, data_seed=4
    ),
    "a fifth, low curvature": Case(
        0.2, 10, ("absent served", "by floored curvature"), rounds=20, n_hidden=4, scale=2.5, data_seed=1
    ),
    "a fifth, old answers": Case(0.2, 9, ("absent served", "too old"), rounds=60, spread=0.5, cohort_seed=16),
    "a tenth, small cache": Case(
        0.1, 20, ("absent served", "capped", "evicted"), settings=Settings(cached_clients=3), rounds=40
    ),
    "one client a round": Case(
        0.1, 10, ("no known rate", "whole step"), n_inputs=4, n_hidden=3, scale=2.5, data_seed=33
    ),
}


@dataclass(frozen=True, kw_only=True)
class Watched(DQNFed):
    """DQN-Fed, with theta after every round written down."""

    thetas: list[FloatArray] = field(default_factory=list)

    def server_step(self, server: Any, updates: Any, cohort: Cohort) -> ServerStep[Any]:
        step = super().server_step(server, updates, cohort)
        if step.status is not Status.AGAIN:
            self.thetas.append(step.server.theta.numpy().copy())
        return step


def client_data(case: Case) -> list[tuple[FloatArray, NDArray[np.int64]]]:
    """Return every client's inputs and labels; each labels by a rule of its own, near a common one."""
    draw = np.random.default_rng(case.data_seed)
    rule = 1.5 * draw.standard_normal((case.n_inputs, case.n_classes))
    clients = []
    for c in range(case.n_clients):
        inputs = draw.standard_normal((12 + c % 3, case.n_inputs))
        own = rule + case.spread * draw.standard_normal(rule.shape)
        noise = 0.3 * draw.standard_normal((len(inputs), case.n_classes))
        clients.append((inputs, (inputs @ own + noise).argmax(1)))
    return clients


def cross_entropy(logits: FloatArray, labels: NDArray[np.int64]) -> tuple[float, FloatArray]:
    """Return the mean cross-entropy and its derivative with respect to the logits."""
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances = chances / chances.sum(1, keepdims=True)
    wanted = np.eye(logits.shape[1])[labels]
    return float(-np.log((chances * wanted).sum(1)).mean()), (chances - wanted) / len(labels)


def value_and_gradient(case: Case) -> ValueAndGradient:
    """Return the clients' losses and gradients in plain NumPy."""
    clients, n_inputs, n_hidden, n_classes = client_data(case), case.n_inputs, case.n_hidden, case.n_classes

    def regression(k: int, theta: FloatArray) -> tuple[float, FloatArray]:
        inputs, labels = clients[k]
        loss, slope = cross_entropy(inputs @ theta.reshape(n_classes, n_inputs).T, labels)
        return loss + 0.5 * RIDGE * float(theta @ theta), (slope.T @ inputs).ravel() + RIDGE * theta

    def network(k: int, theta: FloatArray) -> tuple[float, FloatArray]:
        inputs, labels = clients[k]
        first, second, bias = np.split(theta, np.cumsum([n_hidden * n_inputs, n_classes * n_hidden]))
        head = second.reshape(n_classes, n_hidden)
        units = np.tanh(inputs @ first.reshape(n_hidden, n_inputs).T)
        loss, slope = cross_entropy(units @ head.T + bias, labels)
        below = (slope @ head) * (1.0 - units**2)
        return loss, np.concatenate([(below.T @ inputs).ravel(), (slope.T @ units).ravel(), slope.sum(0)])

    return network if n_hidden else regression


def start_of(case: Case) -> FloatArray:
    """Return the first theta."""
    width = case.n_hidden or case.n_inputs
    n = case.n_classes * width + (case.n_hidden * case.n_inputs + case.n_classes if case.n_hidden else 0)
    if not case.n_descents:
        return np.random.default_rng([case.data_seed, 1]).normal(scale=case.scale / width**0.5, size=n)
    theta, f = np.zeros(n), value_and_gradient(case)
    for _ in range(case.n_descents):
        theta = theta - 0.5 * np.mean([f(k, theta)[1] for k in range(case.n_clients)], axis=0)
    return theta


def package_problem(case: Case) -> Problem:
    """Return the same losses as the package computes them, in float64."""
    width = case.n_hidden or case.n_inputs
    head = nn.Linear(width, case.n_classes, bias=case.n_hidden > 0, dtype=torch.float64)
    hidden = nn.Linear(case.n_inputs, width, bias=False, dtype=torch.float64)
    module = nn.Sequential(hidden, nn.Tanh(), head) if case.n_hidden else head
    with torch.no_grad():
        nn.utils.vector_to_parameters(torch.from_numpy(start_of(case)), module.parameters())
    ridge = 0.0 if case.n_hidden else RIDGE
    return Problem.from_module(module, loss="cross-entropy", ridge=ridge, loss_floor=case.settings.floor)


def method_of(case: Case) -> Watched:
    """Return DQN-Fed with the settings that are not the oracle's defaults: the others must be its own."""
    given = {name: v for name, v in case.settings._asdict().items() if v != getattr(DEFAULTS, name) and name != "floor"}
    return Watched(**{CACHED if name == "cached_clients" else name: value for name, value in given.items()})


class Runs(NamedTuple):
    thetas: list[FloatArray]
    statuses: list[str]
    cohorts: list[list[int]]
    expected: OracleRun


@cache
def both_runs(case: Case) -> Runs:
    """Return the package's run, and the oracle's with the cohorts that the package sampled."""
    method = method_of(case)
    result = run(
        method,
        package_problem(case),
        federation_of([(torch.from_numpy(inputs), torch.from_numpy(labels)) for inputs, labels in client_data(case)]),
        rounds=case.rounds,
        participation=case.participation,
        seed=case.cohort_seed,
        evaluation=Evaluation(participants=False, every=1000),
    )
    records = result.history[1:]
    assert not any(record["dropped"] or record["clipped"] for record in records)
    cohorts = [record["clients"] for record in records]
    expected = oracle_run(start_of(case), value_and_gradient(case), cohorts, case.n_clients, case.settings)
    return Runs(method.thetas, [record["status"] for record in records], cohorts, expected)


def relative_difference(thetas: list[FloatArray], expected: list[FloatArray]) -> float:
    """Return the largest distance of a theta from the expected one, over its length."""
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(thetas, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_every_round_is_the_oracles(name: str) -> None:
    case = CASES[name]
    found = both_runs(case)
    assert found.statuses == found.expected.statuses
    assert len(found.statuses) >= 20
    assert relative_difference(found.thetas, found.expected.thetas) <= 1e-9
    assert set(found.statuses) == set(case.statuses)
    missing = [rule for rule in case.rules if not found.expected.rules[rule]]
    assert not missing, f"no round of this case needs these rules: {missing}"


@pytest.mark.parametrize("name", CASES)
def test_rounding_grows_little_in_these_cases(name: str) -> None:
    """What the comparison relies on: a start that is 1e-11 off stays within 1e-9, and no status changes."""
    case, f = CASES[name], value_and_gradient(CASES[name])
    cohorts, expected, start = both_runs(case).cohorts, both_runs(case).expected, start_of(case)
    for seed in range(2):
        away = np.random.default_rng(seed).standard_normal(len(start))
        away *= 1e-11 * np.linalg.norm(start) / np.linalg.norm(away)
        found = oracle_run(start + away, f, cohorts, case.n_clients, case.settings)
        assert found.statuses == expected.statuses
        assert relative_difference(found.thetas, expected.thetas) <= 1e-9

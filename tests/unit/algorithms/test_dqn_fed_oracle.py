"""Whole runs of DQN-Fed and AdaFed against an oracle that shares nothing with them: every round's model and notes."""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from dqnfed import AdaFed, DQNFed, Problem
from dqnfed.core.federation import Federation
from dqnfed.core.screening import Policy
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.bowls import federation_of
from tests.helpers.dqn_fed_oracle import (
    Batches,
    DQNFedOracle,
    FloatArray,
    IntArray,
    Settings,
    ValueAndGradient,
    oracle_run,
)
from tests.helpers.play import SometimesAway, play

RIDGE = 0.01  # of the softmax regression
DEFAULTS = Settings()
NOTES = ("beyond", "retreat", "restart", "alpha", "step_norm", "votes", "m")


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
    away: frozenset[tuple[int, int]] = frozenset()  # round and client that does not reply then


AWAY = frozenset({(0, 2), (2, 4), (3, 4), (4, 4), (6, 0), (9, 1), (9, 3), (10, 3), (14, 5), (16, 5), (17, 0)})
GRADIENT_CASES = {
    "everybody": Case(
        1.0,
        6,
        ("capped", "damped", "damped metric", "forgotten pair", "by curvature", "by growth of alpha"),
        n_hidden=4,
    ),
    "everybody, a step taken back": Case(1.0, 6, ("retreat", "damped metric"), n_hidden=4, data_seed=3),
    "everybody, past a Pareto point": Case(
        1.0,
        6,
        ("beyond", "perpendicular", "spares above average", "spares the worst", "by allowance", "forgotten pair"),
        rounds=40,
        spread=0.5,
        data_seed=3,
    ),
    "everybody, far past a Pareto point": Case(
        1.0, 6, ("beyond", "spares nobody"), n_inputs=2, n_classes=2, data_seed=5
    ),
    "everybody, a smaller ridge": Case(
        1.0, 6, ("beyond", "spares the worst", "smaller ridge"), n_inputs=2, n_classes=2, data_seed=3
    ),
    "everybody, other settings": Case(
        1.0,
        6,
        ("bounded", "filled in", "by growth", "by growth of alpha", "damped metric", "forgotten pair"),
        settings=Settings(ridge=1e-3, rate_bounds=1.5, metric_memory=3, growth=1.5, cap=False),
        n_hidden=4,
        scale=2.5,
    ),
    "everybody, with a loss floor": Case(1.0, 6, ("capped", "beyond", "by growth"), settings=Settings(floor=0.1)),
    "everybody, but for one in some rounds": Case(
        1.0,
        6,
        ("last step of others, by growth", "no metric pair", "damped metric", "filled in"),
        n_hidden=4,
        away=AWAY,
    ),
    "everybody, until no step helps": Case(
        1.0,
        6,
        ("capped", "smaller ridge", "by growth of alpha"),
        ("next", "stop"),
        settings=Settings(beyond="stop"),
        rounds=60,
        n_inputs=2,
        n_classes=2,
        data_seed=1,
    ),
    "half": Case(
        0.5,
        8,
        ("credited", "fully credited", "filled in", "slow start", "halved m", "too old"),
        n_inputs=3,
        n_hidden=3,
        scale=2.5,
        data_seed=1,
    ),
    "half, with a loss floor": Case(0.5, 8, ("absent", "capped", "too old"), settings=Settings(floor=0.1)),
    "half, long steps": Case(
        0.5,
        8,
        ("retreat", "above the start by the last step alone", "halved m", "fully credited", "beyond"),
        settings=Settings(step_size=10.0),
        data_seed=6,
    ),
    "half, back to the start": Case(
        0.5,
        8,
        ("restart", "retreat", "start not known", "slow start", "after a retreat, by growth"),
        settings=Settings(step_size=30.0),
        n_descents=10,
        data_seed=2,
    ),
    "half, no step beyond": Case(  # the first round is held, and the cache has room for fewer than take part
        0.5,
        12,
        ("absent left out", "not cached", "evicted"),
        ("hold", "next"),
        settings=Settings(cached_clients=2, beyond="stop"),
        n_inputs=4,
        n_classes=2,
        n_descents=10,
        cohort_seed=2,
    ),
    "a quarter, a step taken back": Case(
        0.25,
        12,
        ("retreat", "halved m", "fully credited"),
        settings=Settings(step_size=10.0),
        n_hidden=4,
        data_seed=31,
    ),
    "a quarter, past a Pareto point": Case(
        0.25,
        12,
        ("retreat", "opposed", "spares the worst", "spares nobody", "beyond, by growth of alpha", "fully credited"),
        n_inputs=2,
        n_classes=2,
        n_descents=20,
        data_seed=37,
        cohort_seed=1,
    ),
    "a quarter, other settings": Case(
        0.25,
        20,
        ("bounded", "evicted", "filled in", "halved m"),
        settings=Settings(ridge=1e-3, rate_bounds=1.5, cached_clients=7, cap=False, step_size=3.0),
        n_hidden=4,
        cohort_seed=1,
    ),
    "a fifth, old replies": Case(
        0.2, 9, ("too old", "m held back", "beyond", "beyond, by growth of alpha"), rounds=60, spread=0.5, cohort_seed=1
    ),
    "a tenth, small cache": Case(
        0.1, 30, ("evicted", "filled in", "capped"), settings=Settings(cached_clients=5), rounds=40
    ),
    "one client a round": Case(
        0.1, 10, ("restart", "asked for the first time"), n_inputs=4, n_hidden=3, scale=2.5, data_seed=3
    ),
    "one client a round, no cache": Case(
        0.1, 10, ("no known rate", "not cached"), settings=Settings(cached_clients=0), n_inputs=4, n_hidden=3, scale=2.5
    ),
}
LOCAL_CASES = {
    "half, epochs": Case(0.5, 8, ("fully credited", "too old"), settings=Settings(epochs=3, lr=0.3)),
    "half, long steps": Case(
        0.5,
        8,
        ("halved m", "fully credited", "beyond, by growth of alpha"),
        settings=Settings(epochs=3, lr=0.5, step_size=8.0),
    ),
    "half, momentum and decay": Case(
        0.5,
        8,
        ("absent", "credited"),
        settings=Settings(epochs=2, batch_size=5, lr=0.3, momentum=0.5, weight_decay=0.01, lr_decay=0.9),
    ),
    "a quarter, past a Pareto point": Case(
        0.25,
        12,
        ("retreat", "opposed", "spares the worst", "spares nobody", "after a retreat, by growth", "fully credited"),
        settings=Settings(epochs=3, lr=0.5),
        n_inputs=2,
        n_classes=2,
        n_descents=10,
        data_seed=25,
    ),
    "a fifth, a step taken back, small cache": Case(
        0.2,
        10,
        ("retreat", "after a retreat, by growth", "halved m", "evicted"),
        settings=Settings(batch_size=5, lr=1.0, step_size=5.0, cached_clients=4),
        n_hidden=4,
        data_seed=2,
        cohort_seed=1,
    ),
    "a fifth, training that explodes": Case(
        0.2,
        10,
        ("shortened row", "retreat", "halved m", "evicted"),
        settings=Settings(batch_size=5, lr=5.0, step_size=5.0, cached_clients=4),
        n_hidden=4,
        data_seed=5,
    ),
    "half, back to the start": Case(
        0.5,
        8,
        ("restart", "retreat", "after a retreat, by growth", "start not known", "halved m"),
        settings=Settings(epochs=3, lr=0.3, weight_decay=0.3, step_size=3.0),  # the decay leads to higher losses
        n_descents=40,
        data_seed=3,
    ),
    "a fifth, no step beyond": Case(
        0.2,
        20,
        ("absent left out", "fully credited"),
        ("hold", "next"),
        settings=Settings(epochs=2, beyond="stop"),
        n_inputs=2,
        n_classes=2,
        n_descents=10,
    ),
    "everybody, batches": Case(1.0, 6, (), settings=Settings(epochs=2, batch_size=5, lr=0.3)),
    "everybody, steps longer than the mean": Case(
        1.0,
        6,
        ("beyond, at most the mean step", "beyond, by growth of alpha"),
        settings=Settings(epochs=3, lr=0.5, step_size=8.0),
    ),
    "everybody, a step taken back": Case(
        1.0,
        6,
        ("retreat", "above the start by the last step alone", "halved m"),
        settings=Settings(epochs=3, lr=0.3, weight_decay=0.3, step_size=10.0),
        n_descents=40,
        data_seed=2,
    ),
    "everybody, long steps": Case(
        1.0,
        6,
        ("spares the worst", "beyond, by growth of alpha"),
        settings=Settings(epochs=3, lr=0.5, step_size=8.0),
        data_seed=1,
    ),
}
ADAFED_CASES = {
    "everybody": Case(
        1.0, 6, ("beyond", "spares the worst"), settings=Settings(rates="loss", cap=False, gamma=0.5), data_seed=2
    ),
    "everybody, a step taken back": Case(
        1.0,
        6,
        ("retreat",),
        settings=Settings(rates="loss", cap=False, gamma=2.0, growth=8.0),
        n_hidden=4,
        scale=2.5,
        data_seed=2,
    ),
    "half": Case(
        0.5,
        8,
        ("fully credited", "beyond", "beyond, by growth of alpha"),
        settings=Settings(rates="loss", cap=False, gamma=2.0),
        cohort_seed=1,
    ),
    "a quarter, batches": Case(
        0.25,
        12,
        ("bounded", "halved m", "fully credited"),
        settings=Settings(rates="loss", cap=False, gamma=2.0, batch_size=5, lr=3.0, rate_bounds=3.0),
        n_hidden=4,
        cohort_seed=2,
    ),
}
CASES = {
    **{f"gradients: {name}": case for name, case in GRADIENT_CASES.items()},
    **{f"local SGD: {name}": case for name, case in LOCAL_CASES.items()},
    **{f"AdaFed: {name}": case for name, case in ADAFED_CASES.items()},
}


def client_data(case: Case) -> list[tuple[FloatArray, IntArray]]:
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

    def examples(k: int, rows: IntArray | None) -> tuple[FloatArray, IntArray]:
        inputs, labels = clients[k]
        return (inputs, labels) if rows is None else (inputs[rows], labels[rows])

    def regression(k: int, theta: FloatArray, rows: IntArray | None = None) -> tuple[float, FloatArray]:
        inputs, labels = examples(k, rows)
        loss, slope = cross_entropy(inputs @ theta.reshape(n_classes, n_inputs).T, labels)
        return loss + 0.5 * RIDGE * float(theta @ theta), (slope.T @ inputs).ravel() + RIDGE * theta

    def network(k: int, theta: FloatArray, rows: IntArray | None = None) -> tuple[float, FloatArray]:
        inputs, labels = examples(k, rows)
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


def package_federation(case: Case) -> Federation:
    return federation_of([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in client_data(case)])


def method_of(case: Case) -> DQNFed:
    """Return the method with the settings that are not the oracle's defaults: the others must be its own."""
    given: dict[str, Any] = {k: v for k, v in case.settings._asdict().items() if v != getattr(DEFAULTS, k)}
    given.pop("floor", None)
    if given.pop("rates", None) == "loss":
        given.pop("cap")
        return AdaFed(**given)
    return DQNFed(**given)


def drawn_batches(case: Case, method: DQNFed) -> Batches:
    """Return the order of the examples, which is drawn and not computed: the oracle is told."""
    tasks = TaskBuilder(package_federation(case), package_problem(case), method, case.cohort_seed)

    def batches(k: int, round: int) -> list[IntArray | None]:
        steps = tasks.per_client(torch.tensor([k]), round)[0].batches.numpy()
        return [step[step >= 0] if case.settings.batch_size else None for step in steps]

    return batches


class Runs(NamedTuple):
    thetas: list[FloatArray]
    statuses: list[str]
    notes: list[dict[str, float]]
    cohorts: list[list[int]]
    expected: DQNFedOracle


@cache
def both_runs(case: Case) -> Runs:
    """Return the package's run, and the oracle's with the cohorts that the package sampled."""
    method = method_of(case)
    problem, federation = package_problem(case), package_federation(case)
    played = play(
        method,
        problem,
        federation,
        rounds=case.rounds,
        participation=case.participation,
        seed=case.cohort_seed,
        policy=Policy(max_update_norm=math.inf),
        clients=SometimesAway(away=case.away),
    )
    statuses = [record["status"] for record in played.records]
    n_played = statuses.index("stop") + 1 if "stop" in statuses else case.rounds
    records = played.records[:n_played]
    assert not any(record["clipped"] for record in records)
    dropped = [{found["client"] for found in record["dropped"]} for record in records]
    assert dropped == [{k for k in r["clients"] if (t, k) in case.away} for t, r in enumerate(records)]
    cohorts = [[k for k in r["clients"] if k not in out] for r, out in zip(records, dropped, strict=True)]
    expected = oracle_run(
        start_of(case), value_and_gradient(case), cohorts, case.n_clients, case.settings, drawn_batches(case, method)
    )
    thetas, notes = [theta.numpy() for theta in played.thetas[1:]], [record["diagnostics"] for record in records]
    return Runs(thetas[:n_played], statuses[:n_played], notes, cohorts, expected)


def relative_difference(thetas: list[FloatArray], expected: list[FloatArray]) -> float:
    """Return the largest distance of a theta from the expected one, over its length."""
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(thetas, expected, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_every_round_is_the_oracles(name: str) -> None:
    case = CASES[name]
    found, expected = both_runs(case), both_runs(case).expected
    assert found.statuses == [r.status for r in expected.rounds]
    assert len(found.statuses) >= 8
    assert relative_difference(found.thetas, [r.theta for r in expected.rounds]) <= 1e-6
    for notes, r in zip(found.notes, expected.rounds, strict=True):
        assert {k for k in NOTES if k in notes} == {k for k in NOTES if k in r.notes}
        for key, value in r.notes.items():
            assert notes[key] == pytest.approx(value, rel=1e-5, abs=1e-8, nan_ok=True), key
    assert set(found.statuses) == set(case.statuses)
    missing = [rule for rule in case.rules if not expected.rules[rule]]
    assert not missing, f"no round of this case needs these rules: {missing}"


@pytest.mark.parametrize("name", CASES)
def test_rounding_grows_little_in_these_cases(name: str) -> None:
    """What the comparison relies on: a start that is 1e-12 off stays within 1e-7, and no status changes."""
    case, f = CASES[name], value_and_gradient(CASES[name])
    cohorts, expected, start = both_runs(case).cohorts, both_runs(case).expected, start_of(case)
    for seed in range(2):
        away = np.random.default_rng(seed).standard_normal(len(start))
        away *= 1e-12 * np.linalg.norm(start) / np.linalg.norm(away)
        found = oracle_run(
            start + away, f, cohorts, case.n_clients, case.settings, drawn_batches(case, method_of(case))
        )
        assert [r.status for r in found.rounds] == [r.status for r in expected.rounds]
        assert relative_difference([r.theta for r in found.rounds], [r.theta for r in expected.rounds]) <= 1e-7

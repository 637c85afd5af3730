"""Random replies, in training and in evaluations: the run goes on, and reports nothing impossible."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from dqnfed import RunResult
from dqnfed.algorithms import REGISTRY
from tests.helpers.bowls import network_bowl
from tests.helpers.flower import App, Moment, deployed
from tests.helpers.hostile_runs import app_policy
from tests.helpers.quick import every

LIAR, ROUNDS = 3, 10
METHODS = ("fedavg", "dqn-fed", "qffl", "ditto")
NUMBERS: tuple[Any, ...] = (0, 1, -1, 3, 10**15, 2**62, -5, 0.5, 1e-300, 1e300, -1e9, 50000.0, math.nan, math.inf)
NAMES = ("loss", "scores", "losses", "n-train", "n-test", "n-validation", "models", "client", "name", "kind", "x", "")
TEXTS = ("", "global", "a,b\nround", "</script>", "x" * 10_000, "\x00", "FedAvgUpdate", "TrialUpdate", "\u202e")
DTYPES = ("float32", "float64", "float16", "int64", "int32", "uint8", "bool", "complex128", "<U3", "datetime64[s]")


class Mutator:
    """Replaces, removes, adds and distorts parts of a message at random; counts the messages."""

    def __init__(self, seed: int) -> None:
        self.random, self.n_cases = random.Random(seed), 0

    def __call__(self, message: Message, context: Context, app: App) -> Message:
        self.n_cases += 1
        content = app(message, context).content
        for _ in range(self.random.choice((0, 1, 1, 2, 4))):
            content = self.changed(content)
        return Message(content, reply_to=message)

    def changed(self, content: RecordDict) -> RecordDict:
        named: dict[str, Any] = dict(content.items())
        name = self.random.choice([*named, "about", "update"])
        what = self.random.randrange(6)
        if what == 0:
            named.pop(name, None)
        elif what == 1:
            named[name] = self.random.choice((ArrayRecord({}), MetricRecord({}), ConfigRecord({"kind": "x"})))
        elif name in named:
            named[name] = self.distorted(named[name])
        return RecordDict(named)

    def distorted(self, record: Any) -> Any:
        fields: dict[str, Any] = dict(record.items())
        name = self.random.choice([*fields, self.random.choice(NAMES)])
        if self.random.random() < 0.15:
            fields.pop(name, None)
            return type(record)(fields)
        if isinstance(record, ArrayRecord):
            shape = (self.random.randrange(30),) * self.random.randrange(3)
            old = fields[name].numpy() if name in fields else np.zeros(shape)
            fields[name] = Array(self.array(old, shape))
        elif isinstance(record, MetricRecord):
            value = self.random.choice(NUMBERS)
            fields[name] = [float(value)] * self.random.randrange(4) if self.random.random() < 0.4 else value
        else:
            values: tuple[Any, ...] = (*NUMBERS, *TEXTS, b"bytes", True, [], ["global"], [1, 2], ["a", "b"])
            fields[name] = self.random.choice(values)
        return type(record)(fields)

    def array(self, old: Any, shape: tuple[int, ...]) -> Any:
        changes: list[Callable[[], Any]] = [
            lambda: old * self.random.choice((-1.0, -10.0, 1e-6, 1e6, 1e30, math.nan, math.inf)),
            lambda: np.zeros(shape),
            lambda: np.where(np.arange(old.size).reshape(old.shape) == 0, math.nan, old),
            lambda: old.reshape(1, *old.shape),
            lambda: np.zeros(old.shape, dtype=self.random.choice(DTYPES)),
            lambda: np.random.default_rng(self.random.randrange(2**32)).normal(size=old.shape).astype(old.dtype),
        ]
        return np.asarray(self.random.choice(changes)())


def fuzzed(seed: int) -> tuple[RunResult, int]:
    """Return a run in which one client's messages are all random after the first, and how many these were."""
    mutator, method = Mutator(seed), REGISTRY[METHODS[seed % len(METHODS)]]()

    def plan(moment: Moment) -> Any:
        first = moment.round < 0 and seed % 8 < 4  # in half of the runs the client is met before it lies
        return mutator if moment.client == LIAR and not first else None

    with np.errstate(all="ignore"):
        result = deployed(method, network_bowl(), plan, rounds=ROUNDS, policy=app_policy())
    return result, mutator.n_cases


def check(seed: int) -> int:
    result, n_cases = fuzzed(seed)
    assert result.summary["rounds"] == ROUNDS
    assert bool(result.theta.isfinite().all())
    for record in result.history:
        assert 0.0 <= record["accuracy"]["min"] <= record["accuracy"]["max"] <= 100.0
        assert 0.0 <= record["train_loss"]["mean"] <= record["train_loss"]["max"] < math.inf
        for fault in [*record.get("dropped", []), *record.get("refused", [])]:
            assert fault.get("client", LIAR) == LIAR or "does not change as" in fault["why"]
            assert fault["why"].isprintable()
    assert all(column.isidentifier() for column in result.columns)
    assert {row[1] for row in result.client_rows} <= set(range(6))
    return n_cases


@pytest.mark.parametrize("seed", every(2, range(8)))
def test_random_replies_neither_end_nor_falsify_a_run(seed: int) -> None:
    assert check(seed) >= 1


@pytest.mark.slow
def test_ten_thousand_random_replies() -> None:
    n_cases, seed = 0, 8
    while n_cases < 10_000:
        n_cases += check(seed)
        seed += 1

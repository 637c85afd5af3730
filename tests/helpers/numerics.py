"""Results of every method on a small problem, by which a change of the computations is noticed.

`python -m tests.helpers.numerics` stores them beside `NUMERICS`, which is raised by hand first.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dqnfed import Federation, run
from dqnfed.core.local_work import draw_batches
from dqnfed.core.numerics import NUMERICS
from dqnfed.core.runners import looped, vectorised
from dqnfed.core.seeds import numpy_seed_for, seed_for
from dqnfed.data import RawData, partition, split
from dqnfed.sim.tasks import sampled_clients
from tests.contract.cases import LOCAL_WORK, METHODS, five_rounds

STORED = Path(__file__).parent / "numerics.json"
Numbers = dict[str, list[float]]


def results(*, plain: bool = True, names: tuple[str, ...] = tuple(METHODS)) -> Numbers:
    """Return two sums over the model and its loss after five rounds, of every method with each kind of local work."""
    runner = functools.partial(run, cohort=looped() if plain else vectorised(), accelerate=not plain)
    found: Numbers = {}
    for name in names:
        for work in LOCAL_WORK:
            result = five_rounds(name, work, runner)
            found[f"{name}, {work}"] = [*sums_of(result.theta), result.summary["train_loss"]["mean"]]
    return found


def sums_of(theta: torch.Tensor) -> list[float]:
    """Return two weighted sums of a vector: a change of any entry changes them."""
    values, places = theta.double().numpy(), np.arange(1, len(theta) + 1)
    return [float(values @ np.sin(places)), float(values @ np.cos(places))]


def draws() -> dict[str, str]:
    """Return checksums of what is drawn by seeds: cohorts, batches, splits and partitions are whole numbers."""
    cohorts = [sampled_clients(3, round, 50, 7).tolist() for round in range(20)]
    batches = [
        draw_batches(23, epochs=2, batch_size=5, generator=seed_for(3, round, 4, "batches")).tolist()
        for round in range(5)
    ]
    generator = numpy_seed_for(3, purpose="test")
    labels = torch.from_numpy(generator.integers(0, 5, 400))
    raw = RawData("drawn", torch.arange(400.0)[:, None], labels, 5)
    dealt = {
        rule: split(raw, partition(raw, rule, 8, 3), test=0.2, validation=0.1).hash()
        for rule in ("iid", "shards", "dirichlet", "classes")
    }
    held = Federation.from_arrays(raw.inputs, labels, [c % 4 for c in range(400)], validation=0.1, seed=3)
    parts = [held.train.inputs, held.test.inputs, torch.ones(0) if held.validation is None else held.validation.inputs]
    values: dict[str, Any] = {
        "cohorts": cohorts, "batches": batches, "partitions": dealt, "splits": [part.tolist() for part in parts]
    }  # fmt: skip
    return {name: hashlib.sha256(json.dumps(value).encode()).hexdigest() for name, value in values.items()}


def difference(one: list[float], other: list[float]) -> float:
    """Return the largest difference between two results, relative to their size."""
    size = max(1.0, *(abs(value) for value in (*one, *other) if math.isfinite(value)))
    gaps = [0.0 if (math.isnan(a) and math.isnan(b)) else abs(a - b) / size for a, b in zip(one, other, strict=True)]
    return max(gaps)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    found, fast = results(), results(plain=False)
    worst = max(found, key=lambda key: difference(found[key], fast[key]))
    lines = ",\n".join(f'  "{key}": {json.dumps(value)}' for key, value in found.items())
    drawn = json.dumps(draws(), indent=2)
    STORED.write_text(f'{{"NUMERICS": {NUMERICS}, "draws": {drawn}, "results": {{\n{lines}\n}}}}\n')
    sys.stdout.write(f"plain and accelerated differ by {difference(found[worst], fast[worst]):.1e} in {worst}\n")

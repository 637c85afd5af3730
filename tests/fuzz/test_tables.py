"""Tables with any cells, and damaged files of tables: a federation of finite numbers, or a refusal in words."""

from __future__ import annotations

import random
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dqnfed import FedAvg, Problem, run
from dqnfed.experiments.own_data import OwnData, OwnFederation, own_federation
from dqnfed.models import build
from tests.fuzz.harness import QUICK, outcome, slow_seeds, spoiled

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
CELLS = (
    "", "inf", "-inf", "nan", "NA", "1e999", "1e300", "-1e25", "1e-320", "0", "-0", "1_000", "0x10", "é", "\u2028", '"',
    "a,b", "x" * 300, "TRUE", "1.5.2", "١٢", "\x00", "None", " 3 ", "2026-01-01", "=cmd()", "9" * 400, "+7", "1e5",
)  # fmt: skip
HEADS = ("client", "label", "", "age", "age", "client ", "LABEL", "\ufeffx", "a,b")


def csv_bytes(chance: random.Random) -> bytes:
    n, rows = chance.choice((0, 1, 2, 3, 12, 40)), []
    kinds = [chance.choice(("number", "text", "constant", "odd")) for _ in range(chance.randrange(1, 4))]
    label = chance.choice(("class", "number", "text", "one"))
    for i in range(n):
        cells = [f"c{i % 3}" if chance.random() < 0.97 else chance.choice(CELLS)]
        values = {"class": str(i % 2), "number": f"{chance.gauss(0, 3):.3f}", "text": "ab"[i % 2], "one": "1"}
        cells.append(values[label] if chance.random() < 0.97 else chance.choice(CELLS))
        for kind in kinds:
            usual = {"number": f"{chance.gauss(50, 10):.2f}", "text": chance.choice("pqr"), "constant": "7", "odd": ""}
            cells.append(chance.choice(CELLS) if kind == "odd" or chance.random() < 0.03 else usual[kind])
        rows.append(cells if chance.random() < 0.99 else cells[:-1])
    head = ["client", "label", *(f"x{j}" for j in range(len(kinds)))]
    if chance.random() < 0.1:
        head[chance.randrange(len(head))] = chance.choice(HEADS)
    delimiter = chance.choice(",,,;\t")
    text = "\n".join(delimiter.join(cells) for cells in [head, *rows]) + "\n"
    raw = text.encode(chance.choice(("utf-8", "utf-8", "utf-8", "utf-16")), errors="replace")
    return spoiled(raw, chance) if chance.random() < 0.3 else raw


def odd_column(chance: random.Random, n: int) -> Any:
    kind = chance.randrange(11)
    if kind == 0:
        return pyarrow.array([float(chance.choice((1, 2, float("inf"), float("nan"), 1e300))) for _ in range(n)])
    if kind == 1:
        return pyarrow.array(
            [chance.choice((None, Decimal("1.5"), Decimal(3))) for _ in range(n)], pyarrow.decimal128(9, 2)
        )
    if kind == 2:
        return pyarrow.array([chance.choice((True, False, None)) for _ in range(n)])
    if kind == 3:
        return pyarrow.array([[1, 2]] * n)
    if kind == 4:
        return pyarrow.array([{"a": 1}] * n)
    if kind == 5:
        return pyarrow.array([b"\xff\x00"] * n)
    if kind == 6:
        return pyarrow.nulls(n)
    if kind == 7:
        return pyarrow.array([chance.randrange(2**62) for _ in range(n)], pyarrow.int64())
    if kind == 8:
        return pyarrow.array(np.arange(n), pyarrow.timestamp("ns"))
    if kind == 9:
        return pyarrow.array([chance.choice("abc") for _ in range(n)]).dictionary_encode()
    return pyarrow.array([chance.gauss(0, 1) for _ in range(n)])


def write_parquet(path: Path, chance: random.Random) -> None:
    n = chance.choice((0, 1, 3, 30))
    columns = [pyarrow.array([f"c{i % 3}" for i in range(n)]), pyarrow.array([i % 2 for i in range(n)])]
    columns += [odd_column(chance, n) for _ in range(chance.randrange(1, 4))]
    if chance.random() < 0.15:
        columns[chance.randrange(2)] = odd_column(chance, n)
    names = ["client", "label", *(f"x{j}" for j in range(len(columns) - 2))]
    if chance.random() < 0.05:
        names[-1] = "label"
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=names), path)
    if chance.random() < 0.4:
        path.write_bytes(spoiled(path.read_bytes(), chance))


def write_npz(path: Path, chance: random.Random) -> None:
    n = chance.choice((0, 1, 3, 30))
    odd: tuple[Any, ...] = (
        np.array(5), np.arange(n) * 1j, np.array([object()] * n), np.arange(n + 1), np.full(n, np.inf),
        np.full((n, 0), 1),
        np.array(["a", "b"] * n)[:n], np.zeros(n, [("a", int)]), np.arange(n).astype("M8[s]"), np.zeros((n, 2, 2)),
    )  # fmt: skip
    arrays: dict[str, Any] = {
        "client": np.arange(n) % 3,
        "label": np.arange(n) % 2,
        "x": np.random.default_rng(n).normal(size=(n, 2)),
    }
    if chance.random() < 0.6:
        arrays[chance.choice(("client", "label", "x", "more"))] = chance.choice(odd)
    chance.choice((np.savez, np.savez_compressed))(path, **arrays)
    if chance.random() < 0.4:
        path.write_bytes(spoiled(path.read_bytes(), chance))


def judge(seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    suffix = chance.choice((".csv", ".csv", ".parquet", ".npz"))
    path = folder / f"table{suffix}"
    if suffix == ".csv":
        path.write_bytes(csv_bytes(chance))
    elif suffix == ".parquet":
        write_parquet(path, chance)
    else:
        write_npz(path, chance)
    own = OwnData(
        path, "client", "label", validation=chance.choice((0.0, 0.2)), extremes=chance.choice(("refuse", "missing"))
    )
    found, _ = outcome(lambda: own_federation(own), f"seed {seed}, {suffix}")
    if found is not None:
        check(found, f"seed {seed}, {suffix}")


def check(found: OwnFederation, case: str) -> None:
    """A federation that was made holds finite numbers, and training on it gives a finite loss."""
    federation = found.federation
    for part in (federation.train, federation.test, federation.validation):
        if part is not None:
            assert bool(part.inputs.isfinite().all()), case
            assert bool(part.targets.isfinite().all()), case
            assert federation.n_classes is None or 0 <= int(part.targets.min()) <= int(part.targets.max()), case
            assert federation.n_classes is None or int(part.targets.max()) < federation.n_classes, case
    shape = tuple(federation.train.inputs.shape[1:])
    module = build("linear", input_shape=shape, n_outputs=federation.n_classes or 1, settings={})
    problem = Problem.from_module(module, loss="cross-entropy" if federation.n_classes else "squared-error")
    result, _ = outcome(lambda: run(FedAvg(lr=0.01), problem, federation, rounds=1), case)
    assert result is not None, case
    assert np.isfinite(result.summary["train_loss"]["mean"]), case
    assert np.isfinite(result.accuracy["mean"]), case


@pytest.mark.parametrize("seed", QUICK)
def test_odd_tables(seed: int, tmp_path: Path) -> None:
    judge(seed, tmp_path)


@pytest.mark.parametrize("seeds", slow_seeds(3000))
def test_many_odd_tables(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        judge(seed, tmp_path)

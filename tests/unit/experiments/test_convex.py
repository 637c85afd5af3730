"""The convex workbench: problems, traces, tables and JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from dqnfed.algorithms import REGISTRY
from dqnfed.algorithms.dqn_fed import DQNFed
from dqnfed.data import DataError
from dqnfed.experiments.convex import Entry, all_entries, as_records, chosen, text_table, traced, workbench, write_json
from dqnfed.experiments.convex_problems import (
    INTERPOLATION,
    SPLITS,
    SYNTHETIC,
    client_gradients,
    client_losses,
    convex_problem,
    libsvm_rows,
    pareto_distance,
    weighted_minimiser,
)
from tests.helpers.convex import logistic

GOLDENS = {  # rounds to gaps of 1e-2, 1e-4, ..., 1e-10 on the synthetic problem
    "newton": [1, 2, 3, 3, 4],
    "newton[once]": [1, 4, 7, 11, 14],
    "fednl": [1, 4, 6, 8, 10],
    "fednl[top8n-zero]": [4, 9, 12, 13, 14],
    "fednl-ls": [5, 12, 16, 19, 20],
    "giant": [2, 6, 10, 15, 19],
    "shed": [2, 4, 5, 6, 6],
    "disco": [2, 3, 4, 5, 5],
}


def test_the_synthetic_problem_has_known_numbers() -> None:
    """Its golden loss, from NumPy alone: Newton's method on the mean, written out."""
    convex = convex_problem(SYNTHETIC)
    A, b = convex.federation.train.inputs.numpy(), convex.federation.train.targets.numpy()
    x = np.zeros(A.shape[1])
    for _ in range(30):
        z = b * (A @ x)
        p = 1 / (1 + np.exp(z))
        g = -A.T @ (b * p) / len(b) + 1e-3 * x
        H = (A.T * (p * (1 - p))) @ A / len(b) + 1e-3 * np.eye(len(x))
        x = x - np.linalg.solve(H, g)
    loss = np.logaddexp(0, -b * (A @ x)).mean() + 5e-4 * x @ x
    assert convex.best_loss == pytest.approx(loss, abs=1e-14)
    np.testing.assert_allclose(convex.theta_best.numpy(), x, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", GOLDENS)
def test_rounds_on_the_synthetic_problem(name: str) -> None:
    convex = convex_problem(SYNTHETIC)
    trace = traced(convex, name, all_entries(convex)[name])
    found = [trace.rounds_to(tolerance) for tolerance in (1e-2, 1e-4, 1e-6, 1e-8, 1e-10)]
    for here, known in zip(found, GOLDENS[name], strict=True):
        assert here is not None
        assert abs(here - known) <= 1


def test_a_trace_counts_what_the_method_did() -> None:
    convex = logistic()
    trace = traced(convex, "giant", Entry(REGISTRY["giant"]()))
    rounds = len(trace.gaps) - 1
    assert trace.status == "reached"
    assert trace.phases == [3 * t for t in range(rounds + 1)]
    assert trace.bits == [t * 32 * (2 * 6 + 1 + 10) for t in range(rounds + 1)]
    assert trace.passes[1] == pytest.approx(1 + 6 / 2 + 10 / 3)
    assert trace.gaps[0] == pytest.approx(
        float(client_losses(convex.problem, convex.federation, convex.problem.theta0).mean()) - convex.best_loss
    )
    assert trace.rounds_to(-1.0) is None


def test_partial_participation_counts_bits_per_client() -> None:
    convex = logistic(n_clients=4)
    half = traced(convex, "fednl-pp", Entry(REGISTRY["fednl-pp"](), participation=0.5, max_rounds=3))
    per_participant = 32 * (6 + 7 + 1)
    assert [after - before for before, after in zip(half.bits[1:], half.bits[2:], strict=False)] == [
        per_participant // 2
    ] * 2


@pytest.mark.parametrize(
    ("name", "expected"), [("distributed-newton", "stalled"), ("fedavg[gd]", "out of rounds"), ("newton", "reached")]
)
def test_a_trace_says_how_it_ended(name: str, expected: str) -> None:
    convex = logistic()
    assert traced(convex, name, all_entries(convex)[name]._replace(max_rounds=55)).status == expected


def test_a_diverging_method_is_called_that() -> None:
    trace = traced(logistic(), "gd", Entry(REGISTRY["fedavg"](lr=1e5), max_rounds=50))
    assert trace.status == "diverged"
    assert math.isnan(trace.pareto_distance)


def test_json_has_a_cost_for_every_gap(tmp_path: Path) -> None:
    traces = workbench(SYNTHETIC, ["newton", "distributed-newton", "dqn-fed"], max_rounds=30)
    write_json(traces, tmp_path / "out.json")
    records = json.loads((tmp_path / "out.json").read_text())
    assert records == json.loads(json.dumps(as_records(traces)))
    assert [record["algorithm"] for record in records] == ["newton", "distributed-newton", "dqn-fed"]
    newton, biased, fair = records
    assert list(newton["rounds"]) == ["1e-02", "1e-04", "1e-06", "1e-08", "1e-10", "1e-12"]
    assert newton["rounds"]["1e-10"] == 4
    assert newton["bits"]["1e-10"] == 4 * 32 * (20 + 210)
    assert biased["rounds"]["1e-04"] is None
    assert biased["bits"]["1e-04"] is None
    for key in ("mean_loss", "worst_client_loss", "mean_decrease", "improved_share", "pareto_distance"):
        assert isinstance(fair[key], float)
    assert fair["improved_share"] > 0.9
    table = text_table(traces)
    assert [line.split()[0] for line in table.splitlines()[1:]] == ["newton", "distributed-newton", "dqn-fed"]


def test_dqn_fed_ends_near_the_pareto_set_with_everybody_better_off() -> None:
    convex = convex_problem(SYNTHETIC)
    method = DQNFed(step="line-search", beyond="stop")
    trace = traced(convex, "dqn-fed", Entry(method, max_rounds=100))
    assert trace.improved_share == 1.0
    assert trace.least_decrease > 0
    assert trace.pareto_distance < 0.5 * float(convex.theta_best.norm())


def test_interpolating_clients_make_dqn_fed_linear_and_fast() -> None:
    convex = convex_problem(INTERPOLATION)
    fair = traced(convex, "dqn-fed", all_entries(convex)["dqn-fed"])
    descent = traced(convex, "fedavg[gd]", all_entries(convex)["fedavg[gd]"])
    assert convex.best_loss == 0.0
    assert fair.status == descent.status == "reached"
    assert fair.gap_factor < descent.gap_factor < 1.0
    assert fair.improved_share > 0.95


def test_every_entry_is_a_method_that_suits_convex_problems() -> None:
    convex = convex_problem(SYNTHETIC)
    for entry in all_entries(convex).values():
        assert "convex" in entry.algorithm.info.problem_kinds
    second_order = {name for name, kind in REGISTRY.items() if kind.info.problem_kinds == {"convex"}}
    assert second_order <= {name.split("[")[0] for name in all_entries(convex)}


def test_unknown_names_are_refused_with_those_that_exist() -> None:
    convex = logistic()
    with pytest.raises(ValueError, match=r"no method 'newtown'.*newton"):
        chosen(convex, ["newtown"])
    assert chosen(convex, ["fedprox"], 7)["fedprox"].max_rounds == 7
    with pytest.raises(ValueError, match="one of a1a"):
        convex_problem("mnist")


def test_pareto_distance_is_zero_on_the_pareto_set_only() -> None:
    convex = logistic()
    weights = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    on_it = weighted_minimiser(convex.problem, convex.federation, convex.problem.theta0, weights)
    assert pareto_distance(convex, on_it) <= 1e-6
    assert pareto_distance(convex, convex.problem.theta0) > 0.1
    G = client_gradients(convex.problem, convex.federation, on_it)
    assert float((weights @ G).norm()) <= 1e-12


def libsvm_file(folder: Path, name: str, n_rows: int, *, n_features: int = 5) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{1 if i % 3 else -1} {i % n_features + 1}:0.{i % 7 + 1}" for i in range(n_rows)]
    (folder / name).write_text("\n".join(lines) + "\n")


def test_libsvm_files_are_split_as_the_field_does(tmp_path: Path) -> None:
    libsvm_file(tmp_path / "libsvm", "a1a", 1605)
    inputs, targets, n_clients = libsvm_rows("a1a", tmp_path)
    assert inputs.shape == (1600, 123)
    assert inputs.dtype == torch.float64
    assert (n_clients, SPLITS["mushrooms"].n_clients, SPLITS["w8a"].n_rows) == (16, 80, 49700)
    assert inputs[0, 0] == 0.1  # not the nearest float32
    assert targets[:4].tolist() == [-1.0, 1.0, 1.0, -1.0]


def test_a_missing_or_cut_file_is_an_error_and_no_other_problem(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not complete at .*libsvm: fetch it with `dqnfed data fetch a1a`"):
        convex_problem("a1a", tmp_path)
    libsvm_file(tmp_path / "libsvm", "a9a", 100)
    with pytest.raises(DataError, match=r"holds none of: a1a, a1a\.txt.*dqnfed data fetch a1a"):
        convex_problem("a1a", tmp_path)
    libsvm_file(tmp_path / "libsvm", "a1a", 100)
    with pytest.raises(DataError, match="at least 1600 rows"):
        convex_problem("a1a", tmp_path)

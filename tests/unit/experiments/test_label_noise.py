"""Wrong labels in an experiment: the config's block, the record of what was found, and names of combined methods."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from dqnfed.algorithms.fedcorr import FedCorr
from dqnfed.core.federation import Examples, Federation
from dqnfed.data.label_noise import LabelNoise, Truth
from dqnfed.experiments.config import Config, ConfigError, read_config
from dqnfed.experiments.experiment import build_algorithm, build_problem, method_named, run_experiment
from dqnfed.experiments.noise_record import noise_record

NOISE = ["data.noise.share=0.5", "data.noise.level_low=0.5"]
QUICK = ["data.clients=6", "train.rounds=10", "train.epochs=1", "eval.every=10"]
DATA = ["data.limit=300", "data.noise.share=0.7"]
STAGES = ["algorithms.fedcorr.sweeps=1", "algorithms.fedcorr.fine_tuning=1"]


def small(*changes: str, method: str = "fedcorr+dqn-fed") -> Config:
    return read_config("digits-noisy", [*QUICK, *DATA, *STAGES, *changes]).with_algorithm(method)


def test_the_record_counts_what_was_found() -> None:
    """Two clients of four examples, the second one noisy; written out by hand."""
    right, given = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]), torch.tensor([0, 1, 0, 1, 1, 0, 1, 1])
    now = torch.tensor([[0, 1, 0, 1, 9], [0, 1, 1, 0, 9]])  # row 0 is client 0; the last column is padding
    examples = Examples(torch.zeros(8, 1), given, torch.tensor([0, 4, 8]))
    state = {
        "server.noise_estimate.score": torch.tensor([1.0, 3.0]),
        "server.noise_estimate.is_noisy": torch.tensor([False, True]),
        "server.noise_estimate.level": torch.tensor([0.0, 0.6]),
        "memory.labels": now,
        "memory_row_of": torch.tensor([0, 1]),
    }
    truth = Truth(LabelNoise(), torch.tensor([0.0, 0.7]), right)
    found = noise_record(truth, Federation(examples, examples, n_classes=2), state)
    assert found["summary"] == {
        "n_clients": 2,
        "n_noisy": 1,
        "labels": 8,
        "wrong_before": 3,  # client 1: 1, 0, 1 for 0, 1, 0
        "wrong_after": 2,  # its third label is as it was, its fourth was right
        "changed": 3,
        "clients": {"detected": 1, "precision": 1.0, "recall": 1.0, "f1": 1.0},
        "corrections": {"precision": 2 / 3, "recall": 2 / 3, "from_right": 1},
    }
    assert found["clients"][1]["estimated_level"] == pytest.approx(0.6)
    apart = {**state, "memory_of.1.labels": torch.tensor([0, 1, 0, 1])}  # a memory that is filed on its own
    assert noise_record(truth, Federation(examples, examples, n_classes=2), apart)["summary"]["wrong_after"] == 0


def test_of_a_method_that_corrects_nothing_there_is_only_what_was_wrong(tmp_path: Path) -> None:
    result = run_experiment(small(method="fedavg"), tmp_path)
    noise = json.loads((tmp_path / "noise.json").read_text())
    assert noise["summary"] == result.summary["noise"]
    assert "clients" not in noise["summary"]
    assert noise["summary"]["wrong_before"] == noise["summary"]["wrong_after"] > 0
    assert noise["noise"] == {"kind": "symmetric", "share": 0.7, "level_low": 0.5, "level_high": 1.0}


def test_the_truth_is_not_what_is_trained_on(tmp_path: Path) -> None:
    """The federation has the wrong labels; the right ones are in the truth, and in no file of the run."""
    built = build_problem(small())
    assert built.truth is not None
    assert not torch.equal(built.truth.targets, built.federation.train.targets)
    clean = build_problem(read_config("digits", ["data.partition=iid", "data.clients=6", "data.limit=300"]))
    assert torch.equal(clean.federation.train.targets, built.truth.targets)
    assert torch.equal(clean.federation.test.targets, built.federation.test.targets)
    run_experiment(small(), tmp_path)
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {
        ".lock", "checksums.json", "clients.csv", "clients.json", "config.toml", "env.json", "machine.json",
        "metrics.jsonl", "model.safetensors", "noise.json", "summary.json",
    }  # fmt: skip


def test_where_only_aggregates_may_be_written_no_client_is_in_the_record(tmp_path: Path) -> None:
    run_experiment(small('eval.metrics="aggregate-only"'), tmp_path)
    assert set(json.loads((tmp_path / "noise.json").read_text())) == {"noise", "summary"}


def test_seeds_of_the_noise() -> None:
    def targets(*changes: str) -> torch.Tensor:
        return build_problem(small(*changes)).federation.train.targets

    first = targets("run.seed=1", "data.seed=5")
    assert torch.equal(first, targets("run.seed=2", "data.seed=5"))
    assert not torch.equal(first, targets("run.seed=1", "data.seed=5", "data.noise.seed=6"))


def test_your_own_table_can_be_noisy(tmp_path: Path) -> None:
    rows = [f"{'abc'[i % 3]},{i % 7},{(i * i) % 11},{'yes' if i % 7 > 3 else 'no'}" for i in range(240)]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["site,x,y,outcome", *rows]))
    changes = [f'data.file="{table}"', 'data.client="site"', 'data.label="outcome"', "train.rounds=2", *NOISE]
    built = build_problem(read_config("digits", changes))
    assert built.truth is not None
    assert built.federation.train.targets.max() == 1
    bad = read_config("digits", [*changes[:2], 'data.label="y"', 'data.task="regression"', *NOISE])
    with pytest.raises(ValueError, match=r"regression; leave data\.noise out"):
        build_problem(bad)
    with pytest.raises(ConfigError, match="bowls have none"):
        build_problem(read_config("bowls", NOISE))


def test_a_wrong_key_of_the_block_is_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'data\.noise\.shares' \(did you mean 'share'\?\)"):
        read_config("digits", ["data.noise.shares=0.5"])
    with pytest.raises(ConfigError, match=r"data\.noise\.share"):
        read_config("digits", ["data.noise.share=1.5"])


def test_settings_of_both_methods_hold_for_the_two_together() -> None:
    config = read_config(
        "digits-noisy",
        [
            "algorithms.fedcorr.sweeps=7",
            "algorithms.qffl.q=3.0",
            'algorithms."fedcorr+qffl".floor=0.1'.replace('"', ""),
        ],
    ).with_algorithm("fedcorr+qffl")
    algorithm = build_algorithm(config)
    assert (algorithm.sweeps, algorithm.q, algorithm.floor) == (7, 3.0, 0.1)  # type: ignore[attr-defined]
    assert method_named("fedcorr") is FedCorr
    assert build_algorithm(config.with_algorithm("qffl")).q == 3.0  # type: ignore[attr-defined]


def test_names_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"no method 'dqn-fet' \(did you mean 'dqn-fed'\?\)"):
        method_named("fedcorr+dqn-fet")
    with pytest.raises(ConfigError, match="fednl is for convex problems"):
        method_named("fedcorr+fednl")


def test_too_few_rounds_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        run_experiment(small("train.rounds=3"), tmp_path / "few")
    assert "take 10 rounds with 6 clients, so dqn-fed never begins in 3" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        run_experiment(small("train.rounds=11"), tmp_path / "enough")
    assert "never begins" not in caplog.text

"""`dqnfed data`, `dqnfed partition` and `dqnfed sweep` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dqnfed.cli import app
from dqnfed.data import Manifest, load
from tests.helpers import official

runner = CliRunner()


def said(*words: str) -> str:
    done = runner.invoke(app, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DQNFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_a_partition_is_printed_saved_and_drawn(tmp_path: Path) -> None:
    text = said("partition", "digits", "--dirichlet", "0.5", "--clients", "10", "--out", "parts")
    assert "10 clients, 1797 examples" in text
    manifest = Manifest.load(tmp_path / "parts" / "digits-dirichlet-0.safetensors")
    manifest.check(load("digits"))
    assert manifest.hash()[:16] in text
    assert (tmp_path / "parts" / "digits-dirichlet-0.png").read_bytes()[:4] == b"\x89PNG"
    line = next(line for line in text.splitlines() if line.startswith("client 3 "))
    counts = [0 if cell == "." else int(cell) for cell in line.split()[5:]]
    assert counts == manifest.label_counts(load("digits"))[3].tolist()


def test_a_saved_partition_is_used_by_a_run(tmp_path: Path) -> None:
    said("partition", "digits", "--classes", "2", "--clients", "6", "--test", "0.3", "--out", "parts")
    path = tmp_path / "parts" / "digits-classes-0.safetensors"
    said("run", "digits", "--rounds", "1", "--set", f"data.manifest={path}", "--out", "run", "--quiet")
    clients = json.loads((tmp_path / "run" / "clients.json").read_text())
    assert [[c["n_train"], 0, c["n_test"]] for c in clients] == Manifest.load(path).sizes.tolist()


def test_presets_and_many_classes_are_printed_too(tmp_path: Path) -> None:
    official.cifar100(tmp_path / "data" / "cifar100")
    text = said("partition", "cifar100-setup1", "--clients", "4", "--data-dir", str(tmp_path / "data"))
    assert "most frequent" in text
    assert "4 clients, 400 examples" in text


def test_one_rule_at_a_time() -> None:
    with pytest.raises(ValueError, match="--shards and --dirichlet are given"):
        said("partition", "digits", "--clients", "5", "--shards", "2", "--dirichlet", "0.5")


def test_data_are_verified(tmp_path: Path) -> None:
    assert "right" in said("data", "verify", "digits")
    done = runner.invoke(app, ["data", "verify", "cifar10", "--data-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "dqnfed data fetch cifar10" in done.output
    with pytest.raises(ValueError, match="on request"):
        said("data", "fetch", "clothing1m", "--data-dir", str(tmp_path))
    with pytest.raises(ValueError, match="is not taken from the hub"):
        said("data", "fetch", "clothing1m", "--from", "hub")


def test_a_sweep_ends_in_a_comparison_at_the_best_settings(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / "grid.toml").write_text("[fedavg]\nlr = [0.0001, 1.0]\n")
    small = ["--rounds", "3", "--set", "data.clients=4", "--set", "data.limit=300", "--set", "model.hidden=[8]"]
    text = said("sweep", "digits", "--algorithms", "fedavg,dqn-fed", "--grid", "grid.toml", "--out", "sweep", *small)
    assert "fedavg: lr = 1.0 (validation" in text
    assert "dqn-fed: defaults" in text
    for method in ("fedavg", "dqn-fed"):
        summary = json.loads((tmp_path / "sweep" / "best" / method / "0" / "summary.json").read_text())
        assert summary["status"] == "finished"
    assert (tmp_path / "sweep" / "report.html").is_file()
    with pytest.raises(ValueError, match="one of grid, tpe"):
        said("sweep", "digits", "--sampler", "random")
    with pytest.raises(ValueError, match="one of mean, worst10"):
        said("sweep", "digits", "--select", "best")

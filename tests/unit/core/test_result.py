"""What a run leaves behind: the same in memory and from its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from dqnfed import FedAvg, Problem, RunResult, run
from dqnfed.core import result as core_result
from tests.helpers.bowls import linear_model, network_bowl, normal, small_network


def test_a_run_is_the_same_in_memory_and_on_disk(tmp_path: Path) -> None:
    case = network_bowl()
    memory = run(FedAvg(), case.problem, case.federation, rounds=3, participation=0.5)
    written = run(FedAvg(), case.problem, case.federation, rounds=3, participation=0.5, out=tmp_path / "run")
    loaded = RunResult.load(tmp_path / "run")
    for other in (written, loaded):
        assert torch.equal(other.theta, memory.theta)
        assert other.layout == memory.layout
        assert other.columns == memory.columns
        assert other.client_rows == memory.client_rows
        assert other.clients == memory.clients
        assert [r["train_loss"] for r in other.history] == [r["train_loss"] for r in memory.history]
        assert other.accuracy == memory.accuracy
    assert loaded.summary == written.summary
    assert loaded.config == written.config


def test_saving_gives_the_folder_that_the_run_would_have_written(tmp_path: Path) -> None:
    case = network_bowl()
    result = run(FedAvg(), case.problem, case.federation, rounds=2, out=tmp_path / "run")
    saved = result.save(tmp_path / "saved")
    assert saved == tmp_path / "saved"
    for name in ("config.toml", "clients.json", "metrics.jsonl", "clients.csv", "summary.json", "model.safetensors"):
        assert (saved / name).read_bytes() == (tmp_path / "run" / name).read_bytes(), name


def test_saving_over_the_runs_own_folder_loses_nothing(tmp_path: Path) -> None:
    case = network_bowl()
    result = run(FedAvg(), case.problem, case.federation, rounds=2, out=tmp_path)
    before = (tmp_path / "clients.csv").read_bytes()
    RunResult.load(tmp_path).save(tmp_path)
    assert (tmp_path / "clients.csv").read_bytes() == before
    assert torch.equal(RunResult.load(tmp_path).theta, result.theta)


def test_the_model_comes_back_from_a_template(tmp_path: Path) -> None:
    case = network_bowl()
    result = run(FedAvg(), case.problem, case.federation, rounds=2, out=tmp_path)
    inputs = normal(5, 4, seed=9)
    expected = case.problem.predict(result.theta, inputs)
    torch.testing.assert_close(result.model()(inputs), expected)
    loaded = RunResult.load(tmp_path)
    torch.testing.assert_close(loaded.model(small_network(4, 3, 3))(inputs), expected)
    assert not loaded.model(small_network(4, 3, 3)).training
    with pytest.raises(ValueError, match=r"RunResult\.load\(DIR\)\.model\(MyModule\(\)\)"):
        loaded.model()


def test_a_model_that_can_be_built_from_its_spec_needs_no_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = network_bowl(n_clients=2)
    problem = Problem.from_module(small_network(4, 3, 3), model_spec={"name": "small", "n_hidden": 3})
    result = run(FedAvg(), problem, case.federation, rounds=2, out=tmp_path)
    monkeypatch.setattr(core_result, "MODULE_BUILDERS", [lambda spec: small_network(4, spec["n_hidden"], 3)])
    inputs = normal(5, 4, seed=9)
    torch.testing.assert_close(RunResult.load(tmp_path).model()(inputs), problem.predict(result.theta, inputs))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (linear_model(4, 3), "the saved model has no parameter 'weight'"),
        (small_network(4, 2, 3), r"parameter '0\.weight' has shape \(2, 4\) in the module but \(3, 4\)"),
        (
            nn.Sequential(linear_model(4, 3)),
            r"the saved model has more parameters than the module: '2\.bias', '2\.weight'",
        ),
    ],
)
def test_a_template_of_another_shape_is_refused(template: nn.Module, message: str) -> None:
    case = network_bowl(n_clients=2)
    result = run(FedAvg(), case.problem, case.federation, rounds=1)
    with pytest.raises(ValueError, match=message):
        result.model(template)


def test_a_run_in_progress_is_not_loaded(tmp_path: Path) -> None:
    case = network_bowl(n_clients=2)
    run(FedAvg(), case.problem, case.federation, rounds=1, out=tmp_path)
    (tmp_path / "summary.json").unlink()
    with pytest.raises(FileNotFoundError, match="`dqnfed resume"):
        RunResult.load(tmp_path)


def test_problem_without_module_has_no_model() -> None:
    case = network_bowl(n_clients=2)
    bare = Problem(
        case.problem.theta0, case.problem.layout, case.problem.predict, case.problem.losses, case.problem.score
    )
    assert torch.equal(
        run(FedAvg(), bare, case.federation, rounds=1).theta,
        run(FedAvg(), case.problem, case.federation, rounds=1).theta,
    )
    with pytest.raises(ValueError, match="not made from a module"):
        bare.module_at(bare.theta0)

"""The same comparison under several budgets, from the command to the tables and the figure."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dqnfed.cli import app
from dqnfed.experiments.config import ConfigError, preset_names, read_config
from dqnfed.experiments.epsilons import epsilons_from, with_epsilon, with_noise
from dqnfed.report.epsilons import block, cell, read_summary, rebuilt, write_all
from tests.helpers.repository import ROOT

pytest.importorskip("dp_accounting")
PAGES = sorted((ROOT / "docs" / "results" / "privacy").glob("*.json"))


def test_budgets_are_read_or_refused() -> None:
    assert epsilons_from("1,3,8,inf") == [1.0, 3.0, 8.0, math.inf]
    for text in ("", "1,1", "0,1", "nan", "-2", "1;2"):
        with pytest.raises(ConfigError, match="budgets read"):
            epsilons_from(text)


def test_every_preset_with_settings_for_budgets_can_be_read() -> None:
    found = [name for name in preset_names() if read_config(name).epsilon.set]
    assert found == ["heart", "mnist-by-writer"]
    units = {name: with_noise(name, []).privacy.unit for name in found}
    assert units == {"heart": "record", "mnist-by-writer": "client"}
    assert with_epsilon(with_noise("heart", []), math.inf).privacy.epsilon is None


def test_an_experiment_without_a_clip_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"privacy\.clip"):
        with_noise("digits", [])
    with pytest.raises(ConfigError, match="leave out"):
        with_noise("heart", ["privacy.epsilon=2.0"])


def test_settings_for_one_budget_stand_between_those_for_all_and_the_users(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    head = 'name = "own"\n[data]\nname = "heart"\n[epsilon]\nset = ["privacy.clip=1.0", "train.lr=0.5"]\n'
    file.write_text(f'{head}[epsilon.at]\n3 = ["train.lr=0.25"]\ninf = ["train.lr=2.0"]\n')
    source = str(file)
    rates = {e: with_noise(source, [], e).train.lr for e in (None, 1.0, 3.0, math.inf)}
    assert rates == {None: 0.5, 1.0: 0.5, 3.0: 0.25, math.inf: 2.0}
    assert with_noise(source, ["train.lr=7.0"], 3.0).train.lr == 7.0
    file.write_text(f'{head}[epsilon.at]\nmuch = ["train.lr=0.25"]\n')
    with pytest.raises(ConfigError, match="budgets read"):
        with_noise(source, [], 3.0)


def test_one_command_makes_runs_tables_and_figure(tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = [
        "compare",
        "heart",
        "--epsilon",
        "2,inf",
        "--seeds",
        "0:2",
        "--rounds",
        "2",
        "--jobs",
        "1",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, [*settings, "--algorithms", "fedavg,qffl", "--quiet"])
    assert done.exit_code == 0, done.output
    data = read_summary(out / "epsilons.json")
    assert len(data["runs"]) == 8
    assert {run["epsilon"] for run in data["runs"]} == {2.0, math.inf}
    noise = {(run["method"], run["epsilon"]): run["noise_multiplier"] for run in data["runs"]}
    assert noise["fedavg", math.inf] == 0.0
    assert noise["qffl", 2.0] > noise["fedavg", 2.0] > 0.0, "it asks for losses too"
    summary = json.loads((out / "epsilon-2" / "fedavg" / "0" / "summary.json").read_text())
    assert 1.9 < summary["privacy"]["epsilon"] <= 2.0
    assert "| `qffl` |" in (out / "epsilons.md").read_text(encoding="utf-8")
    assert (out / "epsilons.svg").stat().st_size > 1000


def test_intervals_are_students() -> None:
    assert cell([1.0, 2.0, 3.0]) == "2.0 ± 2.5"  # 4.303 / sqrt(3)
    assert cell([4.0]) == "4.0"
    assert cell([4.0, math.nan]) == "diverged"


@pytest.mark.parametrize("summary", PAGES, ids=lambda path: path.stem)
def test_pages_say_what_their_summaries_say(summary: Path) -> None:
    page = summary.with_suffix(".md").read_text(encoding="utf-8")
    assert rebuilt(page, read_summary(summary)) == page
    assert summary.with_suffix(".svg").is_file()


def test_a_summary_is_read_as_it_was_written(tmp_path: Path) -> None:
    data = read_summary(PAGES[0])
    write_all(data, tmp_path, "again")
    assert read_summary(tmp_path / "again.json") == data
    assert (tmp_path / "again.md").read_text(encoding="utf-8") == block(data) + "\n"

"""Configs of any shape: built and trained for a round, or refused in words."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path
from typing import Any

import pytest

from dqnfed.core.run_folder import toml_text
from dqnfed.experiments.config import Config, checked, preset_names, read_config
from dqnfed.experiments.experiment import build_algorithm, run_experiment
from tests.fuzz.harness import QUICK, odd_value, outcome, slow_seeds, spoiled

BASE: dict[str, Any] = {
    "name": "fuzz",
    "data": {"name": "digits", "partition": "iid", "clients": 3, "limit": 60, "validation": 0.1},
    "model": {"name": "linear"},
    "algorithm": {"name": "fedavg"},
    "train": {"rounds": 1, "lr": 0.1},
    "run": {"threads": 1, "device": "cpu"},
}
METHODS = ("fedavg", "dqn-fed", "qffl", "ditto", "scaffold", "term", "fedadam", "fednl", "fedcorr+fedavg", "mgda")
EXPENSIVE = {"rounds", "epochs", "hidden", "sweeps", "fine_tuning", "local_steps"}  # not to be made large
KEYS = {name: list(getattr(field.annotation, "model_fields", ())) for name, field in Config.model_fields.items()}


def odd_config(seed: int) -> dict[str, Any]:
    chance = random.Random(seed)
    config = copy.deepcopy(BASE)
    config["algorithm"]["name"] = chance.choice(METHODS)
    if chance.random() < 0.3:
        config["data"] = {"name": "bowls", "clients": 3}
    for _ in range(chance.choice((1, 1, 2, 3))):
        block = chance.choice([*KEYS, "algorithm", "model", "unknown"])
        value = odd_value(chance)
        if isinstance(value, int) and value > 3 and chance.random() < 0.9:
            value = 3
        keys = [*KEYS.get(block, []), "lr", "hidden", "weighting", "q", "dropout", "unknown"]
        key = chance.choice(keys)
        if key in EXPENSIVE and isinstance(value, int | float) and value > 3:
            value = 2
        if chance.random() < 0.1 or not isinstance(config.setdefault(block, {}), dict):
            config[block] = value
        else:
            config[block][key] = value
    return config


def judge(seed: int) -> None:
    config = odd_config(seed)
    case = f"seed {seed}, {config}"

    def train() -> Any:
        return run_experiment(checked(config, "fuzz.toml"), None)

    result, _ = outcome(train, case)
    if result is not None:
        loss = result.summary["train_loss"]["mean"]
        is_number = loss is not None and math.isfinite(loss)
        assert is_number or result.summary["status"] == "diverged", f"{case}: a loss of {loss} without a word"


@pytest.mark.parametrize("seed", QUICK)
def test_odd_values(seed: int) -> None:
    judge(seed)


@pytest.mark.parametrize("seeds", slow_seeds(2500))
def test_many_odd_values(seeds: range) -> None:
    for seed in seeds:
        judge(seed)


def judge_text(seed: int, path: Path) -> None:
    """A damaged TOML file is read as what it says now, or refused; its method and the text of it too."""
    chance = random.Random(seed)
    preset = Path(__file__).parents[2] / "src" / "dqnfed" / "experiments" / "presets"
    path.write_bytes(spoiled((preset / f"{chance.choice(preset_names())}.toml").read_bytes(), chance))
    config, _ = outcome(lambda: read_config(str(path)), f"seed {seed}")
    if config is not None:
        outcome(lambda: build_algorithm(config), f"seed {seed}")
        written = path.with_name("again.toml")
        written.write_text(toml_text(config.as_dict()), encoding="utf-8")
        assert read_config(str(written)) == config or "nan" in written.read_text().lower()


@pytest.mark.parametrize("seed", QUICK)
def test_damaged_text(seed: int, tmp_path: Path) -> None:
    judge_text(seed, tmp_path / "fuzz.toml")


@pytest.mark.parametrize("seeds", slow_seeds(1500))
def test_much_damaged_text(seeds: range, tmp_path: Path) -> None:
    for seed in seeds:
        judge_text(seed, tmp_path / "fuzz.toml")

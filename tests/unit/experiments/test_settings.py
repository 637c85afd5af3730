"""Settings: a config gives a method what was set and nothing else, the user's word before the file's."""

from __future__ import annotations

import itertools
import json
import logging
import pickle
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import pytest

from dqnfed.algorithms import REGISTRY
from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.algorithms.fedfa import FedFa
from dqnfed.core.algorithm import hyperparameters
from dqnfed.core.problem import Problem
from dqnfed.core.run_folder import RunFolder, toml_text
from dqnfed.experiments.config import LOCAL_WORK, Config, ConfigError, TrainBlock, checked, preset_names, read_config
from dqnfed.experiments.data_commands import own_config
from dqnfed.experiments.deploy import app_config
from dqnfed.experiments.experiment import build_algorithm, resumed_config, run_experiment
from dqnfed.experiments.planned import was_started
from dqnfed.experiments.settings import given_settings, unused_lines, unused_of, unused_settings
from dqnfed.experiments.sweep import with_settings

# what a config of an earlier version wrote into [train] whether it was set or not
FORMERLY_WRITTEN = {
    "epochs": 1,
    "batch_size": "full",
    "lr": 0.1,
    "momentum": 0.0,
    "weight_decay": 0.0,
    "lr_decay": 1.0,
    "lr_decay_every": 1,
}
SMALL = ["train.rounds=2", "data.clients=4", "data.limit=200", "model.hidden=[4]"]
# where a learning rate may stand, the lowest rank first
IN_FILE = ("train", "algorithms.term", "algorithm")
WHO_AND_HOW_LONG = {"rounds", "participation", "sampling", "candidates", "trace"}
OF_USER = ("train", "algorithms.term", "algorithm")


def read_again(config: Config) -> Config:
    """Return the config as a run folder gives it back."""
    return checked(tomllib.loads(toml_text(config.as_dict())), "config.toml")


def file_of(folder: Path, raw: dict[str, Any]) -> str:
    path = folder / "experiment.toml"
    path.write_text(toml_text(raw))
    return str(path)


def test_the_shared_settings_are_those_of_the_methods() -> None:
    assert set(LOCAL_WORK) == {f.name for f in fields(FedAvg)} - set(hyperparameters(FedAvg))
    assert set(LOCAL_WORK) == set(TrainBlock.model_fields) - WHO_AND_HOW_LONG


@pytest.mark.parametrize("name", REGISTRY)
def test_what_is_not_set_is_the_methods_own_default(name: str) -> None:
    assert build_algorithm(Config().with_algorithm(name)) == REGISTRY[name]()


def test_the_documented_defaults_are_those_of_fedavg() -> None:
    known = {**FORMERLY_WRITTEN, "batch_size": None}
    assert {key: getattr(FedAvg(), key) for key in LOCAL_WORK} == known
    own = {name: [k for k in known if getattr(kind(), k, known[k]) != known[k]] for name, kind in REGISTRY.items()}
    assert {name: keys for name, keys in own.items() if keys} == {"fedfa": ["momentum"]}


def test_fedfa_keeps_its_momentum_unless_another_is_set() -> None:
    def momentum(*changes: str) -> float:
        return build_algorithm(read_config("digits", ["algorithm.name=fedfa", *changes])).momentum

    assert momentum() == FedFa().momentum == 0.9
    assert momentum("train.lr=0.3", "run.seed=4") == 0.9
    for key in ("train", "algorithms.fedfa", "algorithm"):
        assert momentum(f"{key}.momentum=0.0") == 0.0


@pytest.mark.parametrize("preset", preset_names())
def test_a_stored_config_gives_the_same_method(preset: str) -> None:
    """Through a run's config.toml, another process and another seed, for every method with settings of its own."""
    base = read_config(preset, ["train.weight_decay=0.01", "algorithms.dqn-fed.batch_size=8"])
    for name in {*base.compare.algorithms, *base.algorithms, "fedfa", "fedcorr+dqn-fed"}:
        config = base.with_algorithm(name)
        expected = build_algorithm(config)
        for other in (read_again(config), pickle.loads(pickle.dumps(config)), read_again(config.with_seed(3))):
            assert build_algorithm(other) == expected
        assert read_again(config) == config


def test_a_stored_config_of_an_earlier_version_stays_what_it_was(tmp_path: Path) -> None:
    """It had a value for everything, which the run was made with; where that is what holds today, the run goes on."""
    small = read_config("digits", SMALL)
    for name, is_same in (("fedavg", True), ("fedfa", False)):
        config, folder = small.with_algorithm(name), tmp_path / name
        raw = config.as_dict()
        raw["train"] = {**FORMERLY_WRITTEN, **raw["train"]}
        RunFolder(folder).begin(raw, [], {}, ["round"])
        assert build_algorithm(resumed_config(folder)).momentum == 0.0
        if is_same:
            assert was_started(folder, config)
        else:
            with pytest.raises(ConfigError, match="holds a run with other settings"):
                was_started(folder, config)


def test_a_setting_of_one_method_leaves_the_runs_of_others_as_they_are(tmp_path: Path) -> None:
    before = read_config("digits", [*SMALL, "algorithm.name=fedavg"])
    RunFolder(tmp_path).begin(before.as_dict(), [], {}, ["round"])
    assert was_started(tmp_path, read_config("digits", [*SMALL, "algorithm.name=fedavg", "algorithms.qffl.q=3.0"]))
    for change in ("train.lr=0.5", "algorithms.fedavg.server_lr=0.5", "train.participation=0.5", "run.seed=1"):
        with pytest.raises(ConfigError, match="holds a run with other settings"):
            was_started(tmp_path, read_config("digits", [*SMALL, "algorithm.name=fedavg", change]))


def chosen(folder: Path, in_file: Sequence[str], of_user: Sequence[str]) -> tuple[Config, dict[str, float]]:
    """Return the config in which every place that is named has a learning rate of its own, and these rates."""
    rates = {f"file {place}": 0.1 + k / 100 for k, place in enumerate(IN_FILE)}
    rates |= {f"user {place}": 0.5 + k / 100 for k, place in enumerate(OF_USER)}
    raw: dict[str, Any] = {"algorithm": {"name": "term"}, "train": {"rounds": 1}, "algorithms": {"term": {"t": 3.0}}}
    for place in in_file:
        block = raw["algorithms"]["term"] if place == "algorithms.term" else raw[place]
        block["lr"] = rates[f"file {place}"]
    changes = [f"{place}.lr={rates[f'user {place}']}" for place in of_user]
    return read_config(file_of(folder, raw), changes), rates


@pytest.mark.parametrize("n_user", range(4))
def test_the_users_word_counts_before_the_files(n_user: int, tmp_path: Path) -> None:
    """All 64 choices of places, the user's in every order; the rank of a place is its place in the list above."""
    for n_file in range(4):
        for in_file in itertools.combinations(IN_FILE, n_file):
            for of_user in itertools.permutations(OF_USER, n_user):
                config, rates = chosen(tmp_path, in_file, of_user)
                ranked = [f"file {p}" for p in IN_FILE if p in in_file] + [f"user {p}" for p in OF_USER if p in of_user]
                expected = rates[ranked[-1]] if ranked else REGISTRY["term"]().lr
                for read in (config, read_again(config)):
                    algorithm: Any = build_algorithm(read)
                    assert (algorithm.lr, algorithm.t) == (expected, 3.0), (in_file, of_user)


@pytest.mark.parametrize("n_user", range(3))
def test_the_same_holds_for_a_method_that_is_not_the_experiments_own(n_user: int, tmp_path: Path) -> None:
    """Then `algorithm` is of another method, and says nothing about this one."""
    raw: dict[str, Any] = {"algorithm": {"name": "dqn-fed", "lr": 0.9}, "algorithms": {"term": {"lr": 0.2}}}
    raw["train"] = {"lr": 0.1}
    rates = {"train": 0.3, "algorithms.term": 0.4}
    for of_user in itertools.permutations(rates, n_user):
        config = read_config(file_of(tmp_path, raw), [f"{place}.lr={rates[place]}" for place in of_user])
        expected = 0.4 if "algorithms.term" in of_user else 0.3 if "train" in of_user else 0.2
        assert build_algorithm(read_again(config.with_algorithm("term"))).lr == expected


def test_a_whole_block_of_the_user_counts_before_the_file_too(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"algorithm": {"name": "term"}, "algorithms": {"term": {"lr": 0.2, "t": 3.0}}})
    found: Any = build_algorithm(read_config(path, ["train={rounds=3, lr=0.7}"]))
    assert (found.lr, found.t) == (0.7, 3.0)


def test_fedcorr_follows_what_is_said_of_its_finishing_method(tmp_path: Path) -> None:
    both = "fedcorr+dqn-fed"
    raw = {"algorithms": {"dqn-fed": {"lr": 0.2}, both: {"lr": 0.3, "sweeps": 2}}, "algorithm": {"name": both}}
    path = file_of(tmp_path, raw)
    assert build_algorithm(read_config(path)).lr == 0.3
    assert build_algorithm(read_config(path, ["algorithms.dqn-fed.lr=0.4"])).lr == 0.4
    for change in ("train.lr=0.4", "algorithms.fedcorr+dqn-fed.lr=0.4"):
        found: Any = build_algorithm(read_config(path, [change]))
        assert (found.lr, found.sweeps) == (0.4, 2)


def test_settings_of_another_method_do_not_follow_but_the_users_do(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"algorithm": {"name": "qffl", "q": 5.0, "lr": 0.2}})
    changes = ["algorithm.t=2.0", 'algorithm.name="term"']
    for given in (changes, changes[::-1]):
        config = read_config(path, given)
        found: Any = build_algorithm(config)
        assert (found.t, found.lr) == (2.0, REGISTRY["term"]().lr)
    same: Any = build_algorithm(read_config(path, ['algorithm.name="qffl"']))
    assert (same.q, same.lr) == (5.0, 0.2)


def test_a_grid_counts_before_everything(tmp_path: Path) -> None:
    config, _ = chosen(tmp_path, IN_FILE, OF_USER)
    for name in ("term", "fedavg"):
        assert build_algorithm(read_again(with_settings(config, name, {"lr": 0.9}))).lr == 0.9


def test_flowers_run_config_and_ones_own_table_count_as_the_user(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"algorithm": {"name": "fedfa"}, "algorithms": {"fedfa": {"lr": 0.2}}})
    run_config = {"algorithm": "fedfa", "rounds": 3, "set": "train.lr=0.5; train.epochs=2"}
    deployed = build_algorithm(app_config(Path(path), run_config))
    base = read_config(path)
    own = own_config(tmp_path / "t.csv", client="c", label="y", base=base, changes=("train.lr=0.5", "train.epochs=2"))
    assert deployed == build_algorithm(own) == FedFa(lr=0.5, epochs=2)


def test_an_unknown_setting_is_named_where_it_stands() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algorithms\.qffl\.qq' for qffl \(did you mean 'q'"):
        build_algorithm(read_config("digits", ["algorithms.qffl.qq=1.0"]).with_algorithm("qffl"))
    with pytest.raises(ConfigError, match=r"'train\.lr\.x' reaches into 'lr', which is a value"):
        read_config("digits", ["train.lr.x=1"])
    with pytest.raises(ConfigError, match="cannot be used"):
        read_config("digits", ["train.lr=0.3", "algorithms=3"])


@dataclass(frozen=True, kw_only=True)
class OneStep(FedAvg):
    """FedAvg, said to have no use for some settings once it knows its problem."""

    is_prepared: bool = False

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        logging.getLogger("dqnfed").warning("prepared for %d of %d clients", cohort_size, n_clients)
        return replace(self, is_prepared=True)

    def unused(self) -> frozenset[str]:
        return frozenset({"lr", "momentum", "epochs"}) if self.is_prepared else frozenset()


@pytest.fixture
def one_step(monkeypatch: pytest.MonkeyPatch) -> OneStep:
    monkeypatch.setitem(REGISTRY, "one-step", OneStep)
    return OneStep(is_prepared=True)


@dataclass(frozen=True)
class NoLocalWork:
    """A method without any of the shared settings."""


def test_only_what_was_set_is_told_of(one_step: OneStep) -> None:
    def told(*keys: str) -> tuple[list[str], list[str]]:
        """At values that are the defaults: to set them is a wish all the same."""
        raw = {"algorithm": {"name": "one-step"}, "train": {key: FORMERLY_WRITTEN[key] for key in keys}}
        config = checked(raw, "here")
        names = unused_settings(config, one_step)
        return names, unused_lines([(config, names)])

    assert told() == ([], [])
    assert told("batch_size") == ([], [])
    assert told("epochs", "batch_size", "lr") == (
        ["lr", "epochs"],
        ["one-step does not use lr, epochs (train.lr, train.epochs)"],
    )
    assert unused_of(NoLocalWork()) == set(LOCAL_WORK)  # type: ignore[arg-type]


def test_the_key_that_holds_the_value_is_the_one_that_is_named(one_step: OneStep) -> None:
    config = read_config("digits", ["algorithm.name=one-step", "algorithms.one-step.lr=0.1", "algorithm.momentum=0.5"])
    assert given_settings(config)["lr"] == (0.1, "algorithms.one-step.lr")
    assert unused_lines([(config, unused_settings(config, one_step))]) == [
        "one-step does not use lr, epochs, momentum (algorithms.one-step.lr, train.epochs, algorithm.momentum)"
    ]


def test_methods_of_which_the_same_is_to_be_told_share_a_line() -> None:
    config = read_config("digits")
    found = [(config.with_algorithm(name), names) for name, names in (("newton", ["lr"]), ("fedavg", []))]
    found += [(config.with_algorithm("giant"), ["lr"]), (config.with_algorithm("shed"), ["epochs"])]
    assert unused_lines(found) == [
        "newton, giant do not use lr (train.lr)",
        "shed does not use epochs (train.epochs)",
    ]


@pytest.mark.usefixtures("one_step")
def test_a_run_notes_what_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of the method as it was prepared, whose own warnings are given once."""
    config, lines = read_config("digits", [*SMALL, "algorithm.name=one-step", "train.momentum=0.5"]), list[str]()
    with caplog.at_level(logging.WARNING, logger="dqnfed"):
        result = run_experiment(config, tmp_path, note=lines.append)
    assert caplog.messages == ["prepared for 4 of 4 clients"]
    assert lines == ["one-step does not use lr, epochs, momentum (train.lr, train.epochs, train.momentum)"]
    assert result.summary["unused"] == ["lr", "epochs", "momentum"]
    assert json.loads((tmp_path / "summary.json").read_text())["unused"] == result.summary["unused"]


def test_a_run_that_uses_all_of_its_settings_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    run_experiment(read_config("digits", [*SMALL, "algorithm.name=fedavg"]), tmp_path, note=lines.append)
    assert lines == []
    assert json.loads((tmp_path / "summary.json").read_text())["unused"] == []

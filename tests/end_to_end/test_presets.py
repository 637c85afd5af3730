"""Every preset parses, builds all its methods and grids, and runs on a miniature of its dataset."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

from dqnfed.algorithms import REGISTRY
from dqnfed.data.catalogue import dataset_called
from dqnfed.experiments.config import AlgorithmBlock, Config, preset_names, read_config
from dqnfed.experiments.experiment import build_algorithm, build_problem, run_experiment
from dqnfed.experiments.paper import TABLES
from tests.helpers import official
from tests.helpers.quick import every
from tests.helpers.repository import ROOT

NEEDS_FILES = [name for name in preset_names() if read_config(name).data.name not in ("digits", "heart", "bowls")]
METHODS = ("dqn-fed", "fedavg", "qffl")

MINIATURES: dict[str, Callable[[Path], None]] = {
    "cifar10": official.cifar10,
    "cifar100": official.cifar100,
    "fashion_mnist": lambda folder: official.mnist(folder, 200, 100),
    "mnist_by_writer": official.mnist_by_writer,
    "femnist": official.femnist,
    "emnist": official.emnist,
    "shakespeare": lambda folder: official.shakespeare(folder, n_roles=3, n_windows=500),
    "tinyimagenet": official.tinyimagenet,
    "cinic10": official.cinic10,
    "clothing1m": official.clothing1m,
}

NOISY = ("cifar10-noisy", "fashion-mnist-noisy", "digits-noisy", "clothing1m")

FEW_WINDOWS = [
    "data.clients=2", "data.min_examples=450", "data.max_examples=410", "train.batch_size=128", "model.hidden=8"
]  # fmt: skip

# What makes a preset small; everything else stays as it is.
SMALLER: dict[str, list[str]] = {
    "cifar10-setup1": ["data.clients=10", "train.participation=0.3", "model.hidden=[16, 16]"],
    "cifar10-setup1-full": ["data.clients=10", "train.participation=0.3", "model.hidden=[16, 16]"],
    "cifar10-fedfv": ["data.clients=5", "train.participation=0.4", "model.hidden=[16, 16]"],
    "cifar10-setup2": ["data.clients=3", "data.min_examples=6", "model.width=4"],
    "cifar10-setup2-cnn": ["data.clients=3", "data.min_examples=6", "model.channels=[2, 3]", "model.hidden=8"],
    "cifar10-setup2-participation10": ["data.clients=3", "data.min_examples=6", "model.width=4"],
    "cifar10-setup2-participation50": ["data.clients=3", "data.min_examples=6", "model.width=4"],
    "cifar10-one-class": ["model.channels=[2, 3]", "model.hidden=[8, 6]"],
    "cifar10-dirichlet": ["data.clients=3", "data.min_examples=6", "model.channels=[2, 3]", "model.hidden=[8, 6]"],
    "fashion-mnist-one-class": ["model.hidden=[16, 16]"],
    "fashion-mnist-dirichlet": ["data.clients=3", "data.min_examples=6", "model.hidden=[16, 16]"],
    "cifar100-setup1": ["data.clients=3", "model.width=4", "data.limit=120"],
    "cifar100-setup2": ["data.clients=4", "model.width=4", "data.limit=120"],
    "femnist-original": ["data.clients=3", "train.participation=0.7", "model.channels=[2, 3]", "model.hidden=8"],
    "femnist-skewed": ["data.clients=4", "train.participation=0.5", "model.channels=[2, 3]", "model.hidden=8"],
    "mnist-by-writer": ["data.clients=4", "train.participation=0.5", "model.channels=[2, 3]", "model.hidden=8"],
    "mnist-by-writer-skewed": ["data.clients=4", "train.participation=0.5", "model.channels=[2, 3]", "model.hidden=8"],
    "shakespeare-setup1": FEW_WINDOWS,
    "shakespeare-setup2": FEW_WINDOWS,
    "fashion-mnist": ["model.hidden=[16, 16]"],
    "cinic10": ["data.clients=3", "data.min_examples=6", "model.width=4"],
    "tinyimagenet": ["data.clients=2", "data.min_examples=6", "model.width=4"],
    "cifar10-noisy": ["data.clients=4", "train.participation=0.5", "train.epochs=1", "model.width=4"],
    "fashion-mnist-noisy": ["data.clients=4", "train.participation=0.5", "model.hidden=[16]"],
    "clothing1m": [
        "data.clients=3", "data.min_examples=3", "data.per_class=2", "data.side=32", "train.participation=0.7",
        "train.epochs=1", "model.width=4", "model.blocks=[1, 1, 1, 1]",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def miniature(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("data")

    @cache
    def made(dataset: str) -> Path:
        MINIATURES[dataset](root / dataset_called(dataset).folder)
        return root

    return made


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DQNFED_CACHE", str(tmp_path / "cache"))


def small(preset: str, data: Path) -> Config:
    always = [f'data.dir="{data}"', "train.rounds=2", "eval.every=1", 'run.device="cpu"']
    return read_config(preset, [*always, *SMALLER[preset]])


@pytest.mark.parametrize("preset", preset_names())
def test_every_method_and_every_grid_point_of_a_preset_exists(preset: str) -> None:
    config = read_config(preset)
    assert config.name == preset
    assert config.description
    for name in (config.algorithm.name, *config.compare.algorithms, *config.algorithms):
        build_algorithm(config.with_algorithm(name))
    for name, grid in config.grids.items():
        for key, values in grid.items():
            for value in values:
                block = AlgorithmBlock.model_validate({"name": name, key: value})
                method = build_algorithm(config.model_copy(update={"algorithm": block}))
                assert getattr(method, key) == value


def test_every_table_of_the_paper_has_a_preset() -> None:
    plain = {name.replace("-", "") for name in preset_names()}
    tables = {table.key.replace("-", "") for table in TABLES if table.columns != ("seconds",)}
    assert tables <= plain


def test_the_page_of_presets_names_them_all() -> None:
    page = (ROOT / "docs" / "how-to" / "datasets.md").read_text(encoding="utf-8")
    table = page.partition("\n## The presets\n")[2].partition("\n## ")[0]
    assert [name for name in preset_names() if f"`{name}`" not in table] == []


def test_setup_1_is_local_training_for_all_and_its_variant_full_gradients_for_some() -> None:
    local, full = read_config("cifar10-setup1"), read_config("cifar10-setup1-full")
    assert (local.train.participation, local.train.rounds) == (0.1, 2000)
    for name in {*local.compare.algorithms, *local.algorithms}:
        method = build_algorithm(local.with_algorithm(name))
        assert (method.batch_size, method.epochs) == (64, 1), name
    whole = {name for name in REGISTRY if build_algorithm(full.with_algorithm(name)).batch_size is None}
    assert whole == {"dqn-fed", "server-lbfgs"}

    def rest(config: Config) -> dict[str, Any]:
        plain = config.as_dict()
        for key in ("name", "description", "grids"):
            del plain[key]
        blocks = {
            name: {k: v for k, v in found.items() if k != "batch_size"} for name, found in config.algorithms.items()
        }
        return {**plain, "algorithms": {name: block for name, block in blocks.items() if block}}

    assert rest(local) == rest(full)


def test_the_small_cnn_of_setup_2_has_as_many_parameters_as_it_says(miniature: Callable[[str], Path]) -> None:
    changes = [f'data.dir="{miniature("cifar10")}"', "data.clients=3", "data.min_examples=6", 'run.device="cpu"']
    config = read_config("cifar10-setup2-cnn", changes)
    convolutions = (3 * 5 * 5 + 1) * 16 + (16 * 5 * 5 + 1) * 32
    dense = (32 * 8 * 8 + 1) * 128 + (128 + 1) * 10
    assert build_problem(config).problem.n_parameters == convolutions + dense == 277_610
    assert "277,610" in config.description
    resnet = read_config("cifar10-setup2")
    assert config.data.model_copy(update={"dir": None, "clients": 10, "min_examples": 10}) == resnet.data
    assert (config.train.participation, config.train.rounds) == (1.0, 100)


def test_mnist_by_class_is_dealt_as_the_letters_of_femnist(miniature: Callable[[str], Path]) -> None:
    digits, letters = read_config("mnist-by-writer-skewed"), read_config("femnist-skewed")
    assert digits.data.model_copy(update={"name": "emnist", "keep_classes": letters.data.keep_classes}) == letters.data
    by_writer = read_config("mnist-by-writer")
    assert (digits.train, digits.model, digits.algorithms) == (by_writer.train, by_writer.model, by_writer.algorithms)
    federation = build_problem(small("mnist-by-writer-skewed", miniature("mnist_by_writer"))).federation
    assert (federation.n_clients, federation.n_classes) == (4, 10)
    assert max(len(counts) for counts in federation.label_counts() or []) <= 5


@pytest.mark.parametrize("preset", NEEDS_FILES)
def test_presets_say_what_the_paper_leaves_out(preset: str) -> None:
    text = (resources.files("dqnfed.experiments") / "presets" / f"{preset}.toml").read_text()
    head = text.split("name =", 1)[0]
    assert "Decided here" in head or "Not in the paper" in head
    assert tomllib.loads(text)["data"]["name"] == dataset_called(read_config(preset).data.name).name


@pytest.mark.parametrize("preset", every(3, NEEDS_FILES))
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[] if name == "dqn-fed" else [pytest.mark.slow]) for name in METHODS]
)
def test_presets_run_on_a_miniature(preset: str, method: str, miniature: Callable[[str], Path], tmp_path: Path) -> None:
    config = small(preset, miniature(read_config(preset).data.name)).with_algorithm(method)
    result = run_experiment(config, tmp_path / "run")
    assert result.summary["rounds"] == 2
    assert result.summary["status"] == "finished"
    assert 0 <= result.summary["accuracy"]["mean"] <= 100
    assert torch.isfinite(result.theta).all()
    assert (tmp_path / "run" / "summary.json").is_file()


@pytest.mark.parametrize("preset", NOISY)
def test_label_correction_goes_through_all_its_stages_on_a_miniature(
    preset: str, miniature: Callable[[str], Path], tmp_path: Path
) -> None:
    stages = ["algorithms.fedcorr.sweeps=1", "algorithms.fedcorr.fine_tuning=1", "algorithms.fedcorr.neighbours=3"]
    dataset = read_config(preset).data.name
    few = ["data.clients=4", "train.epochs=1"] if dataset == "digits" else SMALLER[preset]
    folder = tmp_path if dataset == "digits" else miniature(dataset)
    changes = [*few, *stages, f'data.dir="{folder}"', "train.rounds=9", "eval.every=9", 'run.device="cpu"']
    config = read_config(preset, changes).with_algorithm("fedcorr+dqn-fed")
    result = run_experiment(config, tmp_path / "run")
    assert result.summary["rounds"] == 9
    assert torch.isfinite(result.theta).all()
    assert [record["status"] for record in result.history[1:3]] == [
        "hold",
        "next",
    ]  # clients copy their labels, then training turns
    if config.data.noise is None:
        assert "noise" not in result.summary  # the wrong labels of real photographs are nobody's to count
    else:
        written = json.loads((tmp_path / "run" / "noise.json").read_text())
        assert written["summary"] == json.loads((tmp_path / "run" / "summary.json").read_text())["noise"]
        assert written["summary"]["labels"] == sum(row["n"] for row in written["clients"])


@pytest.mark.parametrize("preset", NEEDS_FILES)
def test_data_stay_bytes_until_the_device(preset: str, miniature: Callable[[str], Path]) -> None:
    config = small(preset, miniature(read_config(preset).data.name))
    built = build_problem(config)
    problem, federation = built.problem, built.federation
    assert federation.train.inputs.dtype == torch.uint8
    outputs = problem.predict(problem.theta0, federation.test.inputs[:2])
    assert outputs.shape == (2, federation.n_classes)
    assert outputs.dtype == torch.float32


def test_the_fashion_clients_are_named_by_their_class(miniature: Callable[[str], Path]) -> None:
    federation = build_problem(small("fashion-mnist", miniature("fashion_mnist"))).federation
    assert federation.names == ("T-shirt", "pullover", "shirt")
    assert federation.label_counts() == [{0: 20}, {1: 20}, {2: 20}]
    assert federation.train.inputs.shape[1:] == (1, 28, 28)
    framed = small("fashion-mnist", miniature("fashion_mnist"))
    framed = framed.model_copy(update={"data": framed.data.model_copy(update={"pad": 2})})
    assert build_problem(framed).federation.train.inputs.shape[1:] == (1, 32, 32)

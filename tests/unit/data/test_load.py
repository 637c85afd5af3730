"""Loading by name: the cache is quick and never stale, and a missing dataset says what to do."""

from __future__ import annotations

import logging
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from dqnfed.data import DataError, RawData, load
from dqnfed.data.cache import cache_dir, read_cached, write_cached
from dqnfed.data.catalogue import DATASETS, HubSource
from dqnfed.data.hub import fetch_from_hub, from_hub
from dqnfed.data.transform import only_classes, padded, thinned
from tests.helpers import official


def same(one: RawData, other: RawData) -> bool:
    columns = ("inputs", "targets", "clients", "is_test", "is_validation")
    pairs = [(getattr(one, c), getattr(other, c)) for c in columns]
    return (one.name, one.n_classes, one.client_names, one.class_names) == (
        other.name,
        other.n_classes,
        other.client_names,
        other.class_names,
    ) and all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def test_the_cache_gives_the_same_data_in_the_same_types(data_dir: Path) -> None:
    official.femnist(data_dir / "femnist")
    first = load("femnist", data_dir)
    assert len(list(cache_dir().glob("femnist-*.safetensors"))) == 1
    again = load("femnist", data_dir)
    assert same(first, again)
    assert again.inputs.dtype == torch.uint8


def test_changed_files_are_read_again(data_dir: Path) -> None:
    official.mnist(data_dir / "mnist", n_train=100)
    assert len(load("mnist", data_dir)) == 120
    official.mnist(data_dir / "mnist", n_train=50)
    assert len(load("mnist", data_dir)) == 70


def test_a_damaged_cache_is_not_trusted(data_dir: Path) -> None:
    official.mnist(data_dir / "mnist")
    first = load("mnist", data_dir)
    (cached,) = cache_dir().glob("mnist-*.safetensors")
    cached.write_bytes(cached.read_bytes()[:1000])
    assert same(load("mnist", data_dir), first)


def test_two_folders_do_not_share_a_cache(tmp_path: Path) -> None:
    official.mnist(tmp_path / "one" / "mnist", n_train=100)
    official.mnist(tmp_path / "two" / "mnist", n_train=50)
    assert [len(load("mnist", tmp_path / d)) for d in ("one", "two", "one")] == [120, 70, 120]


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    official.mnist(data_dir / "mnist")
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("DQNFED_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert len(load("mnist", data_dir)) == 120
    assert "could not be cached" in caplog.text


def test_a_missing_dataset_says_where_it_belongs_and_how_to_get_it(data_dir: Path) -> None:
    with pytest.raises(DataError, match=r"dqnfed data fetch cifar10.*--data-dir or DQNFED_DATA") as caught:
        load("cifar10", data_dir)
    assert str(data_dir / "cifar10") in str(caught.value)
    with pytest.raises(DataError, match=r"preprocess\.sh"):
        load("femnist", data_dir)
    with pytest.raises(DataError, match="on request"):
        load("clothing1m", data_dir)
    (data_dir / "cifar10").mkdir(parents=True)
    with pytest.raises(DataError, match=r"neither cifar-10-batches-bin nor .*dqnfed data fetch cifar10"):
        load("cifar10", data_dir)
    with pytest.raises(DataError, match="Did you mean 'cifar10'"):
        load("cifar1", data_dir)


def test_the_data_folder_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official.mnist(tmp_path / "mnist")
    monkeypatch.setenv("DQNFED_DATA", str(tmp_path))
    assert len(load("MNIST")) == 120


@pytest.mark.parametrize("dataset", DATASETS.values(), ids=lambda d: d.name)
def test_the_catalogue_is_complete(dataset: object) -> None:
    from dqnfed.data.catalogue import Dataset

    assert isinstance(dataset, Dataset)
    assert dataset.licence
    assert dataset.cite
    assert not dataset.folder or dataset.watched
    assert not dataset.folder or dataset.downloads or dataset.by_hand
    assert len(dataset.mean) == len(dataset.std)
    assert all(source.url.startswith("http") for source in dataset.downloads)
    assert all(len(source.md5) == 32 for source in dataset.downloads if source.md5)


def test_classes_are_chosen_and_renumbered() -> None:
    raw = RawData("x", torch.arange(10)[:, None], torch.tensor([0, 2, 6, 1, 2, 6, 0, 3, 6, 5]), 10)
    chosen = only_classes(raw, [6, 0])
    assert chosen.inputs.flatten().tolist() == [0, 2, 5, 6, 8]
    assert chosen.targets.tolist() == [1, 0, 0, 1, 0]
    assert chosen.n_classes == 2
    for wrong in ([], [0, 0], [10]):
        with pytest.raises(DataError, match=r"different numbers in 0\.\.9"):
            only_classes(raw, wrong)


def test_padding_frames_images_with_zeros() -> None:
    raw = RawData("x", torch.ones(3, 1, 28, 28, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), 1)
    bigger = padded(raw, 2)
    assert bigger.inputs.shape == (3, 1, 32, 32)
    assert bigger.inputs.dtype == torch.uint8
    assert int(bigger.inputs.sum()) == 3 * 28 * 28
    with pytest.raises(DataError, match="pad needs images"):
        padded(RawData("x", torch.ones(3, 4), torch.zeros(3), 0), 2)


def test_thinning_spreads_over_the_dataset() -> None:
    raw = RawData("x", torch.arange(100)[:, None], torch.arange(100), 100)
    assert thinned(raw, 5).targets.tolist() == [0, 24, 49, 74, 99]
    assert thinned(raw, 1000) is raw


def test_the_hub_gives_what_the_readers_give() -> None:
    pixels, labels = official.blobs(np.random.default_rng(0), 6, 2, (28, 28))
    rows = [
        {"image": p, "character": int(y), "writer_id": f"w{i % 3}"}
        for i, (p, y) in enumerate(zip(pixels, labels, strict=True))
    ]
    raw = from_hub(
        "femnist", HubSource("some/where", "image", "character", "writer_id", None), {"train": rows}, n_channels=1
    )
    assert raw.inputs.shape == (6, 1, 28, 28)
    assert raw.client_names == ("w0", "w1", "w2")
    assert raw.clients is not None
    assert raw.clients.tolist() == [0, 1, 2, 0, 1, 2]
    colour = [{"img": np.zeros((4, 4, 3), np.uint8), "label": 0}, {"img": np.zeros((4, 4), np.uint8), "label": 1}]
    split = from_hub("x", HubSource("some/where", "img", "label"), {"train": colour, "test": colour[:1]}, n_channels=3)
    assert split.inputs.shape == (3, 3, 4, 4)
    assert split.is_test is not None
    assert split.is_test.tolist() == [False, False, True]
    with pytest.raises(DataError, match="no split 'test'"):
        from_hub("x", HubSource("some/where", "img", "label"), {"train": colour}, n_channels=3)


def test_hub_data_are_used_where_the_files_are_absent(data_dir: Path) -> None:
    raw = RawData("cifar10", torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.arange(4), 10)
    write_cached(raw, cache_dir() / "cifar10-hub.safetensors", "hub")
    assert len(load("cifar10", data_dir)) == 4
    official.cifar10(data_dir / "cifar10")
    assert len(load("cifar10", data_dir)) == 120
    assert read_cached(cache_dir() / "cifar10-hub.safetensors", "other") is None


def test_hub_data_go_where_the_user_says(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.zeros((32, 32, 3), np.uint8)
    rows = [{"img": image, "label": c} for c in range(3)]
    offered = types.ModuleType("datasets")
    monkeypatch.setattr(offered, "load_dataset", lambda repository: {"train": rows, "test": rows[:1]}, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", offered)
    assert fetch_from_hub("cifar10", data_dir) == data_dir / "cifar10-hub.safetensors"
    assert len(load("cifar10", data_dir)) == 4
    with pytest.raises(DataError, match="is not complete"):
        load("cifar10", data_dir / "elsewhere")

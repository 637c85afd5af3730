"""The real datasets: counts, means and label totals as their authors document them. Skipped where the files are
absent.
"""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from dqnfed.data import RawData, load, partition, split
from dqnfed.data.fetch import verify
from dqnfed.data.readers.text import decode
from tests.helpers.data import real_data


@functools.lru_cache(maxsize=2)
def real(name: str, folder: str | None = None) -> RawData:
    return load(name, real_data(folder or name).parent)


def training_mean(raw: RawData) -> np.ndarray:
    assert raw.is_test is not None
    pixels = raw.inputs[~raw.is_test]
    sums = pixels.sum(dim=(0, 2, 3), dtype=torch.int64)
    return sums.numpy() / (255 * pixels[:, 0].numel())


@pytest.mark.slow
def test_cifar10() -> None:
    raw = real("cifar10")
    assert raw.is_test is not None
    assert raw.inputs.shape == (60_000, 3, 32, 32)
    assert raw.inputs.dtype == torch.uint8
    assert raw.targets[~raw.is_test].bincount().tolist() == [5000] * 10
    assert raw.targets[raw.is_test].bincount().tolist() == [1000] * 10
    assert np.allclose(training_mean(raw), [0.49139968, 0.48215841, 0.44653091], atol=1e-7)
    assert raw.targets[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]


def test_cifar10_setup_1_as_published() -> None:
    raw = real("cifar10")
    manifest = split(raw, partition(raw, "shards", 100, 0, pool="train"), test=0.2)
    assert set(map(tuple, manifest.sizes)) == {(400, 0, 100)}
    assert ((manifest.label_counts(raw) > 0).sum(axis=1) <= 2).all()


def test_fashion_mnist() -> None:
    raw = real("fashion_mnist")
    assert raw.is_test is not None
    assert raw.inputs.shape == (70_000, 1, 28, 28)
    assert raw.targets[~raw.is_test].bincount().tolist() == [6000] * 10
    assert raw.targets[raw.is_test].bincount().tolist() == [1000] * 10
    assert training_mean(raw) == pytest.approx(0.2860, abs=5e-5)
    assert all(verdict.is_right for verdict in verify("fashion_mnist", real_data("fashion_mnist").parent))


def test_mnist() -> None:
    raw = real("mnist")
    assert raw.is_test is not None
    assert raw.targets[~raw.is_test].bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert raw.targets[raw.is_test].bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert training_mean(raw) == pytest.approx(0.1307, abs=5e-5)
    assert all(verdict.is_right for verdict in verify("mnist", real_data("mnist").parent))


def test_mnist_by_writer() -> None:
    raw = real("mnist_by_writer")
    assert raw.clients is not None
    counts = raw.clients.bincount()
    assert len(raw) == 60_000
    assert len(raw.client_names) == 539
    assert (int(counts.min()), int(counts.max())) == (19, 131)
    assert raw.targets.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


@pytest.mark.parametrize(
    ("name", "n_train", "n_test", "n_features", "n_positive"),
    [
        ("a1a", 1_605, 30_956, 123, 395),
        ("a9a", 32_561, 16_281, 123, 7_841),
        ("w8a", 49_749, 14_951, 300, 1_479),
        ("phishing", 11_055, 0, 68, 6_157),
        ("mushrooms", 8_124, 0, 112, 4_208),
    ],
)
def test_libsvm(name: str, n_train: int, n_test: int, n_features: int, n_positive: int) -> None:
    raw = real(name, "libsvm")
    is_test = torch.zeros(len(raw), dtype=torch.bool) if raw.is_test is None else raw.is_test
    assert (int((~is_test).sum()), int(is_test.sum()), raw.inputs.shape[1]) == (n_train, n_test, n_features)
    assert raw.n_classes == 2
    assert int(raw.targets[~is_test].sum()) == n_positive


@pytest.mark.slow
def test_shakespeare() -> None:
    raw = real("shakespeare")
    assert raw.inputs.shape[1] == 80
    assert raw.n_classes == 80
    assert len(raw.client_names) > 1000
    assert len(raw) > 4_000_000
    assert raw.clients is not None
    assert int((raw.clients.bincount() > 10_000).sum()) > 20
    window, after = decode(raw.inputs[0].numpy()), decode(raw.inputs[1].numpy())
    assert window[1:] == after[:-1]  # one role's windows are one character apart
    assert decode(raw.targets[:1].numpy()) == after[-1]

"""Splits: the parts of a client are its examples, once each, with its own label mix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dqnfed.data import DataError, RawData, load, partition, split


def made_up(n: int, n_classes: int, n_owners: int, seed: int = 0) -> RawData:
    rng = np.random.default_rng(seed)
    return RawData(
        "made up",
        torch.zeros(n, 1),
        torch.from_numpy(rng.integers(0, n_classes, n)),
        n_classes,
        clients=torch.from_numpy(rng.integers(0, n_owners, n)),
        is_test=torch.from_numpy(rng.random(n) < 0.15),
    )


@pytest.mark.parametrize(("test", "validation"), [(0.2, 0.0), (0.1, 0.1), (0.5, 0.25), (0.0, 0.0)])
@pytest.mark.parametrize("seed", range(3))
def test_parts_are_disjoint_complete_and_of_the_right_size(test: float, validation: float, seed: int) -> None:
    raw = made_up(2000, 7, 12, seed)
    before = partition(raw, "natural", None, seed)
    after = split(raw, before, test=test, validation=validation)
    for whole, parts in zip(before, after, strict=True):
        assert np.array_equal(np.sort(parts.all), np.sort(whole.all))
        n = len(whole.all)
        assert abs(len(parts.test) - n * test) <= 0.5
        assert abs(len(parts.validation) - n * validation) <= 1.0  # rounded from what the test part left


@pytest.mark.parametrize("seed", range(5))
def test_every_part_has_the_clients_label_mix(seed: int) -> None:
    """Systematic sampling represents each class within one example of its exact share."""
    raw = made_up(3000, 5, 6, seed)
    labels = raw.labels()
    for parts in split(raw, partition(raw, "natural", None, seed), test=0.2, validation=0.1):
        for part in (parts.test, parts.validation):
            for c in range(5):
                exact = (labels[parts.all] == c).sum() * len(part) / len(parts.all)
                assert (
                    abs((labels[part] == c).sum() - exact) <= 1.0 + 0.125
                )  # validation inherits the test part's rounding


def test_regression_targets_keep_their_spread() -> None:
    rng = np.random.default_rng(0)
    values = torch.from_numpy(rng.normal(size=1000).astype(np.float32))
    raw = RawData("made up", torch.zeros(1000, 1), values, 0)
    for parts in split(raw, partition(raw, "iid", 4, 0), test=0.2):
        everything, tested = np.sort(values[parts.all].numpy()), np.sort(values[parts.test].numpy())
        ranks = np.searchsorted(everything, tested)
        assert np.abs(ranks - (np.arange(len(tested)) + 0.5) * 5).max() <= 5  # one from each run of five


def test_digits_eighty_twenty() -> None:
    raw = load("digits")
    sizes = split(raw, partition(raw, "shards", 20, 0), test=0.2).sizes
    assert sizes.sum() == 1797
    assert set(sizes[:, 2]) == {18}
    assert set(sizes[:, 1]) == {0}


@pytest.mark.parametrize("n", [2, 3, 4, 12])
def test_small_clients_can_always_train_and_test(n: int) -> None:
    raw = RawData("made up", torch.zeros(n, 1), torch.zeros(n, dtype=torch.int64), 1)
    parts = split(raw, partition(raw, "iid", 1, 0), test=0.05, validation=0.05).clients[0]
    assert len(parts.test) == 1
    assert len(parts.validation) == (n > 2)
    assert len(parts.train) >= 1


def test_text_is_split_in_order_with_a_gap() -> None:
    """No window of the test part overlaps the training text: windows of 80 characters need 79 between."""
    n, gap = 1000, 79
    raw = RawData("made up", torch.zeros(n, 1), torch.zeros(n, dtype=torch.int64), 1)
    parts = split(raw, partition(raw, "iid", 1, 0), test=0.2, validation=0.1, by="order", gap=gap).clients[0]
    assert parts.train.max() + gap < parts.validation.min()
    assert parts.validation.max() + gap < parts.test.min()
    assert parts.train.tolist() == list(range(700))
    assert parts.test.tolist() == list(range(800 + gap, 1000))


def test_the_official_split_is_kept() -> None:
    raw = made_up(2000, 5, 6)
    assert raw.is_test is not None
    official = raw.is_test.numpy()
    for parts in split(raw, partition(raw, "natural", None, 0), by="official", validation=0.1):
        assert official[parts.test].all()
        assert not official[parts.train].any()
        assert not official[parts.validation].any()
        assert abs(len(parts.validation) - 0.1 * (len(parts.train) + len(parts.validation))) <= 0.5


def test_impossible_splits_get_an_answer() -> None:
    raw = made_up(100, 2, 2)
    manifest = partition(raw, "iid", 4, 0)
    with pytest.raises(DataError, match="leave something to train on"):
        split(raw, manifest, test=0.6, validation=0.4)
    with pytest.raises(DataError, match="is unknown; choose one of label, order, official"):
        split(raw, manifest, by="lable")  # type: ignore[arg-type]
    other = made_up(100, 2, 2, seed=1)
    with pytest.raises(DataError, match="Use the same files"):
        split(other, manifest)
    plain = RawData("plain", raw.inputs, raw.targets, 2)
    with pytest.raises(DataError, match="has no official test set"):
        split(plain, partition(plain, "iid", 4, 0), by="official")

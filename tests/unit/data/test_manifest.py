"""Manifests survive the disk, know their own hash, and refuse data they were not made for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dqnfed.data import DataError, Manifest, load, partition, split


@pytest.fixture
def manifest() -> Manifest:
    raw = load("digits")
    return split(raw, partition(raw, "shards", 20, 3), test=0.2, validation=0.1)


def test_saved_and_loaded_is_the_same(manifest: Manifest, tmp_path: Path) -> None:
    manifest.save(tmp_path / "m.safetensors")
    again = Manifest.load(tmp_path / "m.safetensors")
    assert again.hash() == manifest.hash()
    assert (again.dataset, again.scheme, again.seed, again.names) == ("digits", "shards", 3, manifest.names)
    assert again.settings == manifest.settings
    assert np.array_equal(again.sizes, manifest.sizes)
    for mine, theirs in zip(manifest, again, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    again.check(load("digits"))


def test_the_hash_sees_every_change(manifest: Manifest) -> None:
    raw = load("digits")
    others = [
        split(raw, partition(raw, "shards", 20, 4), test=0.2, validation=0.1),
        split(raw, partition(raw, "shards", 20, 3), test=0.1, validation=0.2),
        manifest.only(np.arange(19)),
        manifest.only(np.arange(20)[::-1]),
    ]
    assert len({m.hash() for m in [manifest, *others]}) == 5


def test_a_changed_file_is_refused(manifest: Manifest, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    manifest.save(path)
    with safe_open(path, framework="pt") as file:
        metadata, indices, lengths = file.metadata(), file.get_tensor("indices"), file.get_tensor("lengths")
    indices[0], indices[1] = indices[1].clone(), indices[0].clone()
    save_file({"indices": indices, "lengths": lengths}, path, metadata=metadata)
    with pytest.raises(DataError, match="does not match its own hash"):
        Manifest.load(path)
    path.write_bytes(b"no manifest")
    with pytest.raises(DataError, match="make it again with `dqnfed partition`"):
        Manifest.load(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(DataError, match="is not a partition manifest"):
        Manifest.load(path)


def test_label_counts_add_up(manifest: Manifest) -> None:
    raw = load("digits")
    counts = manifest.label_counts(raw)
    assert np.array_equal(counts.sum(axis=0), np.bincount(raw.labels()))
    assert np.array_equal(counts.sum(axis=1), manifest.sizes.sum(axis=1))

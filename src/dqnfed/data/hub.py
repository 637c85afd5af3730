"""The same datasets from the Hugging Face hub, through the optional extra `hub`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dqnfed.data.cache import write_cached
from dqnfed.data.catalogue import DATASETS, HubSource, dataset_called
from dqnfed.data.load import from_hub_path
from dqnfed.data.raw import DataError, RawData


def fetch_from_hub(name: str, data_dir: Path | None = None) -> Path:
    """Return the file of a dataset taken from the hub, in `data_dir` or else in the cache.

    `load` uses it where the official files are absent.
    """
    dataset = dataset_called(name)
    if dataset.hub is None:
        offered = ", ".join(known.name for known in DATASETS.values() if known.hub is not None)
        raise DataError(
            f"{name} is not taken from the hub; these are: {offered}. Leave --from out to use the official source."
        )
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError("the hub needs the package datasets; install it with `pip install dqnfed[hub]`.") from error
    raw = from_hub(dataset.name, dataset.hub, load_dataset(dataset.hub.repository), n_channels=len(dataset.mean))
    path = from_hub_path(dataset, data_dir)
    write_cached(raw, path, "hub")
    return path


def from_hub(
    name: str, source: HubSource, splits: Mapping[str, Iterable[Mapping[str, Any]]], *, n_channels: int
) -> RawData:
    """Return the dataset of the hub's train split (and test split, where `source` names one) as the readers would
    give it.
    """
    rows: list[tuple[np.ndarray, int, str | None, bool]] = []
    for split in ("train", *([source.test_split] if source.test_split else [])):
        if split not in splits:
            raise DataError(f"{source.repository} has no split {split!r}; it has {', '.join(splits)}.")
        for row in splits[split]:
            owner = None if source.client is None else str(row[source.client])
            image = as_planes(row[source.inputs], n_channels)
            rows.append((image, int(row[source.targets]), owner, split == source.test_split))
    inputs, targets, owners, tests = zip(*rows, strict=True)
    numbers = {owner: i for i, owner in enumerate(dict.fromkeys(owners))} if source.client is not None else {}
    return RawData(
        name=name,
        inputs=torch.from_numpy(np.stack(inputs)),
        targets=torch.tensor(targets, dtype=torch.int64),
        n_classes=1 + max(targets),
        clients=torch.tensor([numbers[owner] for owner in owners]) if numbers else None,
        client_names=tuple(str(owner) for owner in numbers),
        is_test=torch.tensor(tests) if source.test_split else None,
    )


def as_planes(image: Any, n_channels: int) -> np.ndarray:
    """Return an image (Pillow's or an array) as bytes [channels, height, width]; grey ones among colour are
    repeated.
    """
    pixels = np.asarray(image, np.uint8)
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    if len(planes) == 1:
        planes = np.repeat(planes, n_channels, axis=0)
    if len(planes) != n_channels:
        raise DataError(f"an image with {len(planes)} channels was found where {n_channels} are expected.")
    return np.ascontiguousarray(planes)

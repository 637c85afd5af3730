"""One way to any dataset: by name."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dqnfed.data.cache import cache_dir, default_data_dir, read_cached, stamp, write_cached
from dqnfed.data.catalogue import Dataset, dataset_called
from dqnfed.data.raw import DataError, RawData
from dqnfed.data.readers.files import MissingFiles


def load(name: str, data_dir: Path | None = None) -> RawData:
    """Return the dataset called `name` from the official files under `data_dir/FOLDER`, or from the cache of them.

    `data_dir` is by default $DQNFED_DATA, else `data` here. A missing dataset raises `DataError` with the
    way out.
    """
    dataset = dataset_called(name)
    folder = folder_of(dataset, data_dir)
    if not dataset.folder:
        return dataset.read(folder)
    cached = cache_path(dataset, folder)
    if not folder.is_dir():
        for path in (from_hub_path(dataset, folder.parent), from_hub_path(dataset)):
            if (raw := read_cached(path, "hub")) is not None:
                return raw
        raise DataError(missing(dataset, folder))
    stamped = stamp(dataset, folder)
    if (raw := read_cached(cached, stamped)) is not None:
        return raw
    try:
        raw = dataset.read(folder)
    except MissingFiles as error:
        raise DataError(f"{error} {missing(dataset, folder)}") from error
    write_cached(raw, cached, stamped)
    return raw


def folder_of(dataset: Dataset, data_dir: Path | None) -> Path:
    return (data_dir if data_dir is not None else default_data_dir()) / dataset.folder


def cache_path(dataset: Dataset, folder: Path) -> Path:
    where = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return cache_dir() / f"{dataset.name}-{where}.safetensors"


def from_hub_path(dataset: Dataset, data_dir: Path | None = None) -> Path:
    """Return the file of a dataset taken from the hub: in the data folder where one is named, else in the cache."""
    return (data_dir or cache_dir()) / f"{dataset.name}-hub.safetensors"


def missing(dataset: Dataset, folder: Path) -> str:
    """Return where to put the dataset and how to get it."""
    way = dataset.by_hand or f"fetch it with `dqnfed data fetch {dataset.name}`"
    return (
        f"{dataset.title} is not complete at {folder}: {way}. Another place can be named with --data-dir or "
        "DQNFED_DATA, "
        f"the folder that holds {dataset.folder}/."
    )

"""From the data block of a config to a federation and what the model must know about it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dqnfed.core.federation import Federation, tensor_checksum, untested_line
from dqnfed.data import Manifest, RawData, federation_of, load, partition, split
from dqnfed.data.cache import default_data_dir
from dqnfed.data.catalogue import dataset_called
from dqnfed.data.features import dataset_preprocessing, dataset_table
from dqnfed.data.label_noise import LabelNoise, Truth, with_label_noise
from dqnfed.data.raw import DataError
from dqnfed.data.readers.images import read_clothing1m
from dqnfed.data.row_groups import row_groups
from dqnfed.data.table import FILE_COLUMN
from dqnfed.data.transform import only_classes, padded, thinned
from dqnfed.experiments.config import ConfigError, DataBlock, NoiseBlock
from dqnfed.experiments.own_data import Columns, OwnData, OwnFederation, check_score, own_federation
from dqnfed.experiments.scores import CLASSIFICATION_SCORES, REGRESSION_SCORES

logger = logging.getLogger("dqnfed")


class DataSource(NamedTuple):
    """The clients' data, and what follows from them for the model and the score."""

    federation: Federation
    input_shape: tuple[int, ...]
    n_outputs: int
    settings: dict[str, Any]  # of the model: how bytes become floats
    loss: str
    score: Callable[[Tensor, Tensor, Tensor], Tensor]
    score_name: str
    own: OwnFederation | None = None  # where the data are a table, the user's or the dataset's
    truth: Truth | None = None  # where labels were made wrong on purpose


def data_source(data: DataBlock, seed: int, score: str | None = None) -> DataSource:
    """Return the federation that the data block describes; `score` is None for the usual one of the task."""
    own = None
    if data.file is not None:
        own = own_federation(own_data(data, seed))
        federation = own.federation
    else:
        raw, manifest = dealt(data, seed)
        federation = federation_of(raw, manifest)
        if raw.columns:  # kept with the run, so that `dqnfed predict` reads new rows in the same way
            columns = Columns(dataset_preprocessing(raw, manifest), raw.class_names)
            values = {"inputs": tensor_checksum(raw.inputs), "targets": tensor_checksum(raw.targets)}
            titles = {column.name: dict(zip(column.codes, column.titles, strict=False)) for column in raw.columns}
            found = row_groups(dataset_table(raw), data.breakdown)
            groups = tuple(column.titled(titles[column.column]).tested(manifest) for column in found)
            own = OwnFederation(federation, columns, (), {**values, "who holds what": manifest.hash()}, groups)
        if federation.untested:
            logger.warning("%s", untested_line(federation.untested))
    chosen, function = score_called(score, is_regression=federation.n_classes is None)
    if own is not None:
        check_score(chosen, own)
    truth = None
    if data.noise is not None:
        federation, truth = with_label_noise(federation, label_noise(data.noise), noise_seed(data, seed))
    return DataSource(
        federation=federation,
        input_shape=tuple(federation.train.inputs.shape[1:]),
        n_outputs=federation.n_classes or 1,
        settings={} if own is not None else normalisation(data.name, federation.train.inputs),
        loss="cross-entropy" if federation.n_classes else "squared-error",
        score=function,
        score_name=chosen,
        own=own,
        truth=truth,
    )


def label_noise(block: NoiseBlock) -> LabelNoise:
    """Return the noise that a config's block describes."""
    return LabelNoise(**block.model_dump(exclude={"seed"}))


def noise_seed(data: DataBlock, seed: int) -> int:
    """Return the seed of the wrong labels: its own, else the partition's, else the run's."""
    own = None if data.noise is None else data.noise.seed
    return next(number for number in (own, data.seed, seed) if number is not None)


def dealt(data: DataBlock, seed: int) -> tuple[RawData, Manifest]:
    """Return the dataset and who holds what: dealt by the block's rules, or as its saved manifest says."""
    raw = prepared(data)
    if data.manifest is not None:
        manifest = Manifest.load(Path(data.manifest))
        manifest.check(raw)
        return raw, manifest
    manifest = partition(
        raw,
        data.partition,
        data.clients,
        seed if data.seed is None else data.seed,
        pool=data.pool,
        shards_per_client=data.shards_per_client,
        beta=data.beta,
        capped=data.capped,
        presence=data.presence,
        classes_per_client=data.classes_per_client,
        min_examples=data.min_examples,
        max_examples=data.max_examples,
    )
    return raw, split(raw, manifest, test=data.test, validation=data.validation, by=data.split, gap=data.gap)


def prepared(data: DataBlock) -> RawData:
    """Return the named dataset with the block's choice of classes, frame and size."""
    folder = Path(data.dir) if data.dir else None
    if data.name == "clothing1m" and (data.per_class is not None or data.side is not None):
        # Too large to be cached whole, so the preset's selection is read each time.
        where = (folder or default_data_dir()) / dataset_called(data.name).folder
        raw = read_clothing1m(where, per_class=data.per_class, side=data.side or 224)
    else:
        raw = load(data.name, folder)
    if data.keep_classes:
        raw = only_classes(raw, data.keep_classes)
    if data.limit is not None:
        raw = thinned(raw, data.limit)
    return padded(raw, data.pad) if data.pad else raw


def own_data(data: DataBlock, seed: int) -> OwnData:
    """Return the description of the user's table in a data block."""
    client = data.client
    if client is None and data.file is not None and Path(data.file).is_dir():
        client = FILE_COLUMN
    if data.file is None or client is None or data.label is None:
        raise ConfigError(
            "your own data need data.file, data.client (the column that says who holds a row; left out for a folder "
            "with one file for each client) and data.label (the column to be learnt); on the command line --data, "
            "--client and --label."
        )
    return OwnData(
        path=Path(data.file),
        client=client,
        label=data.label,
        group=data.group,
        drop=data.drop,
        task=data.task,
        test=data.test,
        validation=data.validation,
        seed=seed if data.seed is None else data.seed,
        extremes=data.extremes,
        breakdown=data.breakdown,
    )


def normalisation(name: str, inputs: Tensor) -> dict[str, Any]:
    """Return the mean and std settings for a model on byte images; nothing for features and characters."""
    if inputs.dtype != torch.uint8 or inputs.ndim != 4:
        return {}
    dataset = dataset_called(name)
    n_channels = inputs.shape[1]
    return {
        "mean": list(dataset.mean) or [0.5] * n_channels,
        "std": list(dataset.std) or [0.5] * n_channels,
    }


def score_called(name: str | None, *, is_regression: bool) -> tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return the score's name and function; accuracy by default, minus the squared error for regression."""
    scores = REGRESSION_SCORES if is_regression else CLASSIFICATION_SCORES
    chosen = name or ("loss" if is_regression else "accuracy")
    if chosen not in scores:
        raise DataError(
            f"score {chosen!r} does not fit {'regression' if is_regression else 'classification'}; choose one of "
            f"{', '.join(scores)}."
        )
    return chosen, scores[chosen]

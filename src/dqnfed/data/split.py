"""Train, validation and test within every client, with the client's own label mix in each part."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from dqnfed.data.manifest import ClientIndices, Indices, Manifest
from dqnfed.data.partition import generator
from dqnfed.data.raw import DataError, RawData

SplitBy = Literal["label", "order", "official"]


def split(
    raw: RawData,
    manifest: Manifest,
    *,
    test: float = 0.2,
    validation: float = 0.0,
    by: SplitBy = "label",
    gap: int = 0,
) -> Manifest:
    """Return the manifest with every client's examples shared out over train, validation and test.

    `label`: random, with the same label mix in every part (for regression: the same spread of targets). `order`: the
    first examples train, the last test, `gap` examples between parts left out (overlapping text windows).
    `official`: the dataset's own test set, and its validation set where it has one. A client with two examples or
    more always has one to test on.
    """
    if by not in get_args(SplitBy):
        raise DataError(f"split by {by!r} is unknown; choose one of {', '.join(get_args(SplitBy))}.")
    if min(test, validation) < 0 or test + validation >= 1:
        raise DataError(
            f"test and validation must be shares that leave something to train on, got {test} and {validation}."
        )
    manifest.check(raw)
    rng = generator(manifest.seed, "split", raw.name)
    held = [np.sort(client.all) for client in manifest.clients]
    if by == "label":
        clients = split_by_label(raw.labels(), held, test=test, validation=validation, rng=rng)
    elif by == "order":
        clients = [split_by_order(mine, test=test, validation=validation, gap=gap) for mine in held]
    else:
        clients = split_officially(raw, held, validation=validation, rng=rng)
    for name, client in zip(manifest.names, clients, strict=True):
        if len(client.train) == 0:
            raise DataError(
                f"{name} has nothing to train on after the split; raise min_examples or lower gap, test or validation."
            )
    settings = {**manifest.settings, "test": test, "validation": validation, "split_by": by, "gap": gap}
    return replace(manifest, clients=tuple(clients), settings=settings)


def split_by_label(
    labels: np.ndarray, held: list[Indices], *, test: float, validation: float, rng: np.random.Generator
) -> list[ClientIndices]:
    """Return parts with each client's label mix: systematic sampling along its examples sorted by label, shuffled
    within labels.

    Every class is then represented within one example of its exact share.
    """
    in_test = systematic(labels, held, test, rng)
    rest = [mine[~hit] for mine, hit in zip(held, in_test, strict=True)]
    in_validation = systematic(labels, rest, validation / (1 - test), rng)
    return [
        ClientIndices(left[~check], left[check], mine[hit])
        for mine, hit, left, check in zip(held, in_test, rest, in_validation, strict=True)
    ]


def systematic(labels: np.ndarray, held: list[Indices], share: float, rng: np.random.Generator) -> list[np.ndarray]:
    """Return, per client, which of its examples are taken: evenly spaced along its label-sorted list from a random
    start.
    """
    sizes = np.array([len(mine) for mine in held])
    flat = np.concatenate([np.empty(0, np.int64), *held])
    owner = np.repeat(np.arange(len(held)), sizes)
    order = np.lexsort((rng.random(len(flat)), labels[flat], owner))
    position = np.arange(len(flat)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rate = np.repeat(n_taken(sizes, share) / np.maximum(sizes, 1), sizes)
    start = np.repeat(rng.random(len(held)), sizes)
    tiny = 1e-9  # k / n * n may fall just below k; the last step of a client must still count
    taken = np.empty(len(flat), dtype=bool)
    taken[order] = np.floor((position + 1) * rate + start + tiny) > np.floor(position * rate + start + tiny)
    return np.split(taken, np.cumsum(sizes)[:-1]) if len(held) else []


def n_taken(sizes: np.ndarray, share: float) -> np.ndarray:
    """Return the size of a part: the rounded share, but at least one and never everything, where a client has two
    examples.
    """
    wanted = np.floor(sizes * share + 0.5).astype(np.int64)
    return np.clip(wanted, 1, np.maximum(sizes - 1, 0)) if share > 0 else np.zeros_like(sizes)


def split_by_order(mine: Indices, *, test: float, validation: float, gap: int) -> ClientIndices:
    """Return the first examples for training and the last for testing, with `gap` examples dropped between two
    parts.
    """
    n = len(mine)
    n_test, n_validation = (int(n_taken(np.array([n]), share)[0]) for share in (test, validation))
    end_train = n - n_test - n_validation
    last_before_test = n - n_test
    train, check, final = mine[:end_train], mine[end_train:last_before_test], mine[last_before_test:]
    if n_validation:
        check = check[gap:]
    if n_test:
        final = final[gap:]
    return ClientIndices(train, check, final)


def split_officially(
    raw: RawData, held: list[Indices], *, validation: float, rng: np.random.Generator
) -> list[ClientIndices]:
    """Return the authors' own split; where they gave no validation set, `validation` of the training examples become
    one.
    """
    if raw.is_test is None:
        raise DataError(f"{raw.name} has no official test set; split by label instead.")
    is_test = raw.is_test.numpy()
    final = [mine[is_test[mine]] for mine in held]
    rest = [mine[~is_test[mine]] for mine in held]
    if raw.is_validation is not None:
        is_validation = raw.is_validation.numpy()
        return [
            ClientIndices(left[~is_validation[left]], left[is_validation[left]], last)
            for left, last in zip(rest, final, strict=True)
        ]
    picked = systematic(raw.labels(), rest, validation, rng)
    return [ClientIndices(left[~hit], left[hit], last) for left, hit, last in zip(rest, picked, final, strict=True)]

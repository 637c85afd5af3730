"""LEAF's JSON files: {"users": [...], "num_samples": [...], "user_data": {user: {"x": [...], "y": [...]}}}."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dqnfed.data.raw import DataError, RawData
from dqnfed.data.readers.files import MissingFiles

FEMNIST_SIDE = 28
FEMNIST_CLASSES = 62


def leaf_files(folder: Path) -> list[tuple[Path, bool | None]]:
    """Return LEAF's files under `folder`, each with whether it is a test file (None: not split).

    Takes `train/` and `test/`, else `all_data/`, else `*.json`, at the top or under LEAF's own `data/`.
    """
    for root in (folder, folder / "data"):
        train, test = sorted(root.glob("train/*.json")), sorted(root.glob("test/*.json"))
        if train and test:
            return [*((path, False) for path in train), *((path, True) for path in test)]
        if whole := sorted(root.glob("all_data/*.json")) or sorted(root.glob("*.json")):
            return [(path, None) for path in whole]
    return []


def leaf_users(path: Path) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield (user, x, y) for every user of one file, in the order of its list of users."""
    try:
        with path.open(encoding="utf-8") as file:
            content = json.load(file)
        users, counts, data = content["users"], content["num_samples"], content["user_data"]
        if len(users) != len(counts):
            raise DataError(f"{path} lists {len(users)} users but {len(counts)} num_samples.")
        absent = [user for user in users if user not in data]
        if absent:
            raise DataError(f"{path} lists user {absent[0]!r} but holds no data of theirs.")
        held = [(user, list(data[user]["x"]), list(data[user]["y"])) for user in users]
    except DataError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{path} is not a whole LEAF file with users, num_samples and user_data ({error!r})."
        ) from error
    for (user, x, y), count in zip(held, counts, strict=True):
        if not len(x) == len(y) == count:
            raise DataError(f"{path}: user {user!r} should have {count} samples, but has {len(x)} x and {len(y)} y.")
        yield user, x, y


def read_femnist(folder: Path) -> RawData:
    """Return FEMNIST (Caldas et al., 2018) by writer: white paper is 255, ink is 0, the opposite of MNIST.

    Labels: 0-9 digits, 10-35 capitals, 36-61 small letters. LEAF's floats in 0..1 become bytes again (they came from
    bytes).
    """
    files = leaf_files(folder)
    if not files:
        raise MissingFiles(
            f"{folder} holds none of LEAF's JSON files (train/*.json and test/*.json, or all_data/*.json)."
        )
    names: dict[str, int] = {}
    images, labels, owners, tests = list[np.ndarray](), list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for path, is_test in files:
        for user, x, y in leaf_users(path):
            if not x:
                continue
            try:
                pixels, numbers = np.asarray(x, np.float32), np.asarray(y, np.int64)
            except (ValueError, TypeError, OverflowError) as error:
                raise DataError(f"{path}: x and y of {user!r} must be numbers ({error}).") from error
            if pixels.shape != (len(y), FEMNIST_SIDE**2) or not (pixels.min() >= 0 and pixels.max() <= 1):
                raise DataError(f"{path}: images of {user!r} must be {FEMNIST_SIDE**2} numbers in 0..1 each.")
            if numbers.min() < 0 or numbers.max() >= FEMNIST_CLASSES:
                raise DataError(f"{path}: labels of {user!r} must be 0..{FEMNIST_CLASSES - 1}, found {numbers.max()}.")
            images.append(np.rint(pixels * 255).astype(np.uint8).reshape(-1, 1, FEMNIST_SIDE, FEMNIST_SIDE))
            labels.append(numbers)
            owners.append(np.full(len(y), names.setdefault(user, len(names)), np.int64))
            tests.append(np.full(len(y), bool(is_test)))
    if not images:
        raise DataError(f"the LEAF files in {folder} hold no images.")
    return RawData(
        name="femnist",
        inputs=torch.from_numpy(np.concatenate(images)),
        targets=torch.from_numpy(np.concatenate(labels)),
        n_classes=FEMNIST_CLASSES,
        clients=torch.from_numpy(np.concatenate(owners)),
        client_names=tuple(names),
        is_test=None if files[0][1] is None else torch.from_numpy(np.concatenate(tests)),
    )

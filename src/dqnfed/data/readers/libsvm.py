"""LIBSVM text files: `label index:value index:value ...`, one example a line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from dqnfed.data.raw import DataError, RawData
from dqnfed.data.readers.files import find


def read_libsvm(folder: Path, name: str) -> RawData:
    """Return the dataset `name` from the file of that name, and its test set from `name.t` where there is one.

    Features are dense float32; labels become 0, 1, ... in the order of their values (-1 is 0, +1 is 1).
    """
    train_file = find(folder, name, f"{name}.txt")
    test_file = folder / f"{name}.t"
    files = [train_file, test_file] if test_file.exists() else [train_file]
    parsed = [parsed_file(path) for path in files]
    width = max(inputs.shape[1] for inputs, _ in parsed)
    inputs = np.zeros((sum(len(labels) for _, labels in parsed), width), np.float32)
    start = 0
    for part, _ in parsed:
        inputs[start : start + len(part), : part.shape[1]] = part
        start += len(part)
    values, targets = np.unique(np.concatenate([labels for _, labels in parsed]), return_inverse=True)
    is_test = torch.arange(len(targets)) >= len(parsed[0][1]) if len(files) == 2 else None
    return RawData(
        name=name,
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets.astype(np.int64)),
        n_classes=len(values),
        is_test=is_test,
    )


def parsed_file(path: Path, dtype: type[np.floating] = np.float32) -> tuple[np.ndarray, np.ndarray]:
    """Return the dense features and the labels of one file; a gap of 1e-12 needs them in float64."""
    from sklearn.datasets import load_svmlight_file

    try:
        features, labels = load_svmlight_file(str(path), dtype=dtype, zero_based=False)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{path} is not LIBSVM text, 'label index:value ...' with indices from 1 ({error}).") from error
    if len(labels) == 0:
        raise DataError(f"{path} holds no examples.")
    return features.toarray(), labels

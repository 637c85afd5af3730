"""The 1,797 handwritten digits that come with scikit-learn: no download is needed."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from dqnfed.data.raw import RawData


def read_digits() -> RawData:
    """Return the 8x8 digits (Alpaydin & Kaynak, UCI 1998) as 64 features in [0, 1]."""
    table = digits_table()
    return RawData(
        name="digits",
        inputs=torch.from_numpy((table[:, :-1] / 16.0).astype(np.float32)),
        targets=torch.from_numpy(table[:, -1].astype(np.int64)),
        n_classes=10,
    )


def digits_table() -> np.ndarray:
    """Return [1797, 65]: pixels 0..16 and the digit, from scikit-learn's file: importing the library would take a
    second.
    """
    spec = find_spec("sklearn")
    if spec is not None and spec.origin is not None:
        path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            with gzip.open(path, "rt") as file:
                return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    inputs, targets = load_digits(return_X_y=True)
    return np.column_stack([inputs, targets])

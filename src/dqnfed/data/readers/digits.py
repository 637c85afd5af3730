"""The 1,797 handwritten digits that come with scikit-learn: the only dataset that needs no download."""

from __future__ import annotations

import numpy as np
import torch

from dqnfed.data.raw import RawData


def read_digits() -> RawData:
    """Return the 8x8 digits (Alpaydin & Kaynak, UCI 1998) as 64 features in [0, 1]."""
    from sklearn.datasets import load_digits

    inputs, targets = load_digits(return_X_y=True)
    return RawData(
        name="digits",
        inputs=torch.from_numpy((inputs / 16.0).astype(np.float32)),
        targets=torch.from_numpy(targets.astype(np.int64)),
        n_classes=10,
    )

"""What a preset may ask of a dataset before it is dealt out: some classes only, and a frame of zeros around images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from dqnfed.data.raw import DataError, RawData


def only_classes(raw: RawData, kept: Sequence[int]) -> RawData:
    """Return the examples of these classes, renumbered 0, 1, ... in the order given."""
    if raw.n_classes == 0:
        raise DataError(f"{raw.name} is a regression dataset; it has no classes to choose from.")
    wrong = [c for c in kept if not 0 <= c < raw.n_classes]
    if not kept or wrong or len(set(kept)) != len(kept):
        raise DataError(f"classes must be different numbers in 0..{raw.n_classes - 1}, got {list(kept)}.")
    number = np.full(raw.n_classes, -1)
    number[list(kept)] = np.arange(len(kept))
    labels = raw.labels()
    chosen = raw.take(np.flatnonzero(number[labels] >= 0))
    if len(chosen) == 0:
        raise DataError(f"{raw.name} holds no example of the classes {list(kept)}.")
    names = tuple(raw.class_names[c] for c in kept) if raw.class_names else ()
    targets = torch.from_numpy(number)[chosen.targets]
    return replace(chosen, targets=targets, n_classes=len(kept), class_names=names)


def padded(raw: RawData, pixels: int) -> RawData:
    """Return the images with `pixels` zeros on every side: 28x28 becomes 32x32 with 2."""
    if pixels < 0 or raw.inputs.ndim != 4:
        raise DataError(
            f"pad needs images and a number of pixels from 0, got inputs {list(raw.inputs.shape)} and pad {pixels}."
        )
    return replace(raw, inputs=F.pad(raw.inputs, (pixels,) * 4)) if pixels else raw


def thinned(raw: RawData, n_examples: int) -> RawData:
    """Return `n_examples` examples spread evenly over the dataset: a miniature for trying things out."""
    if n_examples < 1:
        raise DataError(f"limit must be at least 1, got {n_examples}.")
    if n_examples >= len(raw):
        return raw
    return raw.take(np.linspace(0, len(raw) - 1, n_examples).astype(np.int64))

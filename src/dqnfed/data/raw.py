"""What every reader returns: one dataset in memory, exactly as its files say, before anybody decides who holds what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


class DataError(ValueError):
    """A dataset is missing, damaged, or not what its format promises; the message says which and what to do."""


@dataclass(frozen=True)
class Column:
    """A column of a dataset that is a table: numbers, or one of the codes that the dataset's authors document."""

    name: str
    codes: tuple[str, ...] = ()  # "" stands for a missing value; no codes: numbers
    titles: tuple[
        str, ...
    ] = ()  # what the codes mean, in their order, for people; none: the codes speak for themselves


@dataclass(frozen=True)
class RawData:
    """All examples of a dataset. Images and characters stay in one byte each until they reach the device."""

    name: str
    inputs: Tensor  # [N, ...] uint8 pixels [N, C, H, W], uint8 character codes [N, T], or float32 features [N, F]
    targets: Tensor  # [N] int64 classes, or float32 values for regression
    n_classes: int  # 0 means regression
    clients: Tensor | None = None  # [N] int64, natural owner of each example (writer, role, hospital)
    client_names: tuple[str, ...] = ()  # name of natural client i
    class_names: tuple[str, ...] = ()  # where the dataset's authors gave the classes names
    is_test: Tensor | None = None  # [N] bool, True where the dataset's authors put the example in their test set
    is_validation: Tensor | None = None  # [N] bool, likewise for an official validation set
    columns: tuple[Column, ...] = ()  # inputs [N, columns] are a table's own values, NaN: missing; not scaled yet

    def __post_init__(self) -> None:
        n = len(self.inputs)
        for field in ("targets", "clients", "is_test", "is_validation"):
            column = getattr(self, field)
            if column is not None and len(column) != n:
                raise DataError(f"{self.name}: {n} inputs but {len(column)} {field}; the files do not belong together.")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.inputs.shape[1:])

    def labels(self) -> np.ndarray:
        """Return the targets as a NumPy vector, the form in which partitioners read them."""
        return np.asarray(self.targets.numpy())

    def take(self, indices: np.ndarray) -> RawData:
        """Return the dataset of these examples only, in this order; natural clients keep their numbers."""
        rows = torch.from_numpy(np.asarray(indices, dtype=np.int64))

        def column(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[rows]

        return RawData(
            name=self.name,
            inputs=self.inputs[rows],
            targets=self.targets[rows],
            n_classes=self.n_classes,
            clients=column(self.clients),
            client_names=self.client_names,
            class_names=self.class_names,
            is_test=column(self.is_test),
            is_validation=column(self.is_validation),
            columns=self.columns,
        )

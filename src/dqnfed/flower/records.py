"""NamedTuples of tensors as Flower records, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from dqnfed.core.tensors import from_named_tensors, named_tensors

T = TypeVar("T", bound=tuple[Any, ...])


def encoded(record: tuple[Any, ...]) -> ArrayRecord:
    """Return the record's tensors by dotted field name, ready for a message."""
    return array_record(named_tensors(record))


def decoded(kind: type[T], arrays: ArrayRecord, device: torch.device | str = "cpu") -> T:
    """Return the record of the given kind that `encoded` took apart."""
    return from_named_tensors(kind, named_arrays(arrays, device))


def array_record(named: Mapping[str, Tensor]) -> ArrayRecord:
    """Return the tensors as arrays, by name."""
    return ArrayRecord({name: Array(t.detach().cpu().contiguous().numpy()) for name, t in named.items()})


def named_arrays(arrays: ArrayRecord, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return the arrays as tensors, by name."""
    return {name: torch.tensor(array.numpy(), device=device) for name, array in arrays.items()}


def kind_named(kinds: Sequence[type[T]], name: str) -> type[T]:
    """Return the kind of message that has this name; the name is all that a message says about its phase."""
    for kind in kinds:
        if kind.__name__ == name:
            return kind
    raise ValueError(
        f"there is no message kind '{name}' here, only {', '.join(kind.__name__ for kind in kinds)}; "
        "server and client must run the same method in the same version."
    )

"""What clients' data must be, and what is wrong with data that are not."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dqnfed.core.examples import Part

LARGEST = 1e18  # in size, of a number in the data: its square is still a float32


def check_names(n_clients: int, names: Sequence[str], groups: Sequence[str] | None) -> None:
    """Refuse a federation of nobody, and names or groups that do not fit the clients."""
    if not n_clients:
        raise ValueError("a federation needs at least one client, but the list of clients is empty.")
    for what, given in (("names", names), ("groups", groups)):
        if given is not None and len(given) != n_clients:
            raise ValueError(f"{n_clients} clients but {len(given)} {what}; every client needs its own.")
    if len(set(names)) != n_clients:
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"every client needs a name of its own: {n_clients} clients, duplicate names {twice}.")


def check_shares(shares: Mapping[Part, float]) -> None:
    """Refuse shares that cannot be held out, or that leave nothing."""
    for part, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"`{part}` must be a share in [0, 1) of each client's examples, but is {share!r}.")
    if sum(shares.values()) >= 1:
        test, validation = shares["test"], shares["validation"]
        raise ValueError(f"the shares test={test} and validation={validation} leave nothing to train on.")


def checked_pair(name: str, client: Any) -> tuple[Tensor, Tensor]:
    """Return a client's inputs and targets as tensors, or refuse values that no model can learn from."""
    pair = as_pair(f"client '{name}'", client)
    for what, values in zip(("inputs", "targets"), pair, strict=True):
        check_magnitudes(name, what, values)
    check_labels(f"client '{name}' has", pair[1])
    return pair[0], pair[1].long() if pair[1].dtype == torch.bool else pair[1]


def pair_in(who: str, dataset: Any) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a map-style dataset that gives (input, target) pairs."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2 and len(dataset):
        return dataset.tensors[0], dataset.tensors[1]
    try:
        items = [dataset[i] for i in range(len(dataset))]
        inputs = [torch.as_tensor(x) for x, _ in items]
        targets = [torch.as_tensor(y) for _, y in items]
        if items:
            return torch.stack(inputs), torch.stack(targets)
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"{who} has a {type(dataset).__name__} whose examples cannot be read as (input, target) pairs of equal "
            f"shape ({error}); make each a pair of tensors, by a transform for instance."
        ) from error
    raise ValueError(f"{who} has a dataset with no examples; every client needs at least one.")


def as_pair(who: str, given: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets as tensors of real numbers, one row an example."""
    if isinstance(given, Dataset):
        given = pair_in(who, given)
    try:
        inputs, targets = given
        pair = as_tensor(inputs), as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{who} must be a pair (inputs, targets) of arrays of numbers, but cannot be read as one ({error}); make "
            "it two NumPy arrays or tensors."
        ) from error
    for what, values in zip(("inputs", "targets"), pair, strict=True):
        if values.dim() == 0 or values.is_complex():
            raise ValueError(
                f"{who}: {what} of shape {tuple(values.shape)} and type {values.dtype}; they must be real numbers, "
                "one row an example."
            )
    return pair


def as_tensor(values: Any) -> Tensor:
    """Return the values as a tensor; an array that may not be written to is not, and shares its memory all the same."""
    if not isinstance(values, np.ndarray) or values.flags.writeable:
        return torch.as_tensor(values)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.as_tensor(values)


def check_labels(who: str, labels: Tensor) -> None:
    """Refuse class labels below 0, which losses would take for padding."""
    if labels.is_floating_point() or labels.dtype == torch.bool or not labels.numel() or int(labels.min()) >= 0:
        return
    raise ValueError(
        f"{who} the class label {int(labels.min())}, but whole-number labels are classes 0, 1, ...; turn -1 and +1 "
        'into classes with `(y > 0).long()`, or give floats for `loss="logistic"`.'
    )


def given_test(names: Sequence[str], test: Any, like: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the clients' own test examples, shaped as those they train on."""
    if not isinstance(test, list | tuple):
        raise ValueError(f"`test` must be a share in [0, 1) or a list of (inputs, targets), but is {test!r}.")
    if len(test) != len(names):
        raise ValueError(f"{len(names)} clients but test examples of {len(test)}; every client needs its own.")
    found = [checked_pair(name, client) for name, client in zip(names, test, strict=True)]
    check_shapes((names[0], *names), [like, *found])
    return found


def check_magnitudes(name: str, what: str, values: Tensor) -> None:
    """Refuse numbers that are not finite, or so large that their squares are not."""
    if not has_usual_numbers(values):
        bad = ~(values.abs() <= LARGEST)
        place = bad.nonzero()[0].tolist()
        column = f", column {', '.join(map(str, place[1:]))}" if place[1:] else ""
        raise ValueError(
            f"client '{name}' has {values[tuple(place)].item()} in its {what} (row {place[0]}{column}; "
            f"{int(bad.sum())} such values); numbers must be finite and at most {LARGEST:g} in size. Remove these "
            "rows, or fill the values in."
        )


def has_usual_numbers(values: Tensor) -> bool:
    """Return whether all numbers are finite and not too large."""
    return not values.is_floating_point() or not values.numel() or bool((values.abs() <= LARGEST).all())


def check_shapes(names: Sequence[str], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Refuse clients whose inputs and targets do not belong together, or are not shaped like the others'."""
    for name, pair in zip(names, pairs, strict=True):
        if len(pair[0]) != len(pair[1]):
            raise ValueError(
                f"client '{name}' has {len(pair[0])} inputs but {len(pair[1])} targets; they must be as many."
            )
        for what, mine, first in zip(("inputs", "targets"), pair, pairs[0], strict=True):
            if mine.shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"client '{name}' has {what} of shape {tuple(mine.shape[1:])}, client '{names[0]}' of shape "
                    f"{tuple(first.shape[1:])}; all clients must have the same."
                )


def check_given_sizes(sizes: NDArray[np.int64]) -> None:
    """Refuse numbers of examples that a client cannot have."""
    if sizes.ndim != 1 or not len(sizes):
        raise ValueError("`sizes` must hold every client's number of examples, but there are none.")
    if sizes.min() < 1:
        c = int(sizes.argmin())
        raise ValueError(f"client {c} has {sizes[c]} examples by `sizes`; every client needs at least one.")


def refuse_bad_rows(name: str, pair: tuple[Tensor, Tensor], n_examples: int, n_classes: int | None) -> None:
    """Refuse data that are not what was said about their client."""
    if len(pair[0]) != n_examples:
        raise ValueError(
            f"client '{name}' was said to have {n_examples} examples (`sizes`), but its data have {len(pair[0])}."
        )
    if n_classes is not None and not pair[1].is_floating_point() and int(pair[1].max()) >= n_classes:
        raise ValueError(f"client '{name}' has the class {int(pair[1].max())}, but `n_classes` is {n_classes}.")

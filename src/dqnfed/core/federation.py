"""Who holds which data: client data in, one client's (or one cohort's) `Task` out."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from dqnfed.core.seeds import numpy_seed_for

Part = Literal["train", "validation", "test"]
Arrays = Tensor | np.ndarray[Any, Any]
LARGEST = 1e18  # in size, of a number in the data: its square is still a float32

logger = logging.getLogger("dqnfed")


class Examples(NamedTuple):
    """The examples of all clients, one client after the other: client c has rows starts[c]:starts[c + 1]."""

    inputs: Tensor  # [T, ...]
    targets: Tensor  # [T, ...]
    starts: Tensor  # [C + 1], on the host

    @property
    def sizes(self) -> Tensor:
        return self.starts.diff()

    def rows(self, clients: Tensor) -> Tensor:
        """Return the row numbers of the given clients' examples, client after client."""
        starts, sizes = self.starts[clients], self.sizes[clients]
        ends = sizes.cumsum(0)
        return torch.arange(int(ends[-1])) + (starts - ends + sizes).repeat_interleave(sizes)

    def padded_rows(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        """Return row numbers [K, N] and a mask [K, N]; shorter clients repeat their first row under mask 0."""
        all_starts, chosen = self.starts.numpy(), clients.numpy()
        starts, ends = all_starts[chosen, None], all_starts[chosen + 1, None]
        rows = starts + np.arange((ends - starts).max())
        real = rows < ends
        return torch.from_numpy(np.where(real, rows, starts)), torch.from_numpy(real)


@dataclass(frozen=True)
class Federation:
    """The clients' training, validation and test examples, and who they are."""

    train: Examples
    test: Examples
    validation: Examples | None = None
    names: tuple[str, ...] = ()
    groups: tuple[str, ...] | None = None  # declared groups of clients, reported as a second level
    n_classes: int | None = None  # None: regression

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(str(c) for c in range(self.n_clients)))
        parts: tuple[Part, ...] = ("train", "test") if self.validation is None else ("train", "validation", "test")
        for part in parts:
            if self.examples(part).targets.device.type == "cpu":  # those on a GPU came from here
                _check_labels(f"some client has in its {part} examples", self.examples(part).targets)
            n_held = len(self.examples(part).starts) - 1
            if n_held != self.n_clients:
                raise ValueError(
                    f"{self.n_clients} clients but {part} examples of {n_held}; every client needs its own."
                )
            empty = (self.examples(part).sizes == 0).nonzero().flatten().tolist()
            if empty and part == "train":
                raise ValueError(
                    f"client '{self.names[empty[0]]}' has no {part} examples ({len(empty)} such clients); every client "
                    "needs at least one. Remove these clients, or give them data."
                )
            if len(empty) == self.n_clients:
                raise ValueError(
                    f"no client has {part} examples ({self.n_clients} clients), so there is nothing to measure; hold "
                    f"some out (`{part}=0.2`), or give the clients more data."
                )

    @cached_property
    def n_clients(self) -> int:
        return len(self.train.starts) - 1

    @cached_property
    def n_examples(self) -> Tensor:
        """Training examples of every client, [C]."""
        return self.train.sizes

    @cached_property
    def untested(self) -> tuple[str, ...]:
        """Names of the clients that are too small to be tested: they train, and have no score."""
        return tuple(self.names[c] for c in (self.test.sizes == 0).nonzero().flatten().tolist())

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the examples, by part, and of the clients' names; of data that are elsewhere there is none."""
        if not self.train.inputs.numel():
            return {}
        found = {"names of the clients": hashlib.sha256("\0".join(self.names).encode()).hexdigest()}
        for part, held in (("training", self.train), ("validation", self.validation), ("test", self.test)):
            if held is not None:
                for what, tensor in (("inputs", held.inputs), ("targets", held.targets)):
                    found[f"{part} {what}"] = tensor_checksum(tensor, held.starts)
        return found

    def examples(self, part: Part) -> Examples:
        if part == "validation":
            if self.validation is None:
                raise ValueError("this federation has no validation examples; make it with `validation=0.1` or so.")
            return self.validation
        return self.train if part == "train" else self.test

    def to(self, device: torch.device | str) -> Federation:
        """Return the federation with all examples on the device."""

        def moved(part: Examples) -> Examples:
            return Examples(part.inputs.to(device), part.targets.to(device), part.starts)

        validation = None if self.validation is None else moved(self.validation)
        return Federation(moved(self.train), moved(self.test), validation, self.names, self.groups, self.n_classes)

    def only(self, client: int) -> Federation:
        """Return the federation of this one client."""
        if not 0 <= client < self.n_clients:
            raise ValueError(f"there is no client {client}: this federation has clients 0 to {self.n_clients - 1}.")

        def held(part: Examples) -> Examples:
            start, end = int(part.starts[client]), int(part.starts[client + 1])
            return Examples(part.inputs[start:end], part.targets[start:end], torch.tensor([0, end - start]))

        validation = None if self.validation is None else held(self.validation)
        groups = None if self.groups is None else (self.groups[client],)
        names = (self.names[client],)
        return Federation(held(self.train), held(self.test), validation, names, groups, self.n_classes)

    @classmethod
    def elsewhere(
        cls,
        n_train: Sequence[int],
        n_test: Sequence[int],
        *,
        n_validation: Sequence[int] | None = None,
        names: Sequence[str] = (),
        groups: Sequence[str] = (),
    ) -> Federation:
        """Return the federation of clients whose examples are not here: their names and numbers of examples."""

        def counted(sizes: Sequence[int]) -> Examples:
            starts = torch.tensor([0, *sizes]).cumsum(0)
            total = int(starts[-1])
            return Examples(torch.zeros(total, 0), torch.zeros(1).expand(total), starts)

        validation = None if n_validation is None else counted(n_validation)
        return cls(counted(n_train), counted(n_test), validation, tuple(names), tuple(groups) or None)

    def label_counts(self) -> list[dict[int, int]] | None:
        """Return how often each client holds each class in training; None for regression."""
        if self.n_classes is None:
            return None
        counts = []
        for c in range(self.n_clients):
            start, end = int(self.train.starts[c]), int(self.train.starts[c + 1])
            labels, numbers = self.train.targets[start:end].unique(return_counts=True)
            counts.append(dict(zip(labels.tolist(), numbers.tolist(), strict=True)))
        return counts

    @classmethod
    def from_clients(
        cls,
        clients: Sequence[tuple[Arrays, Arrays] | Dataset[Any]],
        *,
        test: float | Sequence[tuple[Arrays, Arrays] | Dataset[Any]] = 0.2,
        validation: float = 0.0,
        seed: int = 0,
        names: Sequence[str] = (),
        groups: Sequence[str] | None = None,
        n_classes: int | None = None,
    ) -> Federation:
        """Return the federation of clients given as (inputs, targets) pairs, or as torch datasets of such pairs; a test
        share is held out of each.
        """
        names = tuple(names) or tuple(str(c) for c in range(len(clients)))
        _check_names(len(clients), names, groups)
        shares: dict[Part, float] = {"test": test if isinstance(test, int | float) else 0.0, "validation": validation}
        _check_shares(shares)
        pairs = [_checked_pair(name, client) for name, client in zip(names, clients, strict=True)]
        _check_shapes(names, pairs)
        parts: dict[Part, list[tuple[Tensor, Tensor]]] = {"train": [], "validation": [], "test": []}
        for c, (x, y) in enumerate(pairs):
            held_out = split_rows(len(x), y, shares, seed=seed, client=c)
            for part, rows in held_out.items():
                parts[part].append((x[rows], y[rows]))
        if not isinstance(test, int | float):
            parts["test"] = _given_test(names, test, pairs[0])
        if n_classes is None and not pairs[0][1].is_floating_point():
            n_classes = 1 + max(int(y.max()) for _, y in pairs if len(y))
        found = cls(
            _joined(parts["train"]),
            _joined(parts["test"]),
            _joined(parts["validation"]) if validation else None,
            names,
            None if groups is None else tuple(groups),
            n_classes,
        )
        if found.untested:
            logger.warning("%s", untested_line(found.untested))
        return found

    @classmethod
    def from_arrays(
        cls,
        inputs: Arrays,
        targets: Arrays,
        clients: Sequence[Any] | Arrays,
        *,
        test: float = 0.2,
        validation: float = 0.0,
        seed: int = 0,
    ) -> Federation:
        """Return the federation of examples that each name their client; clients are sorted by name."""
        inputs, targets = _as_pair("the examples", (inputs, targets))
        owner = np.asarray([str(c) for c in _listed(clients)])
        if len(owner) != len(inputs):
            raise ValueError(f"{len(inputs)} inputs but {len(owner)} client names; every example needs its client.")
        if len(targets) != len(inputs):
            raise ValueError(f"{len(inputs)} inputs but {len(targets)} targets; every example needs its target.")
        labels = sorted(set(owner.tolist()), key=lambda name: (len(name), name) if name.isdigit() else (10**9, name))
        x, y = torch.as_tensor(inputs), torch.as_tensor(targets)
        pairs = [(x[rows], y[rows]) for rows in (torch.as_tensor(np.flatnonzero(owner == name)) for name in labels)]
        return cls.from_clients(pairs, test=test, validation=validation, seed=seed, names=labels)

    @classmethod
    def from_datasets(
        cls, datasets: Iterable[Any], *, test: float = 0.2, validation: float = 0.0, seed: int = 0
    ) -> Federation:
        """Return the federation of one map-style torch dataset per client, each giving (input, target) pairs."""
        pairs = [pair_in(f"client '{c}'", dataset) for c, dataset in enumerate(datasets)]
        return cls.from_clients(pairs, test=test, validation=validation, seed=seed)


def untested_line(names: Sequence[str]) -> str:
    """Return the sentence about clients that have no examples to be tested on."""
    shown = ", ".join(f"'{name}'" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    subject = f"client {shown} is" if len(names) == 1 else f"clients {shown} are"
    return f"{subject} too small to be tested: kept for training, without a score"


def tensor_checksum(values: Tensor, *more: Tensor) -> str:
    """Return the SHA-256 of the tensors' types, shapes and bytes."""
    digest = hashlib.sha256()
    for tensor in (values, *more):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def split_rows(n: int, targets: Tensor, shares: dict[Part, float], *, seed: int, client: int) -> dict[Part, Tensor]:
    """Return disjoint row numbers for each held-out part and "train", every class shared out alike.

    Rows are ordered by class after a shuffle and dealt out along evenly spaced places, so that each part has the
    client's label mix up to rounding; every part with a positive share gets at least one row when there are two.
    """
    generator = numpy_seed_for(seed, client=client, purpose="split")
    order = generator.permutation(n)
    if not targets.is_floating_point() and targets.dim() == 1:
        order = order[np.argsort(targets.cpu().numpy()[order], kind="stable")]
    rows: dict[Part, Tensor] = {}
    left = order
    for part, share in shares.items():
        count = min(max(round(share * n), 1), len(left) - 1) if share > 0 and len(left) > 1 else 0
        places = ((np.arange(count) + 0.5) * len(left) / max(count, 1)).astype(int)
        rows[part] = torch.as_tensor(np.sort(left[places]))
        left = np.delete(left, places)
    rows["train"] = torch.as_tensor(np.sort(left))
    return rows


def _check_names(n_clients: int, names: Sequence[str], groups: Sequence[str] | None) -> None:
    """Refuse a federation of nobody, and names or groups that do not fit the clients."""
    if not n_clients:
        raise ValueError("a federation needs at least one client, but the list of clients is empty.")
    for what, given in (("names", names), ("groups", groups)):
        if given is not None and len(given) != n_clients:
            raise ValueError(f"{n_clients} clients but {len(given)} {what}; every client needs its own.")
    if len(set(names)) != n_clients:
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        raise ValueError(f"every client needs a name of its own: {n_clients} clients, duplicate names {twice}.")


def _check_shares(shares: Mapping[Part, float]) -> None:
    """Refuse shares that cannot be held out, or that leave nothing."""
    for part, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"`{part}` must be a share in [0, 1) of each client's examples, but is {share!r}.")
    if sum(shares.values()) >= 1:
        test, validation = shares["test"], shares["validation"]
        raise ValueError(f"the shares test={test} and validation={validation} leave nothing to train on.")


def _checked_pair(name: str, client: Any) -> tuple[Tensor, Tensor]:
    """Return a client's inputs and targets as tensors, or refuse values that no model can learn from."""
    pair = _as_pair(f"client '{name}'", client)
    for what, values in zip(("inputs", "targets"), pair, strict=True):
        _check_magnitudes(name, what, values)
    _check_labels(f"client '{name}' has", pair[1])
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


def _as_pair(who: str, given: Any) -> tuple[Tensor, Tensor]:
    """Return inputs and targets as tensors of real numbers, one row an example."""
    if isinstance(given, Dataset):
        given = pair_in(who, given)
    try:
        inputs, targets = given
        pair = torch.as_tensor(inputs), torch.as_tensor(targets)
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


def _check_labels(who: str, labels: Tensor) -> None:
    """Refuse class labels below 0, which losses would take for padding."""
    if labels.is_floating_point() or labels.dtype == torch.bool or not labels.numel() or int(labels.min()) >= 0:
        return
    raise ValueError(
        f"{who} the class label {int(labels.min())}, but whole-number labels are classes 0, 1, ...; turn -1 and +1 "
        'into classes with `(y > 0).long()`, or give floats for `loss="logistic"`.'
    )


def _given_test(names: Sequence[str], test: Any, like: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the clients' own test examples, shaped as those they train on."""
    if not isinstance(test, list | tuple):
        raise ValueError(f"`test` must be a share in [0, 1) or a list of (inputs, targets), but is {test!r}.")
    if len(test) != len(names):
        raise ValueError(f"{len(names)} clients but test examples of {len(test)}; every client needs its own.")
    found = [_checked_pair(name, client) for name, client in zip(names, test, strict=True)]
    _check_shapes((names[0], *names), [like, *found])
    return found


def _check_magnitudes(name: str, what: str, values: Tensor) -> None:
    """Refuse numbers that are not finite, or so large that their squares are not."""
    if not values.is_floating_point() or not values.numel():
        return
    bad = ~(values.abs() <= LARGEST)
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        column = f", column {', '.join(map(str, place[1:]))}" if place[1:] else ""
        raise ValueError(
            f"client '{name}' has {values[tuple(place)].item()} in its {what} (row {place[0]}{column}; "
            f"{int(bad.sum())} such values); numbers must be finite and at most {LARGEST:g} in size. Remove these "
            "rows, or fill the values in."
        )


def _check_shapes(names: Sequence[str], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
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


def _joined(pairs: Sequence[tuple[Tensor, Tensor]]) -> Examples:
    sizes = torch.tensor([0] + [len(x) for x, _ in pairs])
    return Examples(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]), sizes.cumsum(0))


def _listed(clients: Sequence[Any] | Arrays) -> list[Any]:
    if isinstance(clients, Tensor | np.ndarray):
        listed: list[Any] = clients.tolist()
        return listed
    try:
        return list(clients)
    except TypeError as error:
        raise ValueError(f"`clients` must name the client of every example, but is {clients!r}.") from error

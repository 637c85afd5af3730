"""Who holds which data: client data in, one client's (or one cohort's) `Task` out."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dqnfed.core.client_data import (
    as_pair,
    check_given_sizes,
    check_labels,
    check_names,
    check_shapes,
    check_shares,
    checked_pair,
    given_test,
    has_usual_numbers,
    pair_in,
    refuse_bad_rows,
)
from dqnfed.core.examples import (
    Arrays,
    CalledClients,
    CalledPart,
    Examples,
    LazyExamples,
    Pair,
    Part,
    StoredRows,
    joined,
    tensor_checksum,
)
from dqnfed.core.host_memory import free_bytes
from dqnfed.core.shares import MANY, part_sizes, split_clients, split_rows

__all__ = ["Examples", "Federation", "Part", "split_rows", "tensor_checksum", "untested_line"]
SHARE_OF_DEVICE = 0.25  # of a device's free memory, which examples that are read from the host may take there

logger = logging.getLogger("dqnfed")


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
                check_labels(f"some client has in its {part} examples", self.examples(part).targets)
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
        """SHA-256 of the examples, by part, and of the clients' names; of data that are elsewhere there is none.

        Of arrays that are read client by client: of the numbers of examples and of some thousand rows.
        """
        if not self.train.is_lazy and not self.train.inputs.numel():
            return {}
        found = {"names of the clients": hashlib.sha256("\0".join(self.names).encode()).hexdigest()}
        for part, held in (("training", self.train), ("validation", self.validation), ("test", self.test)):
            if held is not None:
                found.update({f"{part} {what}": checksum for what, checksum in held.checksums().items()})
        return found

    def examples(self, part: Part) -> Examples:
        if part == "validation":
            if self.validation is None:
                raise ValueError("this federation has no validation examples; make it with `validation=0.1` or so.")
            return self.validation
        return self.train if part == "train" else self.test

    def to(self, device: torch.device | str) -> Federation:
        """Return the federation with all examples on the device; those that are read by client, where they fit."""

        def moved(part: Examples) -> Examples:
            if part.is_lazy:
                return in_device_memory(part, torch.device(device))
            return Examples(part.inputs.to(device), part.targets.to(device), part.starts)

        validation = None if self.validation is None else moved(self.validation)
        return Federation(moved(self.train), moved(self.test), validation, self.names, self.groups, self.n_classes)

    def only(self, client: int) -> Federation:
        """Return the federation of this one client."""
        if not 0 <= client < self.n_clients:
            raise ValueError(f"there is no client {client}: this federation has clients 0 to {self.n_clients - 1}.")

        def held(part: Examples) -> Examples:
            inputs, targets = part.taken(torch.tensor([client]))
            return Examples(inputs, targets, torch.tensor([0, len(inputs)]))

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

    def label_counts(self, clients: Sequence[int] | None = None) -> list[dict[int, int]] | None:
        """Return how often each client (or each of these) holds each class in training; None for regression."""
        if self.n_classes is None:
            return None
        counts = []
        for c in range(self.n_clients) if clients is None else clients:
            labels, numbers = self.train.taken(torch.tensor([c]))[1].unique(return_counts=True)
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
        check_names(len(clients), names, groups)
        shares: dict[Part, float] = {"test": test if isinstance(test, int | float) else 0.0, "validation": validation}
        check_shares(shares)
        pairs = [checked_pair(name, client) for name, client in zip(names, clients, strict=True)]
        check_shapes(names, pairs)
        whole = joined(pairs)
        if n_classes is None and not pairs[0][1].is_floating_point():
            n_classes = 1 + int(whole.targets.max())
        held_out = split_clients(whole.starts, whole.targets, None, shares, seed)
        parts = {part: Examples(whole.inputs[rows], whole.targets[rows], at) for part, (rows, at) in held_out.items()}
        if not isinstance(test, int | float):
            parts["test"] = joined(given_test(names, test, pairs[0]))
        return cls._from_parts(parts, shares, names, groups, n_classes)

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
        """Return the federation of examples that each name their client; clients are sorted by name.

        The arrays stay where they are, and a client's rows are read when it is asked, where they are mapped from a file
        (`numpy.memmap`), where a copy would take half of the free memory, and with more than 10,000 clients.
        """
        is_mapped = _is_mapped(inputs) or _is_mapped(targets)
        x, y = as_pair("the examples", (inputs, targets))
        shares: dict[Part, float] = {"test": test, "validation": validation}
        check_shares(shares)
        order, starts, names = rows_by_client(clients, len(x), len(y))
        if not is_mapped and len(names) <= MANY and x.nbytes <= free_bytes() / 2:
            each = order.tensor_split(starts[1:-1])
            pairs = [(x[rows], y[rows]) for rows in each]
            return cls.from_clients(pairs, test=test, validation=validation, seed=seed, names=names)
        return cls._stored(x, y, order, starts, names, shares, seed)

    @classmethod
    def from_offsets(
        cls,
        inputs: Arrays,
        targets: Arrays,
        starts: Sequence[int] | Arrays,  # [C + 1] client c has the rows starts[c]:starts[c + 1]
        *,
        test: float = 0.2,
        validation: float = 0.0,
        seed: int = 0,
        names: Sequence[str] = (),
    ) -> Federation:
        """Return the federation of clients whose examples stand one client after the other in arrays.

        The arrays stay where they are, mapped from a file perhaps; a client's rows are read when it is asked.
        """
        x, y = as_pair("the examples", (inputs, targets))
        shares: dict[Part, float] = {"test": test, "validation": validation}
        check_shares(shares)
        bounds = torch.as_tensor(starts).long().cpu()
        if bounds.dim() != 1 or len(bounds) < 2 or bool((bounds.diff() < 1).any()) or int(bounds[0]) != 0:
            raise ValueError(
                "`starts` must begin with 0 and rise by a client's number of examples, which is 1 at least."
            )
        if not int(bounds[-1]) == len(x) == len(y):
            raise ValueError(f"{len(x)} inputs and {len(y)} targets, but `starts` ends with {int(bounds[-1])}.")
        names = tuple(names) or tuple(map(str, range(len(bounds) - 1)))
        check_names(len(bounds) - 1, names, None)
        return cls._stored(x, y, None, bounds, names, shares, seed)

    @classmethod
    def from_function(
        cls,
        load: Callable[[int], tuple[Arrays, Arrays]],
        sizes: Sequence[int] | Arrays,  # [C] examples that `load` gives for each client's number
        *,
        test: float = 0.2,
        validation: float = 0.0,
        seed: int = 0,
        names: Sequence[str] = (),
        groups: Sequence[str] | None = None,
        n_classes: int | None = None,
    ) -> Federation:
        """Return the federation of clients whose (inputs, targets) a function gives when they are asked.

        It must give the same for the same client, always; a test share is held out of each.
        """
        held = np.asarray(sizes, dtype=np.int64)
        shares: dict[Part, float] = {"test": test, "validation": validation}
        check_shares(shares)
        check_given_sizes(held)
        names = tuple(names) or tuple(map(str, range(len(held))))
        check_names(len(held), names, groups)
        like = checked_pair(names[0], load(0))
        if n_classes is None and not like[1].is_floating_point():
            raise ValueError(
                "the targets are classes, and not all clients are asked for theirs here; say how many, `n_classes`."
            )

        def read(client: int) -> dict[Part, Pair]:
            pair = checked_pair(names[client], load(client))
            check_shapes((names[0], names[client]), [like, pair])
            refuse_bad_rows(names[client], pair, int(held[client]), n_classes)
            found = split_rows(len(pair[0]), pair[1], dict(shares), seed=seed, client=client)
            return {part: (pair[0][rows], pair[1][rows]) for part, rows in found.items()}

        called = CalledClients(read, (like[0][:0], like[1][:0]))
        parts: dict[Part, Examples] = {
            part: LazyExamples(CalledPart(called, part), torch.from_numpy(np.append(0, counts.cumsum())))
            for part, counts in part_sizes(held, shares).items()
        }
        return cls._from_parts(parts, shares, names, groups, n_classes)

    @classmethod
    def from_datasets(
        cls, datasets: Iterable[Any], *, test: float = 0.2, validation: float = 0.0, seed: int = 0
    ) -> Federation:
        """Return the federation of one map-style torch dataset per client, each giving (input, target) pairs."""
        pairs = [pair_in(f"client '{c}'", dataset) for c, dataset in enumerate(datasets)]
        return cls.from_clients(pairs, test=test, validation=validation, seed=seed)

    @classmethod
    def _stored(
        cls,
        x: Tensor,
        y: Tensor,
        order: Tensor | None,
        starts: Tensor,
        names: tuple[str, ...],
        shares: dict[Part, float],
        seed: int,
    ) -> Federation:
        """Return the federation of arrays that stay where they are; of inputs, those that are read are checked."""
        y = y.long() if y.dtype == torch.bool else y
        check_labels("some client has", y)

        def check(clients: Tensor, sizes: Tensor, found: Pair) -> None:
            if not all(has_usual_numbers(t) for t in found):
                by_client = (t.split(sizes.tolist()) for t in found)
                for c, *pair in zip(clients.tolist(), *by_client, strict=True):
                    checked_pair(names[c], pair)

        parts: dict[Part, Examples] = {
            part: LazyExamples(StoredRows(x, y, rows, at, check), at)
            for part, (rows, at) in split_clients(starts, y, order, shares, seed).items()
        }
        return cls._from_parts(parts, shares, names, None, None if y.is_floating_point() else 1 + int(y.max()))

    @classmethod
    def _from_parts(
        cls,
        parts: dict[Part, Examples],
        shares: dict[Part, float],
        names: Sequence[str],
        groups: Sequence[str] | None,
        n_classes: int | None,
    ) -> Federation:
        validation = parts["validation"] if shares["validation"] else None
        own_groups = None if groups is None else tuple(groups)
        found = cls(parts["train"], parts["test"], validation, tuple(names), own_groups, n_classes)
        if found.untested:
            logger.warning("%s", untested_line(found.untested))
        return found


def rows_by_client(
    clients: Sequence[Any] | Arrays, n_inputs: int, n_targets: int
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Return the rows in the order of their clients, where each client's begin, and the clients' names."""
    owner = np.asarray(clients.cpu()) if isinstance(clients, Tensor) else clients
    if not isinstance(owner, np.ndarray) or owner.dtype.kind not in "iu" or owner.ndim != 1:
        owner = np.asarray([str(c) for c in _listed(owner)])
    if len(owner) != n_inputs:
        raise ValueError(f"{n_inputs} inputs but {len(owner)} client names; every example needs its client.")
    if n_targets != n_inputs:
        raise ValueError(f"{n_inputs} inputs but {n_targets} targets; every example needs its target.")
    if not n_inputs:
        raise ValueError("a federation needs at least one client, but there are no examples.")
    order = np.argsort(owner, kind="stable")
    in_order = owner[order]
    starts = np.concatenate([[0], 1 + np.flatnonzero(in_order[1:] != in_order[:-1]), [len(owner)]])
    names = [str(name) for name in in_order[starts[:-1]].tolist()]
    if owner.dtype.kind not in "iu" or owner.min() < 0:  # numbers are sorted as such, before other names
        by_name = sorted(range(len(names)), key=lambda c: _name_key(names[c]))
        sizes = np.diff(starts)[by_name]
        order = np.concatenate([order[starts[c] : starts[c + 1]] for c in by_name])
        starts, names = np.append(0, sizes.cumsum()), [names[c] for c in by_name]
    return torch.from_numpy(order), torch.from_numpy(starts), tuple(names)


def in_device_memory(part: Examples, device: torch.device) -> Examples:
    """Return examples that are read client by client on the device, where they fit, else as they are."""
    if device.type != "cuda":
        return part
    n_bytes = int(part.starts[-1]) * sum(t.element_size() * t.shape[1:].numel() for t in part[:2])
    if n_bytes > SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[0]:
        return part
    inputs, targets = part.taken(torch.arange(len(part.starts) - 1))
    return Examples(inputs.to(device), targets.to(device), part.starts)


def untested_line(names: Sequence[str]) -> str:
    """Return the sentence about clients that have no examples to be tested on."""
    shown = ", ".join(f"'{name}'" for name in names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    subject = f"client {shown} is" if len(names) == 1 else f"clients {shown} are"
    return f"{subject} too small to be tested: kept for training, without a score"


def _name_key(name: str) -> tuple[int, str]:
    return (len(name), name) if name.isdigit() else (10**9, name)


def _is_mapped(values: Any) -> bool:
    """Return whether an array is mapped from a file, or is a part of one that is."""
    while isinstance(values, np.ndarray):
        if isinstance(values, np.memmap):
            return True
        values = values.base
    return False


def _listed(clients: Sequence[Any] | Arrays) -> list[Any]:
    if isinstance(clients, Tensor | np.ndarray):
        listed: list[Any] = clients.tolist()
        return listed
    try:
        return list(clients)
    except TypeError as error:
        raise ValueError(f"`clients` must name the client of every example, but is {clients!r}.") from error

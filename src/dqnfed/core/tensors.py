"""NamedTuples of tensors: the one shape of everything that crosses between client and server."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn

T = TypeVar("T", bound=tuple[Any, ...])
Layout = tuple[tuple[str, torch.Size], ...]
OnDevice = Callable[[torch.device], Tensor]  # one host tensor on the device asked for


def map_tensors(f: Callable[..., Tensor], record: T, *others: T) -> T:
    """Return the record whose every tensor is f of the tensors at that place; nested records are walked."""
    if not others:
        return type(record)(*[map_tensors(f, value) if isinstance(value, tuple) else f(value) for value in record])
    fields = [
        map_tensors(f, mine, *theirs) if isinstance(mine, tuple) else f(mine, *theirs)
        for mine, *theirs in zip(record, *others, strict=True)
    ]
    return type(record)(*fields)


def tensors(record: tuple[Any, ...]) -> list[Tensor]:
    """Return every tensor of the record, in field order."""
    found: list[Tensor] = []
    for value in record:
        if isinstance(value, tuple):
            found.extend(tensors(value))
        else:
            found.append(value)
    return found


def stack(records: Sequence[T]) -> T:
    """Return one record whose tensors have a leading row per given record."""
    return map_tensors(lambda *rows: torch.stack(rows), records[0], *records[1:])


def row(stacked: T, k: int) -> T:
    """Return the k-th record of a stacked one."""
    return map_tensors(lambda t: t[k], stacked)


def gather(stacked: T, index: Tensor, there: OnDevice | None = None) -> T:
    """Return the stacked record that holds the rows named by the index; `there` is the index on devices, if at hand."""
    there = there or on_devices(index)

    def chosen(t: Tensor) -> Tensor:
        if 0 in t.shape[1:]:  # what a method does not keep: nothing to look up
            return _nothing((index.shape[0], *t.shape[1:]), t.dtype, t.device)
        return t.index_select(0, there(t.device))

    return map_tensors(chosen, stacked)


@lru_cache(maxsize=64)  # asked for in every round
def _nothing(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def on_devices(index: Tensor) -> OnDevice:
    """Return a function that gives the index on a device, and moves it there once only."""
    moved: dict[torch.device, Tensor] = {}

    def there(device: torch.device) -> Tensor:
        if device not in moved:
            moved[device] = index.to(device, non_blocking=True)
        return moved[device]

    return there


def concatenated(parts: Sequence[T]) -> T:
    """Return the stacked record that holds the rows of all the parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return map_tensors(lambda *blocks: torch.cat(blocks), parts[0], *parts[1:])


def n_rows(stacked: tuple[Any, ...]) -> int:
    """Return how many rows a stacked record has."""
    first: Any = stacked
    while isinstance(first, tuple):
        first = first[0]
    return int(first.shape[0])


def all_finite(t: Tensor) -> bool:
    """Return whether the tensor holds finite numbers alone; its norm costs a fraction of a look at every number."""
    norm = float(torch.linalg.vector_norm(t))
    return math.isfinite(norm) or bool(torch.isfinite(t).all())  # a norm may overflow where no number does


def named_tensors(record: tuple[Any, ...], prefix: str = "") -> dict[str, Tensor]:
    """Return the record's tensors by dotted field name, ready for a file or a message."""
    found: dict[str, Tensor] = {}
    for name, value in zip(cast(Any, record)._fields, record, strict=True):
        if isinstance(value, tuple):
            found.update(named_tensors(value, f"{prefix}{name}."))
        else:
            found[prefix + name] = value
    return found


def from_named_tensors(kind: type[T], named: Mapping[str, Tensor], prefix: str = "") -> T:
    """Return the record of the given kind that `named_tensors` took apart."""
    hints = get_type_hints(kind)
    fields: list[Any] = []
    for name in cast(Any, kind)._fields:
        hint = hints[name]
        if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
            fields.append(from_named_tensors(hint, named, f"{prefix}{name}."))
        elif prefix + name in named:
            fields.append(named[prefix + name])
        else:
            raise KeyError(
                f"{kind.__name__} needs the tensor '{prefix + name}', but only {sorted(named)} are here; "
                "the file or message was written by another algorithm or version."
            )
    return kind(*fields)


def module_layout(module: nn.Module) -> Layout:
    """Return the names and shapes of the module's parameters, in the order in which theta holds them."""
    return tuple((name, parameter.shape) for name, parameter in module.named_parameters())


def module_theta(module: nn.Module) -> Tensor:
    """Return the module's parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def named_parameters(theta: Tensor, layout: Layout) -> dict[str, Tensor]:
    """Return views of theta by parameter name."""
    sizes = [shape.numel() for _, shape in layout]
    pieces = torch.split(theta, sizes)
    return {name: piece.view(shape) for (name, shape), piece in zip(layout, pieces, strict=True)}

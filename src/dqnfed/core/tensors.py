"""NamedTuples of tensors: the one shape of everything that crosses between client and server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor, nn

T = TypeVar("T", bound=tuple[Any, ...])
Layout = tuple[tuple[str, torch.Size], ...]


def is_record(value: object) -> bool:
    """Return whether the value is a NamedTuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def map_tensors(f: Callable[..., Tensor], record: T, *others: T) -> T:
    """Return the record whose every tensor is f of the tensors at that place; nested records are walked."""
    fields = (
        map_tensors(f, mine, *theirs) if is_record(mine) else f(mine, *theirs)
        for mine, *theirs in zip(record, *others, strict=True)
    )
    return type(record)(*fields)


def tensors(record: tuple[Any, ...]) -> list[Tensor]:
    """Return every tensor of the record, in field order."""
    return list(named_tensors(record).values())


def stack(records: Sequence[T]) -> T:
    """Return one record whose tensors have a leading row per given record."""
    return map_tensors(lambda *rows: torch.stack(rows), records[0], *records[1:])


def row(stacked: T, k: int) -> T:
    """Return the k-th record of a stacked one."""
    return map_tensors(lambda t: t[k], stacked)


def gather(stacked: T, index: Tensor) -> T:
    """Return the stacked record that holds the rows named by the index."""
    there = on_devices(index)
    return map_tensors(lambda t: t.index_select(0, there(t.device)), stacked)


def on_devices(index: Tensor) -> Callable[[torch.device], Tensor]:
    """Return a function that gives the index on a device, and moves it there once only."""
    moved: dict[torch.device, Tensor] = {}

    def there(device: torch.device) -> Tensor:
        if device not in moved:
            moved[device] = index.to(device)
        return moved[device]

    return there


def concatenated(parts: Sequence[T]) -> T:
    """Return the stacked record that holds the rows of all the parts, in order."""
    if len(parts) == 1:
        return parts[0]
    return map_tensors(lambda *blocks: torch.cat(blocks), parts[0], *parts[1:])


def n_rows(stacked: tuple[Any, ...]) -> int:
    """Return how many rows a stacked record has."""
    return len(tensors(stacked)[0])


def finite_rows(rows: Tensor, norms: Tensor | None = None) -> Tensor:
    """Return which rows [K, m] hold finite numbers alone, [K]; their Euclidean norms, where they are known, help.

    On a CPU the norms are asked first: they cost a fraction of a look at every number.
    """
    if rows.device.type != "cpu" or rows.shape[1] < 2:
        return torch.isfinite(rows).all(1)
    finite = torch.isfinite(torch.linalg.vector_norm(rows, dim=1) if norms is None else norms)
    for k in (~finite).nonzero().flatten().tolist():
        finite[k] = torch.isfinite(rows[k]).all()  # a norm may overflow where no number does
    return finite


def named_tensors(record: tuple[Any, ...], prefix: str = "") -> dict[str, Tensor]:
    """Return the record's tensors by dotted field name, ready for a file or a message."""
    found: dict[str, Tensor] = {}
    for name, value in zip(cast(Any, record)._fields, record, strict=True):
        if is_record(value):
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

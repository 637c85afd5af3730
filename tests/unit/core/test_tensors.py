"""NamedTuples of tensors: stacked, taken apart, put together."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from dqnfed.core.tensors import (
    all_finite,
    concatenated,
    from_named_tensors,
    gather,
    module_layout,
    module_theta,
    n_rows,
    named_parameters,
    named_tensors,
    row,
    stack,
    tensors,
)


class Inner(NamedTuple):
    matrix: Tensor  # [2, 2]
    number: Tensor  # []


class Outer(NamedTuple):
    vector: Tensor  # [3]
    inner: Inner


def record(value: int) -> Outer:
    return Outer(torch.full((3,), float(value)), Inner(torch.full((2, 2), -float(value)), torch.tensor(value)))


def same(one: Outer, other: Outer) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


def test_rows_of_a_stack_are_the_records() -> None:
    stacked = stack([record(k) for k in range(4)])
    assert n_rows(stacked) == 4
    assert stacked.inner.matrix.shape == (4, 2, 2)
    assert all(same(row(stacked, k), record(k)) for k in range(4))


def test_gather_is_a_stack_of_the_named_rows() -> None:
    stacked = stack([record(k) for k in range(4)])
    assert same(gather(stacked, torch.tensor([2, 0, 2])), stack([record(2), record(0), record(2)]))


def test_concatenated_parts_are_one_stack() -> None:
    parts = [stack([record(0), record(1)]), stack([record(2)])]
    assert same(concatenated(parts), stack([record(k) for k in range(3)]))
    assert concatenated(parts[:1]) is parts[0]


def test_names_are_dotted_and_give_the_record_back() -> None:
    named = named_tensors(record(7), "server.")
    assert list(named) == ["server.vector", "server.inner.matrix", "server.inner.number"]
    assert same(from_named_tensors(Outer, named, "server."), record(7))


def test_a_missing_tensor_is_named() -> None:
    named = named_tensors(record(7))
    del named["inner.number"]
    with pytest.raises(KeyError, match=r"Inner needs the tensor 'inner\.number'.*another algorithm or version"):
        from_named_tensors(Outer, named)


def test_theta_holds_the_module_in_layout_order() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    theta, layout = module_theta(module), module_layout(module)
    assert [name for name, _ in layout] == ["0.weight", "0.bias", "1.weight"]
    parts = named_parameters(theta, layout)
    assert all(torch.equal(parts[name], parameter) for name, parameter in module.named_parameters())
    assert len(theta) == sum(p.numel() for p in module.parameters()) == 10


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_a_tensor_is_finite_when_all_its_numbers_are(width: int) -> None:
    rows = torch.ones(6, width)
    rows[1, -1], rows[2, 0], rows[3, 0] = torch.nan, torch.inf, -torch.inf
    rows[4] = 1e38  # whose squares, and with them the norm, are too large for float32
    assert [all_finite(row) for row in rows] == [True, False, False, False, True, True]
    assert all_finite(rows[0, :0])

"""Records survive the way through Flower's messages, and a message's kind is found again by its name."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from dqnfed.algorithms import REGISTRY
from dqnfed.core.expected import layout_of
from dqnfed.core.tensors import tensors
from dqnfed.flower.exchange import mismatched
from dqnfed.flower.records import decoded, encoded, kind_named


class Inner(NamedTuple):
    flags: Tensor
    empty: Tensor


class Outer(NamedTuple):
    vector: Tensor
    number: Tensor
    counts: Tensor
    inner: Inner


def example(dtype: torch.dtype = torch.float64) -> Outer:
    inner = Inner(torch.tensor([True, False]), torch.zeros(0, 3))
    return Outer(torch.arange(6.0, dtype=dtype).view(2, 3).T, torch.tensor(torch.nan), torch.tensor([7, -1]), inner)


def through_flower(content: RecordDict) -> RecordDict:
    """Return the content as the other side gets it: as bytes and back."""
    records = {name: type(record).inflate(record.deflate(), record.children) for name, record in content.items()}
    return RecordDict(records)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_record_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    sent = example(dtype)
    back = decoded(Outer, through_flower(RecordDict({"x": encoded(sent)})).array_records["x"])
    assert layout_of(back) == layout_of(sent)
    for mine, theirs in zip(tensors(back), tensors(sent), strict=True):
        assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        assert torch.equal(mine.isnan(), theirs.isnan())


def test_what_is_decoded_may_be_written_to_and_shares_nothing() -> None:
    sent = example()
    record = encoded(sent)
    decoded(Outer, record).vector.zero_()
    assert torch.equal(decoded(Outer, record).vector, sent.vector)


def test_a_message_of_another_method_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"no message kind 'Trial' here, only Inner, Outer; .* same method"):
        kind_named((Inner, Outer), "Trial")
    with pytest.raises(KeyError, match="Outer needs the tensor 'vector'"):
        decoded(Outer, encoded(example().inner))


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_the_kinds_of_a_method_have_names_of_their_own(name: str) -> None:
    for kinds in (REGISTRY[name].info.messages, REGISTRY[name].info.replies):
        assert len({kind.__name__ for kind in kinds}) == len(kinds)


def test_replies_of_another_shape_than_the_majority_are_named() -> None:
    usual, longer = Inner(torch.ones(2), torch.ones(1)), Inner(torch.ones(3), torch.ones(1))
    other_type = Inner(torch.ones(2, dtype=torch.float64), torch.ones(1))
    assert mismatched({4: usual, 1: longer, 2: usual, 3: other_type}).keys() == {1, 3}
    assert mismatched({4: usual, 1: usual}) == {}
    assert mismatched({}) == {}

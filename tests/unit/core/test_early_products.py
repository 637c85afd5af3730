"""Products that begin when the clients have a field: those of the digest, whoever announces it and whoever does not."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.digest import announced, digest_plan, early_products, packed_digest

ROWS = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Answer(NamedTuple):
    gradient: Tensor
    loss: Tensor


def answers(x: Tensor, *, out_loud: bool) -> Answer:
    def one(x: Tensor) -> Answer:
        gradient = announced(2.0 * x) if out_loud else 2.0 * x
        return Answer(gradient, gradient.sum())

    return vmap(one)(x)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:0], None])
def test_the_digest_is_the_same(rows: Tensor | None) -> None:
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    silent = answers(x, out_loud=False)
    plan = digest_plan(silent, (), "gradient")
    expected = packed_digest(plan, silent, ROWS[0], rows)
    with early_products(rows) as products:
        told = answers(x, out_loud=True)
    assert products.found
    assert torch.equal(told.gradient, silent.gradient)
    assert torch.equal(packed_digest(plan, told, ROWS[0], products=products), expected)
    with early_products(rows) as products:
        silent = answers(x, out_loud=False)
    assert not products.found
    assert torch.equal(packed_digest(plan, silent, ROWS[0], products=products), expected)


def test_nobody_listens_to_a_client_alone() -> None:
    x = torch.ones(6)
    assert announced(x) is x
    with early_products(None) as products:
        assert torch.equal(announced(x), x)
    assert not products.found


def test_what_is_heard_ends_with_the_listening() -> None:
    with early_products(None) as products:
        answers(torch.ones(2, 6), out_loud=True)
        first = list(products.found)
        assert first
        answers(torch.zeros(2, 6), out_loud=True)  # the field of one digest, said once more
        assert all(a is b for a, b in zip(products.found, first, strict=True))
    answers(torch.zeros(2, 6), out_loud=True)
    assert all(a is b for a, b in zip(products.found, first, strict=True))

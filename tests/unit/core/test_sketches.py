"""Sketches tell rows apart: a row that was sent before, and one that has turned as no other client's has."""

from __future__ import annotations

import pytest
import torch

from dqnfed.core.sketches import SketchState, model_number, no_sketches, replayed, sketched, turned, with_rows

C, N = 6, 3000
EVERYBODY = torch.arange(C)


def rows(seed: int) -> torch.Tensor:
    return torch.randn(C, N, generator=torch.Generator().manual_seed(seed))


def after(first: torch.Tensor, model: float = 1.0) -> SketchState:
    return with_rows(no_sketches(C), sketched(first), model, EVERYBODY)


def test_the_length_of_a_difference_is_seen_in_the_sketches() -> None:
    """128 signed sums: the relative error of a length has a standard deviation of 1 / sqrt(2 * 128) = 0.06."""
    one, two = rows(0), rows(1)
    found = (sketched(one) - sketched(two)).norm(dim=1) / (one - two).double().norm(dim=1)
    assert bool(((found - 1.0).abs() < 5 * 0.0625).all())


def test_a_row_that_was_sent_for_another_model_is_a_replay_and_at_the_same_model_it_is_none() -> None:
    first, second = rows(0), rows(1)
    state = with_rows(after(first), sketched(second), 2.0, EVERYBODY)
    mixed = torch.cat([first[:1], second[1:2], rows(2)[2:]])
    assert replayed(state, sketched(mixed), 3.0, EVERYBODY).tolist() == [True, True, False, False, False, False]
    assert not replayed(state, sketched(second), 2.0, EVERYBODY).any()  # a round that was held, or taken back
    assert not replayed(state, sketched(torch.zeros(C, N)), 3.0, EVERYBODY).any()


def test_the_first_row_is_remembered_however_many_follow() -> None:
    state, first = after(rows(0)), rows(0)
    for k in range(1, 30):
        state = with_rows(state, sketched(rows(k)), float(k + 1), EVERYBODY)
    assert replayed(state, sketched(first), 99.0, EVERYBODY).all()


@pytest.mark.parametrize("lie", ["reversed", "random", "short"])
def test_who_turns_alone_is_seen_and_who_turns_with_all_others_is_not(lie: str) -> None:
    first = rows(0)
    state, now = after(first), first + 0.1 * rows(1)
    now[2] = {"reversed": -first[2], "random": rows(5)[2], "short": 1e-6 * first[2]}[lie]
    assert turned(state, sketched(now), EVERYBODY).tolist() == [k == 2 for k in range(C)]
    assert not turned(state, sketched(-first), EVERYBODY).any()
    assert not turned(state, sketched(first), EVERYBODY).any()


def test_models_that_differ_in_one_number_are_told_apart() -> None:
    theta = torch.randn(N, generator=torch.Generator().manual_seed(0))
    other = theta.clone()
    other[17] += 1e-3
    assert model_number(theta) == model_number(theta.clone()) != model_number(other)

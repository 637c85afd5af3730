"""Bad replies: dropped, clipped, and written down, before any method sees them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed import DQNFed, FedAvg
from dqnfed.core.algorithm import AnyAlgorithm, Info
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from dqnfed.core.screening import Policy, clip_unusual, hold_scalars, prepared_with, screen, screened_replies


class Update(NamedTuple):
    delta: Tensor  # [n]
    change: Tensor  # [] grows with delta
    loss: Tensor  # [] does not
    step: Tensor  # [] an integer


class Scalars(NamedTuple):
    loss: Tensor  # []


INFO = Info(server=Update, replies=(Update,), clip_fields=("delta", "change"))


def replies(norms: list[float], dtype: torch.dtype = torch.float64, **changes: Tensor) -> Replies[Update]:
    """Return replies whose deltas have the given norms, in directions of their own."""
    K = len(norms)
    delta = torch.diag(torch.tensor(norms, dtype=dtype))
    made = Update(delta, torch.tensor(norms, dtype=dtype), torch.ones(K, dtype=dtype), torch.arange(K))
    return Replies(made._replace(**changes))


def test_good_replies_pass_untouched() -> None:
    given = replies([1.0, 2.0, 9.9, 0.01])
    found = screen(given, Policy(), INFO)
    assert found.kept.tolist() == [0, 1, 2, 3]
    assert found.factors.tolist() == [1.0] * 4
    assert found.dropped == []
    assert screened_replies(given, found, INFO) is given


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["delta", "change", "loss"])
def test_a_reply_that_is_not_finite_anywhere_is_dropped(bad: float, field: str) -> None:
    given = replies([1.0, 2.0, 3.0])
    getattr(given.updates, field)[1] = bad
    found = screen(given, Policy(), INFO)
    assert found.kept.tolist() == [0, 2]
    assert found.dropped == [(1, "update is not finite")]
    kept = screened_replies(given, found, INFO).updates
    assert torch.equal(kept.delta, given.updates.delta[[0, 2]])
    assert kept.step.tolist() == [0, 2]


def test_fields_may_be_empty_and_of_several_precisions() -> None:
    losses = torch.tensor([1.0, 1e300, math.nan], dtype=torch.float64)
    given = replies([1.0, 2.0, 100.0], torch.float32, change=torch.zeros(3, 0), loss=losses)
    found = screen(given, Policy(), INFO)
    assert found.kept.tolist() == [0, 1]  # a loss that single precision could not hold is a number
    assert found.dropped == [(2, "update is not finite")]
    assert screened_replies(given, found, INFO).updates.change.shape == (2, 0)


def test_nan_in_fields_that_may_be_nan_are_no_fault() -> None:
    given = replies([1.0, 2.0])
    given.updates.loss[0] = torch.nan
    assert screen(given, Policy(), replace(INFO, nan_ok_fields=("loss",))).dropped == []


def test_a_reply_of_zero_norm_is_dropped() -> None:
    found = screen(replies([1.0, 0.0, 3.0]), Policy(), INFO)
    assert found.kept.tolist() == [0, 2]
    assert found.dropped == [(1, "update has zero norm")]


def test_a_long_reply_is_clipped_to_ten_medians_in_every_clipped_field() -> None:
    given = replies([1.0, 2.0, 3.0, 4.0, 500.0])
    found = screen(given, Policy(), INFO)
    kept = screened_replies(given, found, INFO).updates
    assert found.dropped == []
    norms = torch.linalg.vector_norm(kept.delta, dim=1)
    torch.testing.assert_close(norms, torch.tensor([1.0, 2.0, 3.0, 4.0, 30.0], dtype=torch.float64))
    assert kept.change[4] == pytest.approx(30.0)
    assert torch.equal(kept.loss, given.updates.loss)
    assert torch.equal(kept.step, given.updates.step)
    assert given.updates.delta[4, 4] == 500.0  # the reply itself is left alone


def test_the_median_is_of_usable_replies_only() -> None:
    """With the zeros counted, the median of 0, 0, 0, 1, 2, 25 would be 0.5 and 25 would be clipped to 5, not 20."""
    found = screen(replies([0.0, 0.0, 0.0, 1.0, 2.0, 25.0]), Policy(), INFO)
    assert found.kept.tolist() == [3, 4, 5]
    assert found.factors.tolist() == [1.0, 1.0, 20.0 / 25.0]


def test_the_limit_is_a_policy() -> None:
    given = replies([1.0, 2.0, 3.0, 500.0])
    assert screen(given, Policy(max_update_norm=math.inf), INFO).factors.tolist() == [1.0] * 4
    assert screen(given, Policy(max_update_norm=2.0), INFO).factors.tolist() == [1.0, 1.0, 1.0, 5.0 / 500.0]


def test_methods_without_clip_fields_are_neither_clipped_nor_dropped_for_zero() -> None:
    found = screen(replies([0.0, 1.0, 1e9]), Policy(), replace(INFO, clip_fields=()))
    assert found.kept.tolist() == [0, 1, 2]
    assert found.factors.tolist() == [1.0] * 3


def test_another_phase_without_the_measured_field_passes() -> None:
    class Losses(NamedTuple):
        losses: Tensor

    found = screen(Replies(Losses(torch.tensor([[0.0, 0.0], [1.0, 2.0]]))), Policy(), INFO)
    assert found.kept.tolist() == [0, 1]


def test_nobody_may_be_left() -> None:
    given = replies([0.0, 1.0])
    given.updates.delta[1] = torch.nan
    found = screen(given, Policy(), INFO)
    assert found.kept.tolist() == []
    assert sorted(k for k, _ in found.dropped) == [0, 1]


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float64, 1e200)])
def test_lengths_whose_squares_are_no_numbers_are_measured_all_the_same(dtype: torch.dtype, size: float) -> None:
    """The squares of 1e-30 and 1e30 are 0 and infinite in float32, yet both replies are numbers that can be scaled."""
    tiny = screen(replies([1 / size, 2 / size, 3 / size, 90 / size], dtype), Policy(), INFO)
    assert tiny.kept.tolist() == [0, 1, 2, 3]
    assert tiny.factors[3] == pytest.approx(25 / 90, rel=1e-6)
    given = replies([1.0, 2.0, 3.0, size], dtype)
    found = screen(given, Policy(), INFO)
    assert found.factors[3] == pytest.approx(25.0 / size, rel=1e-6)
    assert screened_replies(given, found, INFO).updates.delta[3, 3] == pytest.approx(25.0, rel=1e-6)


def test_a_zero_reply_beside_tiny_ones_is_zero() -> None:
    assert screen(replies([1e-30, 0.0, 1e-30], torch.float32), Policy(), INFO).kept.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"on_nonfinite": "ignore"}, "`on_nonfinite` must be one of drop, fail"),
        ({"max_update_norm": 0.5}, r"`max_update_norm` must be in \[1, inf\], but is 0.5"),
        ({"min_replies": 0}, r"`min_replies` must be in \[1, inf\), but is 0"),
    ],
)
def test_bad_policies_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**settings)  # type: ignore[arg-type]


def test_the_policys_rate_bounds_replace_the_methods_where_it_has_any() -> None:
    problem = Problem.from_module(torch.nn.Linear(3, 2))

    def prepared(algorithm: AnyAlgorithm, **bounds: float) -> AnyAlgorithm:
        return prepared_with(algorithm, Policy(**bounds), problem, 4, 4)  # type: ignore[arg-type]

    assert prepared(DQNFed(), rate_bounds=5.0) == DQNFed(rate_bounds=5.0).prepare(problem, 4, 4)
    assert prepared(DQNFed(rate_bounds=7.0)) == DQNFed(rate_bounds=7.0).prepare(problem, 4, 4)
    assert prepared(FedAvg(), rate_bounds=5.0) == FedAvg()
    local = prepared(DQNFed(epochs=2), rate_bounds=5.0, drop_share=0.3)  # updates of local SGD have no rates to bound
    assert local == DQNFed(epochs=2, drop_share=0.3).prepare(problem, 4, 4)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"on_missing": "wait"}, "on_missing"), ({"timeout": 0.0}, "timeout"), ({"rate_bounds": 0.5}, "rate_bounds")],
)
def test_policies_that_mean_nothing_are_refused(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Policy(**settings)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e19), (torch.float64, 1e200)])
def test_updates_that_cannot_be_squared_are_dropped(dtype: torch.dtype, size: float) -> None:
    """Most of the cohort diverges, so there is no ordinary length to clip to; a Gramian of these would be infinite."""
    found = screen(replies([size, 2 * size, 1.0], dtype), Policy(), INFO)
    assert found.kept.tolist() == [2]
    assert [why for _, why in found.dropped] == ["update is too long to be squared"] * 2
    assert screen(replies([1e30, 1.0, 2.0], torch.float32), Policy(), INFO).kept.tolist() == [
        0,
        1,
        2,
    ]  # one false one


def test_scalars_that_steer_the_step_are_held_near_the_cohorts() -> None:
    """The median size is 2; who could be compared with what it said before has more room."""
    given = Replies(Scalars(torch.tensor([1.0, 2.0, 1e9, -1e9, float("nan"), 2.0, 70.0, 2.0])))
    checked = np.array([True, True, True, False, True, True, False, True])
    found, held = hold_scalars(given, Policy(scalar_bounds=30.0), INFO, checked)
    assert found.scalars("loss").tolist() == pytest.approx([1.0, 2.0, 60.0, -6.0, math.nan, 2.0, 6.0, 2.0], nan_ok=True)
    assert [(k, field) for k, field, _ in held] == [(2, "loss"), (3, "loss"), (6, "loss")]
    for unheld in (Policy(), Policy(scalar_bounds=math.inf)):
        same, nobody = hold_scalars(given, unheld, INFO, checked if unheld.scalar_bounds is None else None)
        assert nobody == []
        assert same is given
    two = given.take(torch.tensor([1, 2]))
    assert hold_scalars(two, Policy(scalar_bounds=30.0), INFO, None) == (two, [])  # of two nobody's is usual


def test_scalars_and_rows_of_clients_without_a_record_are_held_more_closely() -> None:
    """Median size 2: at most 30 times it, 3 times without a record; rows at most 1.5 times the median length then."""
    losses = Replies(Scalars(torch.tensor([2.0, 2.0, 2.0, 1e9, 1e9])))
    policy, checked = Policy(scalar_bounds=30.0), np.array([True, True, True, True, False])
    found, _ = hold_scalars(losses, policy, INFO, checked)
    assert found.scalars("loss").tolist() == [2.0, 2.0, 2.0, 60.0, 6.0]
    rows = replies([1.0, 1.0, 1.0, 4.0, 4.0])
    usual = np.array([1.0, 1.0, 1.0, 3.0, math.nan])
    clipped = clip_unusual(rows, screen(rows, policy, INFO), policy, INFO.clip_fields[0], usual)
    assert clipped.factors.tolist() == [1.0, 1.0, 1.0, 1.0, 1.5 / 4.0]

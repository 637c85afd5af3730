"""The statistics that a GPU sends with the replies are those that the replies themselves would give."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.accel.replies import FastReplies, GraphReplies, KeptRows
from dqnfed.accel.reply_stats import ReplyStats, StatsPlan, packed_stats, stats_plan, unpacked_stats
from dqnfed.core.algorithm import Info
from dqnfed.core.replies import Replies
from dqnfed.core.screening import Policy, screen, screened_replies

CLIPPED = ("gradient", "rate")
NAN_OK = ("rate", "change")


class Inner(NamedTuple):
    share: Tensor  # []


class Update(NamedTuple):
    gradient: Tensor  # [n]
    rate: Tensor  # [] NaN: not known
    kernel: Tensor  # [2, 3]
    n_seen: Tensor  # [] an integer
    change: Tensor  # [n] or [0]
    inner: Inner


INFO = Info(server=Inner, replies=(Update,), clip_fields=CLIPPED, nan_ok_fields=NAN_OK)


def updates(K: int = 5, n: int = 7, dtype: torch.dtype = torch.float64, seed: int = 0) -> Update:
    g = torch.Generator().manual_seed(seed)
    return Update(
        torch.randn(K, n, generator=g, dtype=dtype),
        torch.rand(K, generator=g, dtype=dtype),
        torch.randn(K, 2, 3, generator=g, dtype=dtype),
        torch.arange(K),
        torch.zeros(K, 0, dtype=dtype),
        Inner(-torch.rand(K, generator=g, dtype=dtype)),
    )


def stats_of(given: Update) -> ReplyStats:
    plan = stats_plan(given, NAN_OK, ("gradient",))
    return unpacked_stats(plan, packed_stats(plan, given).numpy(), len(given.rate))


def with_stats(given: Update) -> GraphReplies[Update]:
    """Return the replies as a graph gives them."""
    return GraphReplies(given, lambda: stats_of(given))


def test_the_plan_follows_from_the_fields() -> None:
    plan = stats_plan(updates(), NAN_OK, ("gradient",))
    assert plan == StatsPlan(("rate", "inner.share"), ("kernel",), ("gradient",), (0,))  # its products have the norms
    assert stats_plan(updates(), NAN_OK) == StatsPlan(("rate", "inner.share"), ("gradient", "kernel"), (), ())
    of_numbers = stats_plan(updates(), NAN_OK, ("rate", "n_seen", "change", "unknown"))
    assert of_numbers == stats_plan(updates(), NAN_OK)


def test_replies_without_a_number_have_no_statistics() -> None:
    class Labels(NamedTuple):
        label: Tensor

    given = Labels(torch.arange(4))
    plan = stats_plan(given)
    assert unpacked_stats(plan, packed_stats(plan, given).numpy(), 4) == ReplyStats({}, {}, {})
    assert GraphReplies(given).scalars("label").tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("K", [1, 2, 5])
def test_they_hold_what_a_look_at_the_replies_gives(dtype: torch.dtype, K: int) -> None:
    given = updates(K, dtype=dtype)
    found = stats_of(given)
    assert np.array_equal(found.scalars["rate"], given.rate.double().numpy())
    assert np.array_equal(found.scalars["inner.share"], given.inner.share.double().numpy())
    assert np.array_equal(found.norms["inner.share"], given.inner.share.abs().double().numpy())
    assert np.array_equal(found.norms["kernel"], given.kernel.flatten(1).norm(dim=1).double().numpy())
    eps = torch.finfo(dtype).eps
    np.testing.assert_allclose(found.norms["gradient"], given.gradient.norm(dim=1).double().numpy(), rtol=8 * eps)
    exact = given.gradient.double().numpy()
    np.testing.assert_allclose(found.grams["gradient"], exact @ exact.T, rtol=8 * eps, atol=8 * eps)


@pytest.mark.parametrize("kind", [FastReplies, with_stats])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_question_has_the_plain_answer(kind: Any, dtype: torch.dtype) -> None:
    """Of fields with statistics and without; also after some replies were dropped and some clipped."""
    given = updates(dtype=dtype)
    places, factors = torch.tensor([0, 2, 3]), torch.tensor([1.0, 0.25, 0.5], dtype=torch.float64)
    extra, weights = torch.randn(2, 7, dtype=dtype, generator=torch.Generator().manual_seed(9)), np.array([0.2, 0.8, 0])
    plain, fast = Replies(given), kind(given)
    rtol = 1e-13 if dtype == torch.float64 else 2e-6
    for mine, other in (
        (fast, plain),
        (fast.take(places), plain.take(places)),
        (fast.take(places).scaled(factors, CLIPPED), plain.take(places).scaled(factors, CLIPPED)),
    ):
        assert len(mine) == len(other)
        assert mine.kind is other.kind
        for field in ("gradient", "kernel", "inner.share", "rate"):
            np.testing.assert_allclose(mine.norms(field), other.norms(field), rtol=rtol)
        for field in ("rate", "n_seen", "inner.share"):
            np.testing.assert_allclose(mine.scalars(field), other.scalars(field), rtol=rtol)
        for field in ("gradient", "kernel"):
            np.testing.assert_allclose(mine.gram(field), other.gram(field), rtol=rtol, atol=10 * rtol)
            assert torch.equal(mine.rows(field), other.rows(field))
        for more in (extra, (extra[:1], extra[1:])):
            np.testing.assert_allclose(
                mine.gram("gradient", more), other.gram("gradient", more), rtol=rtol, atol=10 * rtol
            )
        padded = np.pad(weights, (0, len(other) - 3))
        assert torch.equal(mine.combine("kernel", padded), other.combine("kernel", padded))
        assert torch.equal(mine.mean("gradient"), other.mean("gradient"))


@pytest.mark.parametrize("bad", [1.0, math.nan, math.inf, 0.0, 1e-30, 9.0, 1e3, 1e30, 1e200])
@pytest.mark.parametrize("field", ["gradient", "kernel"])
@pytest.mark.parametrize("client", [0, 3])
def test_screening_by_the_statistics_is_screening_by_the_replies(bad: float, field: str, client: int) -> None:
    given = updates()
    getattr(given, field)[client] *= bad
    by_look = screen(Replies(given), Policy(), INFO)
    by_stats = screen(with_stats(given), Policy(), INFO)
    assert by_stats.kept.tolist() == by_look.kept.tolist()
    torch.testing.assert_close(by_stats.factors, by_look.factors, rtol=1e-14, atol=0.0)  # norms of their own rounding
    assert by_stats.dropped == by_look.dropped


@pytest.mark.parametrize("seed", range(5))
def test_a_number_that_is_not_finite_is_seen_and_one_that_may_be_is_not(seed: int) -> None:
    given = updates(seed=seed)
    given.rate[1], given.inner.share[2] = math.nan, math.nan
    assert screen(with_stats(given), Policy(), INFO).dropped == [(2, "update is not finite")]


@pytest.mark.parametrize("seed", range(5))
def test_the_screened_statistics_are_those_of_the_screened_replies(seed: int) -> None:
    given = updates(seed=seed)
    given.gradient[0] *= 1e4  # clipped
    given.gradient[2] *= 0.0  # dropped
    replies = with_stats(given)
    found = screen(replies, Policy(), INFO)
    assert len(found.kept) == 4
    assert float(found.factors.min()) < 1
    left = screened_replies(replies, found, INFO)
    expected = stats_of(left.updates)
    for part in ("scalars", "norms", "grams"):
        mine, other = getattr(left.stats, part), getattr(expected, part)
        assert mine.keys() == other.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name], other[name], rtol=1e-13, atol=0)


def test_untouched_replies_keep_their_statistics() -> None:
    replies = with_stats(updates())
    known = replies.stats.grams["gradient"]
    same = screened_replies(replies, screen(replies, Policy(), INFO), INFO)
    assert same.stats.grams["gradient"] is known


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_too_large_for_a_number_are_computed_again_after_clipping(dtype: torch.dtype) -> None:
    given = updates(dtype=dtype)
    given.gradient[1] *= 1e25 if dtype == torch.float32 else 1e200
    replies = with_stats(given)
    assert not np.isfinite(replies.stats.grams["gradient"]).all()
    found = screen(replies, Policy(), INFO)
    left, expected = (screened_replies(r, found, INFO) for r in (replies, Replies(given)))
    assert np.isfinite(left.gram("gradient")).all()
    np.testing.assert_allclose(left.gram("gradient"), expected.gram("gradient"), rtol=1e-5, atol=1e-5)


def test_statistics_are_waited_for_at_the_first_question_and_once() -> None:
    given, n_waits = updates(), 0

    def wait() -> ReplyStats:
        nonlocal n_waits
        n_waits += 1
        return stats_of(given)

    replies = GraphReplies(given, wait)
    assert len(replies) == 5
    assert replies.kind is Update
    replies.combine("gradient", np.ones(5))
    assert n_waits == 0
    replies.norms("kernel")
    replies.scalars("rate")
    replies.take(torch.tensor([1, 2])).gram("gradient")
    assert n_waits == 1


def test_the_fields_whose_products_are_asked_for_are_noted() -> None:
    given, asked = updates(), list[str]()
    replies = GraphReplies(given, lambda: stats_of(given), lambda field, _: asked.append(field))
    replies.gram("gradient")
    replies.take(torch.tensor([0, 1])).scaled(torch.ones(2, dtype=torch.float64), CLIPPED).gram("kernel")
    assert asked == ["gradient", "kernel"]


@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("asks", ["all", "two of them", "scaled"])
def test_products_with_rows_of_the_server_come_with_the_replies(asks: str, *, changes: bool) -> None:
    """Where the rows have changed since then, the products are computed when they are asked for."""
    given, rows, more = updates(), torch.randn(3, 7, dtype=torch.float64), torch.randn(2, 7, dtype=torch.float64)
    beside = {"gradient": [rows]}
    plan = stats_plan(given, NAN_OK, ("gradient",), beside)
    stats = unpacked_stats(plan, packed_stats(plan, given, beside).numpy(), 5)
    kept = {"gradient": [KeptRows(rows, rows._version)]}
    if changes:
        rows.index_fill_(0, torch.tensor([1]), 2.0)
    plain: Replies[Update] = Replies(given)
    known: Replies[Update] = GraphReplies(given, lambda: stats, kept=kept)
    if asks == "two of them":
        plain, known = (replies.take(torch.tensor([1, 3])) for replies in (plain, known))
    if asks == "scaled":
        factors = torch.rand(5, dtype=torch.float64)
        plain, known = (replies.scaled(factors, CLIPPED) for replies in (plain, known))
    for extra in (rows, (rows, more), (more, rows), (rows.clone(), more[:0])):
        np.testing.assert_allclose(known.gram("gradient", extra), plain.gram("gradient", extra), rtol=1e-12, atol=1e-12)

"""A digest says of the answers what the server would find by looking at them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.core.digest import (
    Digest,
    DigestPlan,
    digest_plan,
    field_gramian,
    packed_digest,
    unpacked_digest,
)
from dqnfed.core.screening import Policy, screen, screened_digest, screened_updates
from dqnfed.core.tensors import numbers_on_host
from dqnfed.maths.gramian import gramian

SCALES = ("gradient", "rate")
OPTIONAL = ("rate", "change")


class Inner(NamedTuple):
    share: Tensor  # []


class Update(NamedTuple):
    gradient: Tensor  # [n]
    rate: Tensor  # [] NaN: not known
    kernel: Tensor  # [2, 3]
    n_seen: Tensor  # [] an integer
    change: Tensor  # [n] or [0]
    inner: Inner


ROWS = torch.linspace(-1.0, 1.0, 21, dtype=torch.float64).reshape(3, 7)  # with which the gradients are compared


def answers(K: int = 5, n: int = 7, dtype: torch.dtype = torch.float64, seed: int = 0) -> Update:
    g = torch.Generator().manual_seed(seed)
    return Update(
        torch.randn(K, n, generator=g, dtype=dtype),
        torch.rand(K, generator=g, dtype=dtype),
        torch.randn(K, 2, 3, generator=g, dtype=dtype),
        torch.arange(K),
        torch.zeros(K, 0, dtype=dtype),
        Inner(-torch.rand(K, generator=g, dtype=dtype)),
    )


def digest_of(updates: Update, theta: Tensor | None = None) -> Digest:
    plan = digest_plan(updates, OPTIONAL, "gradient")
    packed = packed_digest(plan, updates, theta, ROWS.to(updates.gradient.dtype))
    return unpacked_digest(plan, packed.numpy(), len(updates.rate), len(ROWS))


def test_what_is_digested_follows_from_the_fields() -> None:
    plan = digest_plan(answers(), OPTIONAL, "gradient")
    assert plan == DigestPlan(("rate", "inner.share"), ("kernel",), ("gradient",))  # whose Gramian has its norms
    assert digest_plan(answers(), OPTIONAL, "") == DigestPlan(("rate", "inner.share"), ("gradient", "kernel"), ())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("K", [1, 2, 5])
def test_it_holds_what_looking_at_the_answers_gives(dtype: torch.dtype, K: int) -> None:
    updates, theta = answers(K, dtype=dtype), torch.arange(9, dtype=dtype)
    found = digest_of(updates, theta)
    assert found.theta_norm == float(torch.linalg.vector_norm(theta, dtype=torch.float64))
    assert np.array_equal(found.numbers["rate"], updates.rate.double().numpy())
    assert np.array_equal(found.numbers["inner.share"], updates.inner.share.double().numpy())
    assert np.array_equal(found.norms["inner.share"], updates.inner.share.abs().double().numpy())
    assert np.array_equal(found.norms["kernel"], updates.kernel.flatten(1).norm(dim=1).double().numpy())
    eps = torch.finfo(dtype).eps
    np.testing.assert_allclose(found.norms["gradient"], updates.gradient.norm(dim=1).double().numpy(), rtol=8 * eps)
    np.testing.assert_allclose(
        found.gramians["gradient"], gramian(updates.gradient).numpy(), rtol=8 * eps, atol=8 * eps
    )
    np.testing.assert_allclose(
        found.products["gradient"], updates.gradient.double().numpy() @ ROWS.numpy().T, rtol=8 * eps, atol=8 * eps
    )
    assert math.isnan(digest_of(updates).theta_norm)


@pytest.mark.parametrize("bad", [1.0, math.nan, math.inf, 0.0, 1e-30, 9.0, 1e3, 1e30, 1e200])
@pytest.mark.parametrize("field", ["gradient", "kernel"])
@pytest.mark.parametrize("client", [0, 3])
def test_screening_by_the_digest_is_screening_by_the_answers(bad: float, field: str, client: int) -> None:
    updates = answers()
    getattr(updates, field)[client] *= bad
    by_look = screen(updates, Policy(), SCALES, OPTIONAL)
    by_digest = screen(updates, Policy(), SCALES, OPTIONAL, digest=digest_of(updates))
    assert by_digest.kept.tolist() == by_look.kept.tolist()
    torch.testing.assert_close(by_digest.factors, by_look.factors, rtol=1e-14, atol=0.0)  # norms of their own rounding
    assert by_digest.dropped == by_look.dropped


@pytest.mark.parametrize("seed", range(5))
def test_a_number_that_is_not_finite_is_seen_and_one_that_may_be_is_not(seed: int) -> None:
    updates = answers(seed=seed)
    updates.rate[1], updates.inner.share[2] = math.nan, math.nan
    found = screen(updates, Policy(), SCALES, OPTIONAL, digest=digest_of(updates))
    assert found.dropped == [(2, "update is not finite")]


@pytest.mark.parametrize("seed", range(5))
def test_the_screened_digest_is_that_of_the_screened_answers(seed: int) -> None:
    updates = answers(seed=seed)
    updates.gradient[0] *= 1e4  # clipped
    updates.gradient[2] *= 0.0  # dropped
    found = screen(updates, Policy(), SCALES, OPTIONAL)
    assert len(found.kept) == 4
    assert float(found.factors.min()) < 1
    theta = torch.ones(3, dtype=torch.float64)
    left = screened_digest(digest_of(updates, theta), found, SCALES, 5)
    wanted = digest_of(screened_updates(updates, found, SCALES), theta)
    assert left.theta_norm == wanted.theta_norm
    for field in ("numbers", "norms", "gramians", "products"):
        mine, other = getattr(left, field), getattr(wanted, field)
        assert mine.keys() == other.keys()
        for name in mine:
            np.testing.assert_allclose(mine[name], other[name], rtol=1e-13, atol=0)


def test_untouched_answers_keep_their_digest() -> None:
    updates = answers()
    digest = digest_of(updates)
    assert screened_digest(digest, screen(updates, Policy(), SCALES, OPTIONAL), SCALES, 5) is digest


def test_numbers_come_from_the_digest_in_their_own_precision() -> None:
    updates = answers(dtype=torch.float32)
    there = numbers_on_host(updates, digest_of(updates).numbers)
    assert torch.equal(there.rate, updates.rate)
    assert torch.equal(there.inner.share, updates.inner.share)
    assert there.rate.dtype == torch.float32
    assert there.gradient is updates.gradient
    assert there.n_seen is updates.n_seen


def test_a_gramian_is_computed_where_no_digest_has_it() -> None:
    updates = answers()
    expected = gramian(updates.gradient).numpy()
    assert np.array_equal(field_gramian(updates.gradient, None, "gradient"), expected)
    assert np.array_equal(field_gramian(updates.gradient, digest_of(updates), "other"), expected)
    assert field_gramian(updates.gradient, digest := digest_of(updates), "gradient") is digest.gramians["gradient"]


@pytest.mark.parametrize("seed", range(5))
def test_no_mean_of_the_rows_carries_the_model_beyond_the_bound(seed: int) -> None:
    updates, theta = answers(seed=seed), torch.ones(7, dtype=torch.float64)
    weights = torch.softmax(updates.rate, 0)
    moved = theta - 3.0 * (weights @ updates.gradient)
    assert float(moved.norm()) <= digest_of(updates, theta).moved_norm("gradient", 3.0)
    updates.gradient[0, 0] = math.inf
    assert not math.isfinite(digest_of(updates, theta).moved_norm("gradient", 3.0))

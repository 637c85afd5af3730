"""What a server may ask of the replies, against plain loops over clients."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dqnfed.core.replies import Replies
from tests.helpers.bowls import normal

K, N = 5, 12


class Reply(NamedTuple):
    delta: Tensor  # [n]
    matrix: Tensor  # [3, 4]
    loss: Tensor  # []
    label: Tensor  # []


def replies(dtype: torch.dtype = torch.float64) -> Replies[Reply]:
    delta, matrix, loss = normal(K, N, seed=1), normal(K, 3, 4, seed=2), normal(K, seed=3)
    return Replies(Reply(delta.to(dtype), matrix.to(dtype), loss.to(dtype), torch.arange(K)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_combination_is_the_sum_of_weighted_rows_in_their_shape_and_precision(dtype: torch.dtype) -> None:
    given, weights = replies(dtype), np.array([0.5, -1.0, 0.0, 2.0, 0.25])
    for field in ("delta", "matrix"):
        rows = given.rows(field)
        expected = sum(w * rows[k].double() for k, w in enumerate(weights.tolist()))
        for asked in (weights, torch.from_numpy(weights)):
            found = given.combine(field, asked)
            assert (found.shape, found.dtype) == (rows.shape[1:], dtype)
            torch.testing.assert_close(found.double(), expected, rtol=0, atol=10 * torch.finfo(dtype).eps)


def test_a_mean_divides_by_the_sum_of_its_weights() -> None:
    given = replies()
    torch.testing.assert_close(given.mean("delta"), given.rows("delta").mean(0), rtol=1e-14, atol=1e-15)
    counts = torch.tensor([10, 0, 30, 5, 5])
    by_hand = (given.rows("delta") * counts[:, None]).sum(0) / 50
    torch.testing.assert_close(given.mean("delta", counts), by_hand, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("weights", [[0.0] * K, [1.0, -1.0, 3.0, 1.0, 1.0], [float("nan")] * K])
def test_a_mean_refuses_weights_that_are_no_shares(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights of a mean must be non-negative with a positive sum"):
        replies().mean("delta", torch.tensor(weights))


def test_products_are_those_of_every_two_rows_and_of_extra_rows() -> None:
    given, extra = replies(), normal(2, N, seed=9)
    rows = [*given.rows("delta"), *extra]
    expected = [[float(rows[i] @ rows[j]) for j in range(K + 2)] for i in range(K)]
    np.testing.assert_allclose(given.gram("delta"), np.array(expected)[:, :K], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(given.gram("delta", extra), expected, rtol=1e-12, atol=1e-14)
    flat = given.rows("matrix").reshape(K, -1)
    np.testing.assert_allclose(given.gram("matrix"), flat @ flat.T, rtol=1e-12, atol=1e-14)


def test_scalars_and_norms_are_float64_on_the_host() -> None:
    given = replies(torch.float32)
    assert given.scalars("loss").dtype == given.norms("delta").dtype == np.float64
    assert given.scalars("label").tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    lengths = [float(row.double().norm()) for row in given.rows("matrix")]
    np.testing.assert_allclose(given.norms("matrix"), lengths, rtol=1e-6)


def test_replies_may_be_selected_and_scaled_and_stay_as_they_were() -> None:
    given = replies()
    copies = [t.clone() for t in given.updates]
    factors = torch.tensor([1.0, 0.5, 1.0, 0.1, 1.0], dtype=torch.float64)
    scaled = given.scaled(factors, ("delta", "loss", "no such field"))
    assert torch.equal(scaled.updates.delta, given.updates.delta * factors[:, None])
    assert torch.equal(scaled.updates.loss, given.updates.loss * factors)
    assert scaled.updates.matrix is given.updates.matrix
    taken = scaled.take(torch.tensor([3, 1]))
    assert (len(given), len(taken), taken.kind) == (K, 2, Reply)
    assert torch.equal(taken.rows("delta"), scaled.rows("delta")[[3, 1]])
    assert all(torch.equal(mine, copy) for mine, copy in zip(given.updates, copies, strict=True))


class Outer(NamedTuple):
    inner: Reply
    weight: Tensor  # []


def test_fields_of_a_record_inside_the_reply_are_named_with_a_dot() -> None:
    plain = replies()
    nested = Replies(Outer(plain.updates, torch.arange(float(K))))
    weights = np.arange(1.0, K + 1)
    assert torch.equal(nested.rows("inner.matrix"), plain.rows("matrix"))
    assert torch.equal(nested.combine("inner.matrix", weights), plain.combine("matrix", weights))
    assert torch.equal(nested.mean("inner.delta"), plain.mean("delta"))
    np.testing.assert_array_equal(nested.gram("inner.delta"), plain.gram("delta"))
    np.testing.assert_array_equal(nested.norms("inner.matrix"), plain.norms("matrix"))
    np.testing.assert_array_equal(nested.scalars("inner.loss"), plain.scalars("loss"))
    assert nested.dtype("inner.loss") == torch.float64
    assert torch.equal(nested.take(torch.tensor([3])).rows("inner.delta"), plain.rows("delta")[[3]])

"""Which mean gradients the metric compares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dqnfed.algorithms.parts.metric import Mean, Metric
from dqnfed.core.algorithm import Cohort
from dqnfed.core.replies import Replies

METRIC = Metric(2, keeps_mean=True)
THETA = torch.zeros(2, dtype=torch.float64)
BEFORE = torch.tensor([1.0, -1.0], dtype=torch.float64)
ROWS = torch.tensor([[2.0, 4.0], [6.0, 0.0], [100.0, 100.0]], dtype=torch.float64)


class Reply(NamedTuple):
    gradient: Tensor


def change(*clients: int) -> Tensor | None:
    """Return the change of the mean over clients 0 and 1 as seen from the replies of some of three clients."""
    state = METRIC.init(THETA)._replace(before=Mean(BEFORE, torch.tensor([True, True, False])))
    cohort = Cohort(torch.tensor(clients), torch.ones(len(clients)), 3, 1)
    return METRIC.change(state, Replies(Reply(ROWS[list(clients)])), cohort)


def test_the_change_is_that_of_the_same_clients_mean() -> None:
    expected = torch.tensor([3.0, 3.0], dtype=torch.float64)  # (2 + 6) / 2 - 1 and (4 + 0) / 2 + 1
    for clients in ((0, 1), (0, 1, 2)):
        found = change(*clients)
        assert found is not None
        torch.testing.assert_close(found, expected)


def test_without_one_of_them_the_change_is_not_known() -> None:
    assert change(0, 2) is None
    assert change(1) is None
    assert change(2) is None

"""Clients on streams of one GPU."""

from __future__ import annotations

import pytest
import torch

from dqnfed import FedAvg, looped, run
from dqnfed.accel.streams import balanced, streams
from tests.helpers.bowls import network_bowl


def test_the_largest_come_first_and_lanes_are_even() -> None:
    order = balanced([1, 7, 3, 5, 2], 2)
    assert [k for k, _ in order] == [1, 3, 2, 4, 0]
    loads = [sum([1, 7, 3, 5, 2][k] for k, lane in order if lane == one) for one in range(2)]
    assert sorted(loads) == [9, 9]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_replies_are_those_of_one_client_after_the_other() -> None:
    case = network_bowl()
    problem, federation = case.problem.to("cuda"), case.federation.to("cuda")
    algorithm = FedAvg(lr=0.1, batch_size=3, epochs=2)
    runs = [run(algorithm, problem, federation, rounds=4, cohort=cohort) for cohort in (looped(), streams(2))]
    torch.testing.assert_close(runs[0].theta, runs[1].theta, rtol=1e-6, atol=1e-8)

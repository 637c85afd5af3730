"""Every draw is a function of (run seed, round, client, purpose), and of nothing else."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from dqnfed.core.seeds import newest_last, numpy_seed_for, seed_for, seed_number


def test_no_two_places_share_a_number() -> None:
    places = list(itertools.product(range(12), range(12), range(12), ("", "batches", "noise", "cohort")))
    assert len({seed_number(*place) for place in places}) == len(places)


def test_digits_do_not_run_together() -> None:
    assert seed_number(1, 11) != seed_number(11, 1)
    assert seed_number(0, 1, 23) != seed_number(0, 12, 3)


def test_numbers_are_the_same_on_every_machine() -> None:
    """Fixed by BLAKE2b (RFC 7693), recomputed with another implementation: `b2sum -l 64` of "3/14/15/batches"."""
    assert seed_number(3, 14, 15, "batches") == int.from_bytes(bytes.fromhex("6b4b27d97ea24ff8"), "little") >> 1


def test_generators_repeat_and_ignore_the_global_stream() -> None:
    torch.manual_seed(0)
    first = torch.rand(5, generator=seed_for(1, 2, 3, "noise"))
    torch.manual_seed(99)
    assert torch.equal(first, torch.rand(5, generator=seed_for(1, 2, 3, "noise")))
    assert not torch.equal(first, torch.rand(5, generator=seed_for(1, 2, 4, "noise")))
    assert (numpy_seed_for(1, 2).random(5) == numpy_seed_for(1, 2).random(5)).all()


def test_torch_and_numpy_accept_every_number() -> None:
    for seed in (0, 2**31, 2**63 - 1, -5):
        assert 0 <= seed_number(seed) < 2**63
        assert 0 <= float(torch.rand((), generator=seed_for(seed))) < 1
        assert 0 <= numpy_seed_for(seed).random() < 1


def test_newest_last_is_by_round_and_favours_nobody_within_one() -> None:
    clients = np.arange(20)
    assert newest_last(np.array([7, 3, 5]), np.array([3, 1, 2])).tolist() == [1, 2, 0]
    last = {int(newest_last(clients, round)[-1]) for round in range(200)}
    assert last == set(range(20))

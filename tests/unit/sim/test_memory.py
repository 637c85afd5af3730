"""Client memories against the plainest oracle there is: a dict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.algorithms.fedavg import FedAvg
from dqnfed.core.algorithm import Info, Theta
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import map_tensors
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.tasks import TaskBuilder
from tests.helpers.bowls import federation_of, labelled_clients, network_bowl


class Counts(NamedTuple):
    n_rounds: Tensor  # []
    notes: Tensor  # [2]


@dataclass(frozen=True, kw_only=True)
class Counting(FedAvg):
    """FedAvg whose clients start counting with the number of their examples."""

    info: ClassVar[Info] = replace(FedAvg.info, memory=Counts)

    def init_memory(self, problem: Problem, task: Task) -> Counts:  # type: ignore[override]
        return Counts(task.mask.sum(), torch.zeros(2, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class CountingLooped(Counting):
    info: ClassVar[Info] = replace(Counting.info, looped_messages=(Theta,))


def store_of(algorithm: FedAvg, n_clients: int) -> tuple[MemoryStore, Callable[[Tensor], Task]]:
    problem = network_bowl().problem
    builder = TaskBuilder(federation_of(labelled_clients(n_clients, 4)), problem, algorithm, 0)
    return MemoryStore(algorithm, problem, n_clients), lambda clients: builder.stacked(clients, 0)


@pytest.mark.parametrize("algorithm", [Counting(), CountingLooped()])
@pytest.mark.parametrize("seed", range(4))
def test_random_cohorts_equal_a_dict(algorithm: FedAvg, seed: int) -> None:
    n_clients = 7
    store, tasks = store_of(algorithm, n_clients)
    oracle: dict[int, tuple[float, list[float]]] = {}
    rng = np.random.default_rng(seed)
    held: list[tuple[Counts, Counts]] = []  # what was handed out, and its values then

    def drawn() -> Tensor:
        size = n_clients if rng.random() < 0.3 else int(rng.integers(1, n_clients + 1))
        return torch.as_tensor(np.sort(rng.choice(n_clients, size, replace=False)))

    upcoming = drawn()
    for round in range(40):
        clients, upcoming = upcoming, drawn()
        assert store.knows(clients) == all(c in oracle for c in clients.tolist())
        found = store.get(clients, tasks(clients))
        expected = [oracle.get(c, (8.0 + c, [0.0, 0.0])) for c in clients.tolist()]
        assert found.n_rounds.tolist() == [v for v, _ in expected]
        assert found.notes.tolist() == [notes for _, notes in expected]
        held.append((found, map_tensors(torch.clone, found)))
        if round % 2:
            store.prefetch(upcoming)
        stays = torch.as_tensor(np.flatnonzero(rng.random(len(clients)) < 0.8))  # the others were dropped this time
        kept = clients[stays]
        after = Counts(found.n_rounds[stays] + 1, found.notes[stays] + round)
        store.put(kept, after)
        held.append((after, map_tensors(torch.clone, after)))
        for k, c in enumerate(kept.tolist()):
            oracle[c] = (float(after.n_rounds[k]), after.notes[k].tolist())
        for given, then in held:
            assert all(torch.equal(a, b) for a, b in zip(given, then, strict=True)), "a tensor was written into"


def test_newcomers_are_not_stored_before_they_reply() -> None:
    store, tasks = store_of(Counting(), 3)
    clients = torch.tensor([0, 2])
    store.get(clients, tasks(clients))
    assert store.rows is None
    assert store.row_of.tolist() == [-1, -1, -1]
    store.put(clients[:0], None)
    assert store.rows is None


def test_a_memory_that_vmap_did_not_copy_may_be_overwritten_in_part() -> None:
    """A client that keeps the server's own theta hands back one tensor seen n times; writing into it reaches all."""
    store, tasks = store_of(Counting(), 3)
    theta, everyone = torch.zeros(2, dtype=torch.float64), torch.arange(3)
    store.put(everyone, store.get(everyone, tasks(everyone)))
    view = vmap(lambda count: Counts(count, theta))(torch.zeros(3, dtype=torch.float64))
    assert view.notes.data_ptr() == theta.data_ptr()
    store.put(everyone, view)
    store.put(torch.tensor([1]), Counts(torch.ones(1, dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)))
    assert theta.tolist() == [0.0, 0.0]
    assert store.get(everyone, tasks(everyone)).notes.tolist() == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


def test_a_reply_may_share_its_memory() -> None:
    """The memories of those that pass are stored before the server reads the replies."""
    store, tasks = store_of(Counting(), 3)
    everyone = torch.arange(3)
    store.put(everyone, store.get(everyone, tasks(everyone)))
    reply = store.get(everyone, tasks(everyone)).notes  # a method that sends what it keeps
    store.put(torch.tensor([0, 2]), Counts(torch.ones(2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)))
    assert reply.tolist() == [[0.0, 0.0]] * 3


def test_rows_handed_out_stay_as_they_were_when_newcomers_arrive() -> None:
    """Clients 0 and 1 are handed out whole, client 2 arrives, then client 0 changes: the old hand-out must not."""
    store, tasks = store_of(Counting(), 6)
    pair, third = torch.tensor([0, 1]), torch.tensor([2])
    store.put(pair, store.get(pair, tasks(pair)))
    handed_out = store.get(pair, tasks(pair))
    before = map_tensors(Tensor.clone, handed_out)
    store.put(third, store.get(third, tasks(third)))
    first = torch.tensor([0])
    store.put(first, map_tensors(lambda t: torch.full_like(t[:1], 99.0), before))
    assert all(torch.equal(a, b) for a, b in zip(handed_out, before, strict=True))


def test_room_is_reserved_once_and_filled_as_clients_arrive() -> None:
    store, tasks = store_of(Counting(), 6)
    places = set()
    for client in range(5):
        one = torch.tensor([client])
        store.put(one, store.get(one, tasks(one)))
        places.add(store.rows.notes.data_ptr())
        assert len(store.rows.notes) == client + 1
    assert len(places) == 1  # never copied


@pytest.mark.parametrize("large", [0, 2**20])  # written one by one, or stacked first
@pytest.mark.parametrize("n_stacked", [0, 3])  # clients that came stacked before
def test_memories_that_come_one_by_one_are_kept_and_survive_a_file(
    large: int, n_stacked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dqnfed.sim.memory.LARGE", large)
    store, tasks = store_of(Counting(), 6)
    if n_stacked:
        store.put(torch.arange(n_stacked), Counts(torch.arange(3.0), torch.zeros(3, 2, dtype=torch.float64)))
    kept = {c: Counts(torch.tensor(10.0 + c), torch.full((2,), float(c), dtype=torch.float64)) for c in (1, 4)}
    store.keep(list(kept), list(kept.values()))
    other, _ = store_of(Counting(), 6)
    other.load({name: t.clone() for name, t in store.named().items()}, torch.device("cpu"))
    for found in (store, other):
        for c in range(6):
            fresh = float(tasks(torch.tensor([c])).mask.sum())
            count = 10.0 + c if c in kept else float(c) if c < n_stacked else fresh
            one = found.one(c, Task(*(t[0] for t in tasks(torch.tensor([c])))))
            assert float(one.n_rounds) == count
            assert one.notes.tolist() == [float(c) if c in kept else 0.0] * 2
        everyone = torch.arange(6)
        assert [float(v) for v in found.get(everyone, tasks(everyone)).n_rounds[[1, 4]]] == [11.0, 14.0]

"""From a federation to the tasks of a round: uniform sampling, padding that changes nothing."""

from __future__ import annotations

import math

import pytest
import torch

from dqnfed import FedAvg
from dqnfed.sim.setup import cohort_size
from dqnfed.sim.tasks import TaskBuilder, sampled_clients
from tests.helpers.bowls import federation_of, labelled_clients, network_bowl


def test_sampling_is_uniform_over_clients_and_pairs() -> None:
    """4000 rounds, 3 of 10: counts within 5 standard deviations, which chance alone breaks once in 10^4 runs."""
    rounds, n, k = 4000, 10, 3
    times, pairs = torch.zeros(n), torch.zeros(n, n)
    for round in range(rounds):
        chosen = sampled_clients(1, round, n, k)
        times[chosen] += 1
        pairs[chosen[:, None], chosen[None, :]] += 1
    for counts, p in ((times, k / n), (pairs[~torch.eye(n, dtype=torch.bool)], k * (k - 1) / (n * (n - 1)))):
        spread = math.sqrt(rounds * p * (1 - p))
        assert (counts - rounds * p).abs().max() <= 5 * spread


def test_samples_are_ascending_distinct_and_a_function_of_seed_and_round() -> None:
    for round in range(50):
        chosen = sampled_clients(0, round, 20, 7)
        assert chosen.tolist() == sorted(set(chosen.tolist()))
        assert len(chosen) == 7
        assert torch.equal(chosen, sampled_clients(0, round, 20, 7))
    assert sampled_clients(0, 3, 5, 5).tolist() == sampled_clients(0, 3, 5, 9).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("share", "n", "size"), [(1.0, 7, 7), (0.1, 10, 1), (0.01, 10, 1), (0.3, 10, 3), (0.25, 10, 2)]
)
def test_a_share_means_a_rounded_number_of_clients(share: float, n: int, size: int) -> None:
    assert cohort_size(share, n) == size


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, math.nan])
def test_other_shares_are_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"participation must be a share in \(0, 1\]"):
        cohort_size(share, 10)


def test_tasks_hold_each_clients_own_examples_and_batches() -> None:
    clients = labelled_clients(4, 3)
    problem = network_bowl(n_inputs=3).problem
    builder = TaskBuilder(federation_of(clients), problem, FedAvg(epochs=2, batch_size=4, lr=0.5, lr_decay=0.1), 0)
    chosen = torch.tensor([0, 3])
    tasks = builder.stacked(chosen, round=2)
    for k, c in enumerate(chosen.tolist()):
        inputs, targets = clients[c]
        n = len(inputs)
        assert torch.equal(tasks.inputs[k, :n], inputs)
        assert torch.equal(tasks.targets[k, :n], targets)
        assert tasks.mask[k].tolist() == [1.0] * n + [0.0] * (tasks.mask.shape[1] - n)
        used = tasks.batches[k][tasks.batches[k] >= 0]
        assert sorted(used.tolist()) == sorted([*range(n), *range(n)])
        assert float(tasks.lr[k]) == pytest.approx(0.5 * 0.1**2)


def test_a_clients_task_does_not_depend_on_who_else_is_sampled() -> None:
    clients = labelled_clients(4, 3)
    problem = network_bowl(n_inputs=3).problem
    builder = TaskBuilder(federation_of(clients), problem, FedAvg(epochs=1, batch_size=4), 0)
    alone, crowd = builder.stacked(torch.tensor([1]), 5), builder.stacked(torch.tensor([0, 1, 3]), 5)
    steps, n = alone.batches.shape[1], alone.inputs.shape[1]
    assert torch.equal(crowd.batches[1, :steps], alone.batches[0])
    assert (crowd.batches[1, steps:] == -1).all()
    assert torch.equal(crowd.inputs[1, :n], alone.inputs[0])


def test_the_kept_examples_are_those_of_the_same_clients_only() -> None:
    problem, federation, _ = network_bowl()
    builder = TaskBuilder(federation, problem, FedAvg(), 0)
    first = builder.stacked(torch.tensor([0, 1]), 0)
    other = builder.stacked(torch.tensor([0, 2]), 1)
    again = builder.stacked(torch.tensor([0, 1]), 2)
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.targets, other.targets) or first.inputs.shape != other.inputs.shape


def test_a_client_on_its_own_draws_what_it_draws_among_others() -> None:
    problem, federation, _ = network_bowl()
    algorithm = FedAvg(epochs=2, batch_size=3)
    whole = TaskBuilder(federation, problem, algorithm, 5).stacked(torch.tensor([4]), 7)
    alone = TaskBuilder(federation.only(4), problem, algorithm, 5, numbers=[4]).stacked(torch.tensor([0]), 7)
    for mine, theirs in zip(alone, whole, strict=True):
        assert torch.equal(mine, theirs)


def test_indexed_tasks_name_the_rows_that_the_tasks_hold() -> None:
    problem, federation = network_bowl(n_inputs=3).problem, federation_of(labelled_clients(4, 3))
    builder = TaskBuilder(federation, problem, FedAvg(batch_size=4), 0)
    chosen = torch.tensor([0, 2, 3])
    indexed, whole = builder.task_indices(chosen, 1), builder.stacked(chosen, 1)
    assert torch.equal(federation.train.inputs[indexed.inputs], whole.inputs)
    for mine, other in zip(builder.gather_examples(indexed), whole, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("batch_size", [None, 4])
def test_clients_of_one_size_are_named_by_their_numbers_alone(batch_size: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(6, 3, generator=generator), torch.arange(6) % 2) for _ in range(5)]
    builder = TaskBuilder(federation_of(clients), network_bowl(n_inputs=3).problem, FedAvg(batch_size=batch_size), 0)
    chosen = torch.tensor([0, 2, 4])
    indexed = builder.task_indices(chosen, 1)
    assert indexed.inputs.tolist() == chosen.tolist()
    found = builder.gather_examples(indexed)
    for k, (c, alone) in enumerate(zip(chosen.tolist(), builder.per_client(chosen, 1), strict=True)):
        assert torch.equal(found.inputs[k], clients[c][0])
        assert torch.equal(found.targets[k], clients[c][1])
        assert all(torch.equal(mine[k], other) for mine, other in zip(found[2:], alone[2:], strict=True))

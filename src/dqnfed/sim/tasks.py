"""From a federation to the tasks of one round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dqnfed.core.algorithm import Algorithm, AnyAlgorithm
from dqnfed.core.federation import Examples, Federation
from dqnfed.core.local_work import LocalWork, draw_batches
from dqnfed.core.problem import Problem, Task
from dqnfed.core.seeds import numpy_seed_for, seed_for
from dqnfed.sim.stragglers import Stragglers


@lru_cache(maxsize=4)  # the next round's are asked for ahead of it
def sampled_clients(seed: int, round: int, n_clients: int, size: int) -> Tensor:
    """Return the clients of a round, uniform without replacement, ascending; the same for every method."""
    if size >= n_clients:
        return torch.arange(n_clients)
    chosen = numpy_seed_for(seed, round, purpose="cohort").choice(n_clients, size=size, replace=False)
    return torch.from_numpy(np.sort(chosen))


@lru_cache(maxsize=8)
def _filled(value: float, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of one number; nothing writes into it, so that every round's tasks may hold the same."""
    return torch.full(shape, value, dtype=dtype, device=device)


def rounded_up(n: int) -> int:
    """Return the next number of at most three binary digits and zeros: at most a quarter more."""
    unit = 1 << max(0, (n - 1).bit_length() - 3)
    return -(-n // unit) * unit


def _local_work(algorithm: AnyAlgorithm) -> tuple[int, int | None, Callable[[int], float]]:
    """Return epochs, batch size and learning rate by round; a method without such settings makes one full pass."""
    if not isinstance(algorithm, LocalWork):
        return 1, None, lambda _: 0.0
    lr = algorithm.lr
    return algorithm.epochs, algorithm.batch_size, algorithm.lr_at if algorithm.has_schedule else lambda _: lr


class TaskBuilder:
    """Builds the tasks of a cohort; the last cohort's examples are kept, since they often come again."""

    def __init__(
        self,
        federation: Federation,
        problem: Problem,
        algorithm: AnyAlgorithm,
        seed: int,
        *,
        numbers: Sequence[int] | None = None,  # the clients' numbers, where this federation is a part of a larger one
        stragglers: Stragglers | None = None,  # some of whose steps are left out where they may be late
    ) -> None:
        self._stragglers = stragglers if stragglers is not None and stragglers.late == "partial" else None
        self._federation, self._problem, self._algorithm, self._seed = federation, problem, algorithm, seed
        self._epochs, self._batch_size, self._lr_at = _local_work(algorithm)
        self._numbers = range(federation.n_clients) if numbers is None else numbers
        self._sizes: list[int] = federation.n_examples.tolist()
        train, size = federation.train, self._sizes[0]
        is_even = len(train.inputs) == size * len(self._sizes) and set(self._sizes) == {size}
        self._common_size = size if is_even and int(train.starts[0]) == 0 else None  # where all have as many examples
        self._place = problem.theta0.device if train.is_lazy else train.inputs.device
        self._last: tuple[list[int], tuple[Tensor, Tensor]] | None = None
        self._held: tuple[Tensor, Task] | None = None
        self._drawn: tuple[tuple[list[int], int], Task] | None = None
        self._ahead: tuple[tuple[list[int], int], Task] | None = None
        self._each: tuple[tuple[list[int], int], list[Task]] | None = None

    def stacked(self, clients: Tensor, round: int) -> Task:
        """Return the clients' tasks, stacked and padded to the largest; every phase of a round gets the same."""
        indexed = self.task_indices(clients, round)
        if self._held is None or self._held[0] is not indexed.inputs:  # the same cohort has the same rows
            self._held = (indexed.inputs, self._read(clients) or self.gather_examples(indexed))
        return indexed._replace(inputs=self._held[1].inputs, targets=self._held[1].targets)

    def _read(self, clients: Tensor) -> Task | None:
        """Return tasks with the examples of lazy clients, padded; None where the examples are in memory."""
        train = self._federation.train
        if not train.is_lazy:
            return None
        inputs, targets = train.taken(clients)
        ends = train.sizes_of(clients).cumsum(0)
        own = Examples(inputs, targets, torch.cat([torch.zeros(1, dtype=torch.long), ends]))
        rows, _ = own.padded_rows(torch.arange(len(clients)))
        padded = (t[rows].to(self._place, non_blocking=True) for t in (inputs, targets))
        return Task(*padded, *(torch.empty(0) for _ in Task._fields[2:]))

    def task_indices(self, clients: Tensor, round: int) -> Task:
        """Return what `stacked` does, but for inputs the numbers of their rows [K, N], and no targets.

        Where all clients have as many examples, their own numbers [K] say as much.
        """
        key = (clients.tolist(), round)
        if self._drawn is None or self._drawn[0] != key:
            is_ready = self._ahead is not None and self._ahead[0] == key
            self._drawn = self._ahead if is_ready else (key, self._task(clients, round))
        assert self._drawn is not None
        return self._drawn[1]

    def gather_examples(self, indexed: Task) -> Task:
        """Return the tasks with the examples whose rows are given; what it reads stays where it is, as graphs need.

        Tasks that have their examples keep them.
        """
        if indexed.targets.numel():
            return indexed
        inputs, targets = self._federation.train.inputs, self._federation.train.targets
        if self._common_size is not None:
            by_client = (len(self._sizes), self._common_size)
            inputs, targets = inputs.unflatten(0, by_client), targets.unflatten(0, by_client)
        return indexed._replace(inputs=inputs[indexed.inputs], targets=targets[indexed.inputs])

    def prefetch(self, clients: Tensor, round: int) -> None:
        """Draw the tasks that will be asked for next."""
        self._ahead = ((clients.tolist(), round), self._task(clients, round))

    def per_client(self, clients: Tensor, round: int) -> list[Task]:
        """Return the clients' tasks one by one: views of the examples, not padded; every phase gets the same."""
        key = (clients.tolist(), round)
        if self._each is None or self._each[0] != key:
            self._each = (key, self._tasks_one_by_one(key[0], round))
        return self._each[1]

    def pooled(self, clients: Tensor, round: int) -> Task:
        """Return one task with the rows of all these clients together, in batches drawn over all of them."""
        train, theta0 = self._federation.train, self._problem.theta0
        inputs, targets = (t.to(self._place) for t in train.taken(clients))
        batches = draw_batches(
            len(inputs),
            epochs=self._epochs,
            batch_size=self._batch_size,
            generator=seed_for(self._seed, round, purpose="pooled batches"),
        )
        lr = torch.tensor(self._lr_at(round), dtype=theta0.dtype, device=theta0.device)
        noise, mask = theta0.new_zeros(0), theta0.new_ones(len(inputs))
        return Task(inputs, targets, mask, batches.to(self._place), noise, lr)

    def _tasks_one_by_one(self, clients: list[int], round: int) -> list[Task]:
        theta0 = self._problem.theta0
        lr = torch.tensor(self._lr_at(round), dtype=theta0.dtype, device=theta0.device)
        noise = self._noise(torch.tensor(clients), round).to(theta0.device, non_blocking=True)
        tasks = []
        for k, (c, (inputs, targets)) in enumerate(zip(clients, self._examples_of(clients), strict=True)):
            mask = theta0.new_ones(len(inputs))
            batches = self._drawn_batches(c, round).to(inputs.device, non_blocking=True)
            tasks.append(Task(inputs, targets, mask, batches, noise[k], lr))
        return tasks

    def _examples_of(self, clients: list[int]) -> list[tuple[Tensor, Tensor]]:
        """Return each client's examples: views of those in memory, or read for the cohort at once."""
        train, chosen = self._federation.train, torch.tensor(clients)
        if train.is_lazy:
            sizes = train.sizes_of(chosen).tolist()
            inputs, targets = (t.to(self._place).split(sizes) for t in train.taken(chosen))
            return list(zip(inputs, targets, strict=True))
        bounds = zip(train.starts[chosen].tolist(), train.starts[chosen + 1].tolist(), strict=True)
        return [(train.inputs[start:end], train.targets[start:end]) for start, end in bounds]

    def _task(self, clients: Tensor, round: int) -> Task:
        theta0, place, K = self._problem.theta0, self._place, clients.shape[0]
        if self._last is None or self._last[0] != clients.tolist():
            if self._common_size is not None:
                rows, mask = clients, _filled(1.0, (K, self._common_size), theta0.dtype, theta0.device)
            else:
                largest = max(self._sizes[c] for c in clients.tolist())
                rows, real = self._federation.train.padded_rows(clients, self._common_extent(largest))
                mask = real.to(theta0.device, theta0.dtype, non_blocking=True)
            self._last = (clients.tolist(), (rows.to(place, non_blocking=True), mask))
        examples, mask = self._last[1]
        batches = _filled(0, (K, self._epochs, 0), torch.long, place)
        if self._batch_size is not None:
            batches = self._batches(clients, round).to(place, non_blocking=True)
        noise = _filled(0.0, (K, 0), theta0.dtype, theta0.device)
        if type(self._algorithm).noise is not Algorithm.noise:
            noise = self._noise(clients, round).to(theta0.device, non_blocking=True)
        lr = _filled(self._lr_at(round), (K,), theta0.dtype, theta0.device)
        return Task(examples, _filled(0, (K, 0), examples.dtype, place), mask, batches, noise, lr)

    def _noise(self, clients: Tensor, round: int) -> Tensor:
        generators = [seed_for(self._seed, round, self._numbers[c], "noise") for c in clients.tolist()]
        return torch.stack([self._algorithm.noise(self._problem, generator) for generator in generators])

    def _batches(self, clients: Tensor, round: int) -> Tensor:
        drawn = [self._drawn_batches(c, round) for c in clients.tolist()]
        n_steps = self._common_extent(max(map(len, drawn)))
        if {len(batches) for batches in drawn} == {n_steps}:
            return torch.stack(drawn)
        padded = pad_sequence(drawn, batch_first=True, padding_value=-1)
        return F.pad(padded, (0, 0, 0, n_steps - padded.shape[1]), value=-1)

    def _common_extent(self, n: int) -> int:
        """Return to what examples or steps are padded: on a GPU to one of few extents, since each has a graph."""
        return rounded_up(n) if self._place.type == "cuda" else n

    def _drawn_batches(self, client: int, round: int) -> Tensor:
        batches = draw_batches(
            self._sizes[client],
            epochs=self._epochs,
            batch_size=self._batch_size,
            generator=seed_for(self._seed, round, self._numbers[client], "batches"),
        )
        if self._stragglers is not None:
            share = self._stragglers.share(self._seed, round, client, np.array(self._sizes, dtype=np.float64))
            batches[self._stragglers.steps(share, len(batches)) :] = -1
        return batches

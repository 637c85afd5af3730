"""Clients shared out over a Ray cluster: the only file that knows Ray.

Every worker is an actor with one core. It reads the clients' data from Ray's shared memory, one copy on each machine,
and gets with every round what its clients are sent and what they remember; it keeps nothing itself. So a worker that
dies takes nothing with it: others do its share of the round again, to the same bits.
"""

from __future__ import annotations

import logging
import socket
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import map_tensors, stack
from dqnfed.sim.cohort import Answers, stacked_answers

logger = logging.getLogger("dqnfed")
START_SECONDS = 120.0  # in which a first worker must be there
GRACE_SECONDS = 10.0  # that the others have after the first; who comes later joins in a later round
MAX_DEATHS = 10  # of workers in one round


class Share(NamedTuple):
    """One client's work on the way to a worker: the rows of its examples, or the examples themselves."""

    place: int  # in the cohort
    rows: tuple[int, int] | None
    task: Any  # without examples where the rows say which they are
    memory: Any


class Report(NamedTuple):
    """What a worker did in a round."""

    answers: list[tuple[int, Any, Any]]  # place in the cohort, update, memory
    machine: str
    seconds: float


class Worker:
    """A process with one core; what it is asked is all that it knows."""

    def __init__(self, level: int) -> None:
        torch.set_num_threads(1)
        logging.basicConfig(level=level)
        self._orders: list[Any] = []

    def ready(self) -> str:
        """Return the machine's name."""
        return socket.gethostname()

    def answers(self, orders: list[Any], sent: Any, shares: list[Share]) -> Report:
        """Return the answers of some clients; the orders say where method, problem and examples are to be had."""
        began = time.perf_counter()
        if orders != self._orders:
            self._algorithm, self._problem, inputs, targets = ray.get(orders)
            self._inputs, self._targets, self._orders = _shared(inputs), _shared(targets), orders
        message = map_tensors(_copied, sent)
        found = []
        for place, rows, shipped, kept in shares:
            task, memory = map_tensors(_copied, shipped), map_tensors(_copied, kept)
            if rows is not None:
                task = task._replace(inputs=self._inputs[slice(*rows)], targets=self._targets[slice(*rows)])
            update, memory = self._algorithm.client_step(self._problem, task, message, memory)
            found.append((place, map_tensors(_array, update), map_tensors(_array, memory)))
        return Report(found, socket.gethostname(), time.perf_counter() - began)


@dataclass
class Crew:
    """The workers of a cluster: who is missing is asked for again, and joins when it is ready."""

    workers: int | None = None  # None: as many as the cluster has cores
    address: str | None = None  # of a running cluster, "auto" for the one on this machine; None: one of its own
    living: list[Any] = field(default_factory=list)
    _coming: dict[Any, Any] = field(default_factory=dict, repr=False)  # promise of readiness -> worker

    def hire(self) -> None:
        """Take on workers that have become ready, ask for those that are missing, and wait if there is none at all."""
        if not ray.is_initialized():
            start(self.workers, self.address)
        wanted = self.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        for _ in range(wanted - len(self.living) - len(self._coming)):
            options = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
            worker: Any = ray.remote(Worker).options(**options).remote(logger.getEffectiveLevel())
            self._coming[worker.ready.remote()] = worker
        for promise in self._arrived():
            worker = self._coming.pop(promise)
            try:
                ray.get(promise)
            except RayTaskError as error:
                raise error.as_instanceof_cause() from error
            except RayError:
                continue  # it died before it began
            self.living.append(worker)
        if not self.living:
            raise RuntimeError(
                f"no Ray worker was ready within {START_SECONDS:.0f} s: each needs a core, and the cluster has "
                f"{ray.available_resources().get('CPU', 0):g} free ones. `ray status` says more."
            )

    def _arrived(self) -> list[Any]:
        """Return the promises of workers that are ready; nobody is waited for, unless there is no worker yet."""
        coming = list(self._coming)
        if not coming:
            return []
        if not self.living:
            ray.wait(coming, num_returns=1, timeout=START_SECONDS)
            ray.wait(coming, num_returns=len(coming), timeout=GRACE_SECONDS)
        here: list[Any] = ray.wait(coming, num_returns=len(coming), timeout=0.0)[0]
        return here


@dataclass
class OverCluster:
    """Clients on the workers of a Ray cluster; every client is computed by one core, as with `threads`."""

    federation: Federation
    crew: Crew
    _orders: list[Any] = field(default_factory=list, repr=False)  # method, problem and examples in shared memory
    _of: tuple[Any, Any] | None = field(default=None, repr=False)  # the method and the problem that these are

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Answers:
        return stacked_answers(self, algorithm, problem, tasks, sent, memory)

    def apart(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        self.crew.hire()
        self._place(algorithm, problem)
        shares = [self._share(k, task, memories[k]) for k, task in enumerate(tasks)]
        sizes = [len(task.mask) * len(task.batches) for task in tasks]
        found: dict[int, tuple[Any, Any]] = {}
        for report in self._reports(ray.put(map_tensors(_array, sent)), shares, sizes):
            logger.debug("%d clients in %.2f s on %s", len(report.answers), report.seconds, report.machine)
            for place, update, memory in report.answers:
                found[place] = map_tensors(_copied, update), map_tensors(_copied, memory)
        return stack([found[k][0] for k in range(len(tasks))]), [found[k][1] for k in range(len(tasks))]

    def _place(self, algorithm: AnyAlgorithm, problem: Problem) -> None:
        """Put what does not change into the cluster's shared memory, once."""
        if self._of is None or self._of[0] != algorithm or self._of[1] is not problem:
            train = self.federation.train
            self._of = (algorithm, problem)
            self._orders = [ray.put(what) for what in (algorithm, problem, _array(train.inputs), _array(train.targets))]

    def _share(self, place: int, task: Task, memory: Any) -> Share:
        train, rows = self.federation.train, None
        row_bytes = train.inputs[:1].nbytes
        start = task.inputs.data_ptr() - train.inputs.data_ptr()
        if row_bytes and task.inputs.untyped_storage().data_ptr() == train.inputs.untyped_storage().data_ptr():
            rows = (start // row_bytes, start // row_bytes + len(task.inputs))
            task = task._replace(inputs=task.inputs[:0], targets=task.targets[:0])
        return Share(place, rows, map_tensors(_array, task), map_tensors(_array, memory))

    def _reports(self, message: Any, shares: list[Share], sizes: list[int]) -> list[Report]:
        """Return the reports of workers that together did all shares; those of dead ones are done again."""
        reports, left, n_deaths, living = [], shares, 0, self.crew.living
        while left:
            asked = {}
            for worker, dealt in zip(living, _dealt(left, sizes, len(living)), strict=True):
                if dealt:
                    asked[worker.answers.remote(self._orders, message, dealt)] = (worker, dealt)
            left = []
            for promise, (worker, dealt) in asked.items():
                try:
                    reports.append(ray.get(promise))
                except RayTaskError as error:
                    raise error.as_instanceof_cause() from error
                except RayError as error:
                    n_deaths += 1
                    if n_deaths > MAX_DEATHS:
                        raise RuntimeError(
                            f"{n_deaths} workers died in one round, the last one so: {error}. Ray's own logs say why "
                            "(often too little memory); fewer workers take less."
                        ) from error
                    logger.warning("a worker died; its %d clients are done again by others", len(dealt))
                    living.remove(worker)
                    left += dealt
            if left:
                self.crew.hire()
        return reports


def start(workers: int | None, address: str | None) -> None:
    """Connect to the cluster at the address, or start one on this machine."""
    if address is not None:
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
    else:
        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=True, logging_level=logging.WARNING)


def over_cluster(federation: Federation, *, workers: int | None = None, address: str | None = None) -> OverCluster:
    """Return the runner that shares this federation's clients out over a Ray cluster."""
    return OverCluster(federation, Crew(workers, address))


def _dealt(shares: list[Share], sizes: list[int], n_workers: int) -> list[list[Share]]:
    """Return the shares dealt out to the workers, the longest first and each to whom has least to do."""
    hands: list[list[Share]] = [[] for _ in range(n_workers)]
    loads = [0] * n_workers
    for share in sorted(shares, key=lambda share: -sizes[share.place]):
        k = loads.index(min(loads))
        hands[k].append(share)
        loads[k] += sizes[share.place]
    return hands


def _array(t: Tensor) -> Any:
    return t.detach().cpu().numpy()


def _copied(a: Any) -> Tensor:
    return _shared(a).clone()  # in torch's own memory, whose alignment may change the last bit of a product


def _shared(a: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory is read-only, and nobody writes to it
        return torch.from_numpy(np.asarray(a))

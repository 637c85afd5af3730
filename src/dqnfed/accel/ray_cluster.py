"""Clients on the workers of a Ray cluster: the only file that imports Ray.

Every worker is an actor with one core and, where that is asked for, a share of a GPU. It reads the clients' data from
Ray's shared memory, one copy on each machine, and gets every round's message and its clients' memories with its work;
it keeps nothing itself. So a worker that stops loses nothing: others repeat its part of the round, with the same bits.
"""

from __future__ import annotations

import copy
import logging
import socket
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray.exceptions import RayError, RayTaskError
from torch import Tensor

from dqnfed.accel.memory import keep_freed_blocks
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import ModuleModel, Problem, Task
from dqnfed.core.runners import Stacked, stacked_replies
from dqnfed.core.tensors import map_tensors, stack

logger = logging.getLogger("dqnfed")
START_SECONDS = 120.0  # within which a first worker must be ready
MORE_SECONDS = 10.0  # that the others have after the first; later ones are used from a later round on
MAX_FAILURES = 10  # of workers in one round


class ClientWork(NamedTuple):
    """One client's work on the way to a worker: the rows of its examples, or the examples themselves."""

    place: int  # in the cohort
    rows: tuple[int, int] | None
    task: Any  # without examples where the rows say which they are
    memory: Any


class WorkerReplies(NamedTuple):
    """What a worker computed in a round."""

    replies: list[tuple[int, Any, Any]]  # place in the cohort, update, memory
    machine: str
    seconds: float


class Worker:
    """A process with one core, or a share of a GPU; it keeps no state between calls but the data it was given."""

    def __init__(self, level: int, gpu_share: float) -> None:
        torch.set_num_threads(1)
        keep_freed_blocks()
        logging.basicConfig(level=level)
        self._gpu_share, self._device = gpu_share, torch.device("cuda:0" if gpu_share else "cpu")  # Ray shows its own
        self._references: list[Any] = []

    def ready(self) -> str:
        """Return the machine's name, once it is known that the worker has what it computes with."""
        if self._gpu_share and not torch.cuda.is_available():
            raise RuntimeError(
                f"a worker has {self._gpu_share:g} of a GPU by Ray's count, but torch on {socket.gethostname()} sees "
                "none; leave `run.gpu_share` out, or install a torch for its GPUs."
            )
        if self._gpu_share:
            torch.cuda.set_per_process_memory_fraction(self._gpu_share, self._device)
        return socket.gethostname()

    def replies(self, references: list[Any], sent: Any, work: list[ClientWork]) -> WorkerReplies:
        """Return the replies of some clients; the references are to method, problem and examples in shared memory."""
        started = time.perf_counter()
        if references != self._references:
            self._algorithm, problem, inputs, targets = ray.get(references)
            self._problem = placed(problem, self._device)
            self._inputs, self._targets = (_shared(a).to(self._device) for a in (inputs, targets))
            self._references = references

        def here(a: Any) -> Tensor:
            return _copied(a).to(self._device)

        message = map_tensors(here, sent)
        found = []
        for place, rows, shipped, kept in work:
            task, memory = map_tensors(here, shipped), map_tensors(here, kept)
            if rows is not None:
                task = task._replace(inputs=self._inputs[slice(*rows)], targets=self._targets[slice(*rows)])
            update, memory = self._algorithm.client_step(self._problem, task, message, memory)
            found.append((place, map_tensors(_array, update), map_tensors(_array, memory)))
        return WorkerReplies(found, socket.gethostname(), time.perf_counter() - started)


@dataclass
class WorkerPool:
    """The workers of a cluster; missing ones are started again, and used once they are ready."""

    workers: int | None = None  # None: as many as the cluster has cores, or shares of GPUs
    address: str | None = None  # of a running cluster, "auto" for the one on this machine; None: one of its own
    gpu_share: float = 0.0  # of a GPU, that each worker has; 0: none
    alive: list[Any] = field(default_factory=list)
    _starting: dict[Any, Any] = field(default_factory=dict, repr=False)  # future of readiness -> worker

    def ensure_workers(self) -> None:
        """Add workers that have become ready, start those that are missing, and wait if there is none at all."""
        if not ray.is_initialized():
            start(self.workers, self.address)
        wanted = self.workers or n_workers(ray.cluster_resources(), self.gpu_share)
        for _ in range(wanted - len(self.alive) - len(self._starting)):
            options = {"num_cpus": 1, "num_gpus": self.gpu_share, "scheduling_strategy": "SPREAD"}
            worker: Any = ray.remote(Worker).options(**options).remote(logger.getEffectiveLevel(), self.gpu_share)
            self._starting[worker.ready.remote()] = worker
        for future in self._ready():
            worker = self._starting.pop(future)
            try:
                ray.get(future)
            except RayTaskError as error:
                raise error.as_instanceof_cause() from error
            except RayError:
                continue  # it stopped before it was ready
            self.alive.append(worker)
        if not self.alive:
            gpu = f" and {self.gpu_share:g} of a GPU" if self.gpu_share else ""
            free = ray.available_resources()
            raise RuntimeError(
                f"no Ray worker was ready within {START_SECONDS:.0f} s: each needs a core{gpu}, and the cluster has "
                f"{free.get('CPU', 0):g} cores and {free.get('GPU', 0):g} GPUs free. `ray status` says more."
            )

    def _ready(self) -> list[Any]:
        """Return the futures of workers that are ready; waits only if there is no worker yet."""
        starting = list(self._starting)
        if not starting:
            return []
        if not self.alive:
            ray.wait(starting, num_returns=1, timeout=START_SECONDS)
            ray.wait(starting, num_returns=len(starting), timeout=MORE_SECONDS)
        ready: list[Any] = ray.wait(starting, num_returns=len(starting), timeout=0.0)[0]
        return ready


@dataclass
class RayRunner:
    """Clients on the workers of a Ray cluster; every client is computed by one core, as with `threads`, or on a GPU."""

    federation: Federation
    pool: WorkerPool
    _references: list[Any] = field(default_factory=list, repr=False)  # method, problem and examples in shared memory
    _of: tuple[Any, Any] | None = field(default=None, repr=False)  # the method and the problem that these are

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Stacked:
        return stacked_replies(self, algorithm, problem, tasks, sent, memory)

    def per_client(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Sequence[Task], sent: Any, memories: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        self.pool.ensure_workers()
        self._share(algorithm, problem)
        work = [self._client_work(k, task, memories[k]) for k, task in enumerate(tasks)]
        sizes = [len(task.mask) * len(task.batches) for task in tasks]
        found: dict[int, tuple[Any, Any]] = {}
        device = problem.theta0.device
        for part in self._computed(ray.put(map_tensors(_array, sent)), work, sizes):
            logger.debug("%d clients in %.2f s on %s", len(part.replies), part.seconds, part.machine)
            for place, update, memory in part.replies:
                both = (map_tensors(lambda a: _copied(a).to(device), record) for record in (update, memory))
                found[place] = tuple(both)
        return stack([found[k][0] for k in range(len(tasks))]), [found[k][1] for k in range(len(tasks))]

    def _share(self, algorithm: AnyAlgorithm, problem: Problem) -> None:
        """Put what does not change into the cluster's shared memory, once."""
        if self._of is None or self._of[0] != algorithm or self._of[1] is not problem:
            train = self.federation.train
            self._of = (algorithm, problem)
            constant = (algorithm, placed(problem, torch.device("cpu")), _array(train.inputs), _array(train.targets))
            self._references = [ray.put(what) for what in constant]

    def _client_work(self, place: int, task: Task, memory: Any) -> ClientWork:
        train, rows = self.federation.train, None  # of lazy clients there are no rows in shared memory
        row_bytes = train.inputs[:1].nbytes
        start = task.inputs.data_ptr() - train.inputs.data_ptr()
        if row_bytes and task.inputs.untyped_storage().data_ptr() == train.inputs.untyped_storage().data_ptr():
            rows = (start // row_bytes, start // row_bytes + len(task.inputs))
            task = task._replace(inputs=task.inputs[:0], targets=task.targets[:0])
        return ClientWork(place, rows, map_tensors(_array, task), map_tensors(_array, memory))

    def _computed(self, message: Any, work: list[ClientWork], sizes: list[int]) -> list[WorkerReplies]:
        """Return all clients' replies from the workers; the work of those that stopped is repeated by others."""
        found, left, n_failures, alive = [], work, 0, self.pool.alive
        while left:
            asked = {}
            for worker, part in zip(alive, balanced_work(left, sizes, len(alive)), strict=True):
                if part:
                    asked[worker.replies.remote(self._references, message, part)] = (worker, part)
            left = []
            for future, (worker, part) in asked.items():
                try:
                    found.append(ray.get(future))
                except RayTaskError as error:
                    raise error.as_instanceof_cause() from error
                except RayError as error:
                    n_failures += 1
                    if n_failures > MAX_FAILURES:
                        raise RuntimeError(
                            f"{n_failures} workers stopped in one round, the last one so: {error}. Ray's own logs say "
                            "why (often too little memory); fewer workers take less."
                        ) from error
                    logger.warning("a worker stopped; its %d clients are computed again by others", len(part))
                    alive.remove(worker)
                    left += part
            if left:
                self.pool.ensure_workers()
        return found


def n_workers(resources: Mapping[str, float], gpu_share: float) -> int:
    """Return for how many workers a cluster has room: one for each core, or for each share of a GPU that has a core."""
    n_cores = int(resources.get("CPU", 1))
    n_shares = int(resources.get("GPU", 0)) * int(1.0 / gpu_share + 1e-9) if gpu_share else n_cores
    return max(1, min(n_cores, n_shares))


def placed(problem: Problem, device: torch.device) -> Problem:
    """Return the same problem with theta and the module that it computes with on the device."""
    if problem.theta0.device == device:
        return problem
    model = problem.predict
    if not isinstance(model, ModuleModel):
        return replace(problem, theta0=problem.theta0.to(device))
    module = copy.deepcopy(model.module).to(device)
    moved = {"predict": replace(model, module=module), "module": module, "kernels": problem.kernels.fresh()}
    return replace(problem, theta0=problem.theta0.to(device), **moved)  # type: ignore[arg-type]


def start(workers: int | None, address: str | None) -> None:
    """Connect to the cluster at the address, or start one on this machine."""
    if address is not None:
        ray.init(address=address, log_to_driver=True, logging_level=logging.WARNING)
    else:
        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=True, logging_level=logging.WARNING)


def ray_cluster(
    federation: Federation, *, workers: int | None = None, address: str | None = None, gpu_share: float = 0.0
) -> RayRunner:
    """Return the runner that spreads this federation's clients over a Ray cluster."""
    return RayRunner(federation, WorkerPool(workers, address, gpu_share))


def balanced_work(work: list[ClientWork], sizes: list[int], n_workers: int) -> list[list[ClientWork]]:
    """Return the work of every worker, given out the longest first and each to the worker with the smallest load."""
    parts: list[list[ClientWork]] = [[] for _ in range(n_workers)]
    loads = [0] * n_workers
    for one in sorted(work, key=lambda one: -sizes[one.place]):
        k = loads.index(min(loads))
        parts[k].append(one)
        loads[k] += sizes[one.place]
    return parts


def _array(t: Tensor) -> Any:
    return t.detach().cpu().numpy()


def _copied(a: Any) -> Tensor:
    return _shared(a).clone()  # in torch's own memory, whose alignment may change the last bit of a product


def _shared(a: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the memory is read-only, and nothing writes to it
        return torch.from_numpy(np.asarray(a))

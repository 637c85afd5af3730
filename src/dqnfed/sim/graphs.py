"""CUDA graphs: a whole cohort's client step replayed as one launch instead of hundreds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.digest import DigestPlan, digest_plan, packed_digest, unpacked_digest
from dqnfed.core.graphed_sgd import capturing
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import Landing, map_tensors, n_rows, tensors
from dqnfed.sim.cohort import Answers, Digested, Lookup, Vectorised

logger = logging.getLogger("dqnfed")
MAX_GRAPHS = 6  # of one function; shapes that keep changing are cheaper without graphs
LARGE = 2**20  # numbers from which on a tensor is copied alone, at the speed of the memory
NO_ROWS = torch.empty(0, 0)  # to compare answers with
Key = tuple[Any, ...]
T = TypeVar("T", bound=tuple[Any, ...])


class Captured(NamedTuple):
    """A function in a graph: where it reads, and where it leaves its answers, those of one shape in one bundle."""

    graph: torch.cuda.CUDAGraph
    places: list[tuple[list[int], list[Tensor]]]  # which arguments go where, each group in one launch
    answers: list[tuple[list[int], Tensor]]  # which answers are the rows of this tensor
    as_they_are: dict[int, Tensor]  # answers that hold nothing, or are read before the next replay


class GraphedFunction:
    """A function of tensors: called as it is with shapes that are new, captured when they come again, then replayed.

    The answer is that of the function itself. A function that cannot be captured (it asks the host for a value) or
    whose shapes keep changing is always called as it is.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor]],
        *,
        n_fleeting: int = 0,  # so many answers, the last, are read before the next call and need not outlive it
        n_lying: int = 0,  # so many arguments, the last, are read where they lie, since that is seldom elsewhere
    ) -> None:
        self._function, self._n_fleeting, self._n_lying = function, n_fleeting, n_lying
        self._graphs: dict[Key, Captured | None] = {}  # None: seen once, and much of what a run does is done once only
        self._gave_up = False

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        if self._gave_up or not given[0].is_cuda:
            return self._function(*given)
        n_copied = len(given) - self._n_lying
        key = (*((t.shape, t.dtype) for t in given), *(t.data_ptr() for t in given[n_copied:]))
        if key not in self._graphs:
            self._gave_up = len(self._graphs) == MAX_GRAPHS
            if self._gave_up:
                self._graphs.clear()
            else:
                self._graphs[key] = None
            return self._function(*given)
        captured = self._graphs[key]
        if captured is None:
            try:
                captured = self._graphs[key] = self._captured(given)
            except RuntimeError as error:
                logger.info("no CUDA graph, since the step cannot be captured: %s", str(error).splitlines()[0])
                self._gave_up = True
                torch.cuda.synchronize()
                return self._function(*given)
        for which, places in captured.places:
            if len(places) == 1:
                places[0].copy_(given[which[0]])
            else:
                torch._foreach_copy_(places, [given[i] for i in which])
        captured.graph.replay()
        found = dict(captured.as_they_are)
        for which, bundle in captured.answers:
            found.update(zip(which, bundle.clone().unbind(), strict=True))  # a replay writes over the bundle
        return [found[i] for i in range(len(found))]

    def _captured(self, given: Sequence[Tensor]) -> Captured:
        n_copied = len(given) - self._n_lying
        places = [*(t.clone() for t in given[:n_copied]), *given[n_copied:]]
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):  # libraries chose their kernels when the function was called as it is
            answers = self._function(*places)
            kept = answers[: len(answers) - self._n_fleeting]
            bundles = [(which, bundled([kept[i] for i in which])) for which in alike(kept, key=_shape)]
        return Captured(
            graph,
            [(which, [places[i] for i in which]) for which in alike(places[:n_copied], key=_dtype)],
            bundles,
            {i: answer for i, answer in enumerate(answers) if not answer.numel() or i >= len(kept)},
        )


def alike(given: Sequence[Tensor], key: Callable[[Tensor], object]) -> list[list[int]]:
    """Return which of the tensors have a key in common; those without numbers are left out, large ones are alone."""
    groups: dict[object, list[int]] = {}
    for i, t in enumerate(given):
        if t.numel():
            groups.setdefault(key(t) if t.numel() <= LARGE else i, []).append(i)
    return list(groups.values())


def bundled(alike: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as the rows of one; a single one is not copied."""
    return torch.stack(list(alike)) if len(alike) > 1 else alike[0][None]


def _shape(t: Tensor) -> object:
    return t.shape, t.dtype


def _dtype(t: Tensor) -> object:
    return t.dtype


def _kind(record: T) -> T:
    """Return a record of the same kind that holds nothing."""
    return map_tensors(lambda t: t.new_empty(0), record)


class GraphedStep:
    """A cohort's client step, captured with what comes before and after: its examples and the digest of its answers."""

    def __init__(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any, looked_up: Lookup
    ) -> None:
        self._algorithm, self._problem, self._looked_up = algorithm, problem, looked_up
        self._asked = [_kind(record) for record in (tasks, sent, memory)]
        self._answered: list[Any] = []  # the kinds of update and memory, known after the first call
        self._plan, self._landing = DigestPlan((), (), ()), Landing()
        self._function = GraphedFunction(self._step, n_fleeting=1, n_lying=1)

    def __call__(self, tasks: Task, sent: Any, memory: Any, rows: Tensor | None = None) -> Digested:
        compared = NO_ROWS if rows is None else rows
        *found, packed = self._function(*tensors(tasks), *tensors(sent), *tensors(memory), compared)
        values = iter(found)
        updates, kept = (map_tensors(lambda _: next(values), kind) for kind in self._answered)
        plan, n_answers, arrived = self._plan, n_rows(updates), self._landing.sent(packed)
        return Digested(updates, kept, lambda: unpacked_digest(plan, arrived().numpy(), n_answers, len(compared)))

    def _step(self, *given: Tensor) -> Sequence[Tensor]:
        values, compared = iter(given[:-1]), given[-1]
        tasks, sent, memory = (map_tensors(lambda _: next(values), kind) for kind in self._asked)
        algorithm, problem = self._algorithm, self._problem
        tasks = self._looked_up(tasks)
        updates, kept = vmap(lambda task, own: algorithm.client_step(problem, task, sent, own))(tasks, memory)
        self._answered = [_kind(updates), _kind(kept)]
        self._plan = digest_plan(updates, algorithm.optional, algorithm.gramian_of)
        packed = packed_digest(self._plan, updates, getattr(sent, "theta", None), compared)
        return [*tensors(updates), *tensors(kept), packed]


class GraphedBeginning:
    """What the next round's clients can do already, captured; it holds until the clients after them begin."""

    def __init__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, looked_up: Lookup) -> None:
        self._algorithm, self._problem, self._looked_up = algorithm, problem, looked_up
        self._asked = [_kind(record) for record in (tasks, sent)]
        self._function = GraphedFunction(self._step, n_fleeting=1)  # the step reads it, and then the next is begun

    def __call__(self, tasks: Task, sent: Any) -> Tensor:
        return self._function(*tensors(tasks), *tensors(sent))[0]

    def _step(self, *given: Tensor) -> Sequence[Tensor]:
        values = iter(given)
        tasks, sent = (map_tensors(lambda _: next(values), kind) for kind in self._asked)
        algorithm, problem = self._algorithm, self._problem
        return [vmap(lambda task: algorithm.beginning(problem, task, sent))(self._looked_up(tasks))]


class Graphed:
    """All clients at once under vmap, captured in a CUDA graph for each kind of message; without a GPU, plain vmap."""

    def __init__(self) -> None:
        self._steps: dict[Key, GraphedStep] = {}
        self._beginnings: dict[Key, GraphedBeginning] = {}
        self._looked_up: Lookup | None = None  # of the run that these are for

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Answers:
        updates, kept, _ = self.digested(algorithm, problem, tasks, sent, memory, as_they_are)
        return updates, kept

    def digests(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def digested(
        self,
        algorithm: AnyAlgorithm,
        problem: Problem,
        tasks: Task,
        sent: Any,
        memory: Any,
        looked_up: Lookup,
        rows: Tensor | None = None,
    ) -> Digested:
        if not (tasks.mask.is_cuda and algorithm.vectorises_for(sent) and algorithm.captures):
            return Digested(*Vectorised()(algorithm, problem, looked_up(tasks), sent, memory), None)
        if looked_up != self._looked_up:  # another run: what was captured for the one before would keep its data
            self._steps.clear()
            self._beginnings.clear()
            self._looked_up = looked_up
        key = (algorithm, id(problem), type(sent))
        if key not in self._steps:
            self._steps[key] = GraphedStep(algorithm, problem, tasks, sent, memory, looked_up)
        return self._steps[key](tasks, sent, memory, rows)

    def begun(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, looked_up: Lookup) -> Tensor:
        key = (algorithm, id(problem), type(sent))
        if key not in self._beginnings:
            self._beginnings[key] = GraphedBeginning(algorithm, problem, tasks, sent, looked_up)
        return self._beginnings[key](tasks, sent)


def as_they_are(tasks: Task) -> Task:
    """Return tasks that hold their examples already."""
    return tasks


def graphed() -> Graphed:
    """Return the runner for GPUs."""
    return Graphed()

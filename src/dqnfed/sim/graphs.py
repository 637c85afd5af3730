"""CUDA graphs: a whole cohort's client step replayed as one launch instead of hundreds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.digest import DigestPlan, digest_plan, early_products, packed_digest, unpacked_digest
from dqnfed.core.graphed_sgd import capturing
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import Landing, map_tensors, n_rows, tensors
from dqnfed.sim.cohort import Answers, Begun, Digested, Lookup, Vectorised

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
        awaited: Callable[[Tensor], object] | None = None,  # told of the last answer before the others are copied
    ) -> None:
        self._function, self._n_fleeting, self._awaited = function, n_fleeting, awaited
        self._seen: set[Key] = set()  # much of what a run does is done once only, and is not worth a capture
        self._graphs: dict[Key, Captured] = {}
        self._pool: Any = None  # memory of all of them: what they make on the way is gone when one has been replayed
        self._gave_up = False

    def __call__(self, *given: Tensor, lying: Sequence[int] = ()) -> Sequence[Tensor]:
        """Return the function's answers; arguments at the places `lying` are read where they are, as they seldom move.

        All others may be anywhere: they are copied to where the graph reads them.
        """
        if self._gave_up or not given[0].is_cuda:
            return self._as_it_is(given)
        key = (*((t.shape, t.dtype) for t in given), *((i, given[i].data_ptr()) for i in lying))
        captured = self._graphs.get(key)
        if captured is None:
            if key not in self._seen:
                self._seen.add(key)
                return self._as_it_is(given)
            captured = self._new_graph(key, given, lying)
            if captured is None:
                return self._as_it_is(given)
        for which, places in captured.places:
            if len(places) == 1:
                places[0].copy_(given[which[0]])
            else:
                torch._foreach_copy_(places, [given[i] for i in which])
        captured.graph.replay()
        found = dict(captured.as_they_are)
        if self._awaited is not None:
            self._awaited(found[max(found)])
        for which, bundle in captured.answers:
            found.update(zip(which, bundle.clone().unbind(), strict=True))  # a replay writes over the bundle
        return [found[i] for i in range(len(found))]

    def _as_it_is(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        answers = self._function(*given)
        if self._awaited is not None:
            self._awaited(answers[-1])
        return answers

    def _new_graph(self, key: Key, given: Sequence[Tensor], lying: Sequence[int]) -> Captured | None:
        """Return the function captured for these arguments, or None, now and for ever, where that cannot be."""
        try:
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs[key] = self._captured(given, lying)
                return self._graphs[key]
        except RuntimeError as error:
            logger.info("no CUDA graph, since the step cannot be captured: %s", str(error).splitlines()[0])
            torch.cuda.synchronize()
        self._gave_up = True
        self._graphs.clear()
        self._seen.clear()
        return None

    def _captured(self, given: Sequence[Tensor], lying: Sequence[int]) -> Captured:
        places = [t if i in lying else t.clone() for i, t in enumerate(given)]
        copied = [t.new_empty(0) if i in lying else t for i, t in enumerate(places)]
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        with capturing(graph, pool=self._pool):  # libraries chose their kernels when it was called as it is
            answers = self._function(*places)
            kept = answers[: len(answers) - self._n_fleeting]
            bundles = [(which, bundled([kept[i] for i in which])) for which in alike(kept, key=_shape)]
        return Captured(
            graph,
            [(which, [places[i] for i in which]) for which in alike(copied, key=_dtype)],
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
        self._arrived: Callable[[], Tensor] = lambda: NO_ROWS
        self._function = GraphedFunction(self._step, n_fleeting=1, awaited=self._send)

    def __call__(
        self, tasks: Task, sent: Any, memory: Any, rows: Tensor | None = None, begun: Begun | None = None
    ) -> Digested:
        compared = NO_ROWS if rows is None else rows
        still = {id(compared)}
        if begun is not None:  # what a graph has written is where it was the time before
            tasks = begun.tasks
            still |= {id(begun.found), id(tasks.inputs), id(tasks.targets)}
        given = [*tensors(tasks), *tensors(sent), *tensors(memory), compared]
        lying = [i for i, t in enumerate(given) if id(t) in still]
        values = iter(self._function(*given, lying=lying))
        updates, kept = (map_tensors(lambda _: next(values), kind) for kind in self._answered)
        plan, n_answers, arrived = self._plan, n_rows(updates), self._arrived
        return Digested(updates, kept, lambda: unpacked_digest(plan, arrived().numpy(), n_answers, len(compared)))

    def _send(self, packed: Tensor) -> None:
        self._arrived = self._landing.sent(packed)

    def _step(self, *given: Tensor) -> Sequence[Tensor]:
        values, compared = iter(given[:-1]), given[-1]
        tasks, sent, memory = (map_tensors(lambda _: next(values), kind) for kind in self._asked)
        algorithm, problem = self._algorithm, self._problem
        tasks = self._looked_up(tasks)
        with early_products(compared) as products:
            updates, kept = vmap(lambda task, own: algorithm.client_step(problem, task, sent, own))(tasks, memory)
        self._answered = [_kind(updates), _kind(kept)]
        self._plan = digest_plan(updates, algorithm.optional, algorithm.gramian_of)
        packed = packed_digest(self._plan, updates, getattr(sent, "theta", None), products=products)
        return [*tensors(updates), *tensors(kept), packed]


class GraphedBeginning:
    """What the next round's clients can do already, captured; it holds until the clients after them begin."""

    def __init__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, looked_up: Lookup) -> None:
        self._algorithm, self._problem, self._looked_up = algorithm, problem, looked_up
        self._asked = [_kind(record) for record in (tasks, sent)]
        self._function = GraphedFunction(self._step, n_fleeting=3)  # the step reads them, and then the next is begun

    def __call__(self, tasks: Task, sent: Any) -> Begun:
        inputs, targets, found = self._function(*tensors(tasks), *tensors(sent))
        return Begun(found, tasks._replace(inputs=inputs, targets=targets))

    def _step(self, *given: Tensor) -> Sequence[Tensor]:
        values = iter(given)
        tasks, sent = (map_tensors(lambda _: next(values), kind) for kind in self._asked)
        algorithm, problem = self._algorithm, self._problem
        tasks = self._looked_up(tasks)
        return [tasks.inputs, tasks.targets, vmap(lambda task: algorithm.beginning(problem, task, sent))(tasks)]


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
        begun: Begun | None = None,
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
        return self._steps[key](tasks, sent, memory, rows, begun)

    def begun(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, looked_up: Lookup) -> Begun:
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

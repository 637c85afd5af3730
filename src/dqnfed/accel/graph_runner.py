"""A whole cohort's client step in one CUDA graph, for each kind of message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.accel.graphs import GraphedFunction, Key
from dqnfed.accel.replies import GraphReplies, KeptRows
from dqnfed.accel.reply_stats import ReplyStats, packed_stats, stats_plan, unpacked_stats
from dqnfed.accel.transfer import PinnedReadback
from dqnfed.core.algorithm import Algorithm, AnyAlgorithm
from dqnfed.core.problem import Problem, Task
from dqnfed.core.runners import Gather, Stacked, Vectorised, is_vectorised
from dqnfed.core.tensors import map_tensors, n_rows, tensors

T = TypeVar("T", bound=tuple[Any, ...])
# Methods whose clients' step would synchronise with the host. A capture of them would fail and fall back to eager
# calls; but a failed capture takes time, and some libraries are slower after one.
NOT_CAPTURED = {
    "FedNLHead": "the compressor's eigendecomposition returns a status to the host",
    "DQNFedLiteral": "both forms of the rate solve small linear systems",
}


def cuda_graph_safe(algorithm: AnyAlgorithm) -> bool:
    """Return whether clients' steps of this method may be captured in a CUDA graph."""
    inner = getattr(algorithm, "inner", None)  # of a method that corrects labels first
    if isinstance(inner, Algorithm):
        return cuda_graph_safe(inner)
    if any(kind.__name__ in NOT_CAPTURED for kind in type(algorithm).__mro__):
        return False
    if getattr(algorithm, "rates", None) == "hessian":  # DQN-Fed's rates from a solved system
        return False
    return "network" in algorithm.info.problem_kinds


def identity(tasks: Task) -> Task:
    """Return tasks that hold their examples already."""
    return tasks


MAX_KEPT = 4  # matrices of the server with which a graph computes products


class GraphedStep:
    """A cohort's client step, captured together with the gathering of its examples and the statistics of its replies.

    The first cohort's replies have scalars and norms; products of the fields that the server then asks for are computed
    from the second one on, those with rows that the server keeps in one tensor, such as a cache, from the third one on.
    """

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        problem: Problem,
        tasks: Task,
        sent: Any,
        memory: Any,
        gathered: Gather,
        *,
        emulate: bool = False,
    ) -> None:
        self._algorithm, self._problem, self._gathered, self._emulate = algorithm, problem, gathered, emulate
        self._given = [_without_numbers(record) for record in (tasks, sent, memory)]
        self._made: list[Any] = []  # the kinds of update and memory, known after the first call
        self._readback = PinnedReadback()
        self._wait: Callable[[], Tensor] = lambda: torch.empty(0, dtype=torch.float64)
        self._gram_fields: tuple[str, ...] = ()
        self._asked: dict[str, list[ref[Tensor]]] = {}  # by field: rows that products were last asked with
        self._kept: list[tuple[str, Tensor]] = []  # field, and rows that came again: a tensor that changes in place
        self.functions: dict[Key, GraphedFunction] = {}  # by the products that they compute

    def run_with_stats(self, tasks: Task, sent: Any, memory: Any) -> Stacked:
        """Return the replies, whose statistics are on their way to the host, and the stacked memories."""
        fields, kept = self._gram_fields, list(self._kept)
        key = (fields, *((field, rows.data_ptr()) for field, rows in kept))
        if key not in self.functions:
            step = partial(self._step, fields, [field for field, _ in kept])
            self.functions[key] = GraphedFunction(step, n_transient=1, on_last=self._send, emulate=self._emulate)
        given = [*tensors(tasks), *tensors(sent), *tensors(memory)]
        in_place = range(len(given), len(given) + len(kept))
        values = iter(self.functions[key](*given, *(rows for _, rows in kept), fixed=in_place))
        updates, memories = (map_tensors(lambda _: next(values), kind) for kind in self._made)
        beside = by_field(kept)
        plan = stats_plan(updates, self._algorithm.info.nan_ok_fields, fields, beside)
        known = {field: [KeptRows(rows, rows._version) for rows in each] for field, each in beside.items()}
        n_replies, wait = n_rows(updates), self._wait

        def stats() -> ReplyStats:
            return unpacked_stats(plan, wait().numpy(), n_replies)

        return GraphReplies(updates, stats, self._note_gram, known), memories

    def _note_gram(self, field: str, others: list[Tensor]) -> None:
        if field not in self._gram_fields:
            self._gram_fields = (*self._gram_fields, field)
        before, self._asked[field] = self._asked.get(field, []), [ref(rows) for rows in others]
        for rows in others:
            is_kept = any(name == field and mine is rows for name, mine in self._kept)
            if len(rows) and not is_kept and len(self._kept) < MAX_KEPT and any(known() is rows for known in before):
                self._kept.append((field, rows))

    def _send(self, packed: Tensor) -> None:
        self._wait = self._readback.start(packed)

    def _step(self, gram_fields: tuple[str, ...], kept_fields: list[str], *given: Tensor) -> Sequence[Tensor]:
        values = iter(given)
        tasks, sent, memory = (map_tensors(lambda _: next(values), kind) for kind in self._given)
        algorithm, problem = self._algorithm, self._problem
        updates, kept = vmap(lambda task, own: algorithm.client_step(problem, task, sent, own))(
            self._gathered(tasks), memory
        )
        self._made = [_without_numbers(updates), _without_numbers(kept)]
        beside = by_field(list(zip(kept_fields, values, strict=True)))
        plan = stats_plan(updates, algorithm.info.nan_ok_fields, gram_fields, beside)
        return [*tensors(updates), *tensors(kept), packed_stats(plan, updates, beside)]


class Graphed:
    """All clients at once under vmap, captured in a CUDA graph for each kind of message; without a GPU, plain vmap.

    With `emulate` a CPU does the same on static tensors: tests without a GPU then see what is read too late.
    """

    def __init__(self, *, emulate: bool = False) -> None:
        self._emulate = emulate
        self.steps: dict[Key, GraphedStep] = {}
        self._gathered: Gather | None = None  # of the run that these are for

    def __call__(self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any) -> Stacked:
        if not self.runs_indexed(algorithm, sent, tasks.mask.device):
            return Vectorised()(algorithm, problem, tasks, sent, memory)
        return self.indexed(algorithm, problem, tasks, sent, memory, identity)

    def runs_indexed(self, algorithm: AnyAlgorithm, sent: Any, device: torch.device) -> bool:
        can_capture = device.type == "cuda" or self._emulate
        return can_capture and is_vectorised(algorithm, sent) and cuda_graph_safe(algorithm)

    def indexed(
        self, algorithm: AnyAlgorithm, problem: Problem, tasks: Task, sent: Any, memory: Any, gathered: Gather
    ) -> Stacked:
        if gathered != self._gathered:  # another run: the graphs of the one before would keep its data
            self.steps.clear()
            self._gathered = gathered
        key = (algorithm, id(problem), type(sent))
        if key not in self.steps:
            self.steps[key] = GraphedStep(algorithm, problem, tasks, sent, memory, gathered, emulate=self._emulate)
        return self.steps[key].run_with_stats(tasks, sent, memory)


def by_field(kept: Sequence[tuple[str, Tensor]]) -> dict[str, list[Tensor]]:
    """Return the rows that products are computed with, by the replies' field."""
    return {field: [rows for name, rows in kept if name == field] for field, _ in kept}


def _without_numbers(record: T) -> T:
    """Return a record of the same kind whose tensors are empty."""
    return map_tensors(lambda t: t.new_empty(0), record)


def graphed(*, emulate: bool = False) -> Graphed:
    """Return the runner for GPUs."""
    return Graphed(emulate=emulate)

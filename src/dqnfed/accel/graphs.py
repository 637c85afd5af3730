"""CUDA graphs: a function of tensors replayed as one launch instead of hundreds."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger("dqnfed")
MAX_GRAPHS = 6  # of one function; shapes that keep changing are cheaper without graphs
LARGE = 2**20  # numbers from which on a tensor is copied alone, at the speed of the memory
Key = tuple[Any, ...]


class Captured(NamedTuple):
    """A function in a graph with its static tensors; outputs of one shape are the rows of one tensor."""

    replay: Callable[[], None]
    inputs: list[tuple[list[int], list[Tensor]]]  # which arguments are copied where, each group in one launch
    outputs: list[tuple[list[int], Tensor]]  # which outputs are the rows of this tensor
    static: dict[int, Tensor]  # outputs that are not copied: without numbers, or transient


class GraphedFunction:
    """A function of tensors: called eagerly with shapes that are new, captured when they come again, then replayed.

    The outputs are those of the function itself. A function that cannot be captured (it synchronises with the host) or
    whose shapes keep changing is always called eagerly.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor]],
        *,
        n_transient: int = 0,  # so many outputs, the last, are read before the next call and may be overwritten by it
        on_last: Callable[[Tensor], object] | None = None,  # called with the last output, before others are copied
        emulate: bool = False,  # on a CPU too: static tensors as with a graph, so that tests see stale ones
    ) -> None:
        self._function, self._n_transient, self._on_last, self._emulate = function, n_transient, on_last, emulate
        self._seen: set[Key] = set()  # much of what a run does is done once only, and is not worth a capture
        self._graphs: dict[Key, Captured] = {}
        self._pool: Any = None  # memory that all graphs share: none is replayed while another one runs
        self._gave_up = False

    @property
    def n_graphs(self) -> int:
        """How many graphs there are, one for each combination of shapes."""
        return len(self._graphs)

    def __call__(self, *given: Tensor, fixed: Sequence[int] = ()) -> Sequence[Tensor]:
        """Return the function's outputs; arguments at the places `fixed` are read where they are, as they rarely move.

        All others may be anywhere: they are copied to the graph's static inputs.
        """
        if self._gave_up or not (given[0].is_cuda or self._emulate):
            return self._eager(given)
        key = (*((t.shape, t.dtype) for t in given), *((i, given[i].data_ptr()) for i in fixed))
        captured = self._graphs.get(key)
        if captured is None:
            if key not in self._seen:
                self._seen.add(key)
                return self._eager(given)
            captured = self._new_graph(key, given, fixed)
            if captured is None:
                return self._eager(given)
        for which, places in captured.inputs:
            if len(places) == 1:
                places[0].copy_(given[which[0]])
            else:
                torch._foreach_copy_(places, [given[i] for i in which])
        captured.replay()
        found = dict(captured.static)
        if self._on_last is not None:
            self._on_last(found[max(found)])
        for which, rows in captured.outputs:
            found.update(zip(which, rows.clone().unbind(), strict=True))  # the next replay writes over the rows
        return [found[i] for i in range(len(found))]

    def _eager(self, given: Sequence[Tensor]) -> Sequence[Tensor]:
        outputs = self._function(*given)
        if self._on_last is not None:
            self._on_last(outputs[-1])
        return outputs

    def _new_graph(self, key: Key, given: Sequence[Tensor], fixed: Sequence[int]) -> Captured | None:
        """Return the function captured for these arguments, or None, now and later, where that is impossible."""
        try:
            if len(self._graphs) < MAX_GRAPHS:
                self._graphs[key] = self._captured(given, fixed)
                return self._graphs[key]
        except RuntimeError as error:
            logger.info("no CUDA graph, since the step cannot be captured: %s", str(error).splitlines()[0])
            if given[0].is_cuda:
                torch.cuda.synchronize()
        self._gave_up = True
        self._graphs.clear()
        self._seen.clear()
        return None

    def _captured(self, given: Sequence[Tensor], fixed: Sequence[int]) -> Captured:
        inputs = [t if i in fixed else t.clone() for i, t in enumerate(given)]
        copied = [t.new_empty(0) if i in fixed else t for i, t in enumerate(inputs)]
        n_kept, groups = 0, list[list[int]]()

        def body() -> list[Tensor]:
            nonlocal n_kept, groups
            outputs = self._function(*inputs)
            n_kept = len(outputs) - self._n_transient
            groups = grouped(outputs[:n_kept], key=_shape)
            return [*(rows_of([outputs[i] for i in which]) for which in groups), *outputs]

        replay, made = self._emulated(body) if not given[0].is_cuda else self._recorded(body)
        outputs = made[len(groups) :]
        return Captured(
            replay,
            [(which, [inputs[i] for i in which]) for which in grouped(copied, key=_dtype)],
            list(zip(groups, made, strict=False)),
            {i: t for i, t in enumerate(outputs) if not t.numel() or i >= n_kept},
        )

    def _recorded(self, body: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        with capturing(graph, pool=self._pool):  # libraries chose their kernels in the eager call
            made = body()
        return graph.replay, made

    def _emulated(self, body: Callable[[], list[Tensor]]) -> tuple[Callable[[], None], list[Tensor]]:
        made = [t.clone() for t in body()]

        def replay() -> None:
            for place, t in zip(made, body(), strict=True):
                place.copy_(t)

        return replay, made


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None, pool: Any = None) -> Iterator[None]:
    """Capture what this thread launches; meanwhile no unused graph is collected: freeing one would break the capture.

    `pool` is memory that graphs share which are never replayed at the same time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            yield
    finally:
        if was_enabled:
            gc.enable()


def grouped(given: Sequence[Tensor], key: Callable[[Tensor], object]) -> list[list[int]]:
    """Return which of the tensors have a key in common; those without numbers are left out, large ones are alone."""
    groups: dict[object, list[int]] = {}
    for i, t in enumerate(given):
        if t.numel():
            groups.setdefault(key(t) if t.numel() <= LARGE else i, []).append(i)
    return list(groups.values())


def rows_of(alike: Sequence[Tensor]) -> Tensor:
    """Return tensors of one shape as the rows of one; a single one is not copied."""
    return torch.stack(list(alike)) if len(alike) > 1 else alike[0][None]


def _shape(t: Tensor) -> object:
    return t.shape, t.dtype


def _dtype(t: Tensor) -> object:
    return t.dtype

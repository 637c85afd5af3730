"""How much of a GPU's memory a run may take, and what it does at once so that it takes no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from dqnfed.accel.fast_model import fast_model
from dqnfed.accel.gradients import EXAMPLES_AT_ONCE
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import tensors

MOST_STREAMS = 5
MOST_EVALUATED = 8192  # examples of an evaluation at once
FEW = 32  # examples of an evaluation at once, for which a stream less is no price
LANE_EXTRA = 64 * 2**20  # bytes of a stream's own workspaces
GRAPH_COPIES = 1.5  # of a vectorised step: static inputs and outputs beside its activations
GIB = 2**30


class Need(NamedTuple):
    """Bytes that a run takes."""

    fixed: int  # model, examples, replies, and what clients and server keep
    example: int  # more for each example of an evaluation
    step: int  # of one client's step on a stream of its own
    client: int  # of one client of a vectorised cohort


class Plan(NamedTuple):
    """What is done at once."""

    evaluated: int  # examples
    streams: int
    chunk: int | None  # clients of a vectorised cohort; None: all


def least_bytes(need: Need, *, on_streams: bool) -> int:
    """Return the bytes without which nothing works: one client and one example at once."""
    return need.fixed + max(need.step + LANE_EXTRA if on_streams else need.client, need.example)


def memory_plan(budget: int, need: Need, cohort_size: int, *, on_streams: bool) -> Plan:
    """Return as much at once as the budget allows; what clients' captured steps hold is not there for evaluations."""
    if budget < least_bytes(need, on_streams=on_streams):
        least = least_bytes(need, on_streams=on_streams) / GIB
        raise MemoryError(
            f"the run needs {least:.2f} GiB of GPU memory at least (one client and one example at once, "
            f"{need.fixed / GIB:.2f} GiB for model, data and what is kept), but `run.memory` allows "
            f"{budget / GIB:.2f}; allow more, or take a smaller model or batch size."
        )
    left, streams, chunk = budget - need.fixed, 1, None
    if on_streams:
        lane = need.step + LANE_EXTRA
        fits = [n for n in range(1, min(MOST_STREAMS, cohort_size) + 1) if n * lane + FEW * need.example <= left]
        streams = max(fits, default=1)
        left -= streams * lane
    else:
        at_once = max(1, int((left - FEW * need.example) // max(1, need.client)))
        chunk = None if at_once >= cohort_size else at_once
        left -= min(at_once, cohort_size) * need.client
    evaluated = max(1, min(MOST_EVALUATED, int(left // max(1, need.example))))
    return Plan(1 << (evaluated.bit_length() - 1), streams, chunk)


def measured_need(
    problem: Problem, federation: Federation, algorithm: AnyAlgorithm, cohort_size: int, *, on_streams: bool
) -> Need:
    """Return what one client and one example take on the problem's GPU, by trying; the federation is there already."""
    theta, n = problem.theta0, problem.theta0.nbytes
    inputs, targets = (t.to(theta.device) for t in federation.train.taken(torch.arange(1)))
    few = min(64, len(inputs))
    batch_size = getattr(algorithm, "batch_size", None) or min(EXAMPLES_AT_ONCE, int(federation.n_examples.max()))
    places = torch.arange(batch_size, device=theta.device) % len(inputs)
    x, y = inputs[places], targets[places]

    def evaluate() -> Any:
        with torch.no_grad():
            return problem.predict(theta, inputs[:few])

    def step() -> Any:
        leaf = theta.clone().requires_grad_()
        loss = problem.losses(problem.predict(leaf, x), y).mean()
        return torch.autograd.grad(loss, leaf)

    model = fast_model(problem)
    together = problem if model is None else model.for_vmap(problem)

    def client() -> Any:
        def mean_loss(own: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return problem.losses(together.predict(own, a), b).mean()

        return vmap(grad(mean_loss), in_dims=(None, 0, 0))(theta, x[None], y[None])

    kept = kept_bytes(problem, federation, algorithm, Task(x, y, theta.new_ones(len(x)), *_nothing(theta)))
    return Need(
        fixed=torch.cuda.memory_allocated(theta.device) + 3 * cohort_size * n + 8 * n + kept,
        example=-(-peak_of(evaluate, theta.device) // few),
        step=peak_of(step, theta.device) + 6 * n if on_streams else 0,
        client=int(GRAPH_COPIES * peak_of(client, theta.device)) + 4 * n if not on_streams else 0,
    )


def kept_bytes(problem: Problem, federation: Federation, algorithm: AnyAlgorithm, task: Task) -> int:
    """Return the bytes of all clients' memories, and of the rows of absent clients that a server keeps, twice."""
    memory = sum(t.nbytes for t in tensors(algorithm.init_memory(problem, task)))
    server = sum(t.nbytes for t in tensors(algorithm.init_server(problem, federation.n_clients)) if t.is_cuda)
    return memory * federation.n_clients + 2 * server


def peak_of(compute: Callable[[], Any], device: torch.device) -> int:
    """Return by how many bytes a computation raises the memory in use, after one that loads what it needs."""
    compute()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    compute()
    torch.cuda.synchronize(device)
    return max(0, torch.cuda.max_memory_allocated(device) - before)


def _nothing(theta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros(1, 0, dtype=torch.long, device=theta.device), theta.new_zeros(0), theta.new_zeros(())

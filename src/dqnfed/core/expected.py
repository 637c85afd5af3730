"""What a client's reply must look like, found without any client: the method's own client step on made-up examples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.kernels import PLAIN
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import named_tensors

N_EXAMPLES = 4
Layout = tuple[str, dict[str, tuple[torch.dtype, tuple[int, ...]]]]  # kind; by field its type and shape


def layout_of(record: tuple[Any, ...]) -> Layout:
    """Return what must be the same in two records that are to be stacked: kind, names, types, shapes."""
    return type(record).__name__, {name: (t.dtype, tuple(t.shape)) for name, t in named_tensors(record).items()}


def expected_reply(algorithm: AnyAlgorithm, problem: Problem, sent: Any) -> Layout | None:
    """Return the layout of a client's reply to this message; None if the method cannot reply about made-up examples.

    The server knows its model and its method but no example, not even the shape of one. Shapes of replies do not depend
    on the examples, so the client step is made on a function of theta that stands for the loss.
    """
    made_up = stand_in(problem)
    task = made_up_task(algorithm, made_up)
    try:
        memory = algorithm.init_memory(made_up, task)
        return layout_of(algorithm.client_step(made_up, task, sent, memory)[0])
    except Exception:  # a method that looks at the examples' own shape: its replies are compared with each other
        return None


def own_model_names(algorithm: AnyAlgorithm, problem: Problem, n_clients: int) -> list[str]:
    """Return the names of the models that the method evaluates, the primary one first."""
    server = algorithm.init_server(problem, n_clients)
    if not algorithm.info.personal:
        return list(algorithm.models(server, None))
    made_up = stand_in(problem)
    return list(algorithm.models(server, algorithm.init_memory(made_up, made_up_task(algorithm, made_up))))


def stand_in(problem: Problem) -> Problem:
    """Return a problem with the same theta and as many outputs, whose loss is a smooth function of theta."""
    n_outputs = int(problem.layout[-1][1][0]) if problem.layout and problem.layout[-1][1] else 1

    def predict(theta: Tensor, inputs: Tensor) -> Tensor:
        return inputs.to(theta.dtype) * (1e-3 * theta).square().mean() + theta.mean() * theta.new_ones(1, n_outputs)

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        return (1.0 + outputs.square()).log().sum(1)

    return replace(problem, predict=predict, losses=losses, score=_zero_score, module=None, kernels=PLAIN)


def made_up_task(algorithm: AnyAlgorithm, problem: Problem) -> Task:
    """Return the task of a client that has a few examples of one input."""
    theta = problem.theta0
    noise = algorithm.noise(problem, torch.Generator().manual_seed(0)).to(theta.device)
    return Task(
        inputs=torch.linspace(0.5, 1.0, N_EXAMPLES, dtype=theta.dtype, device=theta.device)[:, None],
        targets=torch.zeros(N_EXAMPLES, dtype=torch.long, device=theta.device),
        mask=theta.new_ones(N_EXAMPLES),
        batches=torch.zeros(1, 0, dtype=torch.long, device=theta.device),
        noise=noise,
        lr=theta.new_full((), 1e-3),
    )


def _zero_score(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    return mask.sum() * 0.0

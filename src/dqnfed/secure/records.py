"""One example as the unit: what a client computes of its data is made of clipped parts of its examples, plus noise.

A method gets a problem and a task without data: row numbers in place of inputs, and no targets. What it asks of the
problem's kernels is computed here, from the examples, and is noisy before the method sees it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.kernels import PlainKernels, Pull
from dqnfed.core.optimizers import PLAIN_SGD, Optimizer
from dqnfed.core.problem import Problem, Task
from dqnfed.secure.noise import Privacy, standard_normal

NUMBERS_AT_ONCE = 2**24  # of examples' gradients
LOSS_PART = 0.5  # of a gradient that comes with its loss: the loss's share in the length of the two together


def step_on_records(
    algorithm: AnyAlgorithm, problem: Problem, task: Task, sent: Any, memory: Any, privacy: Privacy
) -> tuple[Any, Any, int]:
    """Return a client's reply and memory, and how many releases any one of its examples had a part in."""
    hidden, kernels = without_data(problem, task, privacy)
    update, memory = algorithm.client_step(hidden, blind(task), sent, memory)
    return update, memory, kernels.n_releases


def check_reads_gradients(algorithm: AnyAlgorithm) -> None:
    """Refuse a method whose clients look at examples, or that holds no example back."""
    name = type(algorithm).__name__
    if algorithm.info.training == "pooled":
        raise ValueError(f"{name} cannot be run with `privacy.unit` = 'record': it has all rows in one place.")
    if algorithm.info.reads_inputs:
        raise ValueError(
            f"{name} cannot be run with `privacy.unit` = 'record': its clients compute with the examples themselves, "
            "not with their gradients and losses alone, so that nothing is known about what it releases."
        )


def check_memory(algorithm: AnyAlgorithm, problem: Problem, task: Task, privacy: Privacy) -> None:
    """Refuse a method whose client memory is made from the data."""
    hidden, kernels = without_data(problem, task, privacy)
    algorithm.init_memory(hidden, blind(task))
    if kernels.n_releases:
        raise ValueError(
            f"{type(algorithm).__name__} cannot be run with `privacy.unit` = 'record': its clients' memories are made "
            "from their data, which is not counted."
        )


def blind(task: Task) -> Task:
    """Return the task with row numbers for inputs and zeros for targets."""
    n = task.mask.shape[0]
    rows = torch.arange(n, device=task.mask.device)
    return task._replace(inputs=rows, targets=torch.zeros_like(rows))


def without_data(problem: Problem, task: Task, privacy: Privacy) -> tuple[Problem, RecordKernels]:
    """Return a problem whose kernels alone know the client's examples, and these kernels."""
    kernels = RecordKernels(problem, task, privacy)
    given = {name: getattr(problem, name) for name in ("theta0", "layout", "score_name", "ridge", "loss_floor")}
    hidden = BlindProblem(**given, predict=_refuse, losses=_refuse, score=_refuse, kernels=kernels)
    kernels.hidden = hidden
    return hidden, kernels


def _refuse(*_: Any) -> NoReturn:
    raise ValueError(
        "the method computes with outputs or losses of single examples, which `privacy.unit` = 'record' does not "
        "cover; choose one that asks for gradients, local training and mean losses alone (FedAvg, q-FFL, DQN-Fed, ...)."
    )


@dataclass(frozen=True)
class BlindProblem(Problem):
    """A problem of which a method gets noisy gradients, steps and losses."""

    def loss(self, theta: Tensor, task: Task) -> Tensor:
        """Return the noisy mean of the clipped losses; it has no gradient."""
        if torch._C._functorch.is_functorch_wrapped_tensor(theta):
            _refuse()
        assert isinstance(self.kernels, RecordKernels)
        return self.kernels.loss(self, theta, task)

    def batch_loss(self, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
        _refuse()


class RecordKernels(PlainKernels):
    """The computations of one client, from clipped gradients and losses of its examples, with Gaussian noise."""

    def __init__(self, problem: Problem, task: Task, privacy: Privacy) -> None:
        self._problem, self._task, self._privacy = problem, task, privacy
        self.hidden: Problem | None = None  # the only problem that these kernels serve
        self.n_releases = 0

    def gradients(self, problem: Problem, thetas: Sequence[Tensor], task: Task) -> list[tuple[Tensor, Tensor]]:
        """Return noisy gradients, each with a noisy loss: one release of both, `longer` clips long."""
        self._check(problem)
        longer = math.hypot(1.0, LOSS_PART)
        found = []
        for theta in thetas:
            rows, n = self._rows(task)
            total, loss = self._clipped_sums(theta, rows)
            self.n_releases += 1
            slope = (total + self._noise(total, longer * self._privacy.clip)) / n
            value = (loss + self._noise(loss, longer / LOSS_PART * self._privacy.loss_clip)) / n
            found.append((slope + problem.ridge * theta, self._with_ridge(theta, value)))
        return found

    def loss(self, problem: Problem, theta: Tensor, task: Task) -> Tensor:
        """Return the noisy mean loss of the task's examples."""
        self._check(problem)
        rows, n = self._rows(task)
        inputs, targets = self._task.inputs[rows], self._task.targets[rows]
        with torch.no_grad():
            each, _ = PlainKernels.forward(self, self._problem, theta, inputs, targets, fixed=False)
        bound = self._privacy.loss_clip
        total = each.nan_to_num(nan=bound, posinf=bound).clamp(-bound, bound).sum()
        self.n_releases += 1
        return self._with_ridge(theta, ((total + self._noise(total, bound)) / n).to(theta.dtype))

    def sgd(
        self,
        problem: Problem,
        task: Task,
        theta: Tensor,
        *,
        momentum: float,
        weight_decay: float,
        pull: Pull | None,
        correction: Tensor | None,
        optimizer: Optimizer = PLAIN_SGD,
    ) -> Tensor:
        """Return theta after the task's steps; an example is in one release for each batch with it."""
        self._check(problem)
        if task.batches.shape[-1]:
            named = task.batches[task.batches >= 0].flatten()
            self.n_releases += int(named.bincount().max()) if len(named) else 0
        else:
            self.n_releases += len(task.batches)
        return super().sgd(
            problem,
            task,
            theta,
            momentum=momentum,
            weight_decay=weight_decay,
            pull=pull,
            correction=correction,
            optimizer=optimizer,
        )

    def _slope(self, problem: Problem, theta: Tensor, task: Task, batch: Tensor) -> Tensor:
        rows, n = self._rows(task)
        if batch.shape[-1]:
            named = batch[batch >= 0]
            rows, n = task.inputs[named], max(1, len(named))
        total, _ = self._clipped_sums(theta, rows)
        return (total + self._noise(total, self._privacy.clip)) / n + problem.ridge * theta

    def _clipped_sums(self, theta: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of the clipped gradients and of the clipped losses of these examples."""
        problem, bound = self._problem, self._privacy.loss_clip
        inputs, targets = self._task.inputs[rows], self._task.targets[rows]

        def loss(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
            return problem.losses(problem.predict(at, x[None]), y[None])[0]

        each = vmap(grad_and_value(loss), in_dims=(None, 0, 0))
        total, losses = torch.zeros_like(theta), theta.new_zeros(())
        for chosen in torch.arange(len(rows)).split(max(1, NUMBERS_AT_ONCE // len(theta))):
            G, values = each(theta, inputs[chosen], targets[chosen])
            norms = torch.linalg.vector_norm(G, dim=1)
            factors = (self._privacy.clip / norms).clamp(max=1.0).nan_to_num(nan=0.0)  # not finite: no part in the sum
            total = total + factors @ G.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            losses = losses + values.nan_to_num(nan=bound, posinf=bound).clamp(-bound, bound).sum()
        return total, losses

    def _rows(self, task: Task) -> tuple[Tensor, int]:
        """Return the numbers of the task's real examples, and how many they are: no secret."""
        rows = task.inputs[task.mask > 0]
        return rows, max(1, len(rows))

    def _noise(self, like: Tensor, sensitivity: float) -> Tensor:
        drawn = torch.from_numpy(standard_normal(like.numel())).view(like.shape)
        return self._privacy.noise_multiplier * sensitivity * drawn.to(like.device, like.dtype)

    def _with_ridge(self, theta: Tensor, loss: Tensor) -> Tensor:
        return (loss + 0.5 * self._problem.ridge * theta.square().sum()).clamp(min=self._problem.loss_floor)

    def _check(self, problem: Problem) -> None:
        if problem is not self.hidden:
            raise ValueError(
                "the method trains on a loss of its own, whose clipping `privacy.unit` = 'record' does not know; "
                "choose one that trains on the problem's loss."
            )

"""The local work of a client: its settings, which stand here once, and local SGD, which uses all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dqnfed.core.algorithm import LOCAL_WORK, Algorithm, check_range
from dqnfed.core.kernels import Pull
from dqnfed.core.problem import Problem, Task

S = TypeVar("S", bound=tuple[Any, ...])
M = TypeVar("M", bound=tuple[Any, ...])
U = TypeVar("U", bound=tuple[Any, ...])


@dataclass(frozen=True, kw_only=True)
class LocalWork(Algorithm[S, M, U]):
    """A method with the shared settings of the local work.

    Every method accepts them, so that one comparison can set them for all. Those that have no effect on a method are
    not in its `info.local_work`; `unused` names them, and so does the summary of a run that sets them.
    """

    lr: float = 0.1  # local learning rate, > 0
    epochs: int = 1  # local passes over the data a round, >= 1
    batch_size: int | None = None  # None: the full batch
    momentum: float = 0.0  # of the local SGD, in [0, 1)
    weight_decay: float = 0.0  # of the local SGD, >= 0
    lr_decay: float = 1.0  # factor on lr every `lr_decay_every` rounds, in (0, 1]
    lr_decay_every: int = 1  # rounds, >= 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "lr", low=0.0, open_low=True)
        check_range(self, "epochs", low=1)
        check_range(self, "momentum", low=0.0, high=1.0, open_high=True)
        check_range(self, "weight_decay", low=0.0)
        check_range(self, "lr_decay", low=0.0, high=1.0, open_low=True)
        check_range(self, "lr_decay_every", low=1)
        if self.batch_size is not None:
            check_range(self, "batch_size", low=1)

    def unused(self) -> frozenset[str]:
        """Return the shared settings that have no effect on this prepared method."""
        unused = frozenset(LOCAL_WORK) - self.info.local_work
        if self.lr_decay == 1.0:
            unused |= {"lr_decay_every"}
        if self.epochs == 1 and self.batch_size is None:
            unused |= {"momentum"}  # of one step, which starts from a velocity of zero
        return unused

    def lr_at(self, round: int) -> float:
        """Return the local learning rate of a round."""
        return self.lr * self.lr_decay ** (round // self.lr_decay_every)

    def local_sgd(
        self,
        problem: Problem,
        task: Task,
        theta: Tensor,
        *,
        pull: Pull | None = None,
        correction: Tensor | None = None,
    ) -> Tensor:
        """Return theta after the client's local SGD with all of these settings; learning rate and batches are the
        task's.

        A `pull` draws theta towards another model in every step, a `correction` [n] is added to every step's gradient.
        """
        return problem.kernels.sgd(
            problem,
            task,
            theta,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            pull=pull,
            correction=correction,
        )

    def passes(self, sent: Any) -> float:
        return float(self.epochs)


AnyMethod = LocalWork[Any, Any, Any]


def draw_batches(n_examples: int, *, epochs: int, batch_size: int | None, generator: torch.Generator) -> Tensor:
    """Return the rows of each local step [S, B]: every epoch is a fresh shuffle, the last batch may be short (-1)."""
    if batch_size is None:
        return torch.zeros(epochs, 0, dtype=torch.long)
    per_epoch = -(-n_examples // batch_size)
    rows = torch.stack([torch.randperm(n_examples, generator=generator) for _ in range(epochs)])
    if n_missing := per_epoch * batch_size - n_examples:
        rows = pad(rows, (0, n_missing), value=-1)
    return rows.view(epochs * per_epoch, batch_size)

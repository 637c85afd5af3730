"""The local work of a client: its settings, which stand here once, and local SGD, which uses all of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dqnfed.core.algorithm import LOCAL_WORK, Algorithm, check_choice, check_range
from dqnfed.core.kernels import Pull
from dqnfed.core.norm_training import sgd_with_norms
from dqnfed.core.optimizers import OPTIMIZERS, Optimizer
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
    optimizer: str = "sgd"  # sgd | adam | adamw: of the local steps; it starts anew in every round
    nesterov: bool = False  # whether the momentum is Nesterov's
    clip_norm: float | None = None  # longest gradient of the loss in a local step, > 0; None: any
    schedule: str = "step"  # constant | step (`lr_decay`) | cosine: of lr over the rounds
    schedule_rounds: int | None = None  # rounds in which cosine takes lr to nearly 0; a config gives its `rounds`
    warmup: int = 0  # first rounds in which lr rises evenly to its value, >= 0

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
        check_choice(self, "optimizer", OPTIMIZERS)
        check_choice(self, "schedule", ("constant", "step", "cosine"))
        check_range(self, "warmup", low=0)
        if self.clip_norm is not None:
            check_range(self, "clip_norm", low=0.0, open_low=True)
        if self.schedule_rounds is not None:
            check_range(self, "schedule_rounds", low=1)
        if self.schedule == "cosine" and self.schedule_rounds is None:
            raise ValueError(
                f"{type(self).__name__}: `schedule` = 'cosine' needs `schedule_rounds`, the rounds over which lr falls."
            )

    def unused(self) -> frozenset[str]:
        """Return the shared settings that have no effect on this prepared method."""
        effects = {
            "lr_decay": self.schedule == "step",
            "lr_decay_every": self.schedule == "step" and self.lr_decay < 1.0,
            "schedule": self.schedule != "constant" or self.lr_decay < 1.0,  # "step" means the same then
            "schedule_rounds": self.schedule == "cosine",
            # of one step, which starts from a velocity of zero, only Nesterov's form shows
            "momentum": self.optimizer == "sgd" and (self.epochs > 1 or self.batch_size is not None or self.nesterov),
            "nesterov": self.optimizer == "sgd" and self.momentum > 0.0,
        }
        return frozenset(LOCAL_WORK) - self.info.local_work | {name for name, has in effects.items() if not has}

    @property
    def has_schedule(self) -> bool:
        """Whether the local learning rate differs between rounds."""
        return self.warmup > 0 or self.schedule == "cosine" or (self.schedule == "step" and self.lr_decay < 1.0)

    def lr_at(self, round: int) -> float:
        """Return the local learning rate of a round."""
        lr = self.lr * min(1.0, (round + 1) / (self.warmup + 1))
        if self.schedule == "cosine":
            assert self.schedule_rounds is not None
            return lr * 0.5 * (1.0 + cos(pi * min(round, self.schedule_rounds - 1) / self.schedule_rounds))
        return lr * self.lr_decay ** (round // self.lr_decay_every) if self.schedule == "step" else lr

    def local_sgd(
        self,
        problem: Problem,
        task: Task,
        theta: Tensor,
        *,
        pull: Pull | None = None,
        correction: Tensor | None = None,
    ) -> Tensor:
        """Return theta after the client's local steps with all of these settings; learning rate and batches are the
        task's.

        A `pull` draws theta towards another model in every step, a `correction` [n] is added to every step's gradient,
        after it was clipped. BatchNorm takes the statistics of each batch, and has those of all examples afterwards.
        """
        sgd = problem.kernels.sgd if problem.norms is None else sgd_with_norms
        return sgd(
            problem,
            task,
            theta,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            pull=pull,
            correction=correction,
            optimizer=Optimizer(self.optimizer, self.nesterov, self.clip_norm),
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

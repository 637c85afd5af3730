"""What a run is made of: what stays the same, and what changes while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm, check_choice, check_range, check_types
from dqnfed.core.consistency import ConsistencyState
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from dqnfed.core.runners import CohortRunner, IndexedRunner, PerClientRunner
from dqnfed.core.screening import Policy
from dqnfed.secure.accounting import SpentFile
from dqnfed.secure.noise import Privacy
from dqnfed.sim.choice import LAST, SELECTS, Choice
from dqnfed.sim.clients import Clients, LocalClients, SummingClients
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.sample import evaluated_clients
from dqnfed.sim.sampling import Sampling
from dqnfed.sim.stragglers import Stragglers
from dqnfed.sim.tasks import TaskBuilder

Record = dict[str, Any]  # one line of metrics.jsonl
# writes further files at the end, and returns what the summary says about them; it may ask for the kept model's outputs
# for the test examples [N, ...], client after client
Completion = Callable[[Callable[[], Tensor]], Record]


class Known(NamedTuple):
    """A number of each of S clients, NaN of all others; its cost goes with these clients and not with all."""

    clients: Tensor  # [S] ascending
    values: Tensor  # [S] float64

    def at(self, clients: Tensor) -> Tensor:
        """Return the numbers of these clients."""
        if not len(self.clients):
            return torch.full((len(clients),), torch.nan, dtype=torch.float64)
        places = torch.searchsorted(self.clients, clients).clamp(max=len(self.clients) - 1)
        return torch.where(self.clients[places] == clients, self.values[places], torch.nan)

    def put(self, clients: Tensor, values: Tensor) -> Self:
        """Return the numbers with new ones of these clients, ascending."""
        if not len(self.clients):
            return type(self)(clients, values.double())
        stay = torch.from_numpy(~np.isin(self.clients.numpy(), clients.numpy()))
        both = torch.cat([self.clients[stay], clients])
        order = both.argsort()
        return type(self)(both[order], torch.cat([self.values[stay], values.double()])[order])


NOBODY = Known(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.float64))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured, and how often."""

    every: int = 1  # rounds between evaluations of all clients; the last round is always evaluated
    participants: bool = True  # every participant's training loss before and after each round (rho needs it)
    participants_every: int = 1  # rounds between these
    part: str = "test"  # train | validation | test: the examples that the score is taken on
    clients: int | None = None  # so many are evaluated, a stratified sample; None: all, of more than 10,000 1,000
    metrics: str = (
        "per-client"  # per-client | aggregate-only: nothing about single clients is written or, if secure, seen
    )
    patience: int | None = None  # evaluations without a better mean validation score before the run stops
    select: str = LAST  # last | loss | mean | worst10 | worst5 | min: which model is kept, by validation examples

    def __post_init__(self) -> None:
        check_types(self)
        check_range(self, "every", low=1)
        check_range(self, "participants_every", low=1)
        check_choice(self, "part", ("train", "validation", "test"))
        check_choice(self, "metrics", ("per-client", "aggregate-only"))
        check_choice(self, "select", SELECTS)
        for name in ("patience", "clients"):
            if getattr(self, name) is not None:
                check_range(self, name, low=1)


@dataclass(frozen=True)
class Setup:
    """What stays the same while a run goes on."""

    algorithm: AnyAlgorithm
    problem: Problem
    federation: Federation
    rounds: int
    cohort_size: int
    seed: int
    runner: CohortRunner
    evaluation: Evaluation
    policy: Policy
    tasks: TaskBuilder
    clients: Clients = field(default_factory=LocalClients)
    replies: Callable[[Any], Replies[Any]] = Replies  # from stacked updates
    fingerprint: Mapping[str, str] | None = None  # of the data, where the federation's own is not to be taken
    files: Mapping[str, str] = field(default_factory=dict)  # further texts for the run's folder, by name
    complete: Completion | None = None
    privacy: Privacy | None = None  # noise, and the budget that it is counted against
    participation: float = 1.0  # share of the clients in a round, of which `cohort_size` is the rounded number
    sampling: Sampling = field(default_factory=Sampling)  # how these are drawn
    stragglers: Stragglers | None = None  # which of them are late; None: nobody

    @cached_property
    def per_client_runner(self) -> PerClientRunner | None:
        """The runner where it runs clients one by one; to check a protocol takes its time."""
        return self.runner if isinstance(self.runner, PerClientRunner) else None

    @cached_property
    def indexed_runner(self) -> IndexedRunner | None:
        """The runner where it can gather the clients' examples itself."""
        return self.runner if isinstance(self.runner, IndexedRunner) else None

    @cached_property
    def summing(self) -> SummingClients | None:
        """The clients, where the server gets sums of what they measure alone."""
        is_wanted = self.clients.is_secure and self.evaluation.metrics == "aggregate-only"
        return self.clients if is_wanted and isinstance(self.clients, SummingClients) else None

    @cached_property
    def evaluated(self) -> Tensor:
        """The clients that are evaluated, ascending."""
        return evaluated_clients(self.federation, self.evaluation.part, self.evaluation.clients, self.seed)  # type: ignore[arg-type]

    @cached_property
    def model_names(self) -> list[str]:
        """The models that the method evaluates, the primary one first."""
        return self.clients.model_names(self)


@dataclass
class State:
    """Everything that the next round depends on, and the sums of the rounds so far."""

    server: Any
    memory: MemoryStore
    losses: Known = NOBODY  # training losses at the present theta
    round: int = 0  # the next one
    stopped: str = ""  # why the method ended the run
    start: Record = field(default_factory=dict)  # the start model's evaluation
    best: Record = field(default_factory=dict)  # score, round, waited: of early stopping
    choice: Choice = field(default_factory=Choice)  # which round's model is the best so far, where the best one is kept
    claims: ConsistencyState | None = None  # what clients said about the last step, where that is checked
    kept: dict[str, Tensor] = field(default_factory=dict)  # that model: see `selection.snapshot`
    guard: dict[str, Tensor] = field(default_factory=dict)  # the best evaluated model and the start: see `guard`
    totals: dict[str, float] = field(
        default_factory=lambda: {"bytes_up": 0, "bytes_down": 0, "passes": 0.0, "seconds": 0.0}
    )
    is_diverging: bool = False  # at the last evaluation; not saved, so that a resumed run says it again
    spent_file: SpentFile | None = None  # where releases are written down before they are made
    rho_sum: float = 0.0
    rho_n: int = 0
    n_dropped: int = 0
    n_clipped: int = 0

"""The contract of a federated method: what ONE client does, and what the server does with the STACKED answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from enum import Enum
from numbers import Integral
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from dqnfed.core.digest import Digest
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import n_rows, tensors

S = TypeVar("S", bound=tuple[Any, ...])
M = TypeVar("M", bound=tuple[Any, ...])
U = TypeVar("U", bound=tuple[Any, ...])


class Status(Enum):
    """What the engine does after a server step."""

    NEXT = "next"  # the round is done
    AGAIN = "again"  # another phase: same cohort, same tasks, `send` again
    HOLD = "hold"  # the round is done and theta stayed
    STOP = "stop"  # the run ends here; the reason is in `ServerStep.reason`


class Cohort(NamedTuple):
    """Who answered this round: the server's only knowledge of identity."""

    clients: Tensor  # [K] client numbers, ascending
    n_examples: Tensor  # [K] training examples
    n_clients: int  # of the whole federation
    round: int
    factors: Tensor | None = None  # [K] by which answers that were too long have been shortened; None: nobody's
    digest: Digest | None = None  # what is known of the answers on the host already; None: nothing


class ServerStep(NamedTuple, Generic[S]):
    """What the server made of the answers."""

    server: S
    status: Status = Status.NEXT
    diagnostics: dict[str, float] = {}  # noqa: RUF012  a NamedTuple default, never mutated
    reason: str = ""
    left_out: tuple[tuple[int, str], ...] = ()  # clients whose answers this round's step does without, and why
    norm_bound: float | None = None  # the new theta is finite, and no longer than this; None: not known


class Theta(NamedTuple):
    """The message of methods whose clients need the model alone."""

    theta: Tensor  # [n]


class Empty(NamedTuple):
    """The memory of clients that keep nothing; the field only carries the number of rows."""

    nothing: Tensor  # [0]


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC, Generic[S, M, U]):
    """A federated method; its fields are its hyper-parameters, and it has no other state.

    The fields of this base class describe the local work that most methods share; a method that does not train
    locally says so in its docstring and ignores them.
    """

    Server: ClassVar[type[Any]]  # a NamedTuple of tensors with a field `theta`
    Memory: ClassVar[type[Any]] = Empty  # what a client keeps between rounds
    Sent: ClassVar[tuple[type[Any], ...]] = (Theta,)  # the kinds of message down; the kind says which phase it is
    Update: ClassVar[tuple[type[Any], ...]]  # the kinds of answer up
    scales: ClassVar[tuple[str, ...]] = ()  # fields of the update that grow with its size; the first is measured
    optional: ClassVar[tuple[str, ...]] = ()  # fields of the update in which NaN means "not known"
    starts: ClassVar[tuple[str, ...]] = ("theta",)  # fields of the server that hold the start model before round 0
    reuses: ClassVar[tuple[str, ...]] = ()  # fields of the server of which a step overwrites what no longer counts
    vectorises: ClassVar[bool] = True  # False: looped cohorts only
    suits: ClassVar[frozenset[str]] = frozenset({"network", "convex"})
    diverges: ClassVar[bool] = False  # True: known to, and left out of `--all`
    exemptions: ClassVar[dict[str, str]] = {}  # contract tests that do not apply, with the reason

    lr: float = 0.1  # local learning rate, > 0
    epochs: int = 1  # local passes over the data a round, >= 1
    batch_size: int | None = None  # None: the full batch
    momentum: float = 0.0  # of the local SGD, in [0, 1)
    weight_decay: float = 0.0  # of the local SGD, >= 0
    lr_decay: float = 1.0  # factor on lr every `lr_decay_every` rounds, in (0, 1]
    lr_decay_every: int = 1  # rounds, >= 1

    def __post_init__(self) -> None:
        check_whole_numbers(self)
        check_range(self, "lr", low=0.0, open_low=True)
        check_range(self, "epochs", low=1)
        check_range(self, "momentum", low=0.0, high=1.0, open_high=True)
        check_range(self, "weight_decay", low=0.0)
        check_range(self, "lr_decay", low=0.0, high=1.0, open_low=True)
        check_range(self, "lr_decay_every", low=1)
        if self.batch_size is not None:
            check_range(self, "batch_size", low=1)

    def lr_at(self, round: int) -> float:
        """Return the local learning rate of a round."""
        return self.lr * self.lr_decay ** (round // self.lr_decay_every)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        """Return this method with every "auto" resolved, or refuse what cannot work and say why."""
        return self

    @abstractmethod
    def init_server(self, problem: Problem, n_clients: int) -> S:
        """Return the server's state before the first round."""

    def init_memory(self, problem: Problem, task: Task) -> M:
        """Return what a client keeps before its first round."""
        return Empty(problem.theta0.new_zeros(0))  # type: ignore[return-value]

    def noise(self, problem: Problem, generator: torch.Generator) -> Tensor:
        """Return the random numbers that one client needs in one round."""
        return problem.theta0.new_zeros(0)

    def cohort(self, server: S, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        """Return the clients of this round, ascending; by default those that were sampled."""
        return sampled

    def send(self, server: S) -> Any:
        """Return what clients may see."""
        return Theta(server.theta)  # type: ignore[attr-defined]

    @abstractmethod
    def client_step(self, problem: Problem, task: Task, sent: Any, memory: M) -> tuple[U, M]:
        """Return ONE client's answer and its new memory; vmapped, so no Python `if` on tensor values."""

    @abstractmethod
    def server_step(self, server: S, updates: U, cohort: Cohort) -> ServerStep[S]:
        """Return the server's new state from the stacked answers [K, ...], in client order."""

    def evaluated(self, server: S, memory: M) -> dict[str, Tensor]:
        """Return the models to judge for one client by name, the primary one first; by default the global model."""
        return {"global": server.theta}  # type: ignore[attr-defined]

    @property
    def is_personal(self) -> bool:
        """Whether `evaluated` differs between clients."""
        return False

    @property
    def captures(self) -> bool:
        """Whether `client_step` may be captured in a CUDA graph: it calls no solver that asks the host."""
        return "network" in self.suits

    @property
    def reads_inputs(self) -> bool:
        """Whether the method itself looks at the examples' inputs, and not only the model that it trains does.

        Then they stay as they were given; else a GPU may keep what the model's first layers make of them.
        """
        return False

    @property
    def gramian_of(self) -> str:
        """The field of the update whose Gramian the server begins with, which a digest then holds; empty: none."""
        return ""

    def compared_with(self, server: S) -> Tensor | None:
        """Return the rows [R, n] whose products with that field the server begins with too; None: none."""
        return None

    def tidied(self, server: S) -> S:
        """Return the same server with done what it put off; called when its message is out and the clients are at work.

        It may not be called: what a step needs, it does itself.
        """
        return server

    def can_begin(self, sent: Any) -> bool:
        """Whether clients of the next round can begin with this round's message, before the server has answered it."""
        return False

    def beginning(self, problem: Problem, task: Task, sent: Any) -> Tensor:
        """Return what ONE client of the next round makes of this round's message, [m]; vmapped as `client_step` is."""
        raise NotImplementedError(f"{type(self).__name__} says that clients can begin early, but not with what.")

    def begun(self, sent: Any, memory: M, before: Any, beginning: Tensor) -> M:
        """Return the memories for a step that goes on from the beginnings [K, m] made of the message before.

        The memories as they are if the new message has no use for them.
        """
        return memory

    def vectorises_for(self, sent: Any) -> bool:
        """Whether clients can answer this message under vmap."""
        return self.vectorises

    def uplink_bits(self, updates: U) -> int:
        """Return what one client sends; compressors count what they would really send, indices too."""
        return message_bits(updates) // n_rows(updates)

    def passes(self, sent: Any) -> float:
        """Return how many gradient passes over its data one client makes for this message."""
        return float(self.epochs)


AnyAlgorithm = Algorithm[Any, Any, Any]


def message_bits(message: tuple[Any, ...]) -> int:
    """Return the size of a message's tensors in bits."""
    return sum(8 * t.element_size() * t.numel() for t in tensors(message))


def check_range(
    settings: Any,
    name: str,
    *,
    low: float | None = None,
    high: float | None = None,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Refuse a hyper-parameter outside its range, with the range."""
    value = getattr(settings, name)
    below = low is not None and (value <= low if open_low else value < low)
    above = high is not None and (value >= high if open_high else value > high)
    if below or above or value != value:
        left = "(-inf" if low is None else f"{'(' if open_low else '['}{low:g}"
        right = "inf)" if high is None else f"{high:g}{')' if open_high else ']'}"
        raise ValueError(f"{type(settings).__name__}: `{name}` must be in {left}, {right}, but is {value}.")


def check_whole_numbers(settings: Any) -> None:
    """Refuse a hyper-parameter that counts something and is no whole number."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        counts = field.type in ("int", "int | None", int, int | None) and value is not None
        if counts and (isinstance(value, bool) or not isinstance(value, Integral)):
            raise ValueError(f"{type(settings).__name__}: `{field.name}` must be a whole number, but is {value!r}.")


def check_choice(settings: Any, name: str, choices: tuple[str, ...]) -> None:
    """Refuse a named option that does not exist, with those that do."""
    value = getattr(settings, name)
    if value not in choices:
        raise ValueError(f"{type(settings).__name__}: `{name}` must be one of {', '.join(choices)}, but is '{value}'.")


def hyperparameters(algorithm: AnyAlgorithm | type[AnyAlgorithm]) -> list[str]:
    """Return the names of a method's own hyper-parameters, without those of the shared local work."""
    shared = {f.name for f in fields(Algorithm)}
    return [f.name for f in fields(algorithm) if f.name not in shared]

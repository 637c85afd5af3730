"""The contract of a federated method: what ONE client computes, and what the server computes from the replies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from math import inf
from numbers import Integral, Real
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from dqnfed.core.problem import Problem, Task
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import tensors

S = TypeVar("S", bound=tuple[Any, ...])
M = TypeVar("M", bound=tuple[Any, ...])
U = TypeVar("U", bound=tuple[Any, ...])

SCALARS = ("loss", "rate", "curvature", "probed_curvature", "probed_slope", "probed_loss")
LOCAL_WORK = (
    "lr", "epochs", "batch_size", "momentum", "weight_decay", "lr_decay", "lr_decay_every",
    "optimizer", "nesterov", "clip_norm", "schedule", "schedule_rounds", "warmup",
)  # fmt: skip
RATE_SCHEDULE = ("lr_decay", "lr_decay_every", "schedule", "schedule_rounds", "warmup")  # those of lr by round


class Status(Enum):
    """What the engine does after a server step."""

    NEXT = "next"  # the round is done
    AGAIN = "again"  # another phase: same cohort, same tasks, `send` again
    HOLD = "hold"  # the round is done and theta did not change
    STOP = "stop"  # the run ends here; the reason is in `ServerStep.reason`


class Cohort(NamedTuple):
    """Which clients replied in this round."""

    clients: Tensor  # [K] client numbers, ascending
    n_examples: Tensor  # [K] training examples
    n_clients: int  # of the whole federation
    round: int
    factors: Tensor | None = None  # [K] by which replies that were too long have been clipped; None: none was


class ServerStep(NamedTuple, Generic[S]):
    """The server's new state, and what the engine does next."""

    server: S
    status: Status = Status.NEXT
    diagnostics: dict[str, float] = {}  # noqa: RUF012  a NamedTuple default, never mutated
    reason: str = ""
    left_out: tuple[tuple[int, str], ...] = ()  # clients whose replies this step does not use, and why


class Theta(NamedTuple):
    """The message of methods whose clients need the model alone."""

    theta: Tensor  # [n]


class Empty(NamedTuple):
    """The memory of clients that keep nothing; the field only carries the number of rows."""

    nothing: Tensor  # [0]


@dataclass(frozen=True, kw_only=True)
class Info:
    """What a method declares about itself."""

    server: type[Any]  # the server's state: a NamedTuple of tensors with a field `theta`
    replies: tuple[type[Any], ...]  # the kinds of reply up
    messages: tuple[type[Any], ...] = (Theta,)  # the kinds of message down; the kind says which phase it is
    memory: type[Any] = Empty  # what a client keeps between rounds
    needs: tuple[str, ...] = ("rows",)  # what the server asks of the replies: sum, gram or rows; then when it asks more
    clip_fields: tuple[str, ...] = ()  # fields of a reply that grow with its size; the first one is measured
    bounded_fields: tuple[str, ...] = SCALARS  # scalars that steer the step: `policy.scalar_bounds` holds them
    own_descent: bool = True  # whether rows follow the client's own loss, so that its losses can check them
    nan_ok_fields: tuple[str, ...] = ()  # fields of a reply in which NaN means "not known"
    theta_fields: tuple[str, ...] = ("theta",)  # fields of the server that hold the start model before round 0
    local_work: frozenset[str] = frozenset(LOCAL_WORK)  # the shared settings that have an effect
    problem_kinds: frozenset[str] = frozenset({"network", "convex"})
    personal: bool = False  # whether `models` differ between clients
    own_part: str = ""  # what every client adds to the server's theta, which is no whole model then
    training: str = "federated"  # or, as a reference: alone, each client by itself; pooled, on all rows together
    looped_messages: tuple[type[Any], ...] = ()  # messages to which `client_step` cannot reply under vmap
    reads_inputs: bool = False  # whether `client_step` itself looks at the examples' inputs
    asks_alone: bool = False  # whether some rounds ask one client alone, whose reply no sum hides
    diverges: bool = False  # True: known to, and left out of `--all`
    exemptions: Mapping[str, str] = field(default_factory=dict)  # contract tests that do not apply, with the reason


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC, Generic[S, M, U]):
    """A federated method; its fields are its hyper-parameters, and it has no other state."""

    info: ClassVar[Info]

    def __post_init__(self) -> None:
        check_types(self)

    def prepare(self, problem: Problem, n_clients: int, cohort_size: int) -> Self:
        """Return this method with every "auto" resolved, or refuse what cannot work and say why."""
        return self

    @property
    def needs(self) -> str:
        """What the prepared method's server asks of the replies: "sum", "gram" or "rows"."""
        return self.info.needs[0].split()[0]

    @property
    def mode(self) -> str:
        """What the prepared method chose where "auto" left it the choice; "": nothing."""
        return ""

    @abstractmethod
    def init_server(self, problem: Problem, n_clients: int) -> S:
        """Return the server's state before the first round."""

    def init_memory(self, problem: Problem, task: Task) -> M:
        """Return what a client keeps before its first round."""
        return Empty(problem.theta0.new_zeros(0))  # type: ignore[return-value]

    def noise(self, problem: Problem, generator: torch.Generator) -> Tensor:
        """Return the random numbers that one client needs in one round."""
        return problem.theta0.new_zeros(0)

    def select(self, server: S, round: int, sampled: Tensor, n_clients: int) -> Tensor:
        """Return the clients of this round, ascending; by default those that were sampled."""
        return sampled

    def send(self, server: S) -> Any:
        """Return the message to the clients."""
        return Theta(server.theta)  # type: ignore[attr-defined]

    @abstractmethod
    def client_step(self, problem: Problem, task: Task, sent: Any, memory: M) -> tuple[U, M]:
        """Return ONE client's reply and its new memory; vmapped, so no Python `if` on tensor values."""

    @abstractmethod
    def server_step(self, server: S, replies: Replies[U], cohort: Cohort) -> ServerStep[S]:
        """Return the server's new state; the one before stays as it is."""

    def models(self, server: S, memory: M) -> dict[str, Tensor]:
        """Return the models to evaluate for one client by name, the primary one first; by default the global model."""
        return {"global": server.theta}  # type: ignore[attr-defined]

    def uplink_bits(self, reply: U) -> int:
        """Return the size of one client's reply; compressors count what they would really send, indices too."""
        return message_bits(reply)

    def passes(self, sent: Any) -> float:
        """Return how many gradient passes over its data one client makes for this message."""
        return 1.0


AnyAlgorithm = Algorithm[Any, Any, Any]


def refuse_reference(algorithm: AnyAlgorithm, where: str) -> None:
    """Raise where a method that is no federated one, but a reference for comparisons, is to run between clients."""
    training = algorithm.info.training
    if training != "federated":
        what = "trains every client by itself" if training == "alone" else "trains on all clients' rows in one place"
        raise ValueError(
            f"{type(algorithm).__name__} {what}, so it is not federated and cannot run {where}; it is a reference for "
            "comparisons in the simulator (`dqnfed compare`). Choose a federated method."
        )


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
    """Refuse a hyper-parameter outside its range, with the range; inf is in it only where `high` is inf and closed."""
    value = getattr(settings, name)
    _check_number(settings, name, value)
    below = value == -inf if low is None else value <= low if open_low else value < low
    above = value == inf if high is None else value >= high if open_high else value > high
    if below or above or value != value:
        left = "(-inf" if low is None else f"{'(' if open_low else '['}{low:g}"
        right = "inf)" if high is None else f"{high:g}{')' if open_high else ']'}"
        raise ValueError(f"{type(settings).__name__}: `{name}` must be in {left}, {right}, but is {value}.")


def _check_number(settings: Any, name: str, value: Any) -> None:
    if not is_number(value):
        raise ValueError(f"{type(settings).__name__}: `{name}` must be a number, but is {value!r}.")


def check_types(settings: Any) -> None:
    """Refuse a setting of another type than it is declared with: a truth value is no number."""
    for setting in fields(settings):
        value, declared = getattr(settings, setting.name), str(setting.type)
        if value is None and declared.endswith("| None"):
            continue
        rule = RULES.get(declared.removesuffix(" | None"))
        if rule is not None and not rule[0](value):
            raise ValueError(f"{type(settings).__name__}: `{setting.name}` must be {rule[1]}, but is {value!r}.")


def is_whole(value: Any) -> bool:
    """Return whether the value is a whole number; a truth value is none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether the value is a real number; a truth value is none."""
    return False if isinstance(value, bool) else isinstance(value, Real)


RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (is_whole, "a whole number"),
    "float": (is_number, "a number"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (lambda value: isinstance(value, str), "text"),
}


def check_choice(settings: Any, name: str, choices: tuple[str, ...]) -> None:
    """Refuse a named option that does not exist, with those that do."""
    value = getattr(settings, name)
    if value not in choices:
        raise ValueError(f"{type(settings).__name__}: `{name}` must be one of {', '.join(choices)}, but is '{value}'.")


def check_used(settings: Any, name: str, *, used: bool, why: str) -> None:
    """Refuse a hyper-parameter that was changed but has no effect here; `why` completes "has no effect ..."."""
    value = getattr(settings, name)
    if not used and value != default_of(settings, name):
        raise ValueError(f"{type(settings).__name__}: `{name}` is {value!r}, but has no effect {why}; leave it out.")


def default_of(settings: Any, name: str) -> Any:
    """Return the default of a dataclass' field."""
    found = next(f for f in fields(settings) if f.name == name)
    return found.default_factory() if found.default_factory is not MISSING else found.default


def hyperparameters(algorithm: AnyAlgorithm | type[AnyAlgorithm]) -> list[str]:
    """Return the names of a method's own hyper-parameters, without the shared settings of the local work."""
    return [f.name for f in fields(algorithm) if f.init and f.name not in LOCAL_WORK]

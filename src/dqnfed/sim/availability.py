"""Who is online when: a trace of a federation, read from a CSV file or drawn from a stated rule."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dqnfed.core.seeds import numpy_seed_for

COLUMNS = ("client", "first_round", "last_round")
MOST_ROUNDS = 1_000_000
IntArray = NDArray[np.int64]


class Span(NamedTuple):
    """Rounds in which a client is online, both ends included."""

    client: int
    first: int
    last: int


@dataclass(frozen=True)
class Trace:
    """Who is online in which round; after its last round it begins again. A client that it does not name never is."""

    spans: tuple[Span, ...]

    @property
    def n_rounds(self) -> int:
        """The rounds up to the last one in which somebody is online."""
        return 1 + max(span.last for span in self.spans)

    def __repr__(self) -> str:
        return f"Trace({self.n_rounds} rounds, {sha256(repr(self.spans).encode()).hexdigest()[:16]})"

    def check(self, n_clients: int) -> None:
        """Refuse a trace that names clients that there are not."""
        unknown = sorted({span.client for span in self.spans if span.client >= n_clients})
        if unknown:
            raise ValueError(
                f"the trace names client {unknown[0]}, but the {n_clients} clients have the numbers 0 to "
                f"{n_clients - 1}; make one for this federation (`dqnfed data trace`)."
            )

    def online(self, round: int, n_clients: int) -> IntArray:
        """Return who is online in a round, ascending."""
        found: IntArray = _table(self, n_clients)[round % self.n_rounds].nonzero()[0]
        return found

    def mean_online(self, n_clients: int) -> float:
        """Return how many clients are online in a round, on average."""
        self.check(n_clients)
        return float(_table(self, n_clients).sum(1).mean())


@lru_cache(maxsize=4)
def _table(trace: Trace, n_clients: int) -> NDArray[np.bool_]:
    """Return whether each client [C] is online in each round [R]."""
    found = np.zeros((trace.n_rounds, n_clients), dtype=bool)
    for client, first, last in trace.spans:
        found[first : last + 1, client] = True
    return found


def read_trace(path: Path) -> Trace:
    """Return the trace of a CSV file with the columns client, first_round, last_round, or say which line is wrong."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"the trace {path} cannot be read: {error}.") from error
    if not rows or not set(COLUMNS) <= set(rows[0]):
        raise ValueError(f"the trace {path} must have the columns {', '.join(COLUMNS)}, and at least one row.")
    return Trace(tuple(sorted(_span(row, path, line) for line, row in enumerate(rows, start=2))))


def _span(row: dict[str, str], path: Path, line: int) -> Span:
    try:
        span = Span(*(int(row[name]) for name in COLUMNS))
    except (TypeError, ValueError):
        span = Span(-1, -1, -1)
    if not (span.client >= 0 and 0 <= span.first <= span.last <= MOST_ROUNDS):
        raise ValueError(
            f"{path}, line {line}: client, first_round and last_round must be whole numbers, 0 <= first_round <= "
            f"last_round <= {MOST_ROUNDS}, but are {', '.join(repr(row.get(name)) for name in COLUMNS)}."
        )
    return span


def trace_text(trace: Trace) -> str:
    """Return the trace as a CSV file."""
    return "\n".join([",".join(COLUMNS), *(",".join(map(str, span)) for span in trace.spans)]) + "\n"


def drawn_trace(
    n_clients: int, n_rounds: int, *, online: float = 0.5, stay: float = 10.0, spread: float = 0.0, seed: int = 0
) -> Trace:
    """Return a trace in which every client comes and goes by itself: a Markov chain with two states.

    It is online for `stay` rounds on average, and `online` of all rounds in the long run; with a spread the share
    differs between clients: its logit is normal with that standard deviation.
    """
    _check_drawn(n_clients, n_rounds, online, stay, spread)
    spans: list[Span] = []
    for client in range(n_clients):
        generator = numpy_seed_for(seed, client=client, purpose="availability")
        share = online if online == 1.0 else _shifted(online, spread * generator.standard_normal())
        leave = 1.0 / stay
        come = 1.0 if share == 1.0 else min(1.0, leave * share / (1.0 - share))
        leave = 0.0 if share == 1.0 else come * (1.0 - share) / share  # where `come` met its bound, stays are longer
        draws = generator.random(n_rounds)
        state, states = bool(generator.random() < share), []
        for draw in draws:
            states.append(state)
            state = bool(draw >= leave) if state else bool(draw < come)
        spans += spans_of(client, states)
    if not spans:
        raise ValueError("in this trace nobody is ever online; raise `online`, or take more clients or rounds.")
    return Trace(tuple(spans))


def spans_of(client: int, states: Sequence[bool]) -> Iterable[Span]:
    """Return the rounds in which a client is online as spans."""
    for is_online, rounds in groupby(range(len(states)), key=lambda round: states[round]):
        if is_online:
            at = list(rounds)
            yield Span(client, at[0], at[-1])


def _shifted(share: float, by: float) -> float:
    return float(1.0 / (1.0 + (1.0 - share) / share * np.exp(-by)))


def _check_drawn(n_clients: int, n_rounds: int, online: float, stay: float, spread: float) -> None:
    rules = {
        "clients": (n_clients >= 1, ">= 1", n_clients),
        "rounds": (1 <= n_rounds <= MOST_ROUNDS, f"from 1 to {MOST_ROUNDS}", n_rounds),
        "online": (0.0 < online <= 1.0, "in (0, 1]", online),
        "stay": (stay >= 1.0, ">= 1 round", stay),
        "spread": (0.0 <= spread < np.inf, ">= 0", spread),
    }
    for name, (is_right, rule, value) in rules.items():
        if not is_right:
            raise ValueError(f"a trace's `{name}` must be {rule}, but is {value}.")

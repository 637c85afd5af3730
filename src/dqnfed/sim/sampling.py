"""Who takes part in a round: drawn from the run's seed, of those who are online, by one of five rules."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dqnfed.core.algorithm import Algorithm, check_choice, check_range, check_types, check_used
from dqnfed.core.seeds import numpy_seed_for
from dqnfed.sim.availability import Trace
from dqnfed.sim.private import share_of
from dqnfed.sim.tasks import sampled_clients

if TYPE_CHECKING:
    from dqnfed.sim.state import Setup, State

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
RULES = ("uniform", "poisson", "size", "power-of-choice", "cyclic")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the clients of a round are drawn; m is the share `participation` of all clients, rounded, at least one.

    uniform: m of those who are online. poisson: each of them by itself with probability `participation`, which may be
    nobody. size: m, with a probability in proportion to their training examples (at most 1). power-of-choice: of
    `candidates` drawn by size the m with the largest training loss (Cho et al., AISTATS 2022). cyclic: m after m in an
    order that is drawn once; a client that is offline when its turn comes misses it.
    """

    rule: str = "uniform"
    candidates: int | None = None  # of power-of-choice, at least m; None: twice m
    trace: Trace | None = None  # who is online in which round; None: everybody, always

    def __post_init__(self) -> None:
        check_types(self)
        check_choice(self, "rule", RULES)
        check_used(self, "candidates", used=self.rule == "power-of-choice", why=f"on the rule '{self.rule}'")
        if self.candidates is not None:
            check_range(self, "candidates", low=1)

    @property
    def is_plain(self) -> bool:
        """Whether these are the defaults, under which a run is what it was before there was a choice."""
        return self == Sampling()

    def check(self, n_clients: int, size: int) -> None:
        """Refuse what does not fit the federation."""
        if self.trace is not None:
            self.trace.check(n_clients)
        if self.candidates is not None and not size <= self.candidates <= n_clients:
            raise ValueError(
                f"Sampling: `candidates` must be from {size}, the clients of a round, to {n_clients}, all clients, but "
                f"is {self.candidates}."
            )

    def expected_size(self, n_clients: int, share: float) -> int:
        """Return how many clients a method is to expect in a round: fewer than all where somebody may be missing."""
        online = n_clients if self.trace is None else self.trace.mean_online(n_clients)
        size = min(max(1, round(share * n_clients)), max(1, int(online)))
        may_miss = online < n_clients or (self.rule == "poisson" and share < 1.0)
        return max(1, min(size, n_clients - 1)) if may_miss else size


def as_sampling(given: Sampling | str) -> Sampling:
    """Return the sampling itself, or that of a rule's name."""
    return given if isinstance(given, Sampling) else Sampling(rule=given)


def clients_of_round(setup: Setup, state: State) -> Tensor:
    """Return the clients of the present round, ascending; none of them is offline."""
    n_clients = setup.federation.n_clients
    if setup.sampling.rule == "power-of-choice":
        sampled = _with_largest_losses(setup, state)
    else:
        sampled = drawn_clients(setup, state.round)
    selected = setup.algorithm.select(state.server, state.round, sampled, n_clients)
    if setup.sampling.trace is None or type(setup.algorithm).select is Algorithm.select:
        return selected
    return selected[torch.from_numpy(np.isin(selected.numpy(), setup.sampling.trace.online(state.round, n_clients)))]


class Draw(NamedTuple):
    """What a rule draws from."""

    seed: int
    round: int
    online: IntArray  # clients, ascending
    size: int  # m
    share: float  # participation
    sizes: FloatArray  # [C] training examples
    is_secret: bool = False  # drawn from the system's generator, for noise that counts on nobody knowing who takes part


def drawn_clients(setup: Setup, round: int) -> Tensor:
    """Return the clients of a round by a rule that asks nothing of them."""
    sampling, n_clients, size = setup.sampling, setup.federation.n_clients, setup.cohort_size
    if sampling.rule == "uniform" and sampling.trace is None:
        return sampled_clients(setup.seed, round, n_clients, size)
    return torch.from_numpy(np.sort(DRAWS[sampling.rule](draw_of(setup, round, size))))


def draw_of(setup: Setup, round: int, size: int) -> Draw:
    """Return what the clients of a round are drawn from."""
    trace, n_clients = setup.sampling.trace, setup.federation.n_clients
    online = np.arange(n_clients) if trace is None else trace.online(round, n_clients)
    sizes = setup.federation.n_examples.double().numpy()
    return Draw(setup.seed, round, online, size, setup.participation, sizes, share_of(setup) < 1.0)


def poisson_draw(draw: Draw) -> IntArray:
    """Return each of those who are online by itself with probability `share`; that may be nobody."""
    n = len(draw.sizes)
    if draw.is_secret:
        chances = (np.frombuffer(secrets.token_bytes(8 * n), dtype=np.uint64) >> np.uint64(11)) / 2.0**53
    else:
        chances = numpy_seed_for(draw.seed, draw.round, purpose="poisson cohort").random(n)
    return draw.online[chances[draw.online] < draw.share]


def uniform_draw(draw: Draw) -> IntArray:
    """Return m of those who are online, or all of them where they are fewer."""
    if len(draw.online) <= draw.size:
        return draw.online
    return numpy_seed_for(draw.seed, draw.round, purpose="cohort").choice(draw.online, size=draw.size, replace=False)


def size_draw(draw: Draw) -> IntArray:
    """Return m clients, each with a probability of exactly min(1, t times its examples): systematic sampling.

    The clients are laid side by side in a random order, as long as their probabilities; a comb with teeth one apart
    and a random start takes those that it hits.
    """
    if len(draw.online) <= draw.size:
        return draw.online
    generator = numpy_seed_for(draw.seed, draw.round, purpose="cohort by size")
    chances = inclusion_probabilities(draw.sizes[draw.online], draw.size)
    order = generator.permutation(len(chances))
    ends = np.cumsum(chances[order])
    teeth = generator.random() + np.arange(draw.size)
    taken: IntArray = order[np.searchsorted(ends, np.minimum(teeth, ends[-1] - 1e-12), side="right")]
    return draw.online[taken]


def inclusion_probabilities(sizes: FloatArray, size: int) -> FloatArray:
    """Return probabilities in proportion to the sizes, none above 1, that add up to `size`."""
    certain = np.zeros(len(sizes), dtype=bool)
    while True:
        left = size - certain.sum()
        chances: FloatArray = np.where(certain, 1.0, left * sizes / sizes[~certain].sum())
        more = (chances > 1.0) & ~certain
        if not more.any():
            return chances
        certain |= more


def cyclic_draw(draw: Draw) -> IntArray:
    """Return the next m clients in an order that is drawn once, without those that are offline."""
    order = cycle(draw.seed, len(draw.sizes))
    turn = order[(draw.round * draw.size + np.arange(draw.size)) % len(order)]
    return turn[np.isin(turn, draw.online)]


@lru_cache(maxsize=4)
def cycle(seed: int, n_clients: int) -> IntArray:
    """Return the order of the cyclic rule."""
    return numpy_seed_for(seed, purpose="cycle").permutation(n_clients)


DRAWS: dict[str, Callable[[Draw], IntArray]] = {
    "uniform": uniform_draw,
    "poisson": poisson_draw,
    "size": size_draw,
    "cyclic": cyclic_draw,
}


def _with_largest_losses(setup: Setup, state: State) -> Tensor:
    """Return those of the candidates whose training losses at the present model are largest; of equals, the first."""
    size, n_clients = setup.cohort_size, setup.federation.n_clients
    n_candidates = setup.sampling.candidates or min(n_clients, 2 * size)
    candidates = torch.from_numpy(np.sort(size_draw(draw_of(setup, state.round, n_candidates))))
    if len(candidates) <= size:
        return candidates
    found = setup.clients.evaluate(setup, state, candidates, with_scores=False)
    state.losses = state.losses.put(found.clients, found.losses)
    order = found.losses.nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
    return found.clients[order[:size]].sort().values

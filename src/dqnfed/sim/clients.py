"""Where the clients are: here, with their data in this process, which trains and evaluates them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.algorithm import Algorithm, AnyAlgorithm
from dqnfed.core.federation import Examples
from dqnfed.core.problem import Problem
from dqnfed.core.replies import Replies
from dqnfed.core.tensors import map_tensors, row, stack
from dqnfed.secure.noise import released
from dqnfed.secure.records import step_on_records
from dqnfed.secure.sums import Moments
from dqnfed.sim.memory import MemoryStore
from dqnfed.sim.sampling import drawn_clients

if TYPE_CHECKING:
    from dqnfed.sim.state import Setup, State

AT_ONCE = 2**20  # examples that are evaluated together where they are in memory: their outputs are kept for the scores
LAZY_AT_ONCE = 2**16  # where they are read


@dataclass
class Traffic:
    """Bytes of an exchange that are more than the method's own reply; questions during the step are added to it."""

    up: int = 0
    down: int = 0


class Answers(NamedTuple):
    """What a cohort replied in one phase."""

    clients: Tensor  # [K] who replied, ascending
    replies: Replies[Any] | None  # None if nobody did
    memory: Any  # stacked or one by one in a list: what the store keeps for those whose replies are used
    missing: list[tuple[int, str]]  # clients that did not reply, and why
    traffic: Traffic | None = None  # where replies are sent in another form than the method's own
    releases: int = 1  # of noisy numbers: in how many of them one client or one of its examples had a part


class Evaluated(NamedTuple):
    """What clients measured at the present model."""

    clients: Tensor  # [K] who replied, ascending
    losses: Tensor  # [K] training losses, host float64
    scores: dict[str, Tensor]  # [K] by model name, the primary first; NaN: untested; empty if they were not asked for


class Validated(NamedTuple):
    """What the clients that replied measured with the primary model on their validation examples."""

    losses: Tensor  # [K] host float64
    scores: Tensor  # [K] host float64


class SumQuestion(NamedTuple):
    """What is to be summed over whom."""

    names: tuple[str, ...]  # see `sums`
    clients: Tensor
    part: str  # the examples of the scores


class Sums(NamedTuple):
    """What follows from sums over the clients that replied."""

    clients: Tensor  # ascending
    numbers: dict[str, list[Moments]]  # by name; scores by model


class Clients(Protocol):
    """The engine's only way to the clients."""

    @property
    def memory_kind(self) -> type[Any] | None:
        """What the store keeps for a client; None: the method's own memory."""

    @property
    def is_secure(self) -> bool:
        """Whether replies reach the server under pads alone."""

    def train(self, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int) -> Answers:
        """Return the clients' replies to what was sent in this phase of the round."""

    def evaluate(self, setup: Setup, state: State, clients: Tensor, *, with_scores: bool) -> Evaluated:
        """Return the clients' training losses at the present model, and their scores."""

    def validate(self, setup: Setup, state: State) -> Validated:
        """Return all clients' losses and scores of the present primary model on their validation examples."""

    def model_names(self, setup: Setup) -> list[str]:
        """Return the names of the models that the method evaluates, the primary one first."""

    def refusals(self) -> list[dict[str, Any]]:
        """Return whose evaluations were refused since the last call, and why."""


@runtime_checkable
class SummingClients(Protocol):
    """Clients that can give sums of what they measure, and nobody's own numbers."""

    def sums(self, setup: Setup, state: State, question: SumQuestion) -> Sums | None:
        """Return the sums over all who replied; None where these are too few."""


@dataclass(frozen=True)
class LocalClients:
    """All clients and their data in this process; every one of them replies."""

    memory_kind: type[Any] | None = None
    is_secure: bool = False

    def train(self, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int) -> Answers:
        if setup.stragglers is None or setup.algorithm.info.training == "alone":
            return self._train(setup, state, clients, sent, phase)
        missing = late_clients(setup, state.round, clients)
        here = clients[~torch.isin(clients, torch.tensor([client for client, _ in missing], dtype=torch.long))]
        if not here.shape[0]:
            return Answers(here, None, None, missing)
        return self._train(setup, state, here, sent, phase)._replace(missing=missing)

    def _train(self, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int) -> Answers:
        algorithm, problem, tasks = setup.algorithm, setup.problem, setup.tasks
        if setup.privacy is not None and setup.privacy.unit == "record":
            return _trained_on_records(setup, state, clients, sent)
        train = setup.federation.train
        device = problem.theta0.device if train.is_lazy else train.inputs.device
        if (per_client := setup.per_client_runner) is not None:
            each = tasks.per_client(clients, state.round)
            memories: Any = [state.memory.one(c, task) for c, task in zip(clients.tolist(), each, strict=True)]
            updates, memory = per_client.per_client(algorithm, problem, each, sent, memories)
        elif (indexed := None if train.is_lazy else setup.indexed_runner) and indexed.runs_indexed(
            algorithm, sent, device
        ):
            by_index = tasks.task_indices(clients, state.round)
            memories = memories_of(setup, state, clients)
            updates, memory = indexed.indexed(algorithm, problem, by_index, sent, memories, tasks.gather_examples)
        else:
            stacked = tasks.stacked(clients, state.round)
            memories = state.memory.get(clients, stacked)
            updates, memory = setup.runner(algorithm, problem, stacked, sent, memories)
        if phase == 0 and device.type != "cpu":
            _prefetch(setup, state)
        replies = updates if isinstance(updates, Replies) else setup.replies(updates)
        if (privacy := setup.privacy) is not None:
            replies = setup.replies(released(replies.updates, privacy, setup.problem.loss_floor))
        return Answers(clients, replies, memory, [])

    def evaluate(self, setup: Setup, state: State, clients: Tensor, *, with_scores: bool) -> Evaluated:
        train, theta = setup.federation.train, state.server.theta
        if "global" not in setup.model_names:  # every client has its own, and theta alone is none
            [own] = self._measured(setup, state, clients, "train").values()
            losses = own.loss
        else:
            losses = evaluate(setup.problem, theta, train, clients, with_score=False).loss
        if not with_scores:
            return Evaluated(clients, losses.cpu(), {})
        held = setup.federation.examples(setup.evaluation.part).sizes_of(clients) > 0  # type: ignore[arg-type]
        found = self._measured(setup, state, clients if bool(held.all()) else clients[held], setup.evaluation.part)
        scores = {name: _spread(each.scores.cpu(), held) for name, each in found.items()}
        return Evaluated(clients, losses.cpu(), scores)

    def validate(self, setup: Setup, state: State) -> Validated:
        asked = setup.evaluated
        held = asked[setup.federation.examples("validation").sizes_of(asked) > 0]
        [found] = self._measured(setup, state, held, "validation", n_models=1).values()
        return Validated(found.loss.cpu(), found.scores.cpu())

    def refusals(self) -> list[dict[str, Any]]:
        return []

    def model_names(self, setup: Setup) -> list[str]:
        server = setup.algorithm.init_server(setup.problem, setup.federation.n_clients)
        if not setup.algorithm.info.personal:
            return list(setup.algorithm.models(server, None))
        first = torch.arange(1)
        memory = MemoryStore(setup.algorithm, setup.problem, 1).get(first, setup.tasks.stacked(first, 0))
        return list(setup.algorithm.models(server, row(memory, 0)))

    def _measured(
        self, setup: Setup, state: State, clients: Tensor, part: str, *, n_models: int | None = None
    ) -> dict[str, Measured]:
        """Return losses and scores on a part of the clients' examples, by model; of the first models or of all."""
        algorithm, problem = setup.algorithm, setup.problem
        examples = setup.federation.examples(part)  # type: ignore[arg-type]
        if not algorithm.info.personal:
            models = islice(algorithm.models(state.server, None).items(), n_models)
            return {name: evaluate(problem, theta, examples, clients) for name, theta in models}
        found: dict[str, list[Measured]] = {}
        for c in clients.split(16):
            memory = memories_of(setup, state, c)
            each = vmap(lambda kept: algorithm.models(state.server, kept))(memory)
            for name, thetas in islice(each.items(), n_models):
                found.setdefault(name, []).append(evaluate_personal(problem, thetas, examples, c))
        return {name: connected(parts) for name, parts in found.items()}


def _trained_on_records(setup: Setup, state: State, clients: Tensor, sent: Any) -> Answers:
    """Return the replies of clients that each compute with clipped parts of their examples and noise."""
    assert setup.privacy is not None
    found = []
    for client, task in zip(clients.tolist(), setup.tasks.per_client(clients, state.round), strict=True):
        memory = state.memory.one(client, task)
        found.append(step_on_records(setup.algorithm, setup.problem, task, sent, memory, setup.privacy))
    replies = setup.replies(stack([update for update, _, _ in found]))
    return Answers(clients, replies, [memory for _, memory, _ in found], [], releases=max(n for _, _, n in found))


@dataclass(frozen=True)
class PooledClients(LocalClients):
    """All rows in one place: one task holds those of the whole cohort, and every client gets its update."""

    def train(self, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int) -> Answers:
        task = setup.tasks.pooled(clients, state.round)
        memory = setup.algorithm.init_memory(setup.problem, task)
        update, _ = setup.algorithm.client_step(setup.problem, task, sent, memory)
        shared = map_tensors(lambda t: t.expand(len(clients), *t.shape), update)
        kept = map_tensors(lambda t: t.expand(len(clients), *t.shape), memory)
        return Answers(clients, setup.replies(shared), kept, [])


def late_clients(setup: Setup, round: int, clients: Tensor) -> list[tuple[int, str]]:
    """Return the clients that send nothing until the deadline, and how late they are."""
    assert setup.stragglers is not None
    sizes, algorithm, found = setup.federation.n_examples.double().numpy(), setup.algorithm, []
    for client in clients.tolist():
        share = setup.stragglers.share(setup.seed, round, client, sizes)
        per_epoch = -(-int(sizes[client]) // (getattr(algorithm, "batch_size", None) or int(sizes[client])))
        n_steps = getattr(algorithm, "epochs", 1) * per_epoch
        is_late = share < 1.0 if setup.stragglers.late == "drop" else setup.stragglers.steps(share, n_steps) == 0
        if is_late:
            found.append((client, f"late: it needs {1.0 / share:.2f} times the deadline"))
    return found


def local_clients(algorithm: AnyAlgorithm) -> LocalClients:
    """Return the clients of a run in this process."""
    return PooledClients() if algorithm.info.training == "pooled" else LocalClients()


def _spread(scores: Tensor, held: Tensor) -> Tensor:
    """Return the scores of those who have examples at their places, NaN at those of the others."""
    if bool(held.all()):
        return scores
    spread = scores.new_full((len(held),), torch.nan)
    spread[held] = scores
    return spread


def memories_of(setup: Setup, state: State, clients: Tensor) -> Any:
    """Return the clients' stacked memories; examples are gathered for clients without one alone."""
    tasks = setup.tasks.task_indices(clients, state.round)
    if not state.memory.knows(clients):
        is_lazy = setup.federation.train.is_lazy
        tasks = setup.tasks.stacked(clients, state.round) if is_lazy else setup.tasks.gather_examples(tasks)
    return state.memory.get(clients, tasks)


def _prefetch(setup: Setup, state: State) -> None:
    """Draw the next round's tasks while the device is busy, unless the method chooses its cohort itself."""
    round, asks = state.round + 1, setup.sampling.rule == "power-of-choice"
    if round >= setup.rounds or asks or type(setup.algorithm).select is not Algorithm.select:
        return
    clients = drawn_clients(setup, round)
    if not clients.shape[0]:
        return
    state.memory.prefetch(clients)
    setup.tasks.prefetch(clients, round)


class Measured(NamedTuple):
    """What an evaluation found, per client, in float64, on the device of the examples."""

    loss: Tensor  # [K] mean loss
    score: Tensor | None  # [K] the problem's score

    @property
    def scores(self) -> Tensor:
        """The scores, where they were asked for."""
        assert self.score is not None
        return self.score


@torch.no_grad()
def evaluate(
    problem: Problem, theta: Tensor, examples: Examples, clients: Tensor, *, with_score: bool = True
) -> Measured:
    """Return the given clients' losses and scores at one shared model.

    The model is the same for all, so the clients' examples form one long batch: no per-client call, no padding.
    """
    sizes, most = examples.sizes_of(clients), LAZY_AT_ONCE if examples.is_lazy else AT_ONCE
    if len(clients) > 1 and int(sizes.sum()) > most:
        blocks = blocks_of(clients, sizes, most=most)
        return connected([evaluate(problem, theta, examples, block, with_score=with_score) for block in blocks])
    everyone = not examples.is_lazy and len(clients) == len(examples.starts) - 1 and bool((clients.diff() == 1).all())
    inputs, targets = (examples.inputs, examples.targets) if everyone else _gathered(problem, examples, clients)
    losses, outputs = problem.kernels.forward(problem, theta, inputs, targets, fixed=everyone)
    means = _mean_losses(problem, theta, losses, sizes)
    return Measured(means, _scores(problem, outputs, targets, sizes) if with_score else None)


@torch.no_grad()
def evaluate_personal(problem: Problem, thetas: Tensor, examples: Examples, clients: Tensor) -> Measured:
    """Return the given clients' losses and scores, each at its own model (a row of thetas)."""
    inputs, targets = _gathered(problem, examples, clients)
    sizes = examples.sizes_of(clients)
    losses, outputs = problem.kernels.forward_each(problem, thetas, inputs, targets, sizes)
    return Measured(_mean_losses(problem, thetas, losses, sizes), _scores(problem, outputs, targets, sizes))


def blocks_of(clients: Tensor, sizes: Tensor, *, most: int) -> Iterator[Tensor]:
    """Yield the clients in blocks of at most so many examples, or of one client; one block where they are not more."""
    ends = sizes.cumsum(0)
    first = 0
    while first < len(clients):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(torch.searchsorted(ends, before + most, right=True)))
        yield clients[first:last]
        first = last


def connected(parts: list[Measured]) -> Measured:
    """Return what was found of all clients, measured in blocks."""
    scores = [part.score for part in parts if part.score is not None]
    return Measured(torch.cat([part.loss for part in parts]), torch.cat(scores) if scores else None)


def _gathered(problem: Problem, examples: Examples, clients: Tensor) -> tuple[Tensor, Tensor]:
    inputs, targets = examples.taken(clients)
    if not examples.is_lazy:
        return inputs, targets
    device = problem.theta0.device
    return inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)


def _mean_losses(problem: Problem, theta: Tensor, losses: Tensor, sizes: Tensor) -> Tensor:
    """Return the clients' mean losses, ridge included; theta is the model of all [n], or of each [K, n]."""
    values = losses.to(torch.float64)
    if bool((sizes == sizes[0]).all()):
        means = values.view(len(sizes), -1).mean(1)
    else:
        means = torch.segment_reduce(values, "mean", lengths=sizes.to(values.device))
    return means + 0.5 * problem.ridge * theta.square().sum(-1).double() if problem.ridge else means


def _scores(problem: Problem, outputs: Tensor, targets: Tensor, sizes: Tensor) -> Tensor:
    padded = Examples(outputs, targets, torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)]))
    index, real = (t.to(outputs.device, non_blocking=True) for t in padded.padded_rows(torch.arange(len(sizes))))
    return vmap(problem.score)(outputs[index], targets[index], real.to(outputs.dtype)).double()

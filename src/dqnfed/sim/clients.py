"""Where the clients are: here, with their data in this process. Elsewhere they are asked by messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from dqnfed.core.algorithm import Algorithm
from dqnfed.core.digest import Digest
from dqnfed.core.problem import Problem, Task
from dqnfed.core.tensors import row
from dqnfed.sim.cohort import Begun, DigestingRunner
from dqnfed.sim.evaluate import forward_of, judge, judge_personal
from dqnfed.sim.feed import sampled_clients
from dqnfed.sim.graphs import GraphedFunction
from dqnfed.sim.memory import MemoryStore

if TYPE_CHECKING:
    from dqnfed.sim.state import Setup, State


class Answers(NamedTuple):
    """What a cohort answered in one phase."""

    clients: Tensor  # [K] who answered, ascending
    updates: Any  # stacked; None if nobody did
    memory: Any  # stacked or one by one in a list: what the store keeps for those whose answers are used
    missing: list[tuple[int, str]]  # clients without an answer, and why
    arrived: Callable[[], Digest] | None = None  # waits for the updates' digest, where the runner makes one


class Beginning(NamedTuple):
    """What the clients of a round could do before its message came."""

    round: int
    sent: Any  # the message of the round before, which they began with
    begun: Begun


class Judgement(NamedTuple):
    """What clients measured at the present model."""

    clients: Tensor  # [K] who answered, ascending
    losses: Tensor  # [K] training losses, host float64
    scores: dict[str, Tensor]  # [K] by model name, the primary model first; empty if nobody asked


class Clients(Protocol):
    """The engine's only way to the clients."""

    @property
    def memory_kind(self) -> type[Any] | None:
        """What the store keeps for a client; None: the method's own memory."""

    def answers(self, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int) -> Answers:
        """Return the clients' answers to what was sent in this phase of the round."""

    def judged(self, setup: Setup, state: State, clients: Tensor, *, with_scores: bool) -> Judgement:
        """Return the clients' training losses at the present model, and their scores."""

    def model_names(self, setup: Setup) -> list[str]:
        """Return the names of the models that the method wants judged, the primary one first."""


@dataclass(frozen=True)
class LocalClients:
    """All clients and their data in this process; every one of them answers."""

    memory_kind: type[Any] | None = None
    _forwards: dict[int, GraphedFunction] = field(default_factory=dict, repr=False)  # of the one problem that is run

    def answers(self, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int) -> Answers:
        if (runner := setup.apart_runner) is not None:
            each = setup.feed.apart(clients, state.round)
            memories = [state.memory.one(c, task) for c, task in zip(clients.tolist(), each, strict=True)]
            return Answers(clients, *runner.apart(setup.algorithm, setup.problem, each, sent, memories), [])
        if (digesting := setup.digesting_runner) is not None and _is_captured(setup, sent):
            return self._digested(digesting, setup, state, clients, sent, phase)
        tasks = setup.feed.tasks(clients, state.round)
        memory = state.memory.get(clients, tasks)
        answers = Answers(clients, *setup.cohort(setup.algorithm, setup.problem, tasks, sent, memory), [])
        if phase == 0 and tasks.mask.is_cuda:
            _look_ahead(setup, state)
        return answers

    def _digested(
        self, runner: DigestingRunner, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int
    ) -> Answers:
        feed = setup.feed
        tasks = feed.indexed(clients, state.round)
        memory = _memories(setup, state, clients)
        begun = None
        if phase == 0 and state.beginning is not None and state.beginning.round == state.round:
            begun = state.beginning.begun
            memory = setup.algorithm.begun(sent, memory, state.beginning.sent, begun.found)
        rows = setup.algorithm.compared_with(state.server)
        updates, kept, arrived = runner.digested(
            setup.algorithm, setup.problem, tasks, sent, memory, feed.looked_up, rows, begun
        )
        if phase == 0:  # before the GPU is waited for
            state.beginning = _begun(runner, setup, sent, state.round + 1, _look_ahead(setup, state))
        return Answers(clients, updates, kept, [], arrived)

    def judged(self, setup: Setup, state: State, clients: Tensor, *, with_scores: bool) -> Judgement:
        train, theta = setup.federation.train, state.server.theta
        forward = self._forward(setup.problem)
        losses = judge(setup.problem, theta, train, clients, with_score=False, forward=forward).loss
        scores = self._scores(setup, state, clients) if with_scores else {}
        return Judgement(clients, losses.cpu(), {name: found.cpu() for name, found in scores.items()})

    def model_names(self, setup: Setup) -> list[str]:
        server = setup.algorithm.init_server(setup.problem, setup.federation.n_clients)
        if not setup.algorithm.is_personal:
            return list(setup.algorithm.evaluated(server, None))
        first = torch.arange(1)
        memory = MemoryStore(setup.algorithm, setup.problem, 1).get(first, setup.feed.tasks(first, 0))
        return list(setup.algorithm.evaluated(server, row(memory, 0)))

    def _scores(self, setup: Setup, state: State, clients: Tensor) -> dict[str, Tensor]:
        algorithm, problem = setup.algorithm, setup.problem
        examples = setup.federation.examples(setup.evaluation.part)  # type: ignore[arg-type]
        if not algorithm.is_personal:
            models = algorithm.evaluated(state.server, None)
            forward = self._forward(problem)
            return {
                name: judge(problem, theta, examples, clients, forward=forward).scores for name, theta in models.items()
            }
        scores: dict[str, list[Tensor]] = {}
        for c in clients.split(16):
            memory = _memories(setup, state, c)
            models = vmap(lambda kept: algorithm.evaluated(state.server, kept))(memory)
            for name, thetas in models.items():
                scores.setdefault(name, []).append(judge_personal(problem, thetas, examples, c).scores)
        return {name: torch.cat(parts) for name, parts in scores.items()}

    def _forward(self, problem: Problem) -> GraphedFunction:
        return self._forwards.setdefault(id(problem), forward_of(problem))


def _is_captured(setup: Setup, sent: Any) -> bool:
    return setup.algorithm.captures and setup.algorithm.vectorises_for(sent)


def _memories(setup: Setup, state: State, clients: Tensor) -> Any:
    """Return the clients' stacked memories; only newcomers' examples are looked up."""
    tasks = setup.feed.indexed(clients, state.round)
    return state.memory.get(clients, tasks if state.memory.knows(clients) else setup.feed.looked_up(tasks))


def _look_ahead(setup: Setup, state: State) -> Task | None:
    """Return the next round's tasks, drawn while the GPU is busy; None if the method chooses its cohort itself."""
    round, n_clients = state.round + 1, setup.federation.n_clients
    if round >= setup.rounds or type(setup.algorithm).cohort is not Algorithm.cohort:
        return None
    clients = sampled_clients(setup.seed, round, n_clients, setup.cohort_size)
    state.memory.look_ahead(clients)
    return setup.feed.look_ahead(clients, round)


def _begun(runner: DigestingRunner, setup: Setup, sent: Any, round: int, tasks: Task | None) -> Beginning | None:
    """Have the next round's clients begin where the method lets them, for a GPU that would else wait for the server."""
    algorithm = setup.algorithm
    if tasks is None or not algorithm.can_begin(sent):
        return None
    return Beginning(round, sent, runner.begun(algorithm, setup.problem, tasks, sent, setup.feed.looked_up))

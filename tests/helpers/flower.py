"""A federation behind Flower messages in which clients can be made to fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import Context, Message, MessageType
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.result import RunResult
from dqnfed.core.screening import Policy
from dqnfed.flower.app import client_app, client_number
from dqnfed.flower.client import Client
from dqnfed.flower.in_process import InProcessGrid
from dqnfed.flower.records import array_record, named_arrays
from dqnfed.flower.strategy import Strategy
from dqnfed.sim.state import Evaluation
from tests.helpers.bowls import Case

App = Callable[[Message, Context], Message]
Fault = Callable[[Message, Context, App], Message]  # what a client does instead of replying through its app


class Moment(NamedTuple):
    """Which message it is: whose, in which round and phase; -1 and 0 for the first evaluation."""

    client: int
    round: int
    phase: int
    is_training: bool


def moment_of(message: Message, context: Context) -> Moment:
    about: Any = message.content["about"]
    is_training = message.metadata.message_type == MessageType.TRAIN
    return Moment(client_number(context), int(about["round"]), int(about["phase"]), is_training)


def with_faults(app: App, fault_at: Callable[[Moment], Fault | None]) -> App:
    """Return the app that fails where the plan says so."""

    def reply(message: Message, context: Context) -> Message:
        fault = fault_at(moment_of(message, context))
        return app(message, context) if fault is None else fault(message, context, app)

    return reply


def changed(change: Callable[[str, Tensor], Tensor]) -> Fault:
    """Return the client that changes the tensors of its honest reply, by field name."""

    def fault(message: Message, context: Context, app: App) -> Message:
        reply = app(message, context)
        named = named_arrays(reply.content.array_records["update"])
        reply.content["update"] = array_record({name: change(name, t) for name, t in named.items()})
        return reply

    return fault


def raises(message: Message, context: Context, app: App) -> Message:
    raise RuntimeError("the disk of this client is full")


def is_late(message: Message, context: Context, app: App) -> Message:
    app(message, context)  # it works all the same, and remembers what it did
    raise TimeoutError


def is_dead(message: Message, context: Context, app: App) -> Message:
    raise TimeoutError


def sends_nonsense(message: Message, context: Context, app: App) -> Message:
    reply = app(message, context)
    del reply.content["update"]
    return reply


def has_forgotten(message: Message, context: Context, app: App) -> Message:
    """A node that was killed and restarted: Flower's state of it is gone."""
    context.state.clear()
    return app(message, context)


sends_nan = changed(lambda _, t: torch.full_like(t, torch.nan))
sends_wrong_shape = changed(lambda _, t: torch.cat([t.reshape(-1), t.reshape(-1)[:1].new_zeros(1)]))


def at(client: int, round: int, fault: Fault) -> Callable[[Moment], Fault | None]:
    """Return the plan by which one client fails in all training messages of one round."""
    return lambda moment: fault if moment.is_training and moment[:2] == (client, round) else None


def no_fault(moment: Moment) -> Fault | None:
    return None


def fleet(
    algorithm: AnyAlgorithm,
    case: Case,
    fault_at: Callable[[Moment], Fault | None] = no_fault,
    *,
    node_config: Mapping[str, Any] | None = None,
) -> InProcessGrid:
    """Return a grid of all clients of the case, some of which fail."""

    def describe(context: Context) -> Client:
        return Client(algorithm, case.problem, case.federation.only(client_number(context)))

    app = with_faults(client_app(describe), fault_at)
    return InProcessGrid(app, case.federation.n_clients, node_config=node_config)


def deployed(
    algorithm: AnyAlgorithm,
    case: Case,
    fault_at: Callable[[Moment], Fault | None] = no_fault,
    *,
    rounds: int,
    grid: InProcessGrid | None = None,
    memory_dir: Path | None = None,
    participation: float = 1.0,
    evaluation: Evaluation | None = None,
    policy: Policy | None = None,
    out: Path | None = None,
    resume: bool = False,
    observers: Sequence[Any] = (),
) -> RunResult:
    """Return the result of a run over a fleet in which some clients fail."""
    strategy = Strategy(
        algorithm,
        case.problem,
        n_clients=case.federation.n_clients,
        participation=participation,
        evaluation=evaluation,
        policy=policy,
        out=out,
        resume=resume,
        wait=0.0,
        observers=observers,
    )
    config = {} if memory_dir is None else {"memory-dir": str(memory_dir)}
    strategy.start(grid or fleet(algorithm, case, fault_at, node_config=config), num_rounds=rounds)
    assert strategy.result is not None
    return strategy.result


def scaled(factor: float, *names: str) -> Fault:
    """Return the client that multiplies the named fields of its replies, or all of them."""
    return changed(lambda name, t: factor * t if not names or name in names else t)

"""Strategy and client apps in one process, through real Flower messages, without Ray, SuperLink or network."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.federation import Federation
from dqnfed.core.problem import Problem
from dqnfed.core.result import RunResult
from dqnfed.core.screening import Policy
from dqnfed.flower.app import client_app, client_number
from dqnfed.flower.client import Client
from dqnfed.flower.privacy import Privacy
from dqnfed.flower.strategy import Strategy
from dqnfed.secure.keys import fresh_identities
from dqnfed.sim.observers import Observer
from dqnfed.sim.sampling import Sampling
from dqnfed.sim.state import Evaluation

SERVER_NODE = 1
CLIENT_APP_RAISED = 2  # Flower's code for an exception in a client app


class InProcessGrid(Grid):
    """A grid whose nodes are client apps in this process; every message and reply is taken apart and put together."""

    def __init__(
        self,
        app: ClientApp | Callable[[Message, Context], Message],
        n_clients: int,
        *,
        node_config: Mapping[str, Any] | None = None,
        run_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._app = app
        self.contexts = {
            100 + client: Context(
                run_id=1,
                node_id=100 + client,
                node_config={"partition-id": client, "num-partitions": n_clients, **(node_config or {})},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for client in range(n_clients)
        }
        # Flower makes messages only for a process that knows which task it is; there is no public way to say so.
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, SERVER_NODE

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        replies = []
        for number, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = f"{id(self)}-{number}"
            reply = self._reply(message, self.contexts[message.metadata.dst_node_id])
            if reply is not None:
                replies.append(reply)
        return replies[::-1]  # in no helpful order

    def _reply(self, message: Message, context: Context) -> Message | None:
        try:
            return self._app(message, context)
        except TimeoutError:
            return None
        except Exception as error:  # as Flower does: the server learns that the app failed, and why
            return Message(Error(CLIENT_APP_RAISED, f"{type(error).__name__}: {error}"), reply_to=message)

    @property
    def run(self) -> Any:
        return None

    def set_run(self, run: Any) -> None: ...

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        raise NotImplementedError("make a `Message` directly")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        raise NotImplementedError("use `send_and_receive`: clients in this process reply at once")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        raise NotImplementedError("use `send_and_receive`: clients in this process reply at once")


def run_in_process(
    algorithm: AnyAlgorithm,
    problem: Problem,
    federation: Federation,
    *,
    rounds: int,
    participation: float = 1.0,
    sampling: Sampling | str = "uniform",
    seed: int = 0,
    evaluation: Evaluation | None = None,
    policy: Policy | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    observers: Sequence[Observer] = (),
    privacy: Privacy | None = None,
    memory_dir: Path | None = None,
    secure: bool = False,
) -> RunResult:
    """Return what `dqnfed.run` returns, computed through Flower's strategy, messages and client apps."""

    identities = fresh_identities(federation.n_clients) if secure else []
    sums_only = secure and (evaluation or Evaluation()).metrics == "aggregate-only"

    def describe(context: Context) -> Client:
        number = client_number(context)
        identity = identities[number] if secure else None
        return Client(algorithm, problem, federation.only(number), privacy, identity, sums_only)

    node_config = {} if memory_dir is None else {"memory-dir": str(memory_dir)}
    grid = InProcessGrid(client_app(describe), federation.n_clients, node_config=node_config)
    strategy = Strategy(
        algorithm,
        problem,
        n_clients=federation.n_clients,
        participation=participation,
        sampling=sampling,
        seed=seed,
        evaluation=evaluation,
        policy=policy,
        out=out,
        resume=resume,
        observers=observers,
        wait=0.0,
        secure=secure,
        privacy=privacy,
    )
    strategy.start(grid, num_rounds=rounds)
    assert strategy.result is not None
    return strategy.result

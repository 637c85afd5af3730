"""A client's Flower app, which loads torch and the methods only when a message is there to be answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

if TYPE_CHECKING:
    from dqnfed.flower.client import Client


def client_app(describe: Callable[[Context], Client]) -> ClientApp:
    """Return the Flower app of a client; `describe` is called for every message, since nothing else lasts."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from dqnfed.flower.client import training_reply

        return training_reply(describe(context), message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        from dqnfed.flower.client import evaluation_reply

        return evaluation_reply(describe(context), message, context)

    return app


def client_number(context: Context) -> int:
    """Return which client this node is: `partition-id` of its node config."""
    if "partition-id" not in context.node_config:
        raise ValueError(
            "this node does not say which client it is; start it with --node-config 'partition-id=0' (clients count "
            "from 0, and every node has its own number)."
        )
    return int(context.node_config["partition-id"])

"""A client's Flower app, which loads torch and the methods only when a message is there to be answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

if TYPE_CHECKING:
    from dqnfed.flower.client import Client


QUESTION = "question"  # Flower's name of such messages
Reply = Callable[[dict[str, Any], Context], dict[str, Any]]


def client_app(describe: Callable[[Context], Client], reply: Reply | None = None) -> ClientApp:
    """Return the Flower app of a client; `describe` is called for every message, since nothing else lasts.

    `reply` answers questions that come before the training (`dqnfed.flower.questions`); without it there are none.
    """
    app = ClientApp()
    if reply is not None:

        @app.query(QUESTION)
        def answer(message: Message, context: Context) -> Message:
            question = json.loads(str(message.content["question"]["json"]))
            found = {"client": client_number(context), **reply(question, context)}
            return Message(RecordDict({"answer": ConfigRecord({"json": json.dumps(found)})}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        from dqnfed.flower.client import training_reply

        return training_reply(describe(context), message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        from dqnfed.flower.client import evaluation_reply

        return evaluation_reply(describe(context), message, context)

    @app.query()
    def query(message: Message, context: Context) -> Message:
        from dqnfed.flower.client import query_reply

        return query_reply(describe(context), message, context)

    return app


def client_number(context: Context) -> int:
    """Return which client this node is: `partition-id` of its node config."""
    if "partition-id" not in context.node_config:
        raise ValueError(
            "this node does not say which client it is; start it with --node-config 'partition-id=0' (clients count "
            "from 0, and every node has its own number)."
        )
    return int(context.node_config["partition-id"])

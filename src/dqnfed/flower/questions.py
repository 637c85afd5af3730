"""Questions to all clients before the training: one message each, one answer each, in JSON."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from dqnfed.flower.app import QUESTION
from dqnfed.flower.exchange import received

flower_log = logging.getLogger("flwr")
POLL_SECONDS = 1.0
LONGEST = 1_000_000  # characters of an answer


def ask(
    grid: Grid, question: Mapping[str, Any], *, n_clients: int, wait: float = 600.0, timeout: float = 3600.0
) -> dict[int, dict[str, Any]]:
    """Return every client's answer, by its number, once all are online; raise where one has none.

    Two nodes that claim to be the same client are an error, and so is a number that does not exist.
    """
    nodes = nodes_online(grid, n_clients, wait)
    content = {"question": ConfigRecord({"json": json.dumps(question)})}
    messages = [Message(RecordDict(dict(content)), node, f"{MessageType.QUERY}.{QUESTION}") for node in nodes]
    replies = list(grid.send_and_receive(messages, timeout=timeout))
    found, faults = received(messages, replies)
    answers: dict[int, dict[str, Any]] = {}
    for node, reply in found.items():
        try:
            answer = read_answer(reply)
            client = int(answer.pop("client"))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            faults[node] = f"its answer cannot be read ({type(error).__name__})"
            continue
        if not 0 <= client < n_clients or client in answers:
            faults[node] = f"it claims to be client {client}, which {'another is' if client in answers else 'is none'}"
            continue
        answers[client] = answer
    if faults or len(answers) < n_clients:
        missing = sorted(set(range(n_clients)) - answers.keys())
        raise ValueError(
            f"clients {missing} gave no usable answer before the training: {'; '.join(sorted(set(faults.values())))}. "
            "Every site must take part; `dqnfed site check` on each says whether it can."
        )
    return dict(sorted(answers.items()))


def nodes_online(grid: Grid, n_clients: int, wait: float) -> list[int]:
    """Return the nodes, when there are as many as clients."""
    end, seen = time.monotonic() + wait, -1
    while len(nodes := sorted(grid.get_node_ids())) < n_clients:
        if len(nodes) != seen:
            seen = len(nodes)
            flower_log.info("dqnfed: %d of %d sites are online", seen, n_clients)
        if time.monotonic() >= end:
            raise TimeoutError(
                f"{len(nodes)} of {n_clients} sites came online within {wait:g} s; start the others with `dqnfed site "
                "run`, or wait longer with `wait`."
            )
        time.sleep(POLL_SECONDS)
    if len(nodes) > n_clients:
        raise ValueError(f"{len(nodes)} nodes are online, but there are {n_clients} sites; turn the others away.")
    return nodes


def read_answer(reply: RecordDict) -> dict[str, Any]:
    record: Any = reply["answer"]
    text = str(record["json"])
    if len(text) > LONGEST:
        raise ValueError("too long")
    answer = json.loads(text)
    if not isinstance(answer, dict):
        raise TypeError(type(answer).__name__)
    return answer

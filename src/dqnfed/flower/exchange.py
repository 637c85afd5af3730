"""Messages out, replies in: who replied, and who did not and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from dqnfed.core.expected import layout_of
from dqnfed.flower.client_memory import Tags

TOO_LATE = "no reply before the timeout"
OFFLINE = "its node is offline"


class Received(NamedTuple):
    """What came back, by node."""

    contents: dict[int, RecordDict]
    faults: dict[int, str]  # nodes without a content, and why


def messages_to(
    nodes: Mapping[int, Tags], message_type: str, place: str, arrays: ArrayRecord, about: ConfigRecord
) -> list[Message]:
    """Return the same message for every node, but for which of its memories the server means."""

    def content(tags: Tags) -> RecordDict:
        mine = {"used": list(tags.used), "kept": list(tags.kept)}
        return RecordDict({place: arrays, "about": ConfigRecord({**about, **mine})})

    return [Message(content(tags), node, message_type) for node, tags in nodes.items()]


def received(messages: Iterable[Message], replies: Iterable[Message]) -> Received:
    """Return the replies by the node that was asked; a node may only reply for itself."""
    asked = {message.metadata.message_id: message.metadata.dst_node_id for message in messages}
    found = Received({}, {})
    for reply in replies:
        node = asked.get(reply.metadata.reply_to_message_id)
        if node is None:
            continue
        if reply.has_error():
            found.faults[node] = f"its app failed: {first_line(reply.error.reason)}"
        elif reply.metadata.src_node_id == node:
            found.contents[node] = reply.content
    for node in asked.values():
        if node not in found.contents:
            found.faults.setdefault(node, TOO_LATE)
    return found


def mismatched(updates: Mapping[int, tuple[Any, ...]]) -> dict[int, str]:
    """Return the clients whose replies have another kind or shape than most, and so cannot be stacked with them."""
    layouts = {client: repr(layout_of(update)) for client, update in sorted(updates.items())}
    if len(set(layouts.values())) <= 1:
        return {}
    usual, _ = Counter(layouts.values()).most_common(1)[0]
    return {client: "its reply has another shape than the others'" for client, s in layouts.items() if s != usual}


def fields_of(content: RecordDict, name: str) -> Mapping[str, Any]:
    """Return the named record of a message."""
    record: Any = content[name]
    fields: Mapping[str, Any] = record
    return fields


def first_line(error: object) -> str:
    """Return an error's first line that is not empty, short enough for a log; what no terminal prints is escaped."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = "".join(c if c.isprintable() else repr(c)[1:-1] for c in lines[0][:200]) if lines else ""
    return first[:200] or type(error).__name__

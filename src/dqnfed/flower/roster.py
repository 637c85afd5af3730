"""Which node is which client."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger("dqnfed")


@dataclass(frozen=True)
class Member:
    """What a client reports about itself."""

    client: int
    name: str
    group: str
    n_train: int
    n_test: int
    n_validation: int


def changed_sizes(now: Member, before: Member) -> str:
    """Return which size a client claims now that it did not claim when it was first met, or nothing."""
    for name in ("n_train", "n_test", "n_validation"):
        if getattr(now, name) != getattr(before, name):
            said = name.replace("_", "-")
            return f"its `{said}` was {getattr(before, name)} and is now {getattr(now, name)}; sizes are fixed"
    return ""


@dataclass
class Roster:
    """The clients by node; a client keeps its number when its node comes back under another id."""

    n_clients: int
    node_of: dict[int, int] = field(default_factory=dict)  # client -> node
    members: dict[int, Member] = field(default_factory=dict)  # by client
    refused: dict[int, str] = field(default_factory=dict)  # nodes that are no clients of this run, and why

    def missing(self) -> list[int]:
        """Return the clients that no node has claimed yet."""
        return [c for c in range(self.n_clients) if c not in self.node_of]

    def unidentified(self, online: set[int]) -> list[int]:
        """Return the nodes that may be clients that are missing or offline; none where all clients are online."""
        if all(self.node_of.get(c) in online for c in range(self.n_clients)):
            return []
        return sorted(online - set(self.node_of.values()) - set(self.refused))

    def objection(self, node: int, member: Member, online: set[int]) -> str:
        """Return why a node cannot be the client that it reports to be, or nothing."""
        number = member.client
        if not 0 <= number < self.n_clients:
            return (
                f"node {node} reports that it is client {number}, but there are {self.n_clients} clients, 0 to "
                f"{self.n_clients - 1}; correct `partition-id` in its --node-config, or the number of clients."
            )
        holder = self.node_of.get(number)
        if holder is not None and holder != node and holder in online:
            return (
                f"nodes {holder} and {node} both report that they are client {number}; give every node a "
                "`partition-id` of its own in its --node-config."
            )
        before = self.members.get(number)
        return "" if before is None else changed_sizes(member, before)

    def enter(self, node: int, member: Member) -> None:
        """Note the client at a node; what it reported when it was first met stays."""
        number = member.client
        if self.node_of.get(number, node) != node:
            logger.warning("client %d is now at node %d", number, node)
        self.node_of[number] = node
        self.members.setdefault(number, member)

    def refuse(self, node: int, why: str) -> None:
        """Remember a node that is no client of this run, so that it is not asked again."""
        self.refused[node] = why

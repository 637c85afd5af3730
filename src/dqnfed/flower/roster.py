"""Which node is which client."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

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
    models: tuple[str, ...]  # that the method evaluates, if scores were asked for


@dataclass
class Roster:
    """The clients by node; a client keeps its number when its node comes back under another id."""

    n_clients: int
    node_of: dict[int, int] = field(default_factory=dict)  # client -> node
    members: dict[int, Member] = field(default_factory=dict)  # by client
    _refused: set[int] = field(default_factory=set)  # nodes

    def missing(self) -> list[int]:
        """Return the clients that no node has claimed yet."""
        return [c for c in range(self.n_clients) if c not in self.node_of]

    def unidentified(self, online: set[int]) -> list[int]:
        """Return the nodes that may be clients that are missing or offline; none where all clients are online."""
        if all(self.node_of.get(c) in online for c in range(self.n_clients)):
            return []
        return sorted(online - set(self.node_of.values()) - self._refused)

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
        return ""

    def enter(self, node: int, member: Member) -> None:
        """Note the client at a node; what it does not report now is as it was."""
        number = member.client
        if self.node_of.get(number, node) != node:
            logger.warning("client %d is now at node %d", number, node)
        before = self.members.get(number)
        self.node_of[number] = node
        self.members[number] = member if member.models or before is None else replace(member, models=before.models)

    def refuse(self, node: int) -> None:
        """Remember a node that is no client of this run, so that it is not asked again."""
        self._refused.add(node)

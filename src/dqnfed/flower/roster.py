"""Which node is which client."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger("dqnfed")


@dataclass(frozen=True)
class Member:
    """What a client said about itself."""

    client: int
    name: str
    group: str
    n_train: int
    n_test: int
    models: tuple[str, ...]  # that the method wants judged, if scores were asked for


@dataclass
class Roster:
    """The clients by node; a client keeps its number when its node comes back under another id."""

    n_clients: int
    node_of: dict[int, int] = field(default_factory=dict)  # client -> node
    members: dict[int, Member] = field(default_factory=dict)  # by client

    def missing(self) -> list[int]:
        """Return the clients that no node has claimed yet."""
        return [c for c in range(self.n_clients) if c not in self.node_of]

    def strangers(self, online: set[int]) -> list[int]:
        """Return the nodes that may be clients who are missing or offline: nobody else need be asked who he is."""
        if all(self.node_of.get(c) in online for c in range(self.n_clients)):
            return []
        return sorted(online - set(self.node_of.values()))

    def enter(self, node: int, member: Member, online: set[int]) -> None:
        """Note the client behind a node, unless another node that is online has the same number."""
        number = member.client
        if not 0 <= number < self.n_clients:
            raise ValueError(
                f"node {node} says that it is client {number}, but there are {self.n_clients} clients, 0 to "
                f"{self.n_clients - 1}; correct `partition-id` in its --node-config, or the number of clients."
            )
        holder = self.node_of.get(number)
        if holder is not None and holder != node and holder in online:
            raise ValueError(
                f"nodes {holder} and {node} both say that they are client {number}; give every node a `partition-id` "
                "of its own in its --node-config."
            )
        if holder is not None and holder != node:
            logger.warning("client %d is now at node %d", number, node)
        self.node_of[number] = node
        self.members[number] = member

"""The server's side of secure aggregation on Flower: relayed keys, padded replies, questions to clients."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.expected import Layout
from dqnfed.core.problem import Problem
from dqnfed.core.tensors import from_named_tensors, stack, tensors
from dqnfed.flower.checks import LOSSES, Refused, record, slack
from dqnfed.flower.exchange import first_line
from dqnfed.flower.records import array_record, kind_named
from dqnfed.flower.secure_records import (
    SECURE,
    PaddedReply,
    form_content,
    likes_by_layout,
    query_content,
    read_form_reply,
    read_padded,
    read_words,
)
from dqnfed.secure.forms import Form, PaddedProducts
from dqnfed.secure.pads import Message as Padded
from dqnfed.secure.pads import fresh_nonce
from dqnfed.secure.queries import Claims, Query
from dqnfed.secure.release import FEWEST, LostClients, Revealing
from dqnfed.secure.replies import SecureReplies, View, norms_in_place
from dqnfed.secure.ring import FloatArray, Words
from dqnfed.secure.source import PaddedSource
from dqnfed.sim.clients import SumQuestion, Sums, Traffic
from dqnfed.sim.state import Setup
from dqnfed.sim.sums import are_enough, check_means, read_sums

logger = logging.getLogger("dqnfed")
Hashed = Callable[[Sequence[int], bytes], Padded]  # the hash of a message, from the clients asked and a nonce
Ask = Callable[[Mapping[int, RecordDict]], tuple[dict[int, Any], dict[int, str]]]  # contents and faults by client


class Shared(NamedTuple):
    """A common key as the server has it: sealed."""

    members: tuple[int, ...]
    sender: int
    context: str
    boxes: dict[int, bytes]  # by client


class SecureServer:
    """What the strategy needs to ask clients securely; it has no key."""

    def __init__(self, algorithm: AnyAlgorithm, problem: Problem, ask: Ask) -> None:
        self._algorithm, self._problem, self._ask = algorithm, problem, ask
        self._shared: Shared | None = None
        self._n_keys = 0
        self._message: Padded | None = None
        self._about: dict[str, Any] = {}
        self.traffic = Traffic()  # of the present message

    def share_key(self, run: str, members: Sequence[int], about: Mapping[str, Any]) -> None:
        """Have the clients agree on a common key, anew whenever one has joined or left."""
        present = tuple(sorted(members))
        if len(present) < FEWEST:
            return  # nobody is asked
        if self._shared is not None and self._shared.members == present:
            return
        self._n_keys += 1
        context = f"{run}/{self._n_keys}/{fresh_nonce().hex()}/{','.join(map(str, present))}"
        question = ConfigRecord({**about, "question": "share-key", "members": list(present), "context": context})
        reasons: dict[int, str] = {}
        for sender in present:
            contents, faults = self._ask({sender: RecordDict({"about": question})})
            reasons |= faults
            if sender in contents:
                boxes = record(contents[sender], "about", ConfigRecord).get("boxes")
                if isinstance(boxes, list) and len(boxes) == len(present):
                    self._shared = Shared(present, sender, context, dict(zip(present, boxes, strict=True)))
                    logger.info("clients %s have a new common key from client %d", list(present), sender)
                    return
                reasons[sender] = "its sealed keys are not one for each client"
        raise ValueError(f"no client shares a common key: {_listed(reasons)}")

    def address(
        self, messages: Iterable[Message], client_of: Mapping[int, int], hashed: Hashed, about: Any
    ) -> list[Message]:
        """Return the messages, each with the sealed key of its client, the clients asked and a fresh nonce."""
        messages = list(messages)
        shared = self._shared
        kept = [m for m in messages if shared is not None and client_of[m.metadata.dst_node_id] in shared.boxes]
        asked = sorted(client_of[m.metadata.dst_node_id] for m in kept)
        if shared is None or len(asked) < FEWEST:
            return []
        nonce, self.traffic = fresh_nonce(), Traffic()
        self._about = dict(about)
        self._message = hashed(asked, nonce)
        for message in kept:
            client = client_of[message.metadata.dst_node_id]
            message.content[SECURE] = ConfigRecord({**self._key_of(client), "asked": asked, "nonce": nonce})
        return kept

    def read(self, content: RecordDict, layout: Layout | None) -> PaddedReply:
        """Return one client's padded reply, or refuse it."""
        if layout is None or self._message is None:
            raise Refused("the server does not know what a reply must look like, and padded ones cannot be compared")
        with_products = self._algorithm.needs == "gram"
        found = read_padded(content, layout, len(self._message.asked), with_products=with_products)
        floor = self._problem.loss_floor
        for name in LOSSES & set(found.scalars):
            if float(found.scalars[name]) < floor - slack(floor):
                raise Refused(f"its {name} is below {floor:g}, the floor of losses (`loss_floor` of the problem)")
        return found

    def replies(self, found: Mapping[int, PaddedReply], layout: Layout) -> SecureReplies[Any]:
        """Return the replies of all clients as the method's step asks them."""
        assert self._message is not None
        clients, device = sorted(found), self._problem.theta0.device
        name, fields = layout
        kind = kind_named(self._algorithm.info.replies, name)
        likes = likes_by_layout(fields, device)
        padded = {field: [found[client].rows[field] for client in clients] for field in likes}
        rows = {field: torch.zeros(1, dtype=like.dtype, device=device) for field, like in likes.items()}
        stacked = stack([from_named_tensors(kind, {**rows, **found[client].scalars}) for client in clients])
        norms = {field: np.array([row.norm for row in each]) for field, each in padded.items()}
        shown = norms_in_place(stacked, norms)
        self.traffic.up += sum(
            row.words.nbytes + row.corrections.nbytes + 8 for each in padded.values() for row in each
        )
        self.traffic.up += sum(t.nbytes for reply in found.values() for t in reply.scalars.values())
        source = PaddedSource(self._message, clients, shown, padded, _Questions(self))
        return SecureReplies(source, likes, View(shown, tuple(range(len(clients))), {}))

    def products(self, message: Padded, clients: Sequence[int], field: str, vectors: Tensor) -> FloatArray:
        """Return the clients' products of their own rows with the vectors."""
        about = ConfigRecord({**self._about, "question": "products", "digest": message.digest, "field": field})
        content = RecordDict({SECURE: array_record({"vectors": vectors}), "about": about})
        contents, faults = self._ask(dict.fromkeys(clients, content))
        if faults:
            raise LostClients(f"clients were lost in the middle of a step: {_listed(faults)}")
        found = [_values(contents[client], len(vectors)) for client in clients]
        self.traffic.down += vectors.element_size() * vectors.numel() * len(clients)
        self.traffic.up += 8 * len(vectors) * len(clients)
        return np.stack(found)

    def form(self, message: Padded, clients: Sequence[int], field: str, form: Form) -> list[PaddedProducts]:
        """Return the clients' padded products for a form."""
        about = {**self._about, "question": "form", "digest": message.digest, "field": field}
        questions = {k: form_content(form, ConfigRecord({**about, **self._key_of(k)})) for k in clients}
        contents, faults = self._ask(questions)
        found: list[PaddedProducts] = []
        for client, content in sorted(contents.items()):
            try:
                found.append(read_form_reply(content, len(form.vectors), len(message.asked)))
            except Exception as error:  # whatever a client sends
                faults[client] = first_line(error)
        if faults:
            raise LostClients(f"clients were lost in the middle of a step: {_listed(faults)}")
        self.traffic.down += sum(t.nbytes for t in (form.vectors, form.middle)) * len(clients)
        self.traffic.up += sum(each.words.nbytes + each.corrections.nbytes + 8 for each in found)
        return found

    def unpad(self, query: Query, claims: Claims, answered: set[int]) -> Words:
        """Return the sum of the pads from the first client that gives it; another one is asked first in every round."""
        first = int.from_bytes(query.message.digest[:4], "big") % len(query.clients)
        reasons: dict[int, str] = {}
        for client in (*query.clients[first:], *query.clients[:first]):
            if client in answered:
                continue
            about = ConfigRecord({**self._about, **self._key_of(client), "question": "unpad"})
            contents, faults = self._ask({client: query_content(query, claims, about)})
            if client in contents:
                answered.add(client)
                arrays = record(contents[client], "pads", ArrayRecord)
                words = arrays["words"].numpy() if "words" in arrays else np.zeros(0)
                if words.dtype == np.uint64:
                    self.traffic.up += words.nbytes
                    self.traffic.down += query.weights.nbytes + sum(t.nbytes for t in tensors(claims.server))
                    return np.array(words)
                faults[client] = "its pads are no words"
            reasons |= faults
            logger.warning("client %d does not unpad: %s", client, first_line(faults[client]))
        raise Revealing(f"no client unpads the sum: {_listed(reasons)}")

    def sums(self, setup: Setup, question: SumQuestion, found: Mapping[int, Words]) -> Sums | None:
        """Return what follows from the clients' words; None where these are too few, or nobody takes the pads off."""
        clients = sorted(found)
        if not are_enough(setup, question, torch.tensor(clients, dtype=torch.long)):
            logger.warning("clients %s are too few for sums of what they measured", clients)
            return None
        assert self._message is not None
        first = int.from_bytes(self._message.digest[:4], "big") % len(clients)
        about = {**self._about, "question": "unpad-sums", "digest": self._message.digest, "clients": clients}
        for client in (*clients[first:], *clients[:first]):
            contents, faults = self._ask(
                {client: RecordDict({"about": ConfigRecord({**about, **self._key_of(client)})})}
            )
            try:
                if client not in contents:
                    raise Refused(faults[client])
                pads = read_words(record(contents[client], "pads", ArrayRecord), len(found[client]))
            except Exception as error:  # whatever a client sends
                logger.warning("client %d does not unpad what was measured: %s", client, first_line(error))
                continue
            try:
                sums = read_sums(setup, question, found, pads)
                check_means(setup, sums)
                return sums
            except (ValueError, OverflowError) as error:
                logger.warning("the sums of what was measured are not used: %s", first_line(error))
                return None
        return None

    def _key_of(self, client: int) -> dict[str, Any]:
        assert self._shared is not None
        return {"sender": self._shared.sender, "context": self._shared.context, "box": self._shared.boxes[client]}


class _Questions:
    """The questions about one message; every client unpads one sum of it."""

    def __init__(self, server: SecureServer) -> None:
        self._server = server
        self._answered: set[int] = set()

    def products(self, message: Padded, clients: Sequence[int], field: str, vectors: Tensor) -> FloatArray:
        return self._server.products(message, clients, field, vectors)

    def form(self, message: Padded, clients: Sequence[int], field: str, form: Form) -> list[PaddedProducts]:
        return self._server.form(message, clients, field, form)

    def unpad(self, query: Query, claims: Claims) -> Words:
        return self._server.unpad(query, claims, self._answered)


def _listed(reasons: Mapping[int, str]) -> str:
    return "; ".join(f"client {client}: {first_line(why)}" for client, why in reasons.items())


def _values(content: RecordDict, n: int) -> FloatArray:
    values = np.asarray(record(content, "products", MetricRecord).get("values"), dtype=np.float64)
    if values.shape != (n,) or not np.isfinite(values).all():
        raise LostClients(f"a client's products are not {n} numbers")
    return values

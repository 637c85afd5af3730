"""Simulated clients whose replies reach the server under one-time pads, with the bits of a deployment."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.tensors import gather, named_tensors, tensors
from dqnfed.secure.distributed import with_shares
from dqnfed.secure.forms import Form, PaddedProducts, form_pads, padded_products
from dqnfed.secure.noise import Privacy
from dqnfed.secure.pads import Message, PadKey, evaluation_of, fresh_nonce, message_of
from dqnfed.secure.queries import Claims, ClientCheck, OwnReply, Query, Refusal, own_products
from dqnfed.secure.replies import Like, SecureReplies, View, likes_of, norms_in_place, row_fields
from dqnfed.secure.ring import FloatArray, Words
from dqnfed.secure.rows import PaddedRow, Pads, padded_row
from dqnfed.secure.source import Link, PaddedSource
from dqnfed.secure.sums import LARGEST, Number, padded_numbers, unpadding_numbers
from dqnfed.sim.clients import Answers, LocalClients, SumQuestion, Sums, Traffic
from dqnfed.sim.sums import LOSS, PART_LOSS, PART_SCORE, read_sums, squared_numbers, summed_score, without

if TYPE_CHECKING:
    from dqnfed.sim.state import Setup, State

WORD = 8  # bytes of a word, and of a scalar
NOT_FINITE = "its update is not finite"


def _directly(message: Message, link: Link) -> Link:
    return link


@dataclass(frozen=True)
class SecureClients(LocalClients):
    """All clients in this process with a common key; the server's step sees padded replies alone."""

    is_secure: bool = True
    key: PadKey = field(default_factory=PadKey.fresh)
    run: str = field(default_factory=lambda: secrets.token_hex(16))
    through: Callable[[Message, Link], Link] = _directly  # what is between server and clients

    def train(self, setup: Setup, state: State, clients: Tensor, sent: Any, phase: int) -> Answers:
        found = super().train(setup, state, clients, sent, phase)
        assert found.replies is not None
        updates, memory, asked = found.replies.updates, found.memory, clients.tolist()
        message = message_of(self.run, state.round, phase, sent, asked, fresh_nonce())
        finite = _finite_rows(updates)
        missing = [(client, NOT_FINITE) for client, ok in zip(asked, finite.tolist(), strict=True) if not ok]
        if missing:
            kept = finite.nonzero().flatten()
            updates, asked = gather(updates, kept), [client for client, ok in zip(asked, finite, strict=True) if ok]
            memory = [memory[k] for k in kept.tolist()] if isinstance(memory, list) else gather(memory, kept)
        present = torch.tensor(asked, dtype=torch.long)
        traffic = Traffic()
        if not asked:
            return Answers(present, None, memory, missing, traffic, found.releases)
        known = self.key, message, asked, updates, setup.algorithm, traffic
        replies = secured(*known, self.through, setup.privacy)
        return Answers(present, replies, memory, missing, traffic, found.releases)

    def sums(self, setup: Setup, state: State, question: SumQuestion) -> Sums | None:
        """Return sums of what the clients measure; each pads its own numbers, and one of them takes the pads off."""
        asked, n_models = question.clients.tolist(), len(setup.model_names)
        values = self._measured_numbers(setup, state, question)
        squared = squared_numbers(question.names, n_models)
        message = evaluation_of(
            self.run, state.round, question.names, {"theta": state.server.theta}, asked, fresh_nonce()
        )
        can_be_summed = values.abs() <= LARGEST
        rows = values.where(can_be_summed, 0.0).T.tolist()
        padded = {
            client: padded_numbers(self.key, message, client, list(map(Number, row, squared)))
            for client, row in zip(asked, rows, strict=True)
        }
        first = asked[int.from_bytes(message.digest[:4], "big") % len(asked)]
        pads = unpadding_numbers(self.key, message, first, asked, squared)
        return without(read_sums(setup, question, padded, pads), can_be_summed.all(1).tolist())

    def _measured_numbers(self, setup: Setup, state: State, question: SumQuestion) -> Tensor:
        """Return the numbers of the question, [numbers, clients]; 0 of clients without examples for scores."""
        if LOSS in question.names:
            found = super().evaluate(setup, state, question.clients, with_scores=True)
            has_none = setup.federation.examples(question.part).sizes_of(found.clients) == 0  # type: ignore[arg-type]
            scores = [each.masked_fill(has_none, 0.0) for each in found.scores.values()]
            return torch.stack([found.losses, *(_as_summed(setup, each) for each in scores)])
        validated = super().validate(setup, state)
        measured = {PART_LOSS: validated.losses, PART_SCORE: _as_summed(setup, validated.scores)}
        return torch.stack([measured[name] for name in question.names])


def _as_summed(setup: Setup, scores: Tensor) -> Tensor:
    return torch.tensor([summed_score(setup.problem, score) for score in scores.tolist()], dtype=torch.float64)


def secured(
    key: PadKey,
    message: Message,
    clients: Sequence[int],
    updates: Any,
    algorithm: AnyAlgorithm,
    traffic: Traffic,
    through: Callable[[Message, Link], Link] = _directly,
    privacy: Privacy | None = None,
) -> SecureReplies[Any]:
    """Return the stacked updates as the server sees them when every client has padded its own."""
    names, likes = row_fields(updates), likes_of(updates)
    named = {name: t.detach().double().cpu().numpy() for name, t in named_tensors(updates).items()}
    own = [_own_reply(client, message, k, named, likes, privacy) for k, client in enumerate(clients)]
    known: dict[str, Pads] = {name: _kept_pads(key, message, name) for name in names}
    with_products = algorithm.needs == "gram"
    padded = {
        name: [
            padded_row(
                key,
                message,
                name,
                reply.rows[name],
                reply.client,
                with_products=with_products,
                pads=known[name],
                norm=reply.norms.get(name),
            )
            for reply in own
        ]
        for name in names
    }
    norms = {name: np.array([row.norm for row in rows]) for name, rows in padded.items()}
    shown = norms_in_place(updates, norms)
    link = _InProcess(key, own, [ClientCheck(algorithm, reply) for reply in own], known, traffic)
    traffic.up += sum(_n_bytes(rows) for rows in padded.values())
    traffic.up += WORD * len(clients) * (len(named) - len(names))
    source = PaddedSource(
        message, clients, shown, padded, through(message, link), has_shares=any(reply.norms for reply in own)
    )
    return SecureReplies(source, likes, View(shown, tuple(range(len(clients))), {}))


class _InProcess:
    """The clients' side of the server's questions."""

    def __init__(
        self,
        key: PadKey,
        own: Sequence[OwnReply],
        checks: Sequence[ClientCheck],
        pads: Mapping[str, Pads],
        traffic: Traffic,
    ) -> None:
        self._key, self._own, self._checks, self._pads, self._traffic = key, own, checks, pads, traffic

    def products(self, message: Message, clients: Sequence[int], name: str, vectors: Tensor) -> FloatArray:
        found = np.stack([own_products(reply.rows[name], vectors) for reply in self._own])
        self._traffic.up += WORD * found.size
        self._traffic.down += vectors.element_size() * vectors.numel() * len(self._own)
        return found

    def form(self, message: Message, clients: Sequence[int], name: str, form: Form) -> list[PaddedProducts]:
        known = self._key, message, name
        pads = cache(form_pads(*known, len(form.vectors)))  # computed once for all clients of this process
        found = [
            padded_products(*known, reply.rows[name], reply.norm(name), reply.client, form, pads=pads)
            for reply in self._own
        ]
        self._traffic.up += sum(each.words.nbytes + each.corrections.nbytes + WORD for each in found)
        self._traffic.down += sum(t.nbytes for t in (form.vectors, form.middle)) * len(self._own)
        return found

    def unpad(self, query: Query, claims: Claims) -> Words:
        waiting = [check for check in self._checks if not check.is_answered]
        if not waiting:
            raise Refusal(f"all {len(self._checks)} clients have unpadded a sum of this message already.")
        first = int.from_bytes(query.message.digest[:4], "big") % len(waiting)  # another client from round to round
        words = waiting[first].unpad(self._key, query, claims, self._pads.get(query.field))
        self._traffic.up += words.nbytes
        self._traffic.down += query.weights.nbytes + sum(t.nbytes for t in tensors(claims.server))
        return words


def _own_reply(
    client: int,
    message: Message,
    place: int,
    named: Mapping[str, FloatArray],
    likes: Mapping[str, Like],
    privacy: Privacy | None,
) -> OwnReply:
    scalars = {name: float(values[place]) for name, values in named.items() if values.ndim == 1}
    rows = {name: named[name][place].reshape(-1) for name in likes}
    noisy, norms = with_shares(rows, list(scalars), privacy, len(message.asked))
    return OwnReply(client, message, noisy, scalars, likes, norms)


def _kept_pads(key: PadKey, message: Message, name: str) -> Pads:
    """Return pads that are computed once for all clients of this process."""
    known: dict[int, Words] = {}

    def pad(client: int, n: int) -> Words:
        if client not in known:
            known[client] = key.pad(message, name, client, n)
        return known[client]

    return pad


def _finite_rows(updates: Any) -> Tensor:
    """Return which clients' rows are finite; others cannot be padded."""
    found = [t.flatten(1).isfinite().all(1) for t in tensors(updates) if t.dim() > 1 and t.numel()]
    n = len(tensors(updates)[0])
    return torch.stack(found).all(0).cpu() if found else torch.ones(n, dtype=torch.bool)


def _n_bytes(rows: Sequence[PaddedRow]) -> int:
    return sum(row.words.nbytes + row.corrections.nbytes + WORD for row in rows)

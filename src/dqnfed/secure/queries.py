"""The question for the sum of the pads, and the client's check of it: its own solve must give the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm, Cohort
from dqnfed.core.tensors import named_tensors
from dqnfed.secure.distributed import check_noise
from dqnfed.secure.forms import Form, products_with
from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.release import Revealing, check_release
from dqnfed.secure.replies import Like, SecureReplies, View
from dqnfed.secure.ring import FloatArray, Whole, Words, whole_weights
from dqnfed.secure.rows import Pads, unit_row, unpadding

SAME = 1e-6  # relative: weights of the client's own solve, and its own numbers in the server's claims


class Refusal(ValueError):
    """Why a client does not unpad."""


class Released(NamedTuple):
    """A sum that the server has from an earlier question about the same message."""

    field: str
    weights: FloatArray  # [K] of the rows
    sum: FloatArray  # [n]


class Query(NamedTuple):
    """Which sum is asked for: whole weights of the unit rows of those who replied."""

    message: Message
    field: str
    clients: tuple[int, ...]  # who replied, ascending
    weights: Whole  # [K]
    scale: float  # the rows' weights times their norms are the whole ones times this


class Claims(NamedTuple):
    """What the server says it has, from which a client computes the weights itself."""

    updates: Any  # the record of all who replied, norms in place of rows
    norms: Mapping[str, FloatArray]  # [K] by field
    grams: Mapping[str, FloatArray]  # [K, K] by field, where products were asked for
    products: tuple[FloatArray, ...]  # [K, R] of every question for products with other vectors, in order
    forms: Mapping[str, FloatArray]  # [K, K] by field, products in a form of products with vectors
    released: tuple[Released, ...]
    server: Any  # the server's state before the step
    cohort: Cohort
    view: View  # the replies that the step is made from: without those that were dropped, clipped ones with factors


class OwnReply(NamedTuple):
    """What a client itself replied to a message."""

    client: int
    message: Message
    rows: Mapping[str, FloatArray]  # [n] by field
    scalars: Mapping[str, float]
    likes: Mapping[str, Like]
    norms: Mapping[str, float] = {}  # that are stated in place of the rows' own

    def norm(self, field: str) -> float:
        """Return the norm that the server was told."""
        return self.norms[field] if field in self.norms else unit_row(self.rows[field])[1]


@dataclass
class ClientCheck:
    """One client's side of the questions about one message; it answers one."""

    algorithm: AnyAlgorithm
    own: OwnReply
    is_answered: bool = False

    def unpad(self, key: PadKey, query: Query, claims: Claims, pads: Pads | None = None) -> Words:
        """Return the sum of the pads for a question that passes every check; refuses any other."""
        if self.is_answered:
            raise Refusal(
                f"client {self.own.client} has unpadded a sum of this message already; it answers one question a round."
            )
        self._check_message(query)
        self._check_claims(query, claims)
        self._check_weights(query, claims)
        self.is_answered = True
        n = len(self.own.rows[query.field])
        return unpadding(key, query.message, query.field, query.weights, query.clients, n, pads)

    def _check_message(self, query: Query) -> None:
        if query.message != self.own.message:
            raise Refusal(f"client {self.own.client} did not reply to the message that the question is about.")
        if self.own.client not in query.clients or not set(query.clients) <= set(query.message.asked):
            raise Refusal(f"the question names the clients {list(query.clients)}, who are not those that were asked.")
        if query.field not in self.own.rows:
            raise Refusal(f"client {self.own.client} has no padded field '{query.field}'.")

    def _check_claims(self, query: Query, claims: Claims) -> None:
        """Compare the client's own numbers with what the server says they are."""
        place = query.clients.index(self.own.client)
        for field in self.own.rows:
            norm = self.own.norm(field)
            if not _close(claims.norms[field][place], norm):
                raise Refusal(f"the norm of client {self.own.client}'s '{field}' is {norm:g}, not what is claimed.")
            if field in claims.grams and not _close(claims.grams[field][place, place], norm**2):
                raise Refusal(f"the claimed product of client {self.own.client}'s '{field}' with itself is wrong.")
        stated = named_tensors(claims.updates)
        for field, value in self.own.scalars.items():
            if not _close(float(stated[field][place]), value):
                raise Refusal(f"client {self.own.client}'s '{field}' is {value:g}, not what is claimed.")
        if any((factors > 1.0 + SAME).any() or (factors < 0.0).any() for factors in claims.view.factors.values()):
            raise Refusal("replies may be shortened, but the question enlarges or reverses some.")
        if place in claims.view.places:
            seen, k = named_tensors(claims.view.updates), claims.view.places.index(place)
            for field, value in self.own.scalars.items():
                if not _is_shortened(float(seen[field][k]), value):
                    raise Refusal(
                        f"client {self.own.client}'s '{field}' is {value:g} and may be held below that, but the step "
                        f"is made with {float(seen[field][k]):g}."
                    )

    def _check_weights(self, query: Query, claims: Claims) -> None:
        """Compute the weights from the claims, and compare."""
        asked = _Replayed(self.own, query, claims)
        replies: SecureReplies[Any] = SecureReplies(asked, self.own.likes, claims.view)
        try:
            self.algorithm.server_step(claims.server, replies, claims.cohort)
        except _Reached as reached:
            norms = claims.norms[query.field]
            mine, theirs = reached.weights * norms, query.weights.astype(np.float64) * query.scale
            _, step = whole_weights(mine)  # to which weights of very many clients are rounded
            if reached.field != query.field or not np.abs(mine - theirs).max() <= SAME * np.abs(mine).max() + step:
                raise Refusal(
                    f"the weights of the question differ from those of the method's own step: client "
                    f"{self.own.client} computes {np.round(mine, 6).tolist()}, asked are {np.round(theirs, 6).tolist()}"
                ) from None
            try:
                if self.own.norms:
                    check_noise(theirs, len(query.message.asked))
                check_release(theirs, [r.weights * norms for r in claims.released if r.field == query.field])
            except Revealing as revealing:
                raise Refusal(str(revealing)) from None
            return
        raise Refusal("the method's own step asks for no such sum.")


class _Reached(Exception):
    """The method's step has come to the sum that is asked for."""

    def __init__(self, field: str, weights: FloatArray) -> None:
        super().__init__(field)
        self.field, self.weights = field, weights


class _Replayed:
    """The server's claims as a source of replies; ends the step at the first sum that was not released before."""

    def __init__(self, own: OwnReply, query: Query, claims: Claims) -> None:
        self._own, self._place, self._claims = own, query.clients.index(own.client), claims
        self._n_asked = 0

    def norms(self, field: str) -> FloatArray:
        return self._claims.norms[field]

    def gram(self, field: str) -> FloatArray:
        if field not in self._claims.grams:
            raise Refusal(f"the method needs the products of '{field}', which are not in the question.")
        return self._claims.grams[field]

    def products(self, field: str, vectors: Tensor) -> FloatArray:
        if self._n_asked >= len(self._claims.products):
            raise Refusal("the method needs more products than the question states.")
        stated = self._claims.products[self._n_asked]
        self._n_asked += 1
        mine = own_products(self._own.rows[field], vectors)
        scale = float(np.abs(mine).max(initial=0.0))
        if stated.shape != (len(self._claims.norms[field]), len(mine)) or not (
            np.abs(stated[self._place] - mine).max(initial=0.0) <= SAME * max(scale, np.finfo(np.float64).tiny)
        ):
            raise Refusal(f"the claimed products of client {self._own.client}'s '{field}' are not its own.")
        return stated

    def form(self, field: str, form: Form) -> FloatArray:
        if field not in self._claims.forms:
            raise Refusal(f"the method needs the products of '{field}' in a form, which are not in the question.")
        stated, p = self._claims.forms[field], products_with(self._own.rows[field], form)
        error = abs(float(stated[self._place, self._place]) - float(p @ form.middle @ p))
        if not error <= SAME * float(np.abs(p) @ np.abs(form.middle) @ np.abs(p)):
            raise Refusal(
                f"in a form the claimed product of client {self._own.client}'s '{field}' with itself is wrong."
            )
        return stated

    def combine(self, field: str, weights: FloatArray) -> FloatArray:
        if not (weights * self._claims.norms[field]).any():
            return np.zeros(self._own.likes[field].shape.numel())
        for released in self._claims.released:
            if released.field == field and same_weights(released.weights, weights):
                return released.sum
        raise _Reached(field, weights)

    def begin(self, server: Any, cohort: Cohort, view: View) -> None:
        pass


def own_products(row: FloatArray, vectors: Tensor) -> FloatArray:
    """Return a row's products with vectors [R, n], as [R]."""
    found: FloatArray = (vectors.double().cpu() @ torch.from_numpy(row)).numpy()
    return found


def same_weights(one: FloatArray, other: FloatArray) -> bool:
    """Return whether two sums have the same weights but for rounding."""
    return bool(np.abs(one - other).max() <= 1e-12 * np.abs(one).max())


def _is_shortened(seen: float, own: float) -> bool:
    """Return whether a number is the own one, or between that and 0."""
    return _close(seen, own) or bool(0.0 <= seen * np.sign(own) <= abs(own))


def _close(one: float, other: float) -> bool:
    if np.isnan(one) or np.isnan(other):
        return bool(np.isnan(one) and np.isnan(other))
    return bool(abs(one - other) <= SAME * max(abs(one), abs(other)))

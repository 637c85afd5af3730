"""The server's side: padded replies as a source of norms, products and released sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from dqnfed.core.algorithm import Cohort
from dqnfed.secure.distributed import check_noise
from dqnfed.secure.forms import Form, PaddedProducts, form_products
from dqnfed.secure.pads import Message
from dqnfed.secure.queries import Claims, Query, Released, same_weights
from dqnfed.secure.release import MOST_PRODUCTS, Revealing, check_release
from dqnfed.secure.replies import View
from dqnfed.secure.ring import FloatArray, Words, whole_weights
from dqnfed.secure.rows import PaddedRow, cosines, unpadded_sum


class Link(Protocol):
    """The server's way to the clients while it computes a step."""

    def products(self, message: Message, clients: Sequence[int], field: str, vectors: Tensor) -> FloatArray:
        """Return the clients' products of their own row with the vectors, [K, R]."""

    def form(self, message: Message, clients: Sequence[int], field: str, form: Form) -> list[PaddedProducts]:
        """Return the clients' padded products for a form, [K]; each client gives them once a message."""

    def unpad(self, query: Query, claims: Claims) -> Words:
        """Return the sum of the pads from a client that has not answered yet."""


class PaddedSource:
    """K padded replies to one message."""

    def __init__(
        self,
        message: Message,
        clients: Sequence[int],  # who replied, ascending
        updates: Any,  # norms in place of rows
        padded: Mapping[str, Sequence[PaddedRow]],  # by field
        link: Link,
        *,
        has_shares: bool = False,  # of noise, in every row
    ) -> None:
        self._message, self._clients, self._updates = message, tuple(clients), updates
        self._padded, self._link, self._has_shares = padded, link, has_shares
        self._places = [message.asked.index(client) for client in clients]
        self._norms = {field: np.array([row.norm for row in rows]) for field, rows in padded.items()}
        self._grams: dict[str, FloatArray] = {}
        self._products: list[FloatArray] = []
        self._n_products = 0
        self._forms: dict[str, FloatArray] = {}
        self._released: list[Released] = []
        self._step: tuple[Any, Cohort, View] | None = None

    def begin(self, server: Any, cohort: Cohort, view: View) -> None:
        self._step, self._products = (server, cohort, view), []

    def norms(self, field: str) -> FloatArray:
        return self._norms[field]

    def gram(self, field: str) -> FloatArray:
        if field not in self._grams:
            norms = self._norms[field]
            self._grams[field] = cosines(self._padded[field], self._places) * np.outer(norms, norms)
        return self._grams[field]

    def products(self, field: str, vectors: Tensor) -> FloatArray:
        self._n_products += len(vectors)
        if self._n_products > MOST_PRODUCTS:
            raise Revealing(
                f"{self._n_products} products of one row with known vectors tell too much of it; a client gives "
                f"{MOST_PRODUCTS} of each reply."
            )
        found = self._link.products(self._message, self._clients, field, vectors)
        self._products.append(found)
        return found

    def form(self, field: str, form: Form) -> FloatArray:
        assert field not in self._forms, "clients give their products in a form once a message"
        padded = self._link.form(self._message, self._clients, field, form)
        self._forms[field] = form_products(padded, self._norms[field], self._places, form)
        return self._forms[field]

    def combine(self, field: str, weights: FloatArray) -> FloatArray:
        rows, norms = self._padded[field], self._norms[field]
        on_units = weights * norms
        if not on_units.any():
            return np.zeros(len(rows[0].words))
        for released in self._released:
            if released.field == field and same_weights(released.weights, weights):
                return released.sum
        if self._has_shares:
            check_noise(on_units, len(self._message.asked))
        check_release(on_units, [r.weights * norms for r in self._released if r.field == field])
        whole, scale = whole_weights(on_units)
        query = Query(self._message, field, self._clients, whole, scale)
        pads = self._link.unpad(query, self._claims())
        found: FloatArray = unpadded_sum(rows, whole, pads) * scale
        self._released.append(Released(field, weights, found))
        return found

    def _claims(self) -> Claims:
        assert self._step is not None, "a sum is asked for outside of a server step"
        server, cohort, view = self._step
        return Claims(
            self._updates,
            self._norms,
            self._grams,
            tuple(self._products),
            self._forms,
            tuple(self._released),
            server,
            cohort,
            view,
        )

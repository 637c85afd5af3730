"""Secure runs whose messages can be looked at and changed on their way between server and clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from dqnfed import Evaluation, RunResult
from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.secure.forms import Form, PaddedProducts
from dqnfed.secure.pads import Message, PadKey
from dqnfed.secure.queries import Claims, Query
from dqnfed.secure.ring import FloatArray, Words
from dqnfed.secure.source import Link
from dqnfed.sim.engine import run_loop
from dqnfed.sim.secure import SecureClients
from dqnfed.sim.setup import plain_config, set_up
from tests.helpers.bowls import Case

Changed = Callable[[Query, Claims], tuple[Query, Claims]]


class Wire:
    """Everything that is asked during a run's steps; `change` may replace a question before a client gets it."""

    def __init__(self, change: Changed = lambda query, claims: (query, claims)) -> None:
        self.messages: list[Message] = []
        self.queries: list[Query] = []
        self.products: list[FloatArray] = []
        self.forms: list[list[PaddedProducts]] = []
        self.change = change

    def __call__(self, message: Message, link: Link) -> Link:
        self.messages.append(message)
        return _Tapped(self, link)


class _Tapped:
    def __init__(self, wire: Wire, link: Link) -> None:
        self._wire, self._link = wire, link

    def products(self, message: Message, clients: Sequence[int], field: str, vectors: Tensor) -> FloatArray:
        found = self._link.products(message, clients, field, vectors)
        self._wire.products.append(found)
        return found

    def form(self, message: Message, clients: Sequence[int], field: str, form: Form) -> list[PaddedProducts]:
        found = self._link.form(message, clients, field, form)
        self._wire.forms.append(found)
        return found

    def unpad(self, query: Query, claims: Claims) -> Words:
        self._wire.queries.append(query)
        return self._link.unpad(*self._wire.change(query, claims))


def secure_run(
    algorithm: AnyAlgorithm, case: Case, wire: Wire, *, rounds: int = 2, key: PadKey | None = None, **options: Any
) -> RunResult:
    """Return a run with `secure=True` whose questions go over the wire."""
    evaluation = Evaluation(every=rounds, participants=False)
    set_up_with = {name: options[name] for name in ("participation", "policy", "seed") if name in options}
    run_with = {name: options[name] for name in ("out", "resume", "checkpoint_seconds", "observers") if name in options}
    setup, faster = set_up(
        algorithm, case.problem, case.federation, rounds=rounds, evaluation=evaluation, secure=True, **set_up_with
    )
    setup = replace(setup, clients=SecureClients(key=key or PadKey.fresh(), through=wire))
    return run_loop(setup, plain_config(setup, 1.0), faster=faster, **run_with)

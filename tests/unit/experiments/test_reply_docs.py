"""The table of what clients send is made from the methods, and true of the messages that they send."""

from __future__ import annotations

import re

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message

from dqnfed.algorithms import REGISTRY
from dqnfed.experiments.reply_docs import PAGE, page, reply_kinds, sent_fields
from tests.contract.cases import METHODS, suited_case
from tests.helpers.flower import App, Fault, Moment, deployed
from tests.helpers.repository import ROOT

Sent = dict[str, dict[str, tuple[str, tuple[int, ...]]]]  # by kind: field, type and shape


def recorded(name: str) -> Sent:
    """Return what the clients of a method really sent over Flower in two rounds."""
    found: Sent = {}

    def listens(message: Message, context: Context, app: App) -> Message:
        reply = app(message, context)
        arrays: ArrayRecord = reply.content.array_records["update"]
        kind = str(reply.content.config_records["about"]["kind"])
        found[kind] = {field: (array.dtype, tuple(array.shape)) for field, array in arrays.items()}
        return reply

    def plan(moment: Moment) -> Fault | None:
        return listens if moment.is_training else None

    deployed(REGISTRY[name](), suited_case(name), plan, rounds=2)
    return found


def fits(shape: tuple[int, ...], declared: str, n: int) -> bool:
    """Return whether a shape is one that a comment such as "[q, n]" declares; letters but n and T are any number."""
    sizes = [part.strip() for part in declared.strip("[]").split(",") if part.strip()]
    known = {"n": n, "T": n * (n + 1) // 2}
    if len(sizes) != len(shape):
        return False
    return all(
        size == (known[name] if name in known else int(name) if re.fullmatch(r"\d+", name) else size)
        for name, size in zip(sizes, shape, strict=True)
    )


QUICK = ("dqn-fed", "fedavg", "scaffold", "ditto", "fednl", "fedmgda-plus")  # the others in `make test-all`


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in METHODS]
)
def test_recorded_messages_have_the_fields_of_the_table(name: str) -> None:
    n, sent = suited_case(name).problem.n_parameters, recorded(name)
    kinds = {kind.__name__: kind for kind, methods in reply_kinds().items() if name in methods}
    assert sent
    assert sent.keys() <= kinds.keys()
    for kind, fields in sent.items():
        declared = sent_fields(kinds[kind])
        assert [field.name for field in declared] == list(fields)
        for field in declared:
            dtype, shape = fields[field.name]
            assert any(fits(shape, each, n) for each in field.shapes), (field, shape)
            whole = field.name.rpartition(".")[2] in ("places", "levels")
            assert dtype == ("int32" if whole else str(torch.float64).removeprefix("torch."))


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / PAGE).read_text(encoding="utf-8") == page()


def test_every_field_is_described() -> None:
    for kind in reply_kinds():
        for field in sent_fields(kind):
            assert field.shapes, (kind, field)
            assert field.meaning, (kind, field)

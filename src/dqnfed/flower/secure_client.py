"""A client's side of secure aggregation on Flower: the common key, the padded reply, the server's questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from torch import Tensor

from dqnfed.core.algorithm import AnyAlgorithm
from dqnfed.core.tensors import named_tensors
from dqnfed.flower.client_memory import node_file
from dqnfed.flower.records import array_record, named_arrays
from dqnfed.flower.secure_records import (
    SECURE,
    form_reply,
    kept_reply,
    padded_content,
    read_form,
    read_kept,
    read_query,
)
from dqnfed.secure.distributed import with_shares
from dqnfed.secure.forms import padded_products
from dqnfed.secure.keys import Identity, opened, sealed
from dqnfed.secure.noise import Privacy
from dqnfed.secure.pads import Message, PadKey, evaluation_of, message_of
from dqnfed.secure.queries import ClientCheck, OwnReply, Refusal, own_products
from dqnfed.secure.release import FEWEST, MOST_PRODUCTS
from dqnfed.secure.replies import Like
from dqnfed.secure.rows import padded_row
from dqnfed.secure.sums import Number, padded_numbers, unpadding_numbers

ROWS, FACTS, TYPES, USED, SUMMED = (  # of the state
    f"dqnfed-secure-{name}" for name in ("rows", "facts", "types", "used", "summed")
)
MOST_USED = 4096  # hashes of messages that a client remembers without `memory-dir`; with it, all of a run


def shared_keys(identity: Identity, client: int, about: Mapping[str, Any]) -> RecordDict:
    """Return a fresh common key, sealed for every client of the membership that the server names."""
    identity.check(client)
    members, context = [int(c) for c in about["members"]], str(about["context"])
    if len(members) < FEWEST or not all(0 <= c < len(identity.roster) for c in members):
        raise Refusal(f"a common key is for at least {FEWEST} clients of the roster, not for {members}.")
    key = PadKey.fresh()
    boxes = [sealed(identity, client, member, key, context) for member in members]
    return RecordDict({"about": ConfigRecord({"client": client, "boxes": boxes})})


def common_key(identity: Identity, client: int, secure: Mapping[str, Any]) -> PadKey:
    """Return the common key that came with a message."""
    identity.check(client)
    return opened(identity, int(secure["sender"]), client, bytes(secure["box"]), str(secure["context"]))


def secure_reply(
    identity: Identity,
    algorithm: AnyAlgorithm,
    client: int,
    update: Any,
    sent: Any,
    content: RecordDict,
    facts: Mapping[str, Any],
    context: Context,
    privacy: Privacy | None = None,
) -> RecordDict:
    """Return the client's reply under pads; what it replied is kept for the questions of the server's step."""
    secure: Any = content[SECURE]
    about: Any = content["about"]
    asked = [int(c) for c in secure["asked"]]
    if client not in asked or len(set(asked)) < FEWEST:
        raise Refusal(f"a secure sum is over at least {FEWEST} clients, this one among them, but asked are {asked}.")
    key = common_key(identity, client, secure)
    message = message_of(str(about["run"]), int(about["round"]), int(about["phase"]), sent, asked, secure["nonce"])
    _use_once(context, str(about["run"]), client, message)
    named = named_tensors(update)
    rows = {name: t for name, t in named.items() if t.dim() and t.numel()}
    scalars = {name: t for name, t in named.items() if not t.dim()}
    flat = {name: t.detach().double().cpu().reshape(-1).numpy() for name, t in rows.items()}
    noisy, norms = with_shares(flat, list(scalars), privacy, len(asked))
    with_products = algorithm.needs == "gram"
    padded = {
        name: padded_row(key, message, name, row, client, with_products=with_products, norm=norms.get(name))
        for name, row in noisy.items()
    }
    own = OwnReply(client, message, noisy, {name: float(t) for name, t in scalars.items()}, _likes(rows), norms)
    context.state[ROWS], context.state[FACTS] = kept_reply(own)
    context.state[TYPES] = array_record({name: t.new_zeros(0, *t.shape) for name, t in rows.items()})
    return padded_content(scalars, padded, ConfigRecord(dict(facts)))


def summed_reply(
    identity: Identity,
    client: int,
    numbers: Sequence[Number],
    models: Mapping[str, Tensor],
    content: RecordDict,
    context: Context,
) -> ArrayRecord:
    """Return what the client measured under pads; what kind of sum it is for is kept for the question for the pads."""
    secure: Any = content[SECURE]
    about: Any = content["about"]
    asked, names = [int(c) for c in secure["asked"]], [str(name) for name in about["sums"]]
    key = common_key(identity, client, secure)
    message = evaluation_of(str(about["run"]), int(about["round"]), names, models, asked, secure["nonce"])
    _use_once(context, str(about["run"]), client, message)
    words = padded_numbers(key, message, client, numbers)
    squared = [each.squared for each in numbers]
    facts = {"digest": message.digest, "asked": asked, "squared": squared, "is-answered": False}
    context.state[SUMMED] = ConfigRecord(facts)  # type: ignore[arg-type]
    return ArrayRecord({"numbers": Array(words)})


def unpad_sums_reply(identity: Identity, client: int, content: RecordDict, context: Context) -> RecordDict:
    """Return the sum of the pads of the clients that measured; once for what this client measured last."""
    about: Any = content["about"]
    facts: Any = context.state.get(SUMMED)
    if not isinstance(facts, ConfigRecord) or bytes(facts["digest"]) != bytes(about["digest"]):  # type: ignore[arg-type]
        raise Refusal(f"client {client} did not measure anything for the message that the question is about.")
    if facts["is-answered"]:
        raise Refusal(f"client {client} has unpadded the sums of this message already; it answers one question.")
    asked: Any = facts["asked"]
    squared: Any = facts["squared"]
    message = Message(bytes(about["digest"]), tuple(sorted(int(c) for c in asked)))
    words = unpadding_numbers(
        common_key(identity, client, about), message, client, [int(c) for c in about["clients"]], list(squared)
    )
    context.state[SUMMED] = ConfigRecord({**facts, "is-answered": True})
    return RecordDict({"pads": ArrayRecord({"numbers": Array(words)}), "about": ConfigRecord({"client": client})})


def products_reply(algorithm: AnyAlgorithm, client: int, content: RecordDict, context: Context) -> RecordDict:
    """Return the products of the client's own row with the vectors of the question; a few of each message."""
    own, _ = _kept(client, context)
    if algorithm.needs != "gram":
        raise Refusal(f"the method needs no products, so client {client} gives none.")
    about: Any = content["about"]
    if bytes(about["digest"]) != own.message.digest:
        raise Refusal(f"client {client} did not reply to the message that the question is about.")
    arrays: Any = content[SECURE]
    vectors = named_arrays(arrays)["vectors"]
    facts: Any = context.state[FACTS]
    n_asked = int(facts.get("n-products", 0)) + len(vectors)
    if n_asked > MOST_PRODUCTS:
        raise Refusal(f"client {client} gives {MOST_PRODUCTS} products of a row at most, but is asked for {n_asked}.")
    context.state[FACTS] = ConfigRecord({**facts, "n-products": n_asked})
    found = own_products(own.rows[str(about["field"])], vectors)
    return RecordDict({"products": MetricRecord({"values": found.tolist()}), "about": ConfigRecord({"client": client})})


def form_products_reply(
    identity: Identity, algorithm: AnyAlgorithm, client: int, content: RecordDict, context: Context
) -> RecordDict:
    """Return the client's padded products for a form; once a message, since the next would have the same pads."""
    own, _ = _kept(client, context)
    about: Any = content["about"]
    facts: Any = context.state[FACTS]
    field = str(about["field"])
    if algorithm.needs != "gram":
        raise Refusal(f"the method needs no products, so client {client} gives none.")
    if bytes(about["digest"]) != own.message.digest or field not in own.rows:
        raise Refusal(f"client {client} did not reply to the message that the question is about.")
    if facts.get("has-given-form"):
        raise Refusal(f"client {client} has given products in a form for this message already; it does so once.")
    context.state[FACTS] = ConfigRecord({**facts, "has-given-form": True})
    key = common_key(identity, client, about)
    found = padded_products(key, own.message, field, own.rows[field], own.norm(field), client, read_form(content))
    return form_reply(found, client)


def unpad_reply(
    identity: Identity, algorithm: AnyAlgorithm, client: int, content: RecordDict, context: Context
) -> RecordDict:
    """Return the sum of the pads for a question that passes the client's checks."""
    own, is_answered = _kept(client, context)
    about: Any = content["about"]
    query, claims = read_query(content, algorithm.info)
    check = ClientCheck(algorithm, own, is_answered)
    key = opened(identity, int(about["sender"]), client, bytes(about["box"]), str(about["context"]))
    words = check.unpad(key, query, claims)
    facts: Any = context.state[FACTS]
    context.state[FACTS] = ConfigRecord({**facts, "is-answered": True})
    return RecordDict({"pads": ArrayRecord({"words": Array(words)}), "about": ConfigRecord({"client": client})})


def _kept(client: int, context: Context) -> tuple[OwnReply, bool]:
    rows, facts, likes = context.state.get(ROWS), context.state.get(FACTS), context.state.get(TYPES)
    if not isinstance(rows, ArrayRecord) or not isinstance(facts, ConfigRecord) or not isinstance(likes, ArrayRecord):
        raise Refusal(f"client {client} has not kept its reply; its node was started anew.")
    found = {name: Like(t.shape[1:], t.dtype, t.device) for name, t in named_arrays(likes).items()}
    return read_kept(client, rows, facts, found), bool(facts["is-answered"])


def _likes(rows: Mapping[str, Tensor]) -> dict[str, Like]:
    return {name: Like(t.shape, t.dtype, t.device) for name, t in rows.items()}


def _use_once(context: Context, run: str, client: int, message: Message) -> None:
    """Refuse a message whose pads were used already, and remember this one; on disk too, if the node says where."""
    state, file = context.state.get(USED), node_file(context, run, client, "used")
    used: list[bytes] = list(state["digests"]) if isinstance(state, ConfigRecord) else []  # type: ignore[arg-type]
    written = file.read_text(encoding="ascii").split() if file is not None and file.is_file() else []
    if message.digest in used or message.digest.hex() in written:
        raise Refusal("this message was replied to already; a second reply would use its pads again.")
    context.state[USED] = ConfigRecord({"digests": [*used, message.digest][-MOST_USED:]})
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="ascii") as lines:
            lines.write(message.digest.hex() + "\n")

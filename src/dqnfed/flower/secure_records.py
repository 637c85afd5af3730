"""Padded replies and the server's claims as Flower records, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from dqnfed.core.algorithm import Cohort, Info
from dqnfed.core.expected import Layout
from dqnfed.core.tensors import from_named_tensors, named_tensors
from dqnfed.flower.checks import Refused, record
from dqnfed.flower.records import array_record, kind_named, named_arrays
from dqnfed.secure.forms import MOST_VECTORS, Form, PaddedProducts
from dqnfed.secure.pads import Message
from dqnfed.secure.queries import Claims, OwnReply, Query, Released
from dqnfed.secure.replies import Like, View
from dqnfed.secure.ring import Words
from dqnfed.secure.rows import PaddedRow
from dqnfed.secure.wholes import LIMBS

SECURE, UPDATE, PADDED = "secure", "update", "padded"  # records of messages


class PaddedReply(NamedTuple):
    """One client's reply: its scalars, norms in place of rows, and the padded rows by field."""

    scalars: dict[str, Tensor]
    rows: dict[str, PaddedRow]


def padded_content(scalars: Mapping[str, Tensor], rows: Mapping[str, PaddedRow], about: ConfigRecord) -> RecordDict:
    """Return the content of a reply under pads."""
    arrays: dict[str, Array] = {}
    for name, row in rows.items():
        arrays[f"{name}/words"], arrays[f"{name}/corrections"] = Array(row.words), Array(row.corrections)
        arrays[f"{name}/norm"] = Array(np.array(row.norm))
    return RecordDict({UPDATE: array_record(dict(scalars)), PADDED: ArrayRecord(arrays), "about": about})


def read_padded(content: RecordDict, layout: Layout, n_asked: int, *, with_products: bool) -> PaddedReply:
    """Return a reply whose fields, types and shapes are those that the server expects."""
    kind, fields = layout
    about, scalars = record(content, "about", ConfigRecord), record(content, UPDATE, ArrayRecord)
    padded = {name: array.numpy() for name, array in record(content, PADDED, ArrayRecord).items()}
    if about.get("kind") != kind:
        raise Refused(f"it is a {str(about.get('kind'))[:50]}, but the server expects a {kind}")
    rows: dict[str, PaddedRow] = {}
    found: dict[str, Tensor] = {}
    for name, (dtype, shape) in fields.items():
        n = int(np.prod(shape))
        if not shape or not n:
            found[name] = _scalar(scalars, name, dtype) if not shape else torch.empty(shape, dtype=dtype)
            continue
        words, corrections = padded.get(f"{name}/words"), padded.get(f"{name}/corrections")
        norm = padded.get(f"{name}/norm")
        wanted = n_asked if with_products else 0
        if words is None or words.dtype != np.uint64 or words.shape != (n,):
            raise Refused(f"its padded {name} is not {n} words")
        if corrections is None or corrections.dtype != np.uint64 or corrections.shape != (wanted,):
            raise Refused(f"its corrections of {name} are not {wanted} words")
        if norm is None or norm.shape != () or not (np.isfinite(norm) and norm >= 0.0):
            raise Refused(f"the norm of its {name} is not a number of at least 0")
        rows[name] = PaddedRow(words, corrections, float(norm))
    return PaddedReply(found, rows)


def read_words(arrays: ArrayRecord, n: int) -> Words:
    """Return n padded whole numbers of what clients measure."""
    words = arrays["numbers"].numpy() if "numbers" in arrays else np.zeros(0)
    if words.dtype != np.uint64 or words.shape != (n, LIMBS):
        raise Refused(f"its padded numbers are not {n} whole numbers of {LIMBS} words")
    return np.array(words)


def _scalar(arrays: ArrayRecord, name: str, dtype: torch.dtype) -> Tensor:
    if name not in arrays or arrays[name].numpy().shape != ():
        raise Refused(f"it has no single number '{name}'")
    return torch.tensor(arrays[name].numpy()).to(dtype)


def query_content(query: Query, claims: Claims, about: ConfigRecord) -> RecordDict:
    """Return the question for a sum of pads, with everything from which a client computes the weights itself."""
    cohort, view = claims.cohort, claims.view
    arrays: dict[str, Tensor] = {
        "weights": torch.from_numpy(query.weights),
        "cohort.clients": cohort.clients,
        "cohort.n_examples": cohort.n_examples,
        **{f"updates/{name}": t for name, t in named_tensors(claims.updates).items()},
        **{f"view/{name}": t for name, t in named_tensors(view.updates).items()},
        **{f"server/{name}": t for name, t in named_tensors(claims.server).items()},
        **_prefixed("norms", claims.norms),
        **_prefixed("grams", claims.grams),
        **_prefixed("factors", view.factors),
        **_prefixed("forms", claims.forms),
        **_prefixed("products", {str(k): values for k, values in enumerate(claims.products)}),
        **_prefixed("released", {f"{k}.weights": r.weights for k, r in enumerate(claims.released)}),
        **_prefixed("released", {f"{k}.sum": r.sum for k, r in enumerate(claims.released)}),
    }
    if cohort.factors is not None:
        arrays["cohort.factors"] = cohort.factors
    facts: dict[str, Any] = {
        **about,
        "digest": query.message.digest,
        "asked": list(query.message.asked),
        "field": query.field,
        "clients": list(query.clients),
        "scale": query.scale,
        "kind": type(claims.updates).__name__,
        "cohort-clients": cohort.n_clients,
        "cohort-round": cohort.round,
        "places": list(view.places),
        "released-fields": [released.field for released in claims.released],
    }
    return RecordDict({SECURE: array_record(arrays), "about": ConfigRecord(facts)})


def read_query(content: RecordDict, info: Info) -> tuple[Query, Claims]:
    """Return the question and the claims that `query_content` packed."""
    about: Any = record(content, "about", ConfigRecord)
    named = named_arrays(record(content, SECURE, ArrayRecord))
    kind = kind_named(info.replies, str(about["kind"]))
    message = Message(bytes(about["digest"]), tuple(int(c) for c in about["asked"]))
    query = Query(
        message,
        str(about["field"]),
        tuple(int(c) for c in about["clients"]),
        named["weights"].numpy(),
        float(about["scale"]),
    )
    view = View(
        from_named_tensors(kind, _under(named, "view")),
        tuple(int(place) for place in about["places"]),
        {name: t.numpy() for name, t in _under(named, "factors").items()},
    )
    fields = [str(name) for name in about["released-fields"]]
    released = _under(named, "released")
    claims = Claims(
        from_named_tensors(kind, _under(named, "updates")),
        {name: t.numpy() for name, t in _under(named, "norms").items()},
        {name: t.numpy() for name, t in _under(named, "grams").items()},
        tuple(t.numpy() for _, t in sorted(_under(named, "products").items(), key=lambda item: int(item[0]))),
        {name: t.numpy() for name, t in _under(named, "forms").items()},
        tuple(
            Released(field, released[f"{k}.weights"].numpy(), released[f"{k}.sum"].numpy())
            for k, field in enumerate(fields)
        ),
        from_named_tensors(info.server, _under(named, "server")),
        Cohort(
            named["cohort.clients"],
            named["cohort.n_examples"],
            int(about["cohort-clients"]),
            int(about["cohort-round"]),
            named.get("cohort.factors"),
        ),
        view,
    )
    return query, claims


def form_content(form: Form, about: ConfigRecord) -> RecordDict:
    """Return the question for products in a form."""
    arrays = {"vectors": form.vectors, "middle": torch.from_numpy(form.middle)}
    facts = ConfigRecord({**about, "exponents": list(form.exponents)})
    return RecordDict({SECURE: array_record(arrays), "about": facts})


def read_form(content: RecordDict) -> Form:
    """Return the question that `form_content` packed."""
    named, about = named_arrays(record(content, SECURE, ArrayRecord)), record(content, "about", ConfigRecord)
    exponents: Any = about["exponents"]
    vectors, middle = named["vectors"], named["middle"].numpy()
    n = len(vectors)
    if vectors.dim() != 2 or middle.shape != (n, n) or len(exponents) != n or not 0 < n <= MOST_VECTORS:
        raise Refused(f"a form is for 1 to {MOST_VECTORS} vectors, with a matrix of as many rows and columns")
    return Form(vectors, tuple(int(e) for e in exponents), middle)


def form_reply(found: PaddedProducts, client: int) -> RecordDict:
    """Return a client's padded products as a message."""
    arrays = {"words": found.words, "corrections": found.corrections, "square": np.array(found.square)}
    record_of = ArrayRecord({name: Array(values) for name, values in arrays.items()})
    return RecordDict({"form": record_of, "about": ConfigRecord({"client": client})})


def read_form_reply(content: RecordDict, n_vectors: int, n_asked: int) -> PaddedProducts:
    """Return the padded products that `form_reply` packed."""
    found = {name: array.numpy() for name, array in record(content, "form", ArrayRecord).items()}
    for name, n in (("words", n_vectors), ("corrections", n_asked)):
        if name not in found or found[name].dtype != np.uint64 or found[name].shape != (n, LIMBS):
            raise Refused(f"its {name} for a form are not {n} whole numbers of {LIMBS} words")
    square = found.get("square")
    if square is None or square.shape != () or not np.isfinite(square):
        raise Refused("its own product in a form is no number")
    return PaddedProducts(np.array(found["words"]), np.array(found["corrections"]), float(square))


def kept_reply(own: OwnReply) -> tuple[ArrayRecord, ConfigRecord]:
    """Return what a client keeps of its own reply until it may be asked about it."""
    rows = {name: torch.from_numpy(values) for name, values in own.rows.items()}
    facts: dict[str, Any] = {"digest": own.message.digest, "asked": list(own.message.asked), "is-answered": False}
    facts |= {"scalars": list(own.scalars), "values": list(own.scalars.values())}
    facts |= {"norm-fields": list(own.norms), "norms": list(own.norms.values())}
    return array_record(rows), ConfigRecord(facts)


def read_kept(client: int, rows: ArrayRecord, facts: Any, likes: Mapping[str, Like]) -> OwnReply:
    """Return the reply that `kept_reply` packed."""
    message = Message(bytes(facts["digest"]), tuple(int(c) for c in facts["asked"]))
    scalars = dict(zip(map(str, facts["scalars"]), map(float, facts["values"]), strict=True))
    norms = dict(zip(map(str, facts["norm-fields"]), map(float, facts["norms"]), strict=True))
    return OwnReply(client, message, {name: array.numpy() for name, array in rows.items()}, scalars, likes, norms)


def _prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Tensor]:
    return {f"{prefix}/{name}": torch.from_numpy(np.ascontiguousarray(value)) for name, value in values.items()}


def _under(named: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}/"): t for name, t in named.items() if name.startswith(f"{prefix}/")}


def likes_by_layout(fields: Mapping[str, tuple[torch.dtype, Sequence[int]]], device: torch.device) -> dict[str, Like]:
    """Return what the padded rows of a reply look like."""
    return {
        name: Like(torch.Size(shape), dtype, device)
        for name, (dtype, shape) in fields.items()
        if shape and np.prod(shape)
    }

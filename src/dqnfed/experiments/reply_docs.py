"""The page of all fields that clients send, made from the kinds of reply that methods declare.

`python -m dqnfed.experiments.reply_docs` writes it. A field's comment begins with its shape; the rest says what it is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from dqnfed.algorithms import REGISTRY

PAGE = Path("docs/reference/replies.md")
SHAPE = re.compile(r"\[[^\]]*\]")
COMMENT = re.compile(r"^\s+(\w+): \w+(?:\s+#\s*(.*))?$")
COMMON = {  # what a field is where its own comment does not say
    "gradient": "of the client's training loss at the model that was sent",
    "loss": "the client's training loss at the model that was sent",
    "rate": "the first-order decrease that the client asks for",
    "trial_loss": "the training loss at a candidate model",
    "probed_curvature": "of the loss along the first step",
    "gradient_change": "of the client's gradient over the last step, or a short way ahead",
    "hessian": "of the client's training loss, its upper triangle",
    "code": "the compressed difference between a matrix and its estimate",
    "error": "the size of what was compressed",
    "error_change": "how `error` has changed",
    "target": "the product of the client's Hessian estimate and its model, less its gradient",
    "target_change": "how `target` has changed",
    "step": "the client's own step",
    "product": "of the client's Hessian with a vector",
    "theta": "the client's own model",
    "vectors": "the eigenvectors of `values`",
    "counts": "how many examples those sums are of",
    "delta": "theta before the local work minus theta after it",
    "disparity": "how unequally the client's groups are served, from 0 to 1",
    "n_labels": "how many classes the client's examples have",
    "n_changed": "how many labels were corrected",
    "values": "the numbers that are kept",
    "places": "where they belong",
    "levels": "whole multiples of a step size",
    "radius": "the largest entry, which sets the step size",
}
INTRODUCTION = """\
# What clients send

<!-- Made by `python -m dqnfed.experiments.reply_docs` from `Info.replies`; change the comments there instead. -->

Every field of every reply to a training message, by method. `n` is the number of parameters of the model, `[]` one
number, `T` = n (n + 1) / 2. Fields are in the model's precision, `places` and `levels` whole numbers. A server on
Flower refuses a reply that has other names, types or shapes than its own model and method give; what else it checks is
in the [deployment guide](../how-to/deploy.md).

Replies to an evaluation are the same for all methods: `loss` (training loss), `scores` and `losses` (on the examples of
the scores, one for each model that the method evaluates), `n-train`, `n-test`, `n-validation`; and the client's number,
name and group, the names of the models, and whether the client lost its memory (`forgot`). A client app that fails
sends the text of its error.

| reply | methods | field | shape | what it is |
|---|---|---|---|---|
"""


class SentField(NamedTuple):
    """One tensor of a reply."""

    name: str  # "record.field" inside a record of the reply
    shapes: tuple[str, ...]  # alternatives, as "[n]"
    meaning: str


def sent_fields(kind: type[Any], prefix: str = "") -> list[SentField]:
    """Return the tensors of a kind of reply, in order."""
    hints, found = get_type_hints(kind), []
    for name, comment in _comments(kind):
        if hasattr(hints[name], "_fields"):
            found += sent_fields(hints[name], f"{prefix}{name}.")
            continue
        comment = comment.replace("[..., n]", "[n]").replace("[...]", "[]")  # of one client
        shapes = tuple(dict.fromkeys(SHAPE.findall(comment.replace("in [0, 1]", ""))))
        said = re.sub(r"^[,\s]*(or\s*)?", "", re.sub(r"^(,?\s*(or )?\[[^\]]*\])+", "", comment)).strip(" ;,")
        said = re.sub(r"^int32$|^in \[0, 1\]$", "", said)
        said = f"[0] {said}" if said.startswith("with ") else said
        found.append(SentField(prefix + name, shapes, said or COMMON.get(name, "")))
    return found


def reply_kinds() -> dict[type[Any], list[str]]:
    """Return all kinds of reply, each with the methods whose clients send it."""
    kinds: dict[type[Any], list[str]] = {}
    for method, algorithm in sorted(REGISTRY.items()):
        for kind in algorithm.info.replies:
            kinds.setdefault(kind, []).append(method)
    return kinds


def page() -> str:
    """Return the page."""
    lines = []
    for kind, methods in reply_kinds().items():
        for place, field in enumerate(sent_fields(kind)):
            head = (f"`{kind.__name__}`", ", ".join(methods)) if place == 0 else ("", "")
            shapes = " or ".join(f"`{shape}`" for shape in field.shapes)
            lines.append("| " + " | ".join((*head, f"`{field.name}`", shapes, field.meaning)) + " |")
    return INTRODUCTION + "\n".join(lines) + "\n"


def _comments(kind: type[Any]) -> Iterator[tuple[str, str]]:
    """Give the fields of a record with the comments behind them."""
    for line in inspect.getsource(kind).splitlines():
        match = COMMENT.match(line)
        if match and match.group(1) in kind._fields:
            yield match.group(1), (match.group(2) or "").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

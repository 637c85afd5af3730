"""The rules for what clients send: a reply that breaks one is refused, with the reason, and nothing of it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from dqnfed.core.expected import Layout
from dqnfed.core.problem import Problem, score_range
from dqnfed.flower.records import decoded, kind_named
from dqnfed.flower.roster import Member
from dqnfed.secure.noise import LOSSES as LOSS_FIELDS

SIZES = ("n-train", "n-test", "n-validation")
LOSSES = {*LOSS_FIELDS, "losses"}  # fields of training replies
NUMBERS = {"loss", "scores", "losses", *SIZES}
LONGEST_NAME = 100  # characters
MANY_EXAMPLES = 2**53  # sizes are weights in float64
FAR = 1000.0  # times the larger of the usual losses now and before: an evaluated loss above it is refused
MANY_RELEASES = 100_000  # of one reply
FEW = 3  # clients; among fewer nobody's loss is usual


class Refused(ValueError):
    """Why a reply is not used."""


class Reported(NamedTuple):
    """What a client measured."""

    loss: float  # training loss; NaN where it was not asked for
    scores: list[float]  # by model, the primary one first
    losses: list[float]  # likewise, on the examples of the scores


class Question(NamedTuple):
    """What clients were asked to evaluate."""

    models: Sequence[str]  # by the server's own method; nothing where no scores are wanted
    with_loss: bool


def read_update(content: RecordDict, kinds: Sequence[type[Any]], expected: Layout | None, problem: Problem) -> Any:
    """Return a training reply that has the kind, the names, the types and the shapes that the server expects."""
    floor, device = problem.loss_floor, problem.theta0.device
    about, arrays = record(content, "about", ConfigRecord), record(content, "update", ArrayRecord)
    kind = kind_named(kinds, str(about.get("kind")))
    if expected is not None:
        _check_layout(kind.__name__, arrays, expected)
    update = decoded(kind, arrays, device)
    for name in LOSSES & set(kind._fields):
        if bool((getattr(update, name) < floor - slack(floor)).any()):
            raise Refused(f"its {name} is below {floor:g}, the floor of losses (`loss_floor` of the problem)")
    return update


def read_releases(about: ConfigRecord) -> int:
    """Return in how many noisy numbers a client, or one of its examples, had a part."""
    found = about.get("releases", 1)
    if not isinstance(found, int) or not 0 <= found <= MANY_RELEASES:
        raise Refused(f"it says {str(found)[:50]} releases, which is no number from 0 to {MANY_RELEASES}")
    return found


def read_member(content: RecordDict) -> Member:
    """Return which client reports, and how many examples it claims to have."""
    about, numbers = record(content, "about", ConfigRecord), record(content, "evaluation", MetricRecord)
    n_train, n_test, n_validation = (_whole(numbers, name) for name in SIZES)
    for name, size, least in ("n-train", n_train, 1), ("n-test", n_test, 1), ("n-validation", n_validation, 0):
        if not least <= size <= MANY_EXAMPLES:
            raise Refused(f"its `{name}` must be a whole number of at least {least}, but is {size}")
    client = _whole(about, "client")
    return Member(
        client,
        clean_name(about.get("name"), f"client {client}"),
        clean_name(about.get("group"), ""),
        n_train,
        n_test,
        n_validation,
    )


def read_report(content: RecordDict, question: Question, problem: Problem) -> Reported:
    """Return what a client measured: finite losses at or above the floor, scores within their range, one a model."""
    about, numbers = record(content, "about", ConfigRecord), record(content, "evaluation", MetricRecord)
    if set(numbers) != NUMBERS:
        raise Refused(f"its evaluation has the numbers {_listed(numbers)}, expected are {_listed(NUMBERS)}")
    if _strings(about, "models") != list(question.models):
        raise Refused(f"it evaluated the models {_listed(_strings(about, 'models'))}, not {_listed(question.models)}")
    scores, losses = _floats(numbers, "scores"), _floats(numbers, "losses")
    for name, values in ("scores", scores), ("losses", losses):
        if len(values) != len(question.models):
            raise Refused(f"it has {len(values)} {name} for {len(question.models)} models")
    loss = _floats(numbers, "loss")[0] if question.with_loss else math.nan
    for value in losses if not question.with_loss else [loss, *losses]:
        if not (math.isfinite(value) and value >= problem.loss_floor - slack(problem.loss_floor)):
            raise Refused(f"its loss is {value:g}, but losses are finite and at least {problem.loss_floor:g}")
    low, high = score_range(problem.score_name)
    for value in scores:
        if not (math.isfinite(value) and low - 1e-3 <= value <= high + 1e-3):
            raise Refused(f"its {problem.score_name} is {value:g}, but must be in [{low:g}, {high:g}]")
    return Reported(loss, scores, losses)


def far_off(reports: Mapping[int, Reported], usual: float) -> dict[int, str]:
    """Return the clients whose losses are far above all that is usual, now or before."""
    if len(reports) < FEW:
        return {}
    largest = {client: max([each.loss, *each.losses], key=_known) for client, each in reports.items()}
    limit = FAR * max(median(map(_known, largest.values())), usual, 1e-6)
    return {
        client: f"its loss is {loss:g}, above {FAR:g} times what is usual"
        for client, loss in largest.items()
        if _known(loss) > limit
    }


def usual_loss(reports: Mapping[int, Reported]) -> float:
    """Return the clients' median training loss; 0 where it is not known."""
    known = [each.loss for each in reports.values() if math.isfinite(each.loss)]
    return median(known) if len(known) >= FEW else 0.0


def held_sizes(sizes: Sequence[int], ratio: float) -> list[int]:
    """Return the claimed sizes as weights: none above `ratio` times the median, nor above all others together.

    The second rule is for four clients or more: of two or three, one may well be as large as the others.
    """
    most = ratio * median(sizes)
    held = [size if size <= most else max(1, int(most)) for size in sizes]
    if len(held) > FEW:
        total = sum(held)
        held = [min(size, total - size) for size in held]
    return held


def slack(floor: float) -> float:
    """Return how far below the floor a loss may be by rounding."""
    return 1e-6 * (1.0 + abs(floor))


def clean_name(value: Any, otherwise: str) -> str:
    """Return a client's name without characters that do not print, not longer than a line."""
    if not isinstance(value, str):
        return otherwise
    name = "".join(c for c in value if c.isprintable()).strip()[:LONGEST_NAME]
    return name or otherwise


def record(content: RecordDict, name: str, kind: type[Any]) -> Any:
    """Return the named record of a message; refuses a message without it."""
    found = content.get(name)
    if not isinstance(found, kind):
        raise Refused(f"it has no record '{name}' of kind {kind.__name__}")
    return found


def _check_layout(kind: str, arrays: ArrayRecord, expected: Layout) -> None:
    """Compare what arrays say about themselves, before their bytes are read; `decoded` checks these against that."""
    wanted_kind, fields = expected
    if kind != wanted_kind:
        raise Refused(f"it is a {kind}, but the server expects a {wanted_kind}")
    if set(arrays) != set(fields):
        raise Refused(f"it has the fields {_listed(arrays)}, but the server expects {_listed(fields)}")
    for name, (dtype, shape) in fields.items():
        wanted = str(dtype).removeprefix("torch.")
        found = arrays[name].numpy()  # of plain numbers: Flower reads no objects
        if str(found.dtype) != wanted:
            raise Refused(f"its {name} is of type {str(found.dtype)[:20]}, but the server expects {wanted}")
        if found.shape != shape:
            raise Refused(f"its {name} has the shape {list(found.shape)}, but the server expects {list(shape)}")


def _whole(numbers: Mapping[str, Any], name: str) -> int:
    value = numbers.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Refused(f"its `{name}` must be a whole number, but is {str(value)[:50]}")
    return value


def _floats(numbers: Mapping[str, Any], name: str) -> list[float]:
    value = numbers[name]
    found = list(value) if isinstance(value, list) else [value]
    return [float(each) for each in found]


def _strings(about: Mapping[str, Any], name: str) -> list[str]:
    value = about.get(name)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise Refused(f"its `{name}` must be a list of names")
    return list(value)


def _listed(names: Any) -> str:
    return repr(", ".join(sorted(clean_name(name, "?") for name in names)))[:200]


def _known(loss: float) -> float:
    return loss if math.isfinite(loss) else 0.0

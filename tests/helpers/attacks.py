"""A hundred ways in which a client can lie to the server, as changes of its honest replies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from tests.helpers.flower import App, Fault, Moment, moment_of

Field = NDArray[Any]
Change = Callable[[RecordDict, Moment], RecordDict]  # of the content of an honest reply
Attack = Callable[[], Change]  # a new liar, with nothing in its memory


def liar(attack: Attack) -> Fault:
    """Return the client that changes its honest replies as the attack says."""
    change = attack()

    def reply(message: Message, context: Context, app: App) -> Message:
        honest = app(message, context)
        return Message(change(honest.content, moment_of(message, context)), reply_to=message)

    return reply


def fields(change: Callable[[str, Field], Field]) -> Attack:
    """Return the attack that changes the fields of training replies by name."""

    def changed(content: RecordDict, moment: Moment) -> RecordDict:
        if not moment.is_training:
            return content
        sent = content.array_records["update"]
        arrays = {name: Array(np.asarray(change(name, array.numpy()))) for name, array in sent.items()}
        return RecordDict({"update": ArrayRecord(arrays), "about": content["about"]})

    return lambda: changed


def rows(change: Callable[[Field], Field]) -> Attack:
    return fields(lambda _, v: change(v).astype(v.dtype) if v.ndim else v)


def scalars(change: Callable[[Field], Field]) -> Attack:
    return fields(lambda _, v: v if v.ndim else np.asarray(change(v)).astype(v.dtype))


def times(factor: float, of: Callable[[Callable[[Field], Field]], Attack]) -> Attack:
    return of(lambda v: v * factor)


def by_factor(factor: float, *names: str) -> Attack:
    return fields(lambda name, v: (v * factor).astype(v.dtype) if name in names else v)


def content(change: Change, *, training: bool) -> Attack:
    """Return the attack that replaces the content of training or of evaluation replies."""
    return lambda: lambda honest, moment: change(honest, moment) if moment.is_training == training else honest


def evaluation(**numbers: Any) -> Attack:
    """Return the attack on numbers of evaluations; `about_x` is the fact x."""

    def changed(honest: RecordDict, _: Moment) -> RecordDict:
        found: dict[str, Any] = dict(honest.metric_records["evaluation"])
        about: dict[str, Any] = dict(honest.config_records["about"])
        for key, value in numbers.items():
            name = key.replace("_", "-")
            place, name = (about, name[6:]) if name.startswith("about-") else (found, name)
            place[name] = value(place[name]) if callable(value) else value
        return RecordDict({"evaluation": MetricRecord(found), "about": ConfigRecord(about)})

    return content(changed, training=False)


def only_if(attack: Attack, when: Callable[[int], bool]) -> Attack:
    """Return the attack in those rounds alone."""

    def new() -> Change:
        change = attack()
        return lambda honest, moment: change(honest, moment) if when(moment.round) else honest

    return new


def both(first: Attack, second: Attack) -> Attack:
    def new() -> Change:
        one, two = first(), second()
        return lambda honest, moment: two(one(honest, moment), moment)

    return new


def replay(n_rounds: int, *names: str) -> Attack:
    """Return the attack that sends what it sent n rounds ago (0: in its first round), or these fields of it."""

    def new() -> Change:
        sent: dict[tuple[str, int], dict[str, Array]] = {}

        def changed(honest: RecordDict, moment: Moment) -> RecordDict:
            if not moment.is_training:
                return honest
            kind = str(honest.config_records["about"]["kind"])
            now = dict(honest.array_records["update"].items())
            sent[kind, moment.round] = now
            rounds = [round for of_kind, round in sent if of_kind == kind]
            old = sent[kind, max(moment.round - n_rounds, min(rounds)) if n_rounds else min(rounds)]
            used = {name: old.get(name, value) if name in names or not names else value for name, value in now.items()}
            return RecordDict({"update": ArrayRecord(used), "about": honest["about"]})

        return changed

    return new


def random_rows(size: float, *, every_round: bool = False) -> Attack:
    """Return the attack whose rows are of usual length times `size`, in a random direction."""

    def new() -> Change:
        generator = np.random.default_rng(0)

        def change(v: Field) -> Field:
            source = generator if every_round else np.random.default_rng(0)
            noise = source.normal(size=v.shape)
            return np.asarray(noise / np.linalg.norm(noise) * np.linalg.norm(v) * size)

        return rows(change)()

    return new


def fails(_: RecordDict, moment: Moment) -> RecordDict:
    raise RuntimeError(f"boom in round {moment.round} [/red] \n second line <script>")


def without_arrays(honest: RecordDict, _: Moment) -> RecordDict:
    return RecordDict({"about": honest["about"]})


def nothing(honest: RecordDict, moment: Moment) -> RecordDict:
    return RecordDict()


def one_more(honest: RecordDict, _: Moment) -> RecordDict:
    arrays = {**dict(honest.array_records["update"].items()), "zzz": Array(np.zeros(3))}
    return RecordDict({"update": ArrayRecord(arrays), "about": honest["about"]})


def of_another_kind(honest: RecordDict, _: Moment) -> RecordDict:
    about = ConfigRecord({**honest.config_records["about"], "kind": "Nope"})
    return RecordDict({"update": honest.array_records["update"], "about": about})


def first_is_nan(v: Field) -> Field:
    return np.where(np.arange(v.size).reshape(v.shape) == 0, np.nan, v).astype(v.dtype)


LATE = 6
AS_LISTED: dict[str, Attack] = {  # sixty kinds, by what they falsify
    "every number NaN": fields(lambda _, v: v * np.nan),
    "the first number NaN": fields(lambda _, v: first_is_nan(v)),
    "every number inf": fields(lambda _, v: v + np.inf),
    "every number 1e30": fields(lambda _, v: (v * 0 + 1e30).astype(v.dtype)),
    "every number 0": fields(lambda _, v: v * 0),
    "row x 1e30": rows(lambda v: v * 1e30),
    "row x -1": rows(lambda v: -v),
    "row x -3": rows(lambda v: -3 * v),
    "row x -10": rows(lambda v: -10 * v),
    "row x -10 late": only_if(rows(lambda v: -10 * v), lambda round: round >= LATE),
    "row random": random_rows(1.0),
    "scalars x -1": scalars(lambda v: -v),
    "scalars x 1e6": scalars(lambda v: v * 1e6),
    "scalars 0": scalars(lambda v: v * 0),
    "scalars NaN": scalars(lambda v: v * np.nan),
    "scalars inf": scalars(lambda v: v + np.inf),
    **{
        f"{name} x {factor}": by_factor(float(factor), name)
        for name in ("rate", "curvature", "loss")
        for factor in ("1e6", "1e3", "30", "-1", "1e-6")
    },
    "loss, rate x 1e6": by_factor(1e6, "loss", "rate"),
    "loss, curvature x 1e6": by_factor(1e6, "loss", "curvature"),
    "one number more": fields(lambda _, v: np.concatenate([v, v[:1]]) if v.ndim == 1 and v.size > 1 else v),
    "one dimension more": fields(lambda _, v: v.reshape(1, *v.shape)),
    "float64": fields(lambda _, v: v.astype(np.float64)),
    "int64": fields(lambda _, v: np.nan_to_num(v).astype(np.int64)),
    "complex": fields(lambda _, v: v.astype(np.complex64)),
    "strings": fields(lambda _, v: np.array(["a"] * max(1, v.size))),
    "booleans": fields(lambda _, v: v > 0),
    "empty rows": fields(lambda _, v: v[:0] if v.ndim else v),
    "no arrays": content(without_arrays, training=True),
    "an array more": content(one_more, training=True),
    "no records": content(nothing, training=True),
    "another kind": content(of_another_kind, training=True),
    "fails": content(fails, training=True),
    "replays its first reply": replay(0),
    "evaluated loss NaN": evaluation(loss=math.nan),
    "evaluated loss inf": evaluation(loss=math.inf),
    "evaluated loss -1e9": evaluation(loss=-1e9),
    "no scores": evaluation(scores=[]),
    "no scores late": only_if(evaluation(scores=[]), lambda round: round >= LATE),
    "five scores": evaluation(scores=[1.0] * 5),
    "score NaN": evaluation(scores=[math.nan]),
    "score 1e308": evaluation(scores=[1e308]),
    "score 50000": evaluation(scores=[50000.0]),
    "n-train -5": evaluation(n_train=-5),
    "n-train 0": evaluation(n_train=0),
    "n-train 1e15": evaluation(n_train=10**15),
    "n-train 2^62": evaluation(n_train=2**62),
    "n-train 3.7": evaluation(n_train=3.7),
    "n-test 0": evaluation(n_test=0),
    "client -1": evaluation(about_client=-1),
    "client 0": evaluation(about_client=0),
    "name of a script": evaluation(about_name='</script><img src=x onerror=alert(1)>\n,"x\u0000'),
    "models of its own": evaluation(about_models=["a,b\nround", "<script>"]),
    "no evaluation": content(nothing, training=False),
    "no evaluation late": only_if(content(nothing, training=False), lambda round: round >= LATE),
    "fails to evaluate late": only_if(content(fails, training=False), lambda round: round >= LATE),
}
SCALARS = ("rate", "curvature", "loss", "probed_curvature", "probed_slope", "probed_loss")
FURTHER: dict[str, Attack] = {
    **{f"row x {factor}": times(float(factor), rows) for factor in ("1e-6", "1e-3", "0.1", "10", "1e3", "1e6")},
    **{f"scalars x {factor}": times(float(factor), scalars) for factor in ("1e-6", "1e-3", "0.1", "10", "1e3")},
    **{
        f"{name} x {factor}": by_factor(float(factor), name)
        for name in ("probed_curvature", "probed_slope", "probed_loss")
        for factor in ("1e6", "30", "-1", "1e-6")
    },
    **{f"{name} x 5": by_factor(5.0, name) for name in ("rate", "curvature", "loss")},
    "loss, rate x 10": by_factor(10.0, "loss", "rate"),
    "loss, rate x 1e3": by_factor(1e3, "loss", "rate"),
    "loss, rate x 1e-6": by_factor(1e-6, "loss", "rate"),
    "loss, rate, curvature x 100": by_factor(100.0, "loss", "rate", "curvature"),
    "rate x 1e6, row x 1e-3": both(by_factor(1e6, "rate"), rows(lambda v: 1e-3 * v)),
    "row x -1, scalars x 10": both(rows(lambda v: -v), scalars(lambda v: 10 * v)),
    "row x -1, loss x 3": both(rows(lambda v: -v), by_factor(3.0, "loss")),
    "everything x -10": fields(lambda _, v: (-10 * v).astype(v.dtype)),
    "everything x 100": fields(lambda _, v: (100 * v).astype(v.dtype)),
    "n-train x 50": evaluation(n_train=lambda n: 50 * n),
    "n-train x 1e4": evaluation(n_train=lambda n: 10_000 * n),
    "n-train x 50 late": only_if(evaluation(n_train=lambda n: 50 * n), lambda round: round >= LATE),
    "n-train x 50, row x -1": both(evaluation(n_train=lambda n: 50 * n), rows(lambda v: -v)),
    "every size 1": evaluation(n_train=1, n_test=1, n_validation=1),
    "replays the reply before": replay(1),
    "replays three rounds ago": replay(3),
    "replays its first row": replay(0, "gradient", "delta"),
    "replays its first loss": replay(0, "loss"),
    "row x -1 in turns": only_if(rows(lambda v: -v), lambda round: round % 2 == 1),
    "row x -10 in turns": only_if(rows(lambda v: -10 * v), lambda round: round % 2 == 0),
    "loss x 30 in turns": only_if(by_factor(30.0, "loss"), lambda round: round % 2 == 1),
    "scalars x 1e6 in turns": only_if(scalars(lambda v: 1e6 * v), lambda round: round % 3 == 2),
    "curvature x 1e3 in turns": only_if(by_factor(1e3, "curvature"), lambda round: round % 2 == 0),
    "row random every round": random_rows(1.0, every_round=True),
    "row random x 3": random_rows(3.0, every_round=True),
    "row constant": rows(lambda v: np.full_like(v, np.linalg.norm(v) / math.sqrt(max(1, v.size)))),
}
ATTACKS: Mapping[str, Attack] = {**AS_LISTED, **FURTHER}

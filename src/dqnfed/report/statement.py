"""What a site shows its ethics board: one statement a client, as content for both the page and the PDF."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dqnfed.core.checksums import listed_checksums
from dqnfed.report.breakdown import breakdown, gap_sentence, of_share, widened
from dqnfed.report.breakdown_tables import hint_of, interval_of, number_text
from dqnfed.report.comparison import REFERENCES, Experiment, Method
from dqnfed.report.headline import behind_sentences, client_sentence
from dqnfed.report.joining import ALONE, POOLED, Estimate, by_client, estimate, joining
from dqnfed.report.reader import Run
from dqnfed.report.run_files import block, read_json
from dqnfed.report.sections import count
from dqnfed.report.tables import MISSING
from dqnfed.report.units import SPACE, Unit, unit_of

RULES = {
    "last": "the last one",
    "loss": "lowest mean validation loss over the sites",
    "mean": "highest mean validation score over the sites",
}
FLOWER_FILE = "flower.json"  # only a run over a network has it


class Text(NamedTuple):
    """A paragraph; `items` are points below it."""

    text: str
    items: tuple[str, ...] = ()
    style: str = ""  # lead | note


class Facts(NamedTuple):
    """Names and values."""

    pairs: tuple[tuple[str, str], ...]


class Grid(NamedTuple):
    """A table; the first column is left-aligned text."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


class Bar(NamedTuple):
    """One bar: its label, value as text, and where value and interval lie from 0 to 1."""

    label: str
    text: str
    place: float
    low: float  # NaN: no interval
    high: float
    is_main: bool


class Bars(NamedTuple):
    bars: tuple[Bar, ...]
    caption: str


class Signatures(NamedTuple):
    """Places to sign."""

    roles: tuple[str, ...]


Block = Text | Facts | Grid | Bars | Signatures


class Section(NamedTuple):
    title: str
    blocks: tuple[Block, ...]


class Statement(NamedTuple):
    """All that one site's statement says."""

    site: str
    experiment: str
    made: str
    sections: tuple[Section, ...]


def statement_of(
    experiment: Experiment, client: int, titles: Mapping[str, Mapping[str, Any]], *, version: str
) -> Statement:
    """Return the statement of one client; `titles` says about methods what `dqnfed list algorithms --json` does."""
    method = experiment.methods[experiment.focus]
    name = next(c.name for run in experiment.runs for c in run.clients if c.client == client)
    sections = (
        Section("Summary", _summary(experiment, client)),
        Section("Data of this site", _data(experiment, method, client)),
        Section("Method", _method(experiment, method, titles)),
        Section("What left this site", _left(method)),
        Section("Results at this site", _results(experiment, client)),
        Section("Groups at this site", _groups(experiment, method, client)),
        Section("What these numbers do not say", _limits(experiment, method, client)),
        Section("Versions and checksums", _versions(method, version)),
        Section("Signatures", (Signatures(("For the site", "For the ethics board")),)),
    )
    return Statement(name, experiment.name, f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", sections)


def _summary(experiment: Experiment, client: int) -> tuple[Block, ...]:
    found = joining(experiment)
    mine = next(gain for gain, c in zip(found.clients, _clients(experiment), strict=True) if c == client)
    unit = found.unit
    if found.has_alone and experiment.methods[experiment.focus].algorithm not in REFERENCES:
        lead = client_sentence(mine, found)
    elif math.isfinite(mine.joined.mean):
        text = f"{mine.name}: the {unit.name} on test rows is {unit.text(mine.joined.mean)} with {found.method}"
        lead = f"{text}; what joining brings is not known, as nobody was trained alone."
    else:
        lead = f"{mine.name}: no test row was scored, so nothing is known about this site."
    return (Text(lead, style="lead"), *(Text(sentence) for sentence in behind_sentences(experiment)))


def _clients(experiment: Experiment) -> list[int]:
    return sorted({c.client for run in experiment.runs for c in run.clients})


def _data(experiment: Experiment, method: Method, client: int) -> tuple[Block, ...]:
    run = method.runs[0]
    data, learnt, about = block(run.config, "data"), _features(run), _client_entry(run, client)
    classes = learnt.get("classes") or []
    columns = block(learnt, "preprocessing")
    source = Path(str(data["file"])).name if data.get("file") else str(data.get("name") or experiment.name)
    if is_deployed(run):
        source = "the site's own, which stayed there"
    pairs = [("Site", str(about.get("name", client))), ("Table", source)]
    if about.get("group"):
        pairs.append(("Group of sites", str(about["group"])))
    if data.get("label"):
        pairs.append(("Learnt column", str(data["label"])))
    pairs.append(("Rows", _row_counts(about)))
    labels = block(about, "labels")
    if labels:
        counted = ", ".join(f"{_class_name(classes, label)} {n:,}" for label, n in labels.items())
        pairs.append(("Training rows by class", counted))
    elif classes:
        pairs.append(("Classes", ", ".join(classes)))
    numeric, categorical = (", ".join(c["name"] for c in columns.get(kind, ())) for kind in ("numeric", "categorical"))
    pairs += [(title, text) for title, text in (("Numbers used", numeric), ("Categories used", categorical)) if text]
    if data.get("drop"):
        pairs.append(("Columns not used", ", ".join(map(str, data["drop"]))))
    others = [c for c in run.clients if c.client != client]
    if others:
        pairs.append(("Other sites", f"{len(others):,}, with {sum(c.n_train for c in others):,} training rows"))
    note = ""
    if len(method.runs) > 1:
        note = (
            f"Each of the {len(method.runs)} seeds draws its own split of the same rows; the numbers are those of one."
        )
    return (Facts(tuple(pairs)), *([Text(note, style="note")] if note else []))


def _row_counts(about: Mapping[str, Any]) -> str:
    parts = (("training", "n_train"), ("validation", "n_validation"), ("test", "n_test"))
    return ", ".join(f"{int(about[key]):,} {title}" for title, key in parts if about.get(key) is not None)


def _class_name(classes: Sequence[str], label: str) -> str:
    return classes[int(label)] if label.isdecimal() and int(label) < len(classes) else f"class {label}"


def _method(experiment: Experiment, method: Method, titles: Mapping[str, Mapping[str, Any]]) -> tuple[Block, ...]:
    run = method.runs[0]
    train, model = block(run.config, "train"), block(run.config, "model")
    about = titles.get(method.algorithm, {})
    inside = ", ".join(f"{key} {_plain(value)}" for key, value in model.items() if key != "name")
    pairs = [
        ("Method", f"{method.label}: {about['title']}" if about.get("title") else method.label),
        ("Model", f"{model.get('name', 'own module')}" + (f" ({inside})" if inside else "")),
    ]
    if (n := _identity(run).get("parameters")) is not None:
        pairs.append(("Parameters", f"{n:,}"))
    steps = (("rounds", "round"), ("epochs", "local epoch"))
    work = [count(int(train[key]), what) for key, what in steps if isinstance(train.get(key), int)]
    work += [f"batches of {train['batch_size']}"] if isinstance(train.get("batch_size"), int) else []
    if work:
        pairs.append(("Training", ", ".join(work)))
    pairs.append(("Model kept", _kept(method)))
    rivals = [m.label for m in experiment.methods if m is not method]
    if rivals:
        pairs.append(("Compared with", ", ".join(rivals)))
    pairs.append(("Seeds", ", ".join(str(r.seed) for r in method.runs)))
    return (Facts(tuple(pairs)),)


def _plain(value: object) -> str:
    return " by ".join(map(str, value)) if isinstance(value, list) else str(value)


def _kept(method: Method) -> str:
    """Return by which rule the model was chosen, and the rounds that the seeds kept."""
    rule = str(method.runs[0].summary.get("select") or "last")
    rounds = [r.summary["kept_round"] for r in method.runs if isinstance(r.summary.get("kept_round"), int)]
    where = ""
    if rounds:
        ends = (min(rounds), max(rounds))
        where = f"; round {ends[0]}" if ends[0] == ends[1] else f"; rounds {ends[0]} to {ends[1]}"
    return RULES.get(rule, f"best {rule} on validation rows") + where


def _left(method: Method) -> tuple[Block, ...]:
    run = method.runs[0]
    is_secure = bool(block(run.config, "privacy").get("secure"))
    are_summed = is_secure and block(run.config, "eval").get("metrics") == "aggregate-only"
    padded = " under one-time pads"
    totals, n_clients = block(run.summary, "totals"), max(1, len(run.clients))
    size = ""
    if isinstance(totals.get("bytes_up"), int | float) and run.n_rounds:
        size = f"; on average {totals['bytes_up'] / n_clients / run.n_rounds / 1024:,.1f} KiB a round and site"
    items = []
    if (run.folder / "features.json").is_file() and is_deployed(run):
        items.append(
            "before the training: the site's name and number, the schema's checksum, numbers of rows; for each number "
            "how many values are known and missing, mean and sum of squared deviations; of categories that the schema "
            "does not list, those of 5 training rows or more"
        )
    items += [
        f"in every round: the method's reply{padded if is_secure else ''}{size}",
        f"at evaluations: losses and scores{padded if are_summed else ''}, and numbers of rows of each part",
    ]
    items += ["if something fails: that it failed, and the kind of error"] if is_deployed(run) else []
    lead = (
        "This was a simulation: all rows lay on one computer and nothing was sent. In a deployment of the same method, "
        "the following would leave the site, and no row:"
    )
    if is_deployed(run):
        lead = "The training ran over a network. The following left the site, and no row did:"
    return (Text(lead, tuple(items)), Text(_privacy(run)))


def is_deployed(run: Run) -> bool:
    """Return whether the training ran over a network."""
    return (run.folder / FLOWER_FILE).is_file()


def _privacy(run: Run) -> str:
    privacy, found = block(run.config, "privacy"), block(run.summary, "privacy")
    parts = [
        "Secure aggregation: the server saw sums and products of replies, never a single one."
        if privacy.get("secure")
        else "Without secure aggregation: the server sees every site's reply, from which something about its rows can "
        "be inferred."
    ]
    if found.get("epsilon") is not None:
        whose = "a single training row" if found.get("unit") == "record" else "a whole site"
        parts.append(f"Differential privacy of {whose}: epsilon {found['epsilon']:.3g}, delta {found['delta']:.3g}.")
    else:
        parts.append("No differential privacy.")
    return " ".join(parts)


def _results(experiment: Experiment, client: int) -> tuple[Block, ...]:
    unit = unit_of(experiment)
    found = [(m, _estimate(experiment, m, client)) for m in _in_order(experiment)]
    known = [(m, e) for m, e in found if math.isfinite(e.mean)]
    if not known:
        return (Text("No score is known of this site: it has no test rows, or none was finite."),)
    low, high = _scale(unit, [e for _, e in known])
    focus = experiment.methods[experiment.focus]

    def place(value: float) -> float:
        return min(1.0, max(0.0, (value - low) / (high - low))) if math.isfinite(value) else math.nan

    bars = tuple(
        Bar(_role(m, focus), unit.text(e.mean), place(e.mean), place(e.low), place(e.high), m is focus)
        for m, e in known
    )
    several = any(e.n_seeds > 1 for _, e in known)
    better = "" if unit.higher_is_better else ", lower is better"
    over = "one seed" if not several else f"mean over {len(experiment.seeds)} seeds"
    if any(math.isfinite(e.low) for _, e in known):
        over += f"; line: 95{SPACE}% interval " + ("over seeds" if several else "for so many test rows")
    rows = []
    for m, e in known:
        everybody = [estimate(values).mean for values in by_client(m, unit).values()]
        finite = [value for value in everybody if math.isfinite(value)]
        rank = 1 + sum(unit.oriented(value) > unit.oriented(e.mean) for value in finite)
        mean = float(np.mean(finite))
        cells = (unit.text(e.mean), interval_of(e, unit) or MISSING, unit.text(mean), f"{rank} of {len(finite)}")
        rows.append((_role(m, focus), *cells))
    heads = ("Training", unit.name.capitalize() if unit.name.islower() else unit.name, f"95{SPACE}% interval")
    grid = Grid((*heads, "Mean over sites", "Place of this site"), tuple(rows))
    return (Bars(bars, f"Test {unit.name}{better}, {over}."), grid)


def _estimate(experiment: Experiment, method: Method, client: int) -> Estimate:
    """Return the client's score; the interval of an accuracy of one seed is what so many test rows can tell."""
    found = estimate(by_client(method, unit_of(experiment)).get(client, {}))
    if found.n_seeds != 1 or experiment.score != "accuracy":
        return found
    n_test = int(_client_entry(method.runs[0], client).get("n_test") or 0)
    return widened(found, of_share(found.mean / 100, n_test))


def _in_order(experiment: Experiment) -> list[Method]:
    """Return the methods: alone, the one in focus, other federated ones, pooled."""
    focus = experiment.methods[experiment.focus]
    rank = {ALONE: 0, POOLED: 3}
    return sorted(experiment.methods, key=lambda m: rank.get(m.algorithm, 1 if m is focus else 2))


def _role(method: Method, focus: Method) -> str:
    if method.algorithm == ALONE:
        return "This site alone"
    if method.algorithm == POOLED:
        return "All rows in one place"
    return f"Joining, {method.label}" if method is focus else f"Joining, {method.label} instead"


def _scale(unit: Unit, estimates: Iterable[Estimate]) -> tuple[float, float]:
    if unit.points:
        return 0.0, 100.0
    values = [v for e in estimates for v in (e.mean, e.low, e.high) if math.isfinite(v)]
    low = 0.0 if unit.spread is not None else min(0.0, *values)
    high = max(0.0, *values)
    return (low, high) if high > low else (low, low + 1.0)


def _groups(experiment: Experiment, method: Method, client: int) -> tuple[Block, ...]:
    columns = breakdown(experiment, method, client)
    if not columns:
        why = "No groups were reported: the option --breakdown sex,age of dqnfed compare names their columns."
        if is_deployed(method.runs[0]):
            why = "None are reported: which rows belong to a group does not leave the site."
        return (Text(why),)
    unit = unit_of(experiment)
    blocks: list[Block] = [Text(hint_of(method.runs, columns), style="note")]
    for column in columns:
        if not column.groups:
            blocks.append(Text(f"By {column.name}: no test row."))
            continue
        heads = (column.name, "n", unit.name, *(rate.title for rate in column.groups[0].rates))
        rows = tuple(
            (g.name, number_text(g.n), _told(g.score, unit), *(_told(r.value, r.unit) for r in g.rates))
            for g in column.groups
        )
        blocks += [Text(gap_sentence(column, unit)), Grid(heads, rows)]
    return tuple(blocks)


def _told(value: Estimate, unit: Unit) -> str:
    if not math.isfinite(value.mean):
        return MISSING
    inside = interval_of(value, unit)
    return unit.text(value.mean) + (f"\n{inside}" if inside else "")


def _limits(experiment: Experiment, method: Method, client: int) -> tuple[Block, ...]:
    about = _client_entry(method.runs[0], client)
    n_test = int(about.get("n_test") or 0)
    a_seed, step = " a seed" if len(method.runs) > 1 else "", ": it moves in large steps." if n_test < 50 else "."
    items = [
        f"The score rests on {count(n_test, 'test row')}{a_seed}{step}",
        "Test rows are of the same time and place as training rows. Other patients, years or devices may differ.",
        "Intervals over seeds say what splits, starts and batches change, not what other patients would.",
        "This is an evaluation of predictions on stored data, not of decisions made with them.",
    ]
    if len(method.runs) == 1:
        items[2] = "There is one seed: how much the results depend on chance is not known."
    return (Text("", tuple(items)),)


def _versions(method: Method, version: str) -> tuple[Block, ...]:
    run = method.runs[0]
    keys = (("dqnfed", "dqnfed"), ("Python", "python"), ("torch", "torch"), ("NumPy", "numpy"), ("System", "platform"))
    pairs = [(title, str(run.env[key])) for title, key in keys if run.env.get(key)]
    pairs += [
        (title, str(run.env[key]))
        for title, key in (("Started", "started"), ("Command", "command"))
        if run.env.get(key)
    ]
    pairs.append(("This statement", f"made by dqnfed {version}"))
    blocks: list[Block] = [Facts(tuple(pairs))]
    rows = []
    for one in method.runs:
        sums = listed_checksums(one.folder) or {}
        rows.append((f"seed {one.seed}", sums.get("config.toml", MISSING), sums.get("model.safetensors", MISSING)))
    caption = "SHA-256 of settings and model. A file that has another one is not the file of this statement."
    blocks.append(Grid(("", "config.toml", "model.safetensors"), tuple(rows), caption))
    data = _identity(run).get("data")
    if isinstance(data, dict):
        sums_of_data = tuple((str(key), str(value)) for key, value in data.items() if len(str(value)) == 64)
        if sums_of_data:
            blocks.append(Grid(("Data of all sites", "SHA-256"), sums_of_data))
    return tuple(blocks)


def _features(run: Run) -> Mapping[str, Any]:
    return read_json(run.folder / "features.json", [], expected=False)


def _client_entry(run: Run, client: int) -> Mapping[str, Any]:
    try:
        entries = json.loads((run.folder / "clients.json").read_text(encoding="utf-8"))
        return next(dict(e) for i, e in enumerate(entries) if int(e.get("client", i)) == client)
    except (OSError, ValueError, TypeError, AttributeError, StopIteration):
        return {}


def _identity(run: Run) -> Mapping[str, Any]:
    """Return what the newest checkpoint says the run is of."""
    files = sorted((run.folder / "checkpoint").glob("checkpoint-*.json"), key=lambda p: (len(p.name), p.name))
    return block(read_json(files[-1], []), "identity") if files else {}

"""The parts of a report that need no script: findings, tables, settings, problems; as HTML."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from dqnfed.report.comparison import Experiment, settings
from dqnfed.report.measures import MEASURE, Measure, measures
from dqnfed.report.reader import Problem, Run
from dqnfed.report.significance import Paired, against_reference
from dqnfed.report.table_formats import MARK, Printed, compared
from dqnfed.report.tables import MISSING, Cell, FairnessTable, over_seeds, places, tabulate

MINUS = "\N{MINUS SIGN}"
TESTED = ("mean", "std", "worst10")
MAX_CLASS_COLUMNS = 30
ARROWS = {True: ("↑", "higher is better"), False: ("↓", "lower is better")}


def facts(experiment: Experiment) -> str:
    """Return one line that says how large the experiment is."""
    run = experiment.runs[0]
    counts = [
        _count(len(experiment.methods), "method"),
        _count(len(experiment.seeds), "seed"),
        _count(len(run.clients), "client"),
        _count(max(run.planned_rounds for run in experiment.runs), "round"),
    ]
    return " · ".join(counts)


def findings(experiment: Experiment) -> str:
    """Return in words who is best on average, who serves the worst-off best, and how far apart that is."""
    table = tabulate(experiment, columns=("mean", "worst10"))
    known = [row for row in table.rows if math.isfinite(row.cells[0].mean)]
    if not known:
        return f"No {experiment.score} has been measured yet."
    best = max(known, key=lambda row: row.cells[0].mean)
    fairest = max(known, key=lambda row: row.cells[1].mean)

    def said(cell: Cell) -> str:
        return f"{cell.mean:.1f} %" if experiment.score == "accuracy" else f"{cell.mean:.4g}"

    if len(known) == 1:
        return (
            f"{best.method.label} reaches a mean {experiment.score} of {said(best.cells[0])}; "
            f"its worst tenth of clients gets {said(best.cells[1])}."
        )
    if best is fairest:
        second = max((row for row in known if row is not best), key=lambda row: row.cells[1].mean)
        return (
            f"{best.method.label} has the highest mean {experiment.score} ({said(best.cells[0])}) and serves the worst "
            f"tenth of clients best ({said(best.cells[1])}; next: {second.method.label} with {said(second.cells[1])})."
        )
    return (
        f"{best.method.label} has the highest mean {experiment.score} ({said(best.cells[0])}), but "
        f"{fairest.method.label} serves the worst tenth of clients best: {said(fairest.cells[1])} against "
        f"{said(best.cells[1])}."
    )


def fairness_html(table: FairnessTable, *, caption: str) -> str:
    """Return the fairness table, best values bold and second best underlined."""
    head = "".join(f'<th scope="col">{_measure_head(measure)}</th>' for measure in table.columns)
    body = "".join(
        f'<tr><th scope="row">{escape(row.method.label)}</th>'
        + "".join(_cell(cell, measure) for cell, measure in zip(row.cells, table.columns, strict=True))
        + "</tr>"
        for row in table.rows
    )
    return _table(caption, f'<th scope="col">Method</th>{head}', body, style="stacked")


def significance_html(experiment: Experiment) -> str:
    """Return the paired test of every method against the one in focus; empty where no two seeds are shared."""
    reference = experiment.focus
    found = {key: against_reference(experiment, key, reference) for key in TESTED}
    if not any(paired for column in found.values() for paired in column):
        return ""
    name = experiment.methods[reference].label
    head = "".join(f'<th scope="col">{escape(MEASURE[key].title)}</th><th scope="col">p</th>' for key in TESTED)
    body = "".join(
        f'<tr><th scope="row">{escape(method.label)}</th>'
        + "".join(_paired_cells(found[key][i], MEASURE[key]) for key in TESTED)
        + "</tr>"
        for i, method in enumerate(experiment.methods)
        if i != reference
    )
    caption = (
        f"Difference from {name} over shared seeds, with its 95 % interval. p: Student's paired test, two-sided, "
        "adjusted for the number of methods (Holm); bold below 0.05."
    )
    return "<h3>Is the difference more than luck?</h3>" + _table(caption, f'<th scope="col">Method</th>{head}', body)


def groups_html(experiment: Experiment) -> str:
    """Return the mean accuracy of every declared group and the gap between them; empty where no group is declared."""
    names = sorted({c.group for run in experiment.runs for c in run.clients if c.group is not None})
    if not names:
        return ""
    columns = [[over_seeds([_group_mean(run, name) for run in m.runs]) for m in experiment.methods] for name in names]
    gaps = [over_seeds([_group_gap(run, names) for run in m.runs]) for m in experiment.methods]
    gap = MEASURE["std"]._replace(title="Gap", explains="best group minus worst group, in points")
    heads = [f'<th scope="col">{escape(name)}</th>' for name in names] + [f'<th scope="col">{_measure_head(gap)}</th>']
    placed = [places(column, MEASURE["mean"]) for column in columns] + [places(gaps, gap)]
    body = _method_rows(experiment, placed, [MEASURE["mean"]] * len(names) + [gap])
    return _table(
        "Mean accuracy of each declared group, percent.", '<th scope="col">Method</th>' + "".join(heads), body
    )


def classes_html(experiment: Experiment) -> str:
    """Return one column per client where every client holds a single class; empty otherwise."""
    first = experiment.runs[0].clients
    one_class = all(len(c.labels) == 1 for run in experiment.runs for c in run.clients)
    if not first or not one_class or len(first) > MAX_CLASS_COLUMNS:
        return ""
    columns = [
        [over_seeds([_client_accuracy(run, c.client) for run in method.runs]) for method in experiment.methods]
        for c in first
    ]
    heads = "".join(f'<th scope="col">{escape(c.name)}</th>' for c in first)
    placed = [places(column, MEASURE["mean"]) for column in columns]
    body = _method_rows(experiment, placed, [MEASURE["mean"]] * len(first))
    return _table(
        "Accuracy of each class, percent; every client holds one class.", f'<th scope="col">Method</th>{heads}', body
    )


def settings_html(experiment: Experiment) -> str:
    """Return shared settings, what differs between methods, versions and the commands that made the runs."""
    runs = [run for run in experiment.runs if not run.model]
    shared, differing = _shared_settings(runs)
    parts = ["<h3>Settings all runs share</h3>", _settings_list(shared)]
    if differing:
        parts += ["<h3>Settings of each method</h3>"]
        parts += [
            f"<h4>{escape(label)}</h4>{_settings_list(own)}" for label, own in _own_settings(experiment, differing)
        ]
    env, varying = _shared_mapping([run.env for run in runs])
    skipped = ("command", "started")
    versions = {key: str(value) for key, value in env.items() if key not in skipped}
    versions |= {key: "differs between runs" for key in varying if key not in skipped}
    versions["seeds"] = ", ".join(map(str, experiment.seeds))
    parts += ["<h3>Versions and machine</h3>", _settings_list(versions)]
    commands = [str(run.env["command"]) for run in runs if run.env.get("command")]
    if commands:
        listed = escape("\n".join(dict.fromkeys(commands)))
        parts.append(
            f"<details><summary>{_count(len(set(commands)), 'command')} to reproduce</summary>"
            f'<pre tabindex="0" aria-label="Commands to reproduce">{listed}</pre></details>'
        )
    return "".join(parts)


def paper_html(experiment: Experiment) -> str:
    """Return our table beside the paper's printed one, impossible values marked; empty where the paper has none."""
    found = compared(experiment)
    if found.source is None:
        return ""
    heads = "".join(
        f'<th scope="col">{_measure_head(measure)}</th>' + ('<th scope="col">paper</th>' if found.has_paper(i) else "")
        for i, measure in enumerate(found.table.columns)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(row.method.label)}</th>'
        + "".join(
            _cell(cell, measure) + (_printed_cell(entry, measure) if found.has_paper(i) else "")
            for i, (cell, entry, measure) in enumerate(zip(row.cells, entries, found.table.columns, strict=True))
        )
        + "</tr>"
        for row, entries in zip(found.table.rows, found.printed, strict=True)
    )
    caption = (
        f"Ours and as printed in the DQN-Fed paper ({found.source.title}). {MARK}: the printed value cannot be true."
    )
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in found.reasons)
    why = f"<details><summary>Why marked values cannot be true</summary><ul>{reasons}</ul></details>" if reasons else ""
    table = _table(caption, f'<th scope="col">Method</th>{heads}', body, style="stacked")
    return f"<h3>Beside the paper</h3>{table}{why}"


def problems_html(problems: Sequence[Problem]) -> str:
    """Return what a reader should know about the runs before trusting the numbers; empty where there is nothing."""
    if not problems:
        return ""
    said: dict[str, list[str]] = {}
    for problem in problems:
        said.setdefault(problem.message, []).append(str(problem.folder))
    items = "".join(f"<li>{escape(message)} {_where(folders)}</li>" for message, folders in said.items())
    title = "One thing to know about these runs" if len(said) == 1 else f"{len(said)} things to know about these runs"
    return f'<details class="problems" open><summary>{title}</summary><ul>{items}</ul></details>'


def _where(folders: Sequence[str]) -> str:
    rest = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
    return f"<br><code>{escape(folders[0])}</code>{rest}"


def _table(caption: str, head: str, body: str, *, style: str = "") -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="{style}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _measure_head(measure: Measure) -> str:
    arrow, meaning = ARROWS[measure.higher_is_better]
    return (
        f'<abbr title="{escape(measure.explains)}">{escape(measure.title)}</abbr> '
        f'<span class="arrow" aria-hidden="true">{arrow}</span><span class="unseen">({meaning})</span>'
    )


def _cell(cell: Cell, measure: Measure) -> str:
    if math.isnan(cell.mean):
        return f"<td>{MISSING}</td>"
    value = f"{cell.mean:.{measure.decimals}f}"
    value = (value, f"<strong>{value}</strong>", f"<u>{value}</u>")[cell.place]
    spread = "" if math.isnan(cell.std) else f'<span class="spread">± {cell.std:.{measure.decimals}f}</span>'
    return f"<td>{value}{spread}</td>"


def _printed_cell(entry: Printed | None, measure: Measure) -> str:
    if entry is None:
        return f"<td>{MISSING}</td>"
    return f"<td>{entry.value:.{measure.decimals}f}{MARK if entry.impossible else ''}</td>"


def _paired_cells(paired: Paired | None, measure: Measure) -> str:
    if paired is None:
        return f"<td>{MISSING}</td><td>{MISSING}</td>"
    digits = measure.decimals
    difference = f"{paired.difference:+.{digits}f}".replace("-", MINUS)
    interval = f"[{paired.low:.{digits}f}, {paired.high:.{digits}f}]".replace("-", MINUS)
    p = "&lt; 0.001" if paired.p < 0.001 else f"{paired.p:.3f}"
    p = f"<strong>{p}</strong>" if paired.p < 0.05 else p
    return f'<td>{difference}<span class="spread">{interval}</span></td><td>{p}</td>'


def _method_rows(experiment: Experiment, columns: Sequence[Sequence[Cell]], printed: Sequence[Measure]) -> str:
    return "".join(
        f'<tr><th scope="row">{escape(method.label)}</th>'
        + "".join(_cell(column[i], measure) for column, measure in zip(columns, printed, strict=True))
        + "</tr>"
        for i, method in enumerate(experiment.methods)
    )


def _group_mean(run: Run, group: str) -> float:
    if not run.accuracy.size:
        return math.nan
    members = np.array([c.group == group for c in run.clients])
    return measures(run.accuracy[members]).get("mean", math.nan)


def _group_gap(run: Run, groups: Sequence[str]) -> float:
    means = [mean for mean in (_group_mean(run, group) for group in groups) if math.isfinite(mean)]
    return max(means) - min(means) if means else math.nan


def _client_accuracy(run: Run, client: int) -> float:
    if not run.accuracy.size:
        return math.nan
    return next((float(a) for c, a in zip(run.clients, run.accuracy, strict=True) if c.client == client), math.nan)


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for block, entries in config.items():
        if isinstance(entries, Mapping):
            found |= {f"{block}.{key}": value for key, value in entries.items()}
        else:
            found[block] = entries
    return found


def _shared_mapping(mappings: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    shared = {
        key: mappings[0][key] for key in keys if all(key in m and m[key] == mappings[0].get(key) for m in mappings)
    }
    return shared, [key for key in keys if key not in shared]


def _shared_settings(runs: Sequence[Run]) -> tuple[dict[str, Any], list[str]]:
    shared, differing = _shared_mapping([_flat(run.config) for run in runs])
    return shared, [key for key in differing if key not in ("run.seed", "algorithm.name")]


def _own_settings(experiment: Experiment, differing: Sequence[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    for method in experiment.methods:
        mine = {f"{block}.{key}": value for (block, key), value in settings(method.runs[0].config).items()}
        own = {key: mine[key] for key in differing if key in mine}
        if own and not method.runs[0].model:
            yield method.label, own


def _settings_list(entries: Mapping[str, Any]) -> str:
    if not entries:
        return '<p class="hint">Not recorded.</p>'
    items = "".join(
        f"<dt>{escape(str(key))}</dt><dd><code>{escape(str(value))}</code></dd>" for key, value in entries.items()
    )
    return f'<dl class="settings">{items}</dl>'


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" + ("" if n == 1 else "s")

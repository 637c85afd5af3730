"""Tables of methods as HTML: fairness, paired test, the paper beside ours, groups, classes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from dqnfed.report.comparison import Experiment
from dqnfed.report.measures import MEASURE, Measure, measures
from dqnfed.report.noise import NOISE_MEASURES, corrected_pairs, noise_values
from dqnfed.report.reader import Run
from dqnfed.report.significance import ACCEPTED, Paired, against_reference
from dqnfed.report.table_formats import MARK, Printed, compared
from dqnfed.report.tables import MISSING, Cell, FairnessTable, over_seeds, places

MINUS = "\N{MINUS SIGN}"
TESTED = ("mean", "std", "worst10")
MAX_CLASS_COLUMNS = 30
ARROWS = {True: ("↑", "higher is better"), False: ("↓", "lower is better")}


class Head(NamedTuple):
    """A column's title as HTML, and the same as plain text, which labels the values on a narrow screen."""

    html: str
    label: str


Rows = Iterable[tuple[str, Sequence[str]]]  # name of the row, cells as HTML


def fairness_html(table: FairnessTable, *, caption: str) -> str:
    """Return the fairness table, best values bold and second best underlined."""
    rows = [
        (row.method.label, [_cell(cell, measure) for cell, measure in zip(row.cells, table.columns, strict=True)])
        for row in table.rows
    ]
    return methods_table(caption, [_head(measure) for measure in table.columns], rows, style="stacked")


def significance_html(experiment: Experiment) -> str:
    """Return the paired test of every method against the one in focus; empty where no two seeds are shared."""
    reference, digits = experiment.focus, 4 if experiment.score == "loss" else 2
    found = {key: against_reference(experiment, key, reference) for key in TESTED}
    if not any(paired for column in found.values() for paired in column):
        return ""
    heads = [head for key in TESTED for head in (plain_head(MEASURE[key].title), plain_head("p"))]
    rows = [
        (method.label, [cell for key in TESTED for cell in _paired_cells(found[key][i], digits)])
        for i, method in enumerate(experiment.methods)
        if i != reference
    ]
    caption = (
        f"Difference from {experiment.methods[reference].label} over shared seeds, with its 95 % interval. "
        "p: Student's paired test, two-sided; bold below 0.05. Both are adjusted for the number of methods (Holm), so "
        "that an interval leaves 0 out where p is below 0.05."
    )
    if any(paired and math.isnan(paired.low) for column in found.values() for paired in column):
        caption += " No interval: the difference is the same with every one of few seeds; p is then the sign test's."
    return "<h3>Is the difference more than luck?</h3>" + methods_table(caption, heads, rows, style="paired")


def paper_html(experiment: Experiment) -> str:
    """Return our table beside the paper's printed one, impossible values marked; empty where the paper has none."""
    found = compared(experiment)
    if found.source is None:
        return ""
    columns = [(measure, found.has_paper(i)) for i, measure in enumerate(found.table.columns)]
    heads = [head for measure, both in columns for head in [_head(measure), *([plain_head("paper")] if both else [])]]
    rows = []
    for row, entries in zip(found.table.rows, found.printed, strict=True):
        cells = []
        for (measure, both), cell, entry in zip(columns, row.cells, entries, strict=True):
            cells += [_cell(cell, measure), *([_printed_cell(entry, measure)] if both else [])]
        rows.append((row.method.label, cells))
    n_rounds = max(run.n_rounds for run in experiment.runs)
    caption = f"Ours after {n_rounds:,} rounds, and as printed in the DQN-Fed paper ({found.source.title})."
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in found.reasons)
    if reasons:
        caption += f" {MARK}: the printed value cannot be true."
        reasons = f"<details><summary>Why marked values cannot be true</summary><ul>{reasons}</ul></details>"
    return f"<h3>Beside the paper</h3>{methods_table(caption, heads, rows, style='stacked printed')}{reasons}"


def noise_html(experiment: Experiment) -> str:
    """Return what methods found of labels that were made wrong, and fairness without and with it; else empty."""
    values = [[noise_values(run) for run in method.runs] for method in experiment.methods]
    if not any(found for runs in values for found in runs):
        return ""
    columns = [
        [over_seeds([found.get(measure.key, math.nan) for found in runs]) for runs in values]
        for measure in NOISE_MEASURES
    ]
    rows = _method_rows(experiment, columns, NOISE_MEASURES)
    caption = "Training labels made wrong on purpose: shares of all labels, and what was found and corrected."
    table = methods_table(caption, [_head(measure) for measure in NOISE_MEASURES], rows, style="stacked")
    return table + _corrected_html(experiment)


def _corrected_html(experiment: Experiment) -> str:
    pairs = corrected_pairs(experiment)
    if not pairs:
        return ""
    heads = [head for key in TESTED for head in (_head(MEASURE[key]), plain_head("corrected"))]
    rows = []
    for alone, corrected in pairs:
        cells = []
        for key in TESTED:
            for method in (alone, corrected):
                found = [run.measures().get(key, math.nan) for run in method.runs]
                cells.append(_cell(over_seeds(found), MEASURE[key]))
        rows.append((alone.label, cells))
    caption = f"{experiment.score.capitalize()} over clients, without and with FedCorr before the method."
    return "<h3>Without and with label correction</h3>" + methods_table(caption, heads, rows, style="stacked printed")


def groups_html(experiment: Experiment) -> str:
    """Return the mean score of every declared group and the gap between them; empty where no group is declared."""
    names = sorted({c.group for run in experiment.runs for c in run.clients if c.group is not None})
    if not names:
        return ""
    columns = [[over_seeds([_group_mean(run, name) for run in m.runs]) for m in experiment.methods] for name in names]
    gaps = [over_seeds([_group_gap(run, names) for run in m.runs]) for m in experiment.methods]
    gap = MEASURE["std"]._replace(title="Gap", explains="best group minus worst group")
    placed = [places(column, MEASURE["mean"]) for column in columns] + [places(gaps, gap)]
    rows = _method_rows(experiment, placed, [MEASURE["mean"]] * len(names) + [gap])
    return methods_table(
        f"Mean {experiment.score} of each declared group.", [*map(plain_head, names), _head(gap)], rows
    )


def classes_html(experiment: Experiment) -> str:
    """Return one column per client where every client holds a single class; empty otherwise."""
    first = experiment.runs[0].clients
    one_class = all(len(c.labels) == 1 for run in experiment.runs for c in run.clients)
    if not first or not one_class or len(first) > MAX_CLASS_COLUMNS:
        return ""
    columns = [
        [over_seeds([_client_score(run, c.client) for run in method.runs]) for method in experiment.methods]
        for c in first
    ]
    placed = [places(column, MEASURE["mean"]) for column in columns]
    rows = _method_rows(experiment, placed, [MEASURE["mean"]] * len(first))
    caption = f"{experiment.score.capitalize()} on each class; every client holds one class."
    return methods_table(caption, [plain_head(c.name) for c in first], rows)


def methods_table(caption: str, heads: Sequence[Head], rows: Rows, *, style: str = "", first: str = "Method") -> str:
    """Return a table of methods (or clients, groups): plain on a wide screen, a block of labelled values per row on a
    narrow one.

    The roles repeat what the elements mean, because a browser forgets it once a narrow layout changes their display.
    """
    head = "".join(f'<th scope="col" role="columnheader">{h.html}</th>' for h in [plain_head(first), *heads])
    body = "".join(
        f'<tr role="row"><th scope="row" role="rowheader">{escape(name)}</th>'
        + "".join(f'<td role="cell" data-label="{h.label}">{cell}</td>' for h, cell in zip(heads, cells, strict=True))
        + "</tr>"
        for name, cells in rows
    )
    return (
        f'<p class="caption">{escape(caption)}</p>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table role="table" class="methods {style}"><thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{body}</tbody></table></div>'
    )


def plain_head(title: str) -> Head:
    return Head(escape(title), escape(title))


def _head(measure: Measure) -> Head:
    arrow, meaning = ARROWS[measure.higher_is_better]
    title = escape(measure.title).replace(" %", "&nbsp;%").replace(" °", "&nbsp;°")
    html = (
        f'<abbr title="{escape(measure.explains)}">{title}</abbr>&nbsp;<span class="arrow" aria-hidden="true">{arrow}'
        f'</span><span class="unseen">({meaning})</span>'
    )
    return Head(html, f"{title}&nbsp;{arrow}")


def _cell(cell: Cell, measure: Measure) -> str:
    if math.isnan(cell.mean):
        return MISSING
    value = f"{cell.mean:.{measure.decimals}f}"
    value = (value, f"<strong>{value}</strong>", f"<u>{value}</u>")[cell.place]
    spread = "" if math.isnan(cell.std) else f'<span class="spread">± {cell.std:.{measure.decimals}f}</span>'
    return value + spread


def _printed_cell(entry: Printed | None, measure: Measure) -> str:
    return MISSING if entry is None else f"{entry.value:.{measure.decimals}f}{MARK if entry.impossible else ''}"


def _paired_cells(paired: Paired | None, digits: int) -> tuple[str, str]:
    if paired is None:
        return MISSING, MISSING
    difference = f"{paired.difference:+.{digits}f}".replace("-", MINUS)
    interval = f"[{paired.low:.{digits}f}, {paired.high:.{digits}f}]".replace("-", MINUS)
    interval = "no interval" if math.isnan(paired.low) else interval
    p = "&lt; 0.001" if paired.p < 0.001 else f"{paired.p:.3f}"
    p = f"<strong>{p}</strong>" if paired.p < ACCEPTED else p
    return f'{difference}<span class="spread">{interval}</span>', p


def _method_rows(experiment: Experiment, columns: Sequence[Sequence[Cell]], printed: Sequence[Measure]) -> Rows:
    return [
        (method.label, [_cell(column[i], measure) for column, measure in zip(columns, printed, strict=True)])
        for i, method in enumerate(experiment.methods)
    ]


def _group_mean(run: Run, group: str) -> float:
    if not run.accuracy.size:
        return math.nan
    members = np.array([c.group == group for c in run.clients])
    return measures(run.accuracy[members]).get("mean", math.nan)


def _group_gap(run: Run, groups: Sequence[str]) -> float:
    means = [mean for mean in (_group_mean(run, group) for group in groups) if math.isfinite(mean)]
    return max(means) - min(means) if means else math.nan


def _client_score(run: Run, client: int) -> float:
    scores = {c.client: float(a) for c, a in zip(run.clients, run.accuracy, strict=False)}
    return scores.get(client, math.nan)

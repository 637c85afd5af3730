"""Tables of groups inside clients as HTML: all rows together, then client by client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from dqnfed.report.breakdown import RECOGNISED, Column, Group, breakdown, gap_sentence
from dqnfed.report.comparison import Experiment
from dqnfed.report.html_tables import Head, methods_table, plain_head
from dqnfed.report.joining import Estimate
from dqnfed.report.reader import Run
from dqnfed.report.tables import MISSING
from dqnfed.report.units import SPACE, Unit, unit_of

MAX_CLIENTS = 30


def breakdown_html(experiment: Experiment) -> str:
    """Return what groups inside clients get with the method in focus; empty where no run reports any."""
    method, unit = experiment.methods[experiment.focus], unit_of(experiment)
    overall = breakdown(experiment, method)
    if not overall:
        return ""
    clients = {c.client: c.name for run in experiment.runs for c in run.clients}
    shown = sorted(clients)[:MAX_CLIENTS]
    inside = {c: breakdown(experiment, method, c) for c in shown}
    title, hint = f"Groups inside clients, {method.label}", hint_of(method.runs, overall)
    html = [f'<h3>{escape(title)}</h3><p class="hint">{escape(hint)}</p>']
    for i, column in enumerate(overall):
        html.append(f'<p class="gap">{escape(gap_sentence(column, unit))}</p>')
        html.append(column_table(column, unit, f"{column.name}: test rows of all clients together."))
        of_clients = [(clients[c], columns[i]) for c, columns in inside.items() if i < len(columns)]
        html.append(clients_table(column, of_clients, unit, n_clients=len(clients)))
    return "".join(html)


def hint_of(runs: Sequence[Run], columns: Sequence[Column]) -> str:
    """Return how sizes, rates and intervals are to be read."""
    n = "test rows, mean over seeds" if len(runs) > 1 else "test rows"
    over = "the wider one of Student's over seeds and " if len(runs) > 1 else ""
    has_rates = any(rate.title.startswith(RECOGNISED) for c in columns for g in c.groups for rate in g.rates)
    rates = ""
    if has_rates:
        rates = "Recognised: share of a class's rows that are predicted so; predicted: share of all rows. "
    return (
        f"n: {n}. {rates}Intervals: 95{SPACE}%, {over}what so many rows can tell (rates: Wilson; AUC: Hanley and "
        "McNeil). They are not adjusted for the number of groups, and small groups say little."
    )


def column_table(column: Column, unit: Unit, caption: str) -> str:
    """Return the groups of a column with size, score and rates."""
    rates = next((group.rates for group in column.groups), ())
    heads = [plain_head("n"), plain_head(unit.name), *(plain_head(rate.title) for rate in rates)]
    rows = [
        (
            group.name,
            [
                number_text(group.n),
                cell(group.score, unit),
                *(cell(r.value, r.unit) for r in group.rates),
            ],
        )
        for group in column.groups
    ]
    return methods_table(caption, heads, rows, style="stacked wide", first=column.name)


def clients_table(column: Column, clients: list[tuple[str, Column]], unit: Unit, *, n_clients: int) -> str:
    """Return every client's groups of a column."""
    names = [group.name for group in column.groups]
    heads: list[Head] = [plain_head(name) for name in names]
    rows = []
    for name, mine in clients:
        by_name = {group.name: group for group in mine.groups}
        rows.append((name, [_client_cell(by_name.get(group), unit) for group in names]))
    rest = "" if len(clients) == n_clients else f" The first {len(clients)} of {n_clients:,} clients."
    caption = f"{column.name}: {unit.name} in every client.{rest}"
    return methods_table(caption, heads, rows, style="stacked", first="Client")


def _client_cell(group: Group | None, unit: Unit) -> str:
    if group is None or not math.isfinite(group.score.mean):
        return MISSING
    return f'{cell(group.score, unit)}<span class="spread">n {number_text(group.n)}</span>'


def cell(value: Estimate, unit: Unit) -> str:
    """Return a value with its interval below it."""
    if not math.isfinite(value.mean):
        return MISSING
    inside = interval_of(value, unit)
    return escape(unit.text(value.mean)) + (f'<span class="spread">{escape(inside)}</span>' if inside else "")


def interval_of(value: Estimate, unit: Unit) -> str:
    """Return an interval in brackets; a score from 0 to 100 stays in these bounds.

    Nothing where there is none, or one without width: a few seeds that agree are no certainty.
    """
    if not math.isfinite(value.low) or value.high - value.low < 1e-9:
        return ""
    low, high = (max(0.0, value.low), min(100.0, value.high)) if unit.points else (value.low, value.high)
    return f"[{unit.text(low).removesuffix(unit.suffix)},{SPACE}{unit.text(high).removesuffix(unit.suffix)}]"


def number_text(n: float) -> str:
    return f"{n:,.0f}" if abs(n - round(n)) < 0.05 or n >= 100 else f"{n:.1f}"

"""The fairness table as Markdown, CSV and LaTeX, with the paper's printed values beside ours where it has them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from dqnfed.experiments.paper import PAPER_SEEDS, PrintedTable, paper_rounds, printed_table
from dqnfed.report.comparison import Experiment, group
from dqnfed.report.impossible import impossible_values
from dqnfed.report.measures import MEASURE, Measure
from dqnfed.report.reader import read_intact
from dqnfed.report.significance import ACCEPTED, against_reference
from dqnfed.report.tables import MISSING, Cell, FairnessTable, tabulate

MARK = "†"


class Printed(NamedTuple):
    """A value of the paper's table, and why it cannot be true (empty where it can)."""

    value: float
    impossible: str


class Compared(NamedTuple):
    """Our table with the paper's values at the same places; all None where the paper has no such table."""

    table: FairnessTable
    source: PrintedTable | None
    printed: tuple[tuple[Printed | None, ...], ...]
    score: str = "accuracy"
    made: str = ""  # how many rounds and seeds, and the paper's where they are others
    reference: str = ""  # the method that the others are tested against; "": no two seeds are shared
    differs: tuple[tuple[bool, ...], ...] = ()  # whether the paired test tells the method from the reference

    def has_paper(self, i: int) -> bool:
        """Whether the paper prints anything in column i."""
        return any(entries[i] is not None for entries in self.printed)

    @property
    def reasons(self) -> list[str]:
        """Why marked values are impossible, one sentence each."""
        return [
            f"{row.method.label}, {measure.title}: printed {_number(entry.value, measure)}, but {entry.impossible}."
            for row, entries in zip(self.table.rows, self.printed, strict=True)
            for measure, entry in zip(self.table.columns, entries, strict=True)
            if entry is not None and entry.impossible
        ]


def table_text(paths: Iterable[Path], form: str, *, weighted: bool = False, columns: Sequence[str] = ()) -> str:
    """Return the tables of all experiments at or below the paths as `latex`, `markdown` or `csv`; in these columns."""
    if form not in FORMS:
        raise ValueError(f"a table is written as one of {', '.join(FORMS)}, but {form!r} was asked for.")
    for key in columns:
        if key not in MEASURE and key != "seconds" and not key.startswith("class:"):
            raise ValueError(f"a table has no column {key!r}; there are {', '.join(MEASURE)}, seconds and class:NAME.")
    reading = read_intact(paths)
    if not reading.runs:
        reasons = "; ".join(map(str, reading.problems)) or "no folder was given"
        raise ValueError(f"there is no run to tabulate: {reasons}. Give a run folder, or a folder above run folders.")
    experiments = group(reading.runs).experiments
    return FORMS[form]([compared(experiment, weighted=weighted, columns=columns) for experiment in experiments])


def compared(experiment: Experiment, *, weighted: bool = False, columns: Sequence[str] = ()) -> Compared:
    """Return an experiment's table in these columns; by default in those of the paper's table for it, else in all."""
    source = None if weighted else printed_table(experiment.runs[0].experiment)
    table = tabulate(experiment, weighted=weighted, columns=columns or _columns(source))
    entries = tuple(
        tuple(_printed(source, row.method.algorithm, measure.key) for measure in table.columns) for row in table.rows
    )
    tested = [] if weighted else [key for key in (measure.key for measure in table.columns) if key in MEASURE]
    found = {key: against_reference(experiment, key, experiment.focus) for key in tested}
    differs = tuple(
        tuple(
            (paired := found.get(m.key, [None] * (i + 1))[i]) is not None and paired.p < ACCEPTED for m in table.columns
        )
        for i in range(len(table.rows))
    )
    has_test = any(paired is not None for column in found.values() for paired in column)
    reference = experiment.methods[experiment.focus].label if has_test else ""
    return Compared(table, source, entries, experiment.score, _made(experiment, source), reference, differs)


def _made(experiment: Experiment, source: PrintedTable | None) -> str:
    """Return how many rounds and seeds the table is of, and the rounds of the paper's experiment if they are others."""
    rounds = sorted({run.n_rounds for run in experiment.runs})
    text = f"{' or '.join(f'{n:,}' for n in rounds)} rounds, {len(experiment.seeds)} seed"
    text += "" if len(experiment.seeds) == 1 else "s"
    planned = None if source is None else paper_rounds(source)
    if planned is None or (rounds == [planned] and len(experiment.seeds) == PAPER_SEEDS):
        return text
    return f"{text}; the paper's values are of {planned:,} rounds and {PAPER_SEEDS} seeds"


def markdown(tables: Sequence[Compared]) -> str:
    """Return GitHub-flavoured Markdown: best bold, second best underlined, the paper's value in its own column."""
    return "\n".join(_markdown_table(table) for table in tables)


def comma_separated(tables: Sequence[Compared]) -> str:
    """Return one CSV table for all experiments: plain numbers at full precision, empty where unknown."""
    keys = list(dict.fromkeys(measure.key for table in tables for measure in table.table.columns))
    with_paper = any(table.source for table in tables)
    names = ["_mean", "_std", *(["_paper", "_paper_impossible"] if with_paper else [])]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["experiment", "method", "n_seeds", *(key + name for key in keys for name in names)])
    for table in tables:
        for row, entries in zip(table.table.rows, table.printed, strict=True):
            found = {m.key: (c, e) for m, c, e in zip(table.table.columns, row.cells, entries, strict=True)}
            cells = [_csv_cells(*found.get(key, (None, None)))[: len(names)] for key in keys]
            n_seeds = len(row.method.runs)
            writer.writerow([table.table.experiment, row.method.label, n_seeds, *(c for part in cells for c in part)])
    return text.getvalue()


def latex(tables: Sequence[Compared]) -> str:
    """Return LaTeX `table` environments for the booktabs package, in the notation of the paper."""
    return "% needs \\usepackage{booktabs}\n" + "\n".join(_latex_table(table) for table in tables)


FORMS: dict[str, Callable[[Sequence[Compared]], str]] = {
    "latex": latex,
    "markdown": markdown,
    "csv": comma_separated,
}


def _columns(source: PrintedTable | None) -> list[str] | None:
    if source is None:
        return None
    return [*source.columns, *(["improved"] if "mean" in source.columns else [])]


def _printed(source: PrintedTable | None, algorithm: str, key: str) -> Printed | None:
    if source is None:
        return None
    value, name = source.value(algorithm, key), source.printed_name(algorithm)
    if value is None or name is None:
        return None
    return Printed(value, impossible_values(source, name).get(key, ""))


def _markdown_table(table: Compared) -> str:
    heads, aligns = ["Method"], [":--"]
    for i, measure in enumerate(table.table.columns):
        heads.append(f"{measure.title} {'↑' if measure.higher_is_better else '↓'}")
        aligns.append("--:")
        if table.has_paper(i):
            heads.append("paper")
            aligns.append("--:")
    lines = [f"### {table.table.experiment}", "", _pipes(heads), _pipes(aligns)]
    for row, entries in zip(table.table.rows, table.printed, strict=True):
        cells = [row.method.label.replace("|", "\\|")]
        for i, (measure, cell, entry) in enumerate(zip(table.table.columns, row.cells, entries, strict=True)):
            text = cell.text(measure)
            cells.append((text, f"**{text}**", f"<ins>{text}</ins>")[cell.place])
            if table.has_paper(i):
                cells.append(
                    MISSING if entry is None else _number(entry.value, measure) + MARK * bool(entry.impossible)
                )
        lines.append(_pipes(cells))
    if table.reasons:
        lines += ["", f"{MARK} cannot be true:", "", *(f"- {reason}" for reason in table.reasons)]
    return "\n".join(lines) + "\n"


def _latex_table(table: Compared) -> str:
    paper = [table.has_paper(i) for i in range(len(table.table.columns))]
    spec = "l" + "".join("rr" if both else "r" for both in paper)
    titles = [
        rf"\multicolumn{{2}}{{c}}{{{m.latex}}}" if both else m.latex
        for m, both in zip(table.table.columns, paper, strict=True)
    ]
    heads = ["Method & " + " & ".join(titles) + r" \\"]
    if any(paper):
        heads.append(" & " + " & ".join("ours & paper" if both else "" for both in paper) + r" \\")
    rows = []
    for i, (row, entries) in enumerate(zip(table.table.rows, table.printed, strict=True)):
        cells, marks = [_latex_text(row.method.label)], iter(table.differs[i])
        for both, measure, cell, entry in zip(paper, table.table.columns, row.cells, entries, strict=True):
            cells.append(_latex_cell(cell, measure) + (r"$^{*}$" if next(marks) else ""))
            if both:
                mark = r"$^\dagger$" if entry is not None and entry.impossible else ""
                cells.append("--" if entry is None else _number(entry.value, measure) + mark)
        rows.append(" & ".join(cells) + r" \\")
    caption = _latex_text(f"Test {table.score} over clients: {table.table.experiment}; {table.made}.")
    if table.reference:
        caption += rf" $^{{*}}$: differs from {_latex_text(table.reference)} at the 5\% level "
        caption += "(paired $t$-test over seeds, Holm)."
    if table.reasons:
        caption += r" $^\dagger$: the printed value cannot be true."
    return "\n".join(
        [
            r"\begin{table}[h]",
            r"\centering",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{{spec}}}",
            r"\toprule",
            *heads,
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            *(f"% {reason}" for reason in table.reasons),
            "",
        ]
    )


def _latex_cell(cell: Cell, measure: Measure) -> str:
    if math.isnan(cell.mean):
        return "--"
    value = _number(cell.mean, measure)
    value = (value, rf"\textbf{{{value}}}", rf"\underline{{{value}}}")[cell.place]
    return value if math.isnan(cell.std) else rf"{value} {{\scriptsize $\pm$ {_number(cell.std, measure)}}}"


def _latex_text(text: str) -> str:
    special = {
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
    }
    special |= {"^": r"\textasciicircum{}", "\\": r"\textbackslash{}", "·": r"$\cdot$", "±": r"$\pm$"}
    return "".join(special.get(letter, letter) for letter in text)


def _csv_cells(cell: Cell | None, entry: Printed | None) -> list[str]:
    ours = ["", ""] if cell is None else ["" if math.isnan(x) else repr(x) for x in (cell.mean, cell.std)]
    return [*ours, *(["", ""] if entry is None else [repr(entry.value), entry.impossible])]


def _number(value: float, measure: Measure) -> str:
    return f"{value:.{measure.decimals}f}"


def _pipes(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"

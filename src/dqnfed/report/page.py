"""One self-contained HTML page from run folders: no network, no dependency, opens from disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

from rich.table import Table

from dqnfed.report import breakdown_tables, client_bars, headline, html_tables, sections
from dqnfed.report.comparison import Experiment, group
from dqnfed.report.payload import packed, payload
from dqnfed.report.reader import Problem, read_runs
from dqnfed.report.searches import searches_html
from dqnfed.report.tables import tabulate, terminal_table
from dqnfed.report.taking_part import taking_part_html
from dqnfed.report.units import score_note, score_word

PAGE_COLUMNS = ("mean", "std", "worst5", "worst10", "best5", "best10", "angle", "kl", "jain", "improved")
SCRIPTS = ("basics.js", "lines.js", "charts.js", "clients.js", "page.js")  # in this order
# the page may run its own scripts and styles and nothing else: a browser enforces that it asks the network for nothing
OFFLINE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class Content(NamedTuple):
    """All that a page shows, before it is laid out."""

    title: str
    experiments: tuple[Experiment, ...]
    problems: tuple[Problem, ...]
    n_folders: int


def read_content(paths: Sequence[Path], *, title: str | None = None, expect_running: bool = False) -> Content:
    """Return what there is to report about the runs at or below the paths."""
    reading = read_runs(paths)
    grouped = group(reading.runs, expect_running=expect_running)
    names = ", ".join(dict.fromkeys(run.experiment for run in reading.runs))
    n_folders = len({run.folder for run in reading.runs})
    return Content(title or names or "No runs", grouped.experiments, reading.problems + grouped.problems, n_folders)


class Report(NamedTuple):
    """A written page, and what a terminal shows of it."""

    path: Path
    table: Table
    problems: tuple[Problem, ...]


def write_report(runs: Sequence[Path], out: Path, *, title: str | None = None) -> Path:
    """Write one HTML file about the runs at or below the given folders and return its path.

    `out` may be a folder, which gets a `report.html`. Raises ValueError when not a single run can be read; whatever
    else is wrong with the runs is said on the page.
    """
    return make_report(runs, out, title=title).path


def make_report(runs: Sequence[Path], out: Path, *, title: str | None = None) -> Report:
    """Write the page as `write_report` does, and return it with the fairness table and the problems; reads once."""
    content = read_content(runs, title=title)
    if not content.experiments:
        reasons = "; ".join(map(str, content.problems)) or "no folder was given"
        raise ValueError(f"there is no run to report on: {reasons}. Give a run folder, or a folder above run folders.")
    target = Path(out)
    if target.is_dir() or not target.suffix:
        target = target / "report.html"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, page(content))
    return Report(target, terminal_table(content.experiments), content.problems)


def page(content: Content, *, policy: str = OFFLINE_POLICY, scripts: Sequence[str] = SCRIPTS) -> str:
    """Return the whole page as HTML."""
    return Template(asset("page.html")).substitute(
        policy=escape(policy),
        title=escape(content.title),
        style=asset("page.css"),
        facts=escape(_facts(content)),
        choice=_experiment_select(content),
        problems=sections.problems_html(content.problems),
        articles="\n".join(article(experiment, i) for i, experiment in enumerate(content.experiments)),
        version=escape(package_version()),
        scale="Accuracies are in percent; every client"
        if any(e.score == "accuracy" for e in content.experiments)
        else "Every client",
        folders=sections.count(content.n_folders, "run folder"),
        time=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        data=packed(payload(content.experiments)),
        script="\n".join(asset(name) for name in scripts),
    )


def article(experiment: Experiment, i: int) -> str:
    """Return one experiment: findings, tables, empty charts that the script fills, and settings."""
    tables = _tables(experiment)
    return Template(asset("article.html")).substitute(
        tables,
        i=str(i),
        name=escape(experiment.name),
        score=escape(score_word(experiment)),
        no_parts="" if tables["groups"] or tables["breakdown"] or tables["classes"] else "hidden",
        no_noise="" if tables["noise"] else "hidden",
        settings=_taking_part(experiment) + searches_html(experiment.runs) + sections.settings_html(experiment),
    )


def _taking_part(experiment: Experiment) -> str:
    runs = [run for run in experiment.runs if not run.model]
    return taking_part_html([run.part for run in runs if run.part is not None], [c.name for c in runs[0].clients])


def live_parts(content: Content) -> dict[str, str]:
    """Return the parts of the page that change while a run goes on, by the name of the element that shows them."""
    parts = {"facts": escape(_facts(content)), "problems": sections.problems_html(content.problems)}
    for i, experiment in enumerate(content.experiments):
        parts |= {f"{name}-{i}": html for name, html in _tables(experiment).items()}
    return parts


def asset(name: str) -> str:
    """Return the text of a file that is packed with the report module."""
    return (files("dqnfed.report") / "assets" / name).read_text(encoding="utf-8")


def _tables(experiment: Experiment) -> dict[str, str]:
    seeds = ", mean ± standard deviation over seeds" if len(experiment.seeds) > 1 else ""
    weights = "each weighted by its number of training examples"
    by_size = tabulate(experiment, weighted=True, columns=PAGE_COLUMNS)
    score = f"Test {score_word(experiment)}"
    about = score_note(experiment)
    return {
        "findings": _findings_html(experiment),
        "bars": client_bars.clients_html(experiment),
        "equal": html_tables.fairness_html(
            tabulate(experiment, columns=PAGE_COLUMNS), caption=f"{score} over clients{seeds}.{about}"
        ),
        "size": html_tables.fairness_html(by_size, caption=f"{score} over clients, {weights}{seeds}.{about}"),
        "significance": html_tables.significance_html(experiment),
        "paper": html_tables.paper_html(experiment),
        "noise": html_tables.noise_html(experiment),
        "groups": html_tables.groups_html(experiment),
        "breakdown": breakdown_tables.breakdown_html(experiment),
        "classes": html_tables.classes_html(experiment),
    }


def _findings_html(experiment: Experiment) -> str:
    first, *others = headline.findings(experiment)
    rest = "".join(f"<p>{escape(sentence)}</p>" for sentence in others)
    return f'<p class="lead">{escape(first)}</p><div class="found">{rest}</div>'


def _experiment_select(content: Content) -> str:
    if len(content.experiments) < 2:
        return ""
    options = "".join(f'<option value="{i}">{escape(e.name)}</option>' for i, e in enumerate(content.experiments))
    return f'<label>Experiment <select id="experiment">{options}</select></label>'


def _facts(content: Content) -> str:
    if len(content.experiments) == 1:
        return sections.facts(content.experiments[0])
    return f"{len(content.experiments)} experiments, {content.n_folders} runs"


def package_version() -> str:
    """Return the version of this package."""
    try:
        return version("dqnfed")
    except PackageNotFoundError:
        return "(not installed)"


def write_whole(path: Path, text: str) -> None:
    """Replace the file in one step: nobody sees half a page."""
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    Path(name).chmod(0o644)
    Path(name).replace(path)

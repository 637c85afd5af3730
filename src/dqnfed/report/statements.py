"""Site statements: one page and one PDF a client, from the run folders of one experiment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dqnfed.report.comparison import Experiment, group
from dqnfed.report.page import asset, package_version, write_whole
from dqnfed.report.reader import read_intact
from dqnfed.report.statement import statement_of
from dqnfed.report.statement_html import statement_page
from dqnfed.report.statement_pdf import write_pdf


def write_statements(
    runs: Sequence[Path], out: Path, titles: Mapping[str, Mapping[str, Any]], *, clients: Sequence[str] = ()
) -> list[Path]:
    """Write the statements of these clients, or of all, and return the files.

    `titles` says about methods what `dqnfed list algorithms --json` does, by name.
    """
    reading = read_intact(runs)
    experiments = group(reading.runs).experiments
    if not experiments:
        reasons = "; ".join(map(str, reading.problems)) or "no folder was given"
        raise ValueError(f"there is no run to state anything about: {reasons}.")
    if len(experiments) > 1:
        names = ", ".join(experiment.name for experiment in experiments)
        raise ValueError(
            f"a statement is about one experiment, but the runs belong to {names}; give the folder of one."
        )
    [experiment] = experiments
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for client, stem in stems_of(experiment, clients).items():
        found = statement_of(experiment, client, titles, version=package_version())
        page = out / f"{stem}.html"
        write_whole(page, statement_page(found, asset("statement.css")))
        write_pdf(found, page.with_suffix(".pdf"))
        written += [page, page.with_suffix(".pdf")]
    return written


def stems_of(experiment: Experiment, wanted: Sequence[str]) -> dict[int, str]:
    """Return the file name, without its ending, for every wanted client; of equal ones the later gets its number."""
    names = {c.client: c.name for run in reversed(experiment.runs) for c in run.clients}
    if not names:
        raise ValueError("these runs hold no clients to state anything about.")
    for name in wanted:
        if name not in names.values():
            shown = ", ".join(list(names.values())[:20])
            raise ValueError(f"there is no client {name!r} in these runs; there are {shown}.")
    found: dict[int, str] = {}
    for client in sorted(names):
        if not wanted or names[client] in wanted:
            stem = "statement-" + (re.sub(r"[^\w.-]+", "-", names[client]).strip("-.")[:80] or str(client))
            taken = {used.lower() for used in found.values()}
            found[client] = stem if stem.lower() not in taken else f"{stem}-{client}"
    return found

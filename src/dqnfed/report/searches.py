"""Hyper-parameter searches: the whole grid that was tried, beside the runs at the best settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dqnfed.report.reader import Run
from dqnfed.report.run_files import block, number, read_json

SEARCH_FILE = "sweep.json"  # OUT/sweep.json, OUT/best/<method>/<seed>, OUT/trials/...


def search_of(run: Run) -> Path | None:
    """Return the file of the search that chose the run's settings, or None."""
    parents = run.folder.resolve().parents
    if len(parents) < 3 or parents[1].name != "best":
        return None
    file = parents[2] / SEARCH_FILE
    return file if file.is_file() else None


def searches_html(runs: Sequence[Run]) -> str:
    """Return every search behind the runs: each method's best settings and everything that was tried."""
    found = dict.fromkeys(file for run in runs if (file := search_of(run)) is not None)
    return "".join(search_html(read_json(file, [])) for file in found)


def search_html(search: Mapping[str, Any]) -> str:
    """Return one search: what was selected by, then a table of settings for each method, best first."""
    seeds = search.get("seeds")
    n_seeds = len(seeds) if isinstance(seeds, list) else 0
    how = (
        f"Chosen by the clients' {search.get('select', '?')} {search.get('part', 'validation')} score, "
        f"mean over {n_seeds} seed{'' if n_seeds == 1 else 's'}; test data were not looked at."
    )
    methods = "".join(_method_html(name, found) for name, found in block(search, "algorithms").items())
    return f'<h3>Settings that were tried</h3><p class="caption">{escape(how)}</p>{methods}'


def _method_html(name: str, found: Mapping[str, Any]) -> str:
    tried = found.get("tried") or []
    best = _point(block(found, "best")) or "defaults, nothing to choose"
    title = f"<strong>{escape(name)}</strong>: <code>{escape(best)}</code>"
    if not tried:
        return f"<p>{title}</p>"
    rows = "".join(_row(point, is_best=i == 0) for i, point in enumerate(tried))
    return (
        f"<details><summary>{title} ({len(tried)} tried)</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="Settings tried for {escape(name)}">'
        '<table class="methods"><thead><tr><th scope="col">Settings</th><th scope="col">Score</th>'
        f'<th scope="col">By seed</th></tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _row(point: Mapping[str, Any], *, is_best: bool) -> str:
    score = number(point.get("score"))
    said = escape(f"could not run: {point.get('why', '')}") if math.isnan(score) else f"{score:.2f}"
    said = f"<strong>{said}</strong>" if is_best else said
    by_seed = ", ".join(f"{number(value):.2f}" for value in block(point, "scores").values())
    settings = escape(_point(block(point, "settings")))
    return f'<tr><th scope="row"><code>{settings}</code></th><td>{said}</td><td>{escape(by_seed)}</td></tr>'


def _point(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in settings.items())

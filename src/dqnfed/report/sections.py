"""The words of a report: what was found, how the runs were made, what to know before trusting them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from dqnfed.report.comparison import Experiment, settings
from dqnfed.report.reader import Problem


def facts(experiment: Experiment) -> str:
    """Return one line that says how large the experiment is."""
    counts = [
        count(len(experiment.methods), "method"),
        count(len(experiment.seeds), "seed"),
        count(len(experiment.runs[0].clients), "client"),
        count(max(run.planned_rounds for run in experiment.runs), "round"),
    ]
    return " · ".join(counts)


def settings_html(experiment: Experiment) -> str:
    """Return shared settings, what differs between methods, versions and the commands that made the runs."""
    runs = [run for run in experiment.runs if not run.model]
    shared, differing = _shared([_flat(run.config) for run in runs])
    parts = ["<h3>Settings all runs share</h3>", _list(shared)]
    own = list(_own_settings(experiment, [key for key in differing if key not in ("run.seed", "algorithm.name")]))
    if own:
        parts += ["<h3>Settings of each method</h3>"]
        parts += [f"<h4>{escape(label)}</h4>{_list(entries)}" for label, entries in own]
    env, varying = _shared([{k: v for k, v in run.env.items() if k not in ("command", "started")} for run in runs])
    env |= dict.fromkeys(varying, "differs between runs")
    parts += ["<h3>Versions and machine</h3>", _list(env | {"seeds": ", ".join(map(str, experiment.seeds))})]
    commands = list(dict.fromkeys(str(run.env["command"]) for run in runs if run.env.get("command")))
    if commands:
        parts.append(
            f"<details><summary>{count(len(commands), 'command')} to reproduce</summary>"
            f'<pre tabindex="0" role="region" aria-label="Commands to reproduce">{escape(chr(10).join(commands))}</pre>'
            "</details>"
        )
    return "".join(parts)


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


def count(n: int, noun: str) -> str:
    """Return `n` with its noun in the right number."""
    return f"{n:,} {noun}" + ("" if n == 1 else "s")


def _where(folders: Sequence[str]) -> str:
    rest = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
    return f"<br><code>{escape(folders[0])}</code>{rest}"


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for block, entries in config.items():
        if isinstance(entries, Mapping):
            found |= {f"{block}.{key}": value for key, value in entries.items()}
        else:
            found[block] = entries
    return found


def _shared(mappings: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Return the entries that all mappings have in common, and the keys of the others."""
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    alike = [key for key in keys if all(key in m and m[key] == mappings[0].get(key) for m in mappings)]
    return {key: mappings[0][key] for key in alike}, [key for key in keys if key not in alike]


def _own_settings(experiment: Experiment, differing: Sequence[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    for method in experiment.methods:
        mine = {f"{block}.{key}": value for (block, key), value in settings(method.runs[0].config).items()}
        own = {key: mine[key] for key in differing if key in mine}
        if own and not method.runs[0].model:
            yield method.label, own


def _list(entries: Mapping[str, Any]) -> str:
    if not entries:
        return '<p class="hint">Not recorded.</p>'
    items = "".join(f"<dt>{escape(str(k))}</dt><dd><code>{escape(str(v))}</code></dd>" for k, v in entries.items())
    return f'<dl class="settings">{items}</dl>'

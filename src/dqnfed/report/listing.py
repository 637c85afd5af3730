"""Which settings of the paper are measured, from the stored summaries, and what these say about DQN-Fed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from dqnfed.report import tuned, tuned_page
from dqnfed.report.result_summaries import Json
from dqnfed.report.result_tables import LEADERBOARD, by_experiment
from dqnfed.report.run_files import read_toml

SETTINGS = "settings.toml"
PERSONAL = ("ditto", "fedrep", "local-only")  # where a summary does not say which methods have a model for each client
COMPARED = (tuned_page.OURS, tuned_page.FEDAVG)
FEWEST_METHODS = 3  # of an experiment in which a place says something
AGAIN = ("second-order-networks", "half-precision", "wall-clock", "wall-clock-cpu")  # no comparisons of their own


class Setting(NamedTuple):
    """One setting: where it is shown, and whether it is measured."""

    name: str
    page: str  # empty: none
    is_measured: bool
    text: str


def settings(folder: Path) -> list[Setting]:
    """Return every setting that is listed in a folder of pages."""
    listed = read_toml(folder / SETTINGS, []).get("setting", [])
    return [setting(entry, folder) for entry in listed]


def setting(entry: Json, folder: Path) -> Setting:
    """Return whether a listed setting is measured, and how."""
    page, name = entry.get("page", ""), entry["name"]
    rows = folder / entry.get("rows", "")
    if rows.is_file():
        return Setting(name, page, is_measured=True, text=f"measured: {facts_of_rows(rows)}{noted(entry)}")
    data = stored(page, folder)
    if data is not None and page == LEADERBOARD:
        return Setting(name, page, is_measured=True, text=f"measured: {facts_of_leaderboard(data)}{noted(entry)}")
    runs = [] if data is None else data["runs"]
    if "experiment" in entry:
        runs = [run for run in runs if run["experiment"] == entry["experiment"]]
    if data is not None and runs:
        return Setting(name, page, is_measured=True, text=f"measured: {facts(data, runs)}")
    why = entry.get("reason")
    if why is None and page in tuned.declared_names(folder):
        why = (
            f"not measured: no run is stored; `make results TABLE={page} RUN=1` ({tuned.declared(page, folder).budget})"
        )
    elif why is None:
        why = f"not measured: no run is stored; `make results TABLE={page} RUN=1`"
    elif not page:
        why = f"not measured: {why}"
    return Setting(name, page, is_measured=False, text=why + noted(entry))


def noted(entry: Json) -> str:
    """Return what is to be added about a setting."""
    return f"; {entry['note']}" if "note" in entry else ""


def facts_of_rows(path: Path) -> str:
    """Return methods, seeds and NUMERICS of a page that is made by a program of its own."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    n_methods, n_seeds = len({row["method"] for row in rows}), min(len(row["runs"]) for row in rows)
    told = sorted({str(row.get("numerics", "not recorded")) for row in rows})
    return f"{n_methods} methods, {n_seeds} seeds, no trials, NUMERICS {', '.join(told)}"


def facts_of_leaderboard(data: Json) -> str:
    """Return problems, methods, seeds and trials of the leaderboard."""
    problems = sorted({run["problem"] for run in data["runs"]})
    n_methods, n_seeds = (len({run[what] for run in data["runs"]}) for what in ("method", "seed"))
    n_trials = sum(len(points) for problem in problems for points in data["tuned"].get(problem, {}).values())
    return f"{n_methods} methods on {', '.join(problems)}, {n_seeds} seeds, {n_trials} trials"


def stored(page: str, folder: Path) -> Json | None:
    """Return a page's stored summary, or None."""
    path = folder / "data" / f"{page}.json"
    found: Json | None = json.loads(path.read_text(encoding="utf-8")) if page and path.is_file() else None
    return found


def facts(data: Json, runs: Sequence[Json]) -> str:
    """Return methods, seeds, trials and NUMERICS of runs, as their summary has them."""
    by_row: dict[tuple[str, str], int] = {}
    for run in runs:
        row = run["experiment"], run["algorithm"]
        by_row[row] = by_row.get(row, 0) + 1
    fewest, most, n_methods = min(by_row.values()), max(by_row.values()), len({run["algorithm"] for run in runs})
    seeds = f"{most} seed{'s' if most > 1 else ''}" if fewest == most else f"{fewest} to {most} seeds"
    experiments = {run["experiment"] for run in runs}
    n_trials = sum(trial["experiment"] in experiments for trial in data.get("trials", ()))
    trials = f"{n_trials} trials" if "trials" in data else "settings of the preset, no trials stored"
    numbers = {run.get("numerics") for run in runs} if "numerics" not in data else {data["numerics"]}
    told = ", ".join(sorted("not recorded" if number is None else str(number) for number in numbers))
    return f"{n_methods} method{'s' if n_methods > 1 else ''}, {seeds}, {trials}, NUMERICS {told}"


def listing(folder: Path) -> str:
    """Return the settings as lines for a terminal."""
    found = settings(folder)
    width = max((len(one.name) for one in found), default=0)
    n_measured = sum(one.is_measured for one in found)
    head = (
        f"{n_measured} of {len(found)} settings have stored runs; TABLE=NAME rebuilds a page, RUN=1 measures it first."
    )
    return "\n".join([head, "", *(f"{one.name:<{width}}  {one.page or '-':<28}  {one.text}" for one in found)])


def settings_table(folder: Path) -> list[str]:
    """Return the settings as a table of a page."""
    lines = ["| setting | page | |", "|---|---|---|"]
    for one in settings(folder):
        link = f"[{one.page}]({one.page}.md)" if one.page else ""
        lines.append(f"| {one.name} | {link} | {one.text} |")
    return lines


def evidence_table(folder: Path) -> list[str]:
    """Return what every stored comparison says about DQN-Fed at its defaults."""
    titles = ["page", "experiment", "NUMERICS", "tuned alike", "seeds", "place in the mean", "in the worst 10 %"]
    titles += ["mean against FedAvg", "worst 10 % against FedAvg", "share of FedAvg's rounds", "improved", "FedAvg's"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for path in sorted((folder / "data").glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if path.stem in (LEADERBOARD, *AGAIN):
            continue
        for name, found in by_experiment(data["runs"]).items():
            runs = found
            if "trials" not in data:  # the page's own table is that of the last round
                runs = [{key: value for key, value in run.items() if key != "late"} for run in runs]
            methods = tuned_page.ranked(runs)
            if len(methods) >= FEWEST_METHODS and set(COMPARED) <= methods.keys():
                lines.append(evidence(path.stem, name, methods, data))
    return lines


def evidence(page: str, name: str, methods: tuned_page.Methods, data: Json) -> str:
    """Return one comparison's row."""
    ours, fedavg = (methods[m] for m in COMPARED)
    places = [tuned_page.standing(methods, data.get("personal", PERSONAL), column) for column in ("mean", "worst10")]
    gaps = [tuned_page.differences(methods, c, tuned_page.FEDAVG).get(tuned_page.OURS) for c in ("mean", "worst10")]
    share = tuned_page.share_of_rounds(ours, fedavg)
    number = data.get("numerics", ours[0].get("numerics", "not recorded"))
    cells = [f"[{page}]({page}.md)", name, str(number), "yes" if "trials" in data else "no", str(len(ours))]
    cells += [f"{standing.place} of {standing.n}" for standing in places]
    cells += [tuned_page.difference_text(gap) or "one seed" for gap in gaps]
    cells += ["-" if share is None else f"{share:.2f}"]
    for runs in (ours, fedavg):
        known = [run["improved"] for run in runs if run["improved"] is not None]
        cells.append(f"{100 * fmean(known):.0f} %" if known else "")
    return "| " + " | ".join(cells) + " |"

"""Budgets against scores, from the runs of `dqnfed compare --epsilon`: a summary, its tables and its figure.

python -m dqnfed.report.epsilons docs/results/privacy/heart.json                     # rebuild the page from its summary
python -m dqnfed.report.epsilons docs/results/privacy/heart.json --from runs/heart   # take a new summary first

The page beside the summary (`heart.md`) is written by hand but for what stands between its two marks.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from scipy import stats

from dqnfed.report.figures import COLOURS, write_figure
from dqnfed.report.reader import Run, find_runs, read_runs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = dict[str, Any]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
MANY = 20  # clients, from which on the worst tenth is shown in place of the worst client
TITLES = {"mean": "mean", "min": "worst client", "worst10": "worst 10 % of clients"}


def summary_of(folder: Path) -> Json:
    """Return the numbers of all finished runs below a folder."""
    found, _ = find_runs([folder])
    runs = [run for run in read_runs(found).runs if run.status != "running" and "privacy" in run.summary]
    if not runs:
        raise ValueError(f"there is no finished run with `privacy` in {folder}; `dqnfed compare --epsilon` makes them.")
    many = len(runs[0].clients) >= MANY
    rows = sorted((_row(run) for run in runs), key=lambda row: (row["method"], row["epsilon"], row["seed"]))
    return {"score": runs[0].score, "worst": "worst10" if many else "min", "runs": rows}


def _row(run: Run) -> Json:
    scores, privacy = run.measures(), run.summary["privacy"]
    settings: Any = run.config.get("privacy", {})
    return {
        "method": str(run.summary["algorithm"]),
        "epsilon": float(settings.get("epsilon") or math.inf),
        "seed": int(run.summary["seed"]) if "seed" in run.summary else int(run.config["run"]["seed"]),
        "status": run.status,
        "rounds": run.n_rounds,
        "noise_multiplier": round(float(privacy["noise_multiplier"]), 3),
        "unit": privacy["unit"],
        "noise": privacy["noise"],
        "delta": privacy["delta"],
        **{name: round(scores[name], 3) for name in ("mean", "min", "worst10") if name in scores},
    }


def cell(values: Sequence[float]) -> str:
    """Return the mean over seeds and half the width of its 95 % interval (Student's t)."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < len(values) or not finite:
        return "diverged"
    if len(finite) < 2:
        return f"{finite[0]:.1f}"
    half = float(stats.t.ppf(0.975, len(finite) - 1)) * stdev(finite) / math.sqrt(len(finite))
    return f"{fmean(finite):.1f} ± {half:.1f}"


def block(data: Json) -> str:
    """Return the tables of a summary, in Markdown."""
    runs, worst = data["runs"], str(data["worst"])
    budgets = sorted({run["epsilon"] for run in runs})
    methods = list(dict.fromkeys(run["method"] for run in runs))
    seeds = sorted({run["seed"] for run in runs})
    about = runs[0]
    first = f"{data['score']}, mean over seeds {', '.join(map(str, seeds))} ± half the width of the 95 % interval"
    noise = f"`privacy.unit` = {about['unit']}, `privacy.noise` = {about['noise']}, delta {about['delta']:g}"
    lines = [f"{first}; {noise}."]
    for measure in ("mean", worst):
        lines += ["", f"| {TITLES[measure]} | {' | '.join(f'epsilon {b:g}' for b in budgets)} |"]
        lines.append("|---" * (len(budgets) + 1) + "|")
        for method in methods:
            lines.append(f"| `{method}` | {' | '.join(_cell_of(data, method, b, measure) for b in budgets)} |")
    lines += ["", f"| noise multiplier | {' | '.join(f'epsilon {b:g}' for b in budgets)} |"]
    lines.append("|---" * (len(budgets) + 1) + "|")
    for method in methods:
        chosen = [[r["noise_multiplier"] for r in _of(data, method, b)] for b in budgets]
        lines.append(f"| `{method}` | {' | '.join(f'{fmean(each):.2f}' if each else '' for each in chosen)} |")
    n_rounds = max(run["rounds"] for run in runs)
    if early := _named([run for run in runs if run["rounds"] < n_rounds]):
        lines += ["", f"Ended before round {n_rounds}: {early}."]
    if diverged := _named([run for run in runs if run["status"] == "diverged"]):
        lines += ["", f"Losses at the end above twice the start's (status `diverged`): {diverged}."]
    return "\n".join(lines)


def _named(runs: Sequence[Json]) -> str:
    """Return which runs these are."""
    seeds: dict[tuple[str, float], list[str]] = {}
    for run in runs:
        seeds.setdefault((run["method"], run["epsilon"]), []).append(str(run["seed"]))
    return "; ".join(
        f"`{method}` at epsilon {epsilon:g}, seed{'s' if len(known) > 1 else ''} {', '.join(known)}"
        for (method, epsilon), known in seeds.items()
    )


def _of(data: Json, method: str, epsilon: float) -> list[Json]:
    return [run for run in data["runs"] if run["method"] == method and run["epsilon"] == epsilon]


def _cell_of(data: Json, method: str, epsilon: float, measure: str) -> str:
    runs = _of(data, method, epsilon)
    return cell([float(run.get(measure, math.nan)) for run in runs]) if runs else "not run"


def draw(figure: Figure, data: Json) -> None:
    """Draw the mean and the worst clients against the budget, with intervals over seeds."""
    budgets = sorted({run["epsilon"] for run in data["runs"]})
    methods = list(dict.fromkeys(run["method"] for run in data["runs"]))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, measure in zip(panels, ("mean", str(data["worst"])), strict=True):
        for k, method in enumerate(methods):
            values = [[float(r.get(measure, math.nan)) for r in _of(data, method, b)] for b in budgets]
            places = [i + 0.06 * (k - (len(methods) - 1) / 2) for i in range(len(budgets))]
            centres = [fmean(each) if each else math.nan for each in values]
            halves = [_half(each) for each in values]
            axes.errorbar(places, centres, halves, marker="o", capsize=3, label=method, color=COLOURS[k % len(COLOURS)])
        axes.set(title=TITLES[measure], xlabel="epsilon", ylabel=str(data["score"]) if measure == "mean" else "")
        axes.set_xticks(range(len(budgets)), ["∞" if math.isinf(b) else f"{b:g}" for b in budgets])
    panels[0].legend()


def _half(values: Sequence[float]) -> float:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return 0.0
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def write_all(data: Json, out: Path, name: str) -> list[Path]:
    """Write the summary, its tables and its figure, and return the files."""
    out.mkdir(parents=True, exist_ok=True)
    summary, text = out / f"{name}.json", out / f"{name}.md"
    summary.write_text(_as_text(data), encoding="utf-8")
    text.write_text(block(data) + "\n", encoding="utf-8")
    return [summary, text, *write_figure(data, draw, out / name, ("svg",))]


def rebuilt(page: str, data: Json) -> str:
    """Return the page with its measured part made anew."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"a page of results needs one line '{BEGIN}' and one line '{END}', between which tables go.")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{block(data)}\n{END}{rest.split(END)[1]}"


def read_summary(file: Path) -> Json:
    """Return a summary that `write_all` wrote."""
    found: Json = json.loads(file.read_text(encoding="utf-8"))
    for run in found["runs"]:
        run["epsilon"] = float(run["epsilon"])
    return found


def _as_text(data: Json) -> str:
    runs = [{**run, "epsilon": "inf" if math.isinf(run["epsilon"]) else run["epsilon"]} for run in data["runs"]]
    return json.dumps({**data, "runs": runs}, separators=(",", ":")).replace('{"method"', '\n{"method"') + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Rebuild a page and its figure, from new runs if they are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("summary", type=Path)
    parser.add_argument("--from", dest="source", type=Path, help="the folder of `dqnfed compare --epsilon`")
    given = parser.parse_args(arguments)
    if given.source is not None:
        given.summary.parent.mkdir(parents=True, exist_ok=True)
        given.summary.write_text(_as_text(summary_of(given.source)), encoding="utf-8")
    data, page = read_summary(given.summary), given.summary.with_suffix(".md")
    page.write_text(rebuilt(page.read_text(encoding="utf-8"), data), encoding="utf-8")
    write_figure(data, draw, given.summary.with_suffix(""), ("svg",))


if __name__ == "__main__":
    main()

"""The leaderboard's page from the lines of benchmarks/leaderboard.py: ranks with intervals, and a table a problem."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dqnfed.report.figures import write_picture

Json = dict[str, Any]
FloatArray = NDArray[np.float64]
REFERENCES = ("local-only", "pooled")
RESAMPLES = 2000
Ranked = Mapping[str, Mapping[str, Mapping[int, Json]]]  # by problem, method and seed
ROWS = {"mean": "mean accuracy", "worst10": "worst 10 %"}  # what methods are ranked by
KEPT = (
    "problem", "method", "seed", "settings", "status", "accuracy", "clients", "curve", "rounds", "passes", "bytes_up",
    "train_seconds",
)  # fmt: skip


def stored_lines(path: Path) -> list[Json]:
    """Return the lines that a stored summary was made of, as far as it kept them."""
    data = json.loads(path.read_text(encoding="utf-8"))
    trials = [
        {"problem": problem, "method": method, "settings": point_named(name), "accuracy": {"mean": mean}}
        for problem, methods in data["tuned"].items()
        for method, points in methods.items()
        for name, mean in points.items()
    ]
    return [*({"kind": "tune", **trial} for trial in trials), *({"kind": "test", **run} for run in data["runs"])]


def point_name(settings: Mapping[str, float]) -> str:
    """Return the name of a trial's settings."""
    return ", ".join(f"{key} {value:g}" for key, value in settings.items())


def point_named(name: str) -> dict[str, float]:
    """Return the settings that a trial's name says."""
    return {key: float(value) for key, value in (part.split(" ") for part in name.split(", ") if part)}


def collected(sources: Iterable[Path], *, command: str, hardware: str, commit: str) -> Json:
    """Return the summary of the lines; of a run that is there twice, the later one counts.

    A source that is a summary itself (.json) is what the lines are added to: its runs keep what is said about them.
    """
    runs: dict[tuple[str, str, int], Json] = {}
    tuned: dict[str, dict[str, dict[str, float | None]]] = {}
    refused: dict[str, dict[str, str]] = {}
    about = {"command": command, "hardware": hardware, "commit": commit}
    for path in sources:
        if path.suffix == ".json":
            data = json.loads(path.read_text(encoding="utf-8"))
            runs |= {(run["problem"], run["method"], run["seed"]): run for run in data["runs"]}
            for name, known in (("tuned", tuned), ("refused", refused)):
                for problem, methods in data[name].items():
                    known.setdefault(problem, {}).update(methods)
            about = {key: _with_addition(data[key], new, key) for key, new in about.items()}
            continue
        for line in _lines_in(path):
            problem, method = line["problem"], line["method"]
            if "error" in line:
                refused.setdefault(problem, {})[method] = line["error"]
            elif line["kind"] == "tune":
                point, mean = point_name(line["settings"]), line["accuracy"]["mean"]
                tuned.setdefault(problem, {}).setdefault(method, {})[point] = mean
            else:
                runs[problem, method, line["seed"]] = {key: line[key] for key in KEPT}
    if not runs:
        raise ValueError("there is no finished run; give a file of benchmarks/leaderboard.py that has test runs.")
    for problem, method, _ in runs:
        refused.get(problem, {}).pop(method, None)
    return {
        "table": "leaderboard", **about, "runs": [runs[key] for key in sorted(runs)], "tuned": tuned, "refused": refused
    }  # fmt: skip


def _lines_in(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _with_addition(before: str, new: str, key: str) -> str:
    """Return what is said about the runs that were there, and about those that were added where it is not the same."""
    if new in before:
        return before
    return f"{before}\n{new}" if key == "command" else f"{before}, runs added since: {new}"


def block(data: Json) -> str:
    """Return the part of the page that is made from its summary."""
    problems = by_problem(data["runs"])
    lines: list[str] = []
    for place, ranked in enumerate(rank_groups(problems)):
        lines += _rank_lines(ranked, place, _left_out(ranked, problems))
    for problem, methods in problems.items():
        lines += [f"## {problem}", "", *_table(methods, data["tuned"].get(problem, {})), ""]
        for method, why in sorted(data["refused"].get(problem, {}).items()):
            lines += [f"`{method}` could not run: {why}", ""]
    lines += [f"Hardware: {data['hardware']}. Commit: `{data['commit']}`.", "", "```bash", data["command"], "```"]
    return "\n".join(lines)


def by_problem(runs: Sequence[Json]) -> dict[str, dict[str, dict[int, Json]]]:
    """Return the runs by problem, method and seed."""
    found: dict[str, dict[str, dict[int, Json]]] = {}
    for run in runs:
        found.setdefault(run["problem"], {}).setdefault(run["method"], {})[run["seed"]] = run
    return found


def comparable(methods: Mapping[str, Mapping[int, Json]]) -> dict[str, Mapping[int, Json]]:
    """Return the federated methods that have every seed that any of them has."""
    federated = {name: runs for name, runs in methods.items() if name not in REFERENCES}
    seeds = {seed for runs in federated.values() for seed in runs}
    return {name: runs for name, runs in federated.items() if set(runs) == seeds}


def rank_groups(problems: Ranked) -> list[Ranked]:
    """Return the problems' comparable methods, in groups with a table of ranks each.

    A problem joins the first group with whose largest problem it shares half of the methods that either has: what was
    run with ten methods alone does not take the others out of the ranks of the problems that have them all.
    """
    found: list[dict[str, Mapping[str, Mapping[int, Json]]]] = []
    ranked = {problem: comparable(methods) for problem, methods in problems.items()}
    for problem in sorted(ranked, key=lambda name: -len(ranked[name])):
        mine = ranked[problem].keys()
        for group in found:
            largest = next(iter(group.values())).keys()
            if len(mine & largest) >= len(mine | largest) / 2:
                group[problem] = ranked[problem]
                break
        else:
            found.append({problem: ranked[problem]})
    return list(found)


def by_rank(ranked: Ranked) -> list[str]:
    """Return the methods that every problem has, by the sum of their mean ranks in all measures."""
    by = [mean_ranks(ranked, measure) for measure in ROWS]
    names, total = by[0][0], sum(found[0] for _, found in by)
    return [names[k] for k in np.argsort(total, kind="stable")]


def _left_out(ranked: Ranked, problems: Ranked) -> list[str]:
    """Return the federated methods with a run on one of these problems that are not ranked."""
    run = {name for problem in ranked for name in problems[problem] if name not in REFERENCES}
    return sorted(name for name in run if not all(name in methods for methods in ranked.values()))


def ranks(scores: FloatArray) -> FloatArray:
    """Return the ranks of the scores in each row [B, M], 1 the highest, equal ones in the middle; NaN is last."""
    from scipy.stats import rankdata

    found: FloatArray = rankdata(-np.nan_to_num(scores, nan=-np.inf), axis=1)
    return found


def mean_ranks(ranked: Ranked, measure: str) -> tuple[list[str], FloatArray]:
    """Return the methods that every problem has, and their mean rank [M], its lower and its upper end [3, M].

    The mean over problems of the mean over seeds; the ends are those of 95 % of the means in which each problem's seeds
    are drawn again with replacement, from a fixed seed.
    """
    names = sorted(set.intersection(*(set(methods) for methods in ranked.values())))
    tables = []
    for methods in ranked.values():
        seeds = sorted(next(iter(methods.values())))
        scores = [[_number(methods[name][seed]["accuracy"][measure]) for name in names] for seed in seeds]
        tables.append(ranks(np.array(scores)))
    generator = np.random.default_rng(0)
    drawn = [t[generator.integers(len(t), size=(RESAMPLES, len(t)))].mean(axis=1) for t in tables]
    low, high = np.quantile(np.mean(drawn, axis=0), [0.025, 0.975], axis=0)
    return names, np.array([np.mean([t.mean(axis=0) for t in tables], axis=0), low, high])


def critical_difference(n_methods: int, n_blocks: int) -> float:
    """Return Nemenyi's: mean ranks over so many blocks that differ by less may be chance (5 %, all pairs)."""
    from scipy.stats import studentized_range

    quantile = float(studentized_range.ppf(0.95, n_methods, np.inf)) / math.sqrt(2.0)
    return quantile * math.sqrt(n_methods * (n_methods + 1) / (6.0 * n_blocks))


def n_blocks(ranked: Ranked) -> int:
    """Return the number of problems times seeds."""
    return sum(len(next(iter(methods.values()))) for methods in ranked.values())


def _rank_lines(ranked: Ranked, place: int, left_out: Sequence[str]) -> list[str]:
    by = {measure: mean_ranks(ranked, measure) for measure in ROWS}
    names = by["mean"][0]
    if len(names) < 2:
        return []
    cost = {name: _cost(ranked, name) for name in names}
    order = [names.index(name) for name in by_rank(ranked)]
    lines = [
        f"## Mean ranks: {', '.join(ranked)}",
        "",
        "| method | " + " | ".join(ROWS.values()) + " | KiB up | passes | seconds |",
    ]
    lines.append("|---" * (len(ROWS) + 4) + "|")
    for k in order:
        cells = [f"{by[m][1][0, k]:.1f} [{by[m][1][1, k]:.1f}, {by[m][1][2, k]:.1f}]" for m in ROWS]
        lines.append(f"| `{names[k]}` | {' | '.join(cells)} | {cost[names[k]]} |")
    n, difference = n_blocks(ranked), critical_difference(len(names), n_blocks(ranked))
    meaning = (
        f"Ranks of {len(names)} methods, 1 the best, over {', '.join(ranked)}; brackets hold 95 % of the mean ranks "
        "when the seeds of each problem are drawn again. They are about the seeds, not about other problems. By "
        f"Nemenyi's test over all pairs two mean ranks differ at 5 % where they are {difference:.1f} apart ({n} "
        "blocks of one problem and seed, taken for independent, which seeds of one problem are not quite): what lies "
        "in the figure's shaded band is not told apart from the best."
    )
    if left_out:
        said = ", ".join(f"`{name}`" for name in left_out)
        meaning += f" Not ranked, for want of a problem or of a seed: {said}."
    return [*lines, "", meaning, "", f"![Mean ranks with intervals](figures/{figure_of(place)})", ""]


def figure_of(place: int) -> str:
    """Return the file of the figure of a group's ranks."""
    return f"leaderboard-ranks-{place + 1}.svg"


def _cost(ranked: Ranked, name: str) -> str:
    runs = [run for methods in ranked.values() for run in methods[name].values()]
    kib, passes = fmean(run["bytes_up"] for run in runs) / 1024, fmean(run["passes"] for run in runs)
    return f"{kib:.0f} | {passes:.1f} | {fmean(run['train_seconds'] for run in runs):.1f}"


def _table(methods: Mapping[str, Mapping[int, Json]], tuned: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    titles = ["method", "mean", "std", "worst 10 %", "worst client", "gain over alone", "not worse than alone"]
    titles += ["rounds to the target", "MiB to it", "KiB up", "passes", "seconds", "chosen of", "seeds"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    alone, target = methods.get("local-only", {}), target_of(methods)
    for name in sorted(methods, key=lambda name: -_mean(methods[name], "mean")):
        runs = methods[name]
        n_diverged = sum(run["status"] == "diverged" for run in runs.values())  # a model from before may be kept
        title = f"`{name}`" + (f" ({n_diverged} of {len(runs)} runs diverged)" if n_diverged else "")
        cells = [title, *(_spread([run["accuracy"][m] for run in runs.values()]) for m in _MEASURES)]
        cells += _gains(runs, alone) if name != "local-only" else ["", ""]
        cells += _to_target(runs, target) if name not in REFERENCES else ["", ""]
        cells += [
            f"{fmean(run['bytes_up'] for run in runs.values()) / 1024:.0f}",
            f"{fmean(run['passes'] for run in runs.values()):.1f}",
            f"{fmean(run['train_seconds'] for run in runs.values()):.1f}",
            _chosen(next(iter(runs.values()))["settings"], tuned.get(name, {})),
            str(len(runs)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if target:
        lines += ["", f"Target: tuned `fedavg`'s mean accuracy, {_spread(list(target.values()))}, with the same seed."]
    return lines


_MEASURES = ("mean", "std", "worst10", "min")


def target_of(methods: Mapping[str, Mapping[int, Json]]) -> dict[int, float]:
    """Return the mean accuracy of FedAvg's kept model, by seed."""
    found = {seed: run["accuracy"]["mean"] for seed, run in methods.get("fedavg", {}).items()}
    return {seed: mean for seed, mean in found.items() if mean is not None}


def _gains(runs: Mapping[int, Json], alone: Mapping[int, Json]) -> list[str]:
    """Return the mean gain of a client over training alone, over seeds, and the share of clients that gain or keep."""
    means, shares = [], []
    for seed in runs.keys() & alone.keys():
        pairs = zip(runs[seed]["clients"], alone[seed]["clients"], strict=True)
        gaps = [mine - own for mine, own in pairs if mine is not None and own is not None]
        if gaps:
            means.append(fmean(gaps))
            shares.append(fmean(gap >= 0 for gap in gaps))
    return [_spread(means, sign="+"), f"{100 * fmean(shares):.0f} %" if shares else ""]


def _to_target(runs: Mapping[int, Json], target: Mapping[int, float]) -> list[str]:
    """Return the mean rounds and MiB, both ways, to the target; dashes where a seed does not reach it."""
    found = []
    for seed in runs.keys() & target.keys():
        aim = round(target[seed], 2)
        found.append(next(((r, traffic) for r, mean, traffic in runs[seed]["curve"] if mean >= aim), None))
    reached = [hit for hit in found if hit is not None]
    if not reached or len(reached) < len(found):
        return ["-", "-"]
    return [f"{fmean(r for r, _ in reached):.0f}", f"{fmean(t for _, t in reached) / 2**20:.2f}"]


def _chosen(settings: Mapping[str, float], tried: Mapping[str, float | None]) -> str:
    """Return the setting that was chosen, of how many, and whether a value beyond those tried may be better."""
    said = ", ".join(f"{key} {value:g}" for key, value in settings.items())
    if not said:
        return "its defaults"
    values = [float(point.rsplit(" ", 1)[1]) for point in tried]
    ends = {min(values, default=math.nan): "lowest", max(values, default=math.nan): "highest"}
    end = ends.get(float(f"{next(iter(settings.values())):g}")) if len(values) > 1 else None
    return f"{said} of {len(tried)}" + (f", the {end}" if end else "")


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _mean(runs: Mapping[int, Json], measure: str) -> float:
    values = [run["accuracy"][measure] for run in runs.values()]
    return -math.inf if None in values else fmean(values)


def _spread(values: Sequence[float | None], sign: str = "") -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return "diverged" if values else ""
    return f"{fmean(known):{sign}.1f}" + (f" ± {stdev(known):.1f}" if len(known) > 1 else "")


def write_ranks(data: Json, folder: Path) -> None:
    """Write a figure of mean ranks a group, with intervals and Nemenyi's critical difference as a bar."""
    for place, ranked in enumerate(rank_groups(by_problem(data["runs"]))):
        by = {measure: mean_ranks(ranked, measure) for measure in ROWS}
        if (n_methods := len(by["mean"][0])) > 1:
            draw = _drawn_ranks(by, critical_difference(n_methods, n_blocks(ranked)))
            write_picture(folder / figure_of(place), (7.2, 1.2 + 0.2 * n_methods), draw)


def _drawn_ranks(by: Mapping[str, tuple[list[str], FloatArray]], difference: float) -> Callable[[Any], None]:
    def draw(figure: Any) -> None:
        names, order = by["mean"][0], np.argsort(sum(found[0] for _, found in by.values()))
        for place, (measure, (_, found)) in enumerate(by.items()):
            axes = figure.add_subplot(1, len(by), place + 1)
            middle, low, high = found[:, order]
            axes.errorbar(middle, range(len(names)), xerr=[middle - low, high - middle], fmt="o", markersize=3)
            best = float(middle.min())
            axes.axvspan(best, best + difference, color="#e9ecec", linewidth=0, zorder=0)
            axes.plot([best, best + difference], [-1.6, -1.6], color="#1b2125", linewidth=2)
            axes.annotate("critical difference from the best", (best, -2.1), fontsize=7, va="bottom")
            axes.set_ylim(len(names) - 0.4, -3.4)
            labels = [names[k] if place == 0 else "" for k in order]
            axes.set_yticks(range(len(names)), labels, fontsize=7)
            axes.set_xlabel(f"mean rank, {ROWS[measure]}")
        figure.tight_layout()

    return draw

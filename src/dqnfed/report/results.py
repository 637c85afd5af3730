"""Pages of measured results: run folders become a small summary file, and the summary becomes a page's table.

python -m dqnfed.report.results cifar10-setup1                          # rebuild the page from its summary
python -m dqnfed.report.results cifar10-setup1 --from runs/setup1       # take a new summary from run folders first

A page `docs/results/TABLE.md` is written by hand but for what stands between its two marks.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dqnfed.experiments.paper import PrintedTable, printed_table
from dqnfed.report.impossible import impossible_values
from dqnfed.report.run_files import block as part_of
from dqnfed.report.run_files import read_json, read_records, read_toml

Json = dict[str, Any]
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
FOLDER = Path("docs/results")
MEASURES = {"mean": "mean", "std": "std", "worst5": "worst 5 %", "worst10": "worst 10 %", "best5": "best 5 %"}
CURVE_POINTS = 50
MARK = "†"


def collected(folders: Iterable[Path], *, table: str, command: str, hardware: str, commit: str) -> Json:
    """Return the summary of finished runs: small enough for the repository, and all that a page shows."""
    runs = [run_summary(folder) for folder in sorted(folders)]
    if not runs:
        raise ValueError(f"there is no finished run for the table '{table}'; give the folder that holds them.")
    return {"table": table, "command": command, "hardware": hardware, "commit": commit, "runs": runs}


def finished_runs(above: Path) -> list[Path]:
    """Return the folders of finished runs at or below a folder."""
    return sorted(path.parent for path in above.rglob("summary.json") if (path.parent / "metrics.jsonl").is_file())


def run_summary(folder: Path) -> Json:
    """Return what is kept of one run."""
    said: list[str] = []
    summary, config = read_json(folder / "summary.json", said), read_toml(folder / "config.toml", said)
    records = [r for r in read_records(folder / "metrics.jsonl", said) if r["round"] >= 0]
    if said or not records:
        raise ValueError(f"{folder} is no whole run: {'; '.join(said) or 'it has no rounds'}; run it again.")
    evaluated = [r for r in records if r["accuracy"] is not None]
    shown = evaluated[:: max(1, len(evaluated) // CURVE_POINTS)]
    late = [r["rho"] for r in records[len(records) // 2 :] if r["rho"] is not None]
    train = part_of(config, "train")
    return {
        "experiment": summary["name"],
        "algorithm": summary["algorithm"],
        "seed": summary["seed"],
        "settings": {k: v for k, v in part_of(config, "algorithm").items() if k != "name"},
        "train": {k: train.get(k) for k in ("rounds", "epochs", "batch_size", "lr", "participation")},
        "rounds": summary["rounds"],
        "status": summary["status"],
        "participants": fmean(len(r["clients"]) for r in records),
        "accuracy": _rounded(summary["accuracy"]),
        "train_loss": _rounded(summary["train_loss"]),
        "improved": None if summary["rho_mean"] is None else round(summary["rho_mean"], 4),
        "improved_late": round(fmean(late), 4) if late else None,
        "seconds": round(summary["totals"]["seconds"], 2),
        "passes": summary["totals"]["passes"],
        "bytes_up": summary["totals"]["bytes_up"],
        "curve": [[r["round"] + 1, round(r["accuracy"]["mean"], 2)] for r in shown],
    }


def block(data: Json) -> str:
    """Return the part of a page that is made from its summary; one table for each experiment."""
    experiments = by_experiment(data["runs"])
    printed = printed_table(data["table"])
    columns = [key for key in MEASURES if any(key in run["accuracy"] for run in data["runs"])]
    lines: list[str] = []
    for name, runs in experiments.items():
        lines += [f"### {name}", ""] if len(experiments) > 1 else []
        lines += [*_table(by_method(runs), columns), ""]
    n_seeds = {len(runs) for name in experiments for runs in by_method(experiments[name]).values()}
    seeds = f"{min(n_seeds)} seeds each" if len(n_seeds) == 1 else "seeds as in the column"
    meaning = (
        f"Mean ± standard deviation over seeds ({seeds}), accuracy in percent on each client's own test examples; "
        "*improved* is the mean share of participants whose loss a round lowers, *late* the same over the last half of "
        "the rounds; passes and KiB are for one participant and round; *seconds* is a whole run, evaluations included."
    )
    if any(run["algorithm"] == "fedavg" for run in data["runs"]):
        meaning += (
            " *To FedAvg's end* is the first evaluated round whose mean accuracy is at least what FedAvg has after its "
            "last round, with the same seed; a dash if that never happens with one of the seeds."
        )
    lines += [
        meaning,
        "",
        f"Hardware: {data['hardware']}. Commit: `{data['commit']}`.",
        "",
        "```bash",
        data["command"],
        "```",
    ]
    if printed is not None:
        lines += ["", *_printed_lines(printed)]
    return "\n".join(lines)


def by_experiment(runs: Sequence[Json]) -> dict[str, list[Json]]:
    """Return the runs of each experiment, in the order in which they stand."""
    found: dict[str, list[Json]] = {}
    for run in runs:
        found.setdefault(run.get("experiment", ""), []).append(run)
    return found


def by_method(runs: Sequence[Json]) -> dict[str, list[Json]]:
    """Return the runs of each method, the best mean accuracy first."""
    found: dict[str, list[Json]] = {}
    for run in runs:
        found.setdefault(run["algorithm"], []).append(run)
    return dict(sorted(found.items(), key=lambda item: -_mean(run["accuracy"]["mean"] for run in item[1])))


def rebuilt(page: str, data: Json) -> str:
    """Return the page with its measured part made anew."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"a page of results needs one line '{BEGIN}' and one line '{END}', between which tables go.")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{block(data)}\n{END}{rest.split(END)[1]}"


def _table(methods: Mapping[str, list[Json]], columns: Sequence[str]) -> list[str]:
    titles = ["method", *(MEASURES[c] for c in columns), "improved", "late", "rounds", "passes", "KiB up", "seconds"]
    targets = {run["seed"]: run["accuracy"]["mean"] for run in methods.get("fedavg", [])}
    titles += ["to FedAvg's end", "seeds"] if targets else ["seeds"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name, runs in methods.items():
        cells = [f"`{name}`", *(_spread([run["accuracy"][c] for run in runs]) for c in columns)]
        for key in ("improved", "improved_late"):
            known = [run[key] for run in runs if run[key] is not None]
            cells.append(f"{100 * _mean(known):.1f} %" if known else "")
        cells.append(_range([run["rounds"] for run in runs]))
        asked = sum(run["rounds"] * run["participants"] for run in runs)
        cells += [f"{sum(run['passes'] for run in runs) / asked:.1f}"]
        cells += [f"{sum(run['bytes_up'] for run in runs) / asked / 1024:.0f}"]
        cells += [f"{_mean(run['seconds'] for run in runs):.1f}"]
        cells += [*([_first_rounds(runs, targets)] if targets else []), str(len(runs))]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _first_rounds(runs: Sequence[Json], targets: Mapping[int, float]) -> str:
    """Return the mean number of rounds to the accuracy that FedAvg ends with; a dash if a seed never gets there."""
    found = [
        next((number for number, mean in run["curve"] if mean >= round(targets[run["seed"]], 2)), None)
        for run in runs
        if run["seed"] in targets
    ]
    reached = [number for number in found if number is not None]
    return f"{_mean(reached):.0f}" if reached and len(reached) == len(found) else "-"


def _printed_lines(printed: PrintedTable) -> list[str]:
    lines = [
        f"The paper prints for this setting ({printed.title}):",
        "",
        "| method | " + " | ".join(printed.columns) + " |",
        "|---" * (len(printed.columns) + 1) + "|",
    ]
    reasons: list[str] = []
    for name, row in printed.rows.items():
        impossible = impossible_values(printed, name)
        cells = [
            "" if value is None else f"{value:g}{MARK if column in impossible else ''}"
            for column, value in zip(printed.columns, row, strict=True)
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        reasons += [f"{name}, {column}: {why}" for column, why in impossible.items()]
    if reasons:
        lines += ["", f"{MARK} cannot be true: " + "; ".join(reasons) + "."]
    return lines


def _spread(values: Sequence[float]) -> str:
    return f"{_mean(values):.2f} ± {stdev(values):.2f}" if len(values) > 1 else f"{values[0]:.2f}"


def _range(values: Sequence[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)}-{max(values)}"


def _mean(values: Iterable[float]) -> float:
    return fmean(list(values))


def _rounded(values: Mapping[str, float]) -> Json:
    return {key: round(value, 4) if math.isfinite(value) else None for key, value in values.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Rebuild a page, from new runs if they are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("--from", dest="runs", type=Path, help="folder of finished runs")
    parser.add_argument("--command", help="the command that made them, for the page")
    parser.add_argument("--hardware", default="not stated")
    options = parser.parse_args(arguments)
    summary, page = FOLDER / "data" / f"{options.table}.json", FOLDER / f"{options.table}.md"
    if options.runs is not None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
        command = options.command or f"dqnfed compare {options.table}"
        data = collected(
            finished_runs(options.runs),
            table=options.table,
            command=command,
            hardware=options.hardware,
            commit=commit.stdout.strip() or "unknown",
        )
        summary.parent.mkdir(parents=True, exist_ok=True)
        summary.write_text(json.dumps(data, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    if not summary.is_file():
        sys.exit(f"there is no summary {summary}; give the folder of finished runs with --from.")
    page.write_text(rebuilt(page.read_text(encoding="utf-8"), json.loads(summary.read_text())), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Pages of measured results: run folders become a small summary file, and the summary becomes a page's tables.

python -m dqnfed.report.results cifar10-setup1                          # rebuild the page from its summary
python -m dqnfed.report.results cifar10-setup1 --run                    # run its commands first, then rebuild it
python -m dqnfed.report.results cifar10-setup1 --from runs/setup1       # take a new summary from run folders first
python -m dqnfed.report.results cifar10-setup1 --from a.jsonl b.jsonl   # or from summaries that were made elsewhere

A page `docs/results/TABLE.md` is written by hand but for what stands between its two marks: tables, figures, the
commands of `docs/results/tables.toml` and the paper's values.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dqnfed.report import leaderboard, tuned, tuned_page
from dqnfed.report.result_figures import Picture, pictures, write_pictures
from dqnfed.report.result_summaries import Json, collected, run_summary, summaries_in
from dqnfed.report.result_tables import (
    by_experiment,
    by_method,
    columns_of,
    decimals_of,
    mean_of,
    printed_for,
    printed_lines,
    range_,
    spread,
    title_of,
    value_of,
)
from dqnfed.report.run_files import read_toml

__all__ = ["block", "main", "rebuilt", "run_summary"]

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
FOLDER = Path("docs/results")
RUNS = Path("runs/results")
LEADERBOARD = "leaderboard"  # a page with another summary: see `report.leaderboard`


def block(data: Json) -> str:
    """Return the part of a page that is made from its summary: for each experiment a table and figures."""
    if data["table"] == LEADERBOARD:
        return leaderboard.block(data)
    experiments = by_experiment(data["runs"])
    drawn: dict[str, list[str]] = {}
    for picture in pictures_of(data):
        shown = [f"![{picture.kind.caption}](figures/{picture.file})", "", f"*{picture.kind.caption}.*", ""]
        drawn.setdefault(picture.experiment, []).extend(shown)
    if "trials" in data:
        return tuned_page.block(data, drawn)
    lines: list[str] = []
    for name, runs in experiments.items():
        lines += [f"### {name}", ""] if len(experiments) > 1 else []
        methods = by_method(runs)
        lines += [*_table(methods, columns_of(data["table"], name, runs)), "", *_settings_lines(methods)]
        lines += drawn.get(name, [])
    n_seeds = {len(runs) for name in experiments for runs in by_method(experiments[name]).values()}
    each = "one seed each" if n_seeds == {1} else f"{min(n_seeds)} seeds each"
    seeds = each if len(n_seeds) == 1 else "seeds as in the column"
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
    repeated = {table.key: table for name in experiments if (table := printed_for(data["table"], name)) is not None}
    for printed in repeated.values():  # once, where two experiments of a page repeat the same table
        lines += ["", *printed_lines(printed)]
    return "\n".join(lines)


def pictures_of(data: Json) -> list[Picture]:
    """Return the figures of a page; the methods that the paper prints come first."""
    if data["table"] == LEADERBOARD:
        return []
    experiments = {name: by_method(runs) for name, runs in by_experiment(data["runs"]).items()}
    named = {run["algorithm"]: None for run in data["runs"]}
    tables = [printed for name in experiments if (printed := printed_for(data["table"], name)) is not None]
    first = ["dqn-fed", "fedavg", *(m for m in named if any(printed.printed_name(m) for printed in tables))]
    return pictures(data["table"], experiments, list(dict.fromkeys(first)))


def rebuilt(page: str, data: Json) -> str:
    """Return the page with its measured part made anew."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"a page of results needs one line '{BEGIN}' and one line '{END}', between which tables go.")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{block(data)}\n{END}{rest.split(END)[1]}"


def _table(methods: Mapping[str, list[Json]], columns: Sequence[str]) -> list[str]:
    titles = ["method", *(title_of(c) for c in columns), "improved", "late", "rounds", "passes", "KiB up", "seconds"]
    targets = {run["seed"]: run["accuracy"]["mean"] for run in methods.get("fedavg", [])}
    targets = {seed: mean for seed, mean in targets.items() if mean is not None}
    titles += ["to FedAvg's end", "seeds"] if targets else ["seeds"]
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for name, runs in methods.items():
        n_lost = sum(run["accuracy"]["mean"] is None for run in runs)
        title = f"`{name}`" + (f" (diverged with {n_lost} of {len(runs)} seeds)" if n_lost else "")
        cells = [title, *(spread([value_of(run, c) for run in runs], decimals_of(c)) for c in columns)]
        for key in ("improved", "improved_late"):
            known = [run[key] for run in runs if run[key] is not None]
            cells.append(f"{100 * mean_of(known):.1f} %" if known else "")
        cells.append(range_([run["rounds"] for run in runs]))
        asked = sum(run["rounds"] * run["participants"] for run in runs)
        cells += [f"{sum(run['passes'] for run in runs) / asked:.1f}"]
        cells += [f"{sum(run['bytes_up'] for run in runs) / asked / 1024:.0f}"]
        cells += [f"{mean_of(run['seconds'] for run in runs):.1f}"]
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
    return f"{mean_of(reached):.0f}" if reached and len(reached) == len(found) else "-"


def _settings_lines(methods: Mapping[str, list[Json]]) -> list[str]:
    """Return a sentence on the settings that the experiment gives to methods; nothing where it gives none."""
    told = {name: runs[0]["settings"] for name, runs in methods.items() if runs[0].get("settings")}
    said = [f"`{name}` {', '.join(f'{k} = {v}' for k, v in found.items())}" for name, found in told.items()]
    return [f"Settings beside the defaults: {'; '.join(said)}.", ""] if said else []


def commands_of(table: str, seeds: str | None = None) -> list[str]:
    """Return the commands that measure a page's runs, as `tables.toml` says, perhaps with other seeds."""
    said: list[str] = []
    found = read_toml(FOLDER / "tables.toml", said).get(table, {})
    commands = found.get("commands", [f"dqnfed compare {table} --seeds 0:5"])
    return [re.sub(r"--seeds \S+", f"--seeds {seeds}", command) if seeds else command for command in commands]


def measured(table: str, commands: Sequence[str], n_jobs: str | None) -> Path:
    """Run a page's commands, each into the folder of its experiment, and return the folder above; it can be resumed."""
    for command in commands:
        program, *rest = shlex.split(command)
        extra = ["--out", str(RUNS / table / experiment_of(rest)), *(["--jobs", n_jobs] if n_jobs else [])]
        code = _ended([str(Path(sys.executable).with_name(program)), *rest, *extra])
        if code != 0:
            sys.exit(
                f"`{command}` ended with {code}; what it has done is in {RUNS / table}, and the same call goes on."
            )
    return RUNS / table


def _ended(command: Sequence[str]) -> int:
    """Run a command and return its exit code; on Ctrl-C, which it hears as well, it is given time to save its runs."""
    with subprocess.Popen(command) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue


def experiment_of(words: Sequence[str]) -> str:
    """Return the name of a command's experiment: the preset's, unless `--set name=...` gives another."""
    return next((word.removeprefix("name=") for word in words if word.startswith("name=")), words[1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Rebuild a page, from new runs if they are given or asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("--run", action="store_true", help="run the page's commands first")
    parser.add_argument("--seeds", help="of these runs, in place of the commands' own")
    parser.add_argument("--jobs", help="runs at a time; default: what `dqnfed compare` chooses")
    parser.add_argument(
        "--from", dest="sources", type=Path, nargs="+", default=[], help="folders of finished runs, .jsonl, .json"
    )
    parser.add_argument("--algorithms", default="", help="only these methods, separated by commas")
    parser.add_argument("--command", help="the command that made them, for the page; default: those of tables.toml")
    parser.add_argument("--hardware", help="on which they were made; default: what the lines of a tuned table say")
    parser.add_argument("--commit", help="with which they were made; default: the present one, or what the lines say")
    options = parser.parse_args(arguments)
    summary, page = FOLDER / "data" / f"{options.table}.json", FOLDER / f"{options.table}.md"
    commands = commands_of(options.table, options.seeds)
    is_leaderboard, is_tuned = options.table == LEADERBOARD, options.table in tuned.declared_names(FOLDER)
    if is_leaderboard and options.run:
        sys.exit("the leaderboard is measured by `make leaderboard`; then give its lines with --from.")
    sources = [*options.sources, *([measured(options.table, commands, options.jobs)] if options.run else [])]
    about = {"hardware": options.hardware or "not stated", "commit": options.commit or _present_commit()}
    if sources and is_leaderboard:
        command = options.command or "make leaderboard"
        _write_summary(summary, leaderboard.collected(sources, command=command, **about))
    elif sources and is_tuned and all(source.suffix == ".jsonl" for source in sources):
        table, lines = tuned.declared(options.table, FOLDER), tuned.read_lines(sources)
        said = {"hardware": options.hardware or "", "commit": options.commit or "", "command": options.command or ""}
        _write_summary(summary, tuned.collected(lines, table, **said))
    elif sources:
        data = collected(
            [run for source in sources for run in summaries_in(source)],
            table=options.table,
            command=options.command or "\n".join(commands),
            algorithms=[name for name in options.algorithms.split(",") if name],
            **about,
        )
        _write_summary(summary, data)
    if not summary.is_file():
        sys.exit(f"there is no summary {summary}; measure it with --run, or give finished runs with --from.")
    data = json.loads(summary.read_text(encoding="utf-8"))
    page.write_text(rebuilt(page.read_text(encoding="utf-8"), data), encoding="utf-8")
    write_pictures(pictures_of(data), FOLDER / "figures")
    if is_leaderboard:
        leaderboard.write_ranks(data, FOLDER / "figures")


def _write_summary(path: Path, data: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")


def _present_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()

"""Pages of measured results: run folders become a small summary file, and the summary becomes a page's tables.

python -m dqnfed.report.results                                         # list what is measured, and what is not
python -m dqnfed.report.results digits                                  # rebuild the page from its summary
python -m dqnfed.report.results digits --run                            # run its commands first, then rebuild it
python -m dqnfed.report.results digits --from runs/digits               # take a new summary from run folders first
python -m dqnfed.report.results digits --from a.jsonl b.jsonl           # or from summaries that were made elsewhere
python -m dqnfed.report.results fashion-mnist --from runs/fashion-mnist.jsonl  # adds lines of tuned_tables.py

A page `docs/results/TABLE.md` is written by hand but for what stands between its two marks: tables, figures, the
commands of `docs/results/tables.toml` or the declaration of `docs/results/tuned.toml`, and the paper's values. The page
`index` is rebuilt with every other one.
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
from dqnfed.report.listing import evidence_table, listing, settings_table
from dqnfed.report.result_figures import Picture, pictures, write_pictures
from dqnfed.report.result_summaries import Json, collected, run_summary, summaries_in
from dqnfed.report.result_tables import (
    LEADERBOARD,
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
INDEX = "index"  # what all pages together say


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
    number = data["runs"][0].get("numerics")
    numerics = "" if number is None else f" NUMERICS {number} in every row."
    lines += [
        meaning,
        "",
        f"Hardware: {data['hardware']}. Commit: `{data['commit']}`.{numerics}",
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
    return with_block(page, block(data))


def with_block(page: str, text: str) -> str:
    """Return the page with this text between its marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"a page of results needs one line '{BEGIN}' and one line '{END}', between which tables go.")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def unmeasured_block(table: str, folder: Path) -> str:
    """Return what a page says that has no stored run: how to measure it, and the budget written first."""
    command = "make leaderboard" if table == LEADERBOARD else f"make results TABLE={table} RUN=1"
    said = f"Not measured yet: no run is stored. `{command}` measures it, in slices that resume."
    if table in tuned.declared_names(folder):
        said += f"\n\nBudget, written first: {tuned.declared(table, folder).budget}."
    return said


def index_block(folder: Path) -> str:
    """Return what all pages together say."""
    meaning = (
        "Places are among methods with one model for all, forms of DQN-Fed beside the default left out. Differences "
        "are paired by seed, with their standard error; `*`: Student's paired test, by Holm's correction where several "
        "methods are compared with FedAvg, accepts it at 5 %. *Share of FedAvg's rounds*: those until FedAvg's final "
        "mean over FedAvg's own, curves averaged over three evaluations; a dash where a seed never gets there. "
        "*Improved* is the mean share of participants whose loss a round lowers. Where *tuned alike* says no, the page "
        "says how settings were chosen, and scores are those of the last round."
    )
    comparisons = ["## What every stored comparison says", "", *evidence_table(folder), "", meaning]
    return "\n".join([*comparisons, "", "## What is measured", "", *settings_table(folder)])


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
    """Return the commands that measure a page's runs, as `tuned.toml` or `tables.toml` say, perhaps other seeds."""
    if table in tuned.declared_names(FOLDER):
        return [f"python benchmarks/tuned_tables.py {table}{f' --seeds {seeds}' if seeds else ''}"]
    found = read_toml(FOLDER / "tables.toml", []).get(table, {})
    commands = found.get("commands", [f"dqnfed compare {table} --seeds 0:5"])
    return [re.sub(r"--seeds \S+", f"--seeds {seeds}", command) if seeds else command for command in commands]


def measured(table: str, commands: Sequence[str], extra: Sequence[str] = ()) -> Path:
    """Run a page's commands and return where their runs are: a file of lines where methods are tuned alike, else the
    folder above those of the experiments. It can be resumed.
    """
    lines = RUNS.parent / f"{table}.jsonl"
    for command in commands:
        program, *rest = shlex.split(command)
        out = lines if program == "python" else RUNS / table / experiment_of(rest)
        code = _ended([str(Path(sys.executable).with_name(program)), *rest, "--out", str(out), *extra])
        if code != 0:
            sys.exit(f"`{command}` ended with {code}; what it has done is in {out}, and the same call goes on.")
    return lines if lines.is_file() else RUNS / table


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
    """Rebuild a page, from new runs if they are given or asked for; without one, list what is measured."""
    options = _parser().parse_args(arguments)
    if options.table is None:
        sys.stdout.write(listing(FOLDER) + "\n")
        return
    programs = read_toml(FOLDER / "tables.toml", []).get(options.table, {}).get("programs")
    if programs is not None:
        _run_programs(options.table, [*(programs["run"] if options.run else []), *programs["rebuild"]])
    elif options.table != INDEX:
        _rebuild(options)
    index = FOLDER / f"{INDEX}.md"
    if index.is_file():
        index.write_text(with_block(index.read_text(encoding="utf-8"), index_block(FOLDER)), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", help="the page; default: list what is measured")
    parser.add_argument("--run", action="store_true", help="run the page's commands first")
    parser.add_argument("--seeds", help="of these runs, in place of the commands' own")
    parser.add_argument("--jobs", help="runs at a time; default: what the command chooses")
    parser.add_argument("--seconds", help="tuned tables: runs that would end later are not started")
    parser.add_argument("--device", help="tuned tables: cpu or cuda; default: a GPU where there is one")
    parser.add_argument(
        "--from", dest="sources", type=Path, nargs="+", default=[], help="folders of finished runs, .jsonl, .json"
    )
    parser.add_argument("--algorithms", default="", help="only these methods, separated by commas")
    parser.add_argument("--command", help="the command that made them, for the page; default: those of tables.toml")
    parser.add_argument("--hardware", help="on which they were made; default: what the lines of a tuned table say")
    parser.add_argument("--commit", help="with which they were made; default: the present one, or what the lines say")
    return parser


def _run_programs(table: str, commands: Sequence[str]) -> None:
    """Run a page's own programs one after the other."""
    for command in commands:
        program, *rest = shlex.split(command)
        if _ended([str(Path(sys.executable).with_name(program)), *rest]) != 0:
            sys.exit(f"`{command}`, for the page {table}, has failed; see above.")
    if not commands:
        sys.exit(f"the page {table} is text and has no stored summary; RUN=1 measures it and prints its tables.")


def _rebuild(options: argparse.Namespace) -> None:
    """Rebuild a page from its summary, which is first taken from new runs if there are any."""
    table = options.table
    summary, page = _summary(table), FOLDER / f"{table}.md"
    commands = commands_of(table, options.seeds)
    if table == LEADERBOARD and options.run:
        sys.exit("the leaderboard is measured by `make leaderboard`; then give its lines with --from.")
    given = {name: getattr(options, name) for name in ("jobs", "seconds", "device")}
    extra = [word for name, value in given.items() if value for word in (f"--{name}", value)]
    sources = [*options.sources, *([measured(table, commands, extra)] if options.run else [])]
    if sources:
        _write_summary(summary, _collected(sources, commands, options))
    text = page.read_text(encoding="utf-8")
    if not summary.is_file():
        page.write_text(with_block(text, unmeasured_block(table, FOLDER)), encoding="utf-8")
        return
    data = json.loads(summary.read_text(encoding="utf-8"))
    page.write_text(rebuilt(text, data), encoding="utf-8")
    write_pictures(pictures_of(data), FOLDER / "figures")
    if table == LEADERBOARD:
        leaderboard.write_ranks(data, FOLDER / "figures")


def _collected(sources: Sequence[Path], commands: Sequence[str], options: argparse.Namespace) -> Json:
    """Return a page's new summary."""
    table, commit = options.table, options.commit or _present_commit()
    about = {"hardware": options.hardware or "not stated", "commit": commit}
    if table == LEADERBOARD:
        return leaderboard.collected(sources, command=options.command or "make leaderboard", **about)
    if table in tuned.declared_names(FOLDER) and all(source.suffix == ".jsonl" for source in sources):
        said = {"hardware": options.hardware or "", "commit": options.commit or "", "command": options.command or ""}
        declared, new = tuned.declared(table, FOLDER), tuned.read_lines(sources)
        stored = tuned.stored_lines(_summary(table), declared, tuned.refuse_mixed(new) if new else None)
        return tuned.collected([*stored, *new], declared, **said)
    return collected(
        [run for source in sources for run in summaries_in(source)],
        table=table,
        command=options.command or "\n".join(commands),
        algorithms=[name for name in options.algorithms.split(",") if name],
        **about,
    )


def _summary(table: str) -> Path:
    return FOLDER / "data" / f"{table}.json"


def _write_summary(path: Path, data: Json) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")


def _present_commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()

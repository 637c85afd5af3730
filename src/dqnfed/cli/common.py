"""What all commands share: the application, its options, and how results are printed."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

app = typer.Typer(
    name="dqnfed",
    help="Fair and fast federated learning: DQN-Fed, the methods it is compared with, and honest fairness reports.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def print_version(asked: bool) -> None:
    if asked:
        from dqnfed import __version__

        typer.echo(f"dqnfed {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Fair and fast federated learning: DQN-Fed, the methods it is compared with, and honest fairness reports."""


MANY_SEEDS = 5  # more are told together
DIVERGED = 3  # exit code of a run whose loss is not finite or has risen
console = Console()
errors = Console(stderr=True)

Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only results and errors.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Every dropped or clipped client, every checkpoint.")]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a config key, e.g. train.lr=0.3.")
]
Out = Annotated[Path | None, typer.Option("--out", help="Run folder; default: runs/<preset>-<time>.")]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Where datasets lie; default: $DQNFED_DATA, else data.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Estimate time and memory from three rounds; write nothing.")]
Select = Annotated[
    str | None,
    typer.Option(
        "--select",
        metavar="last|loss|mean|worst10|worst5|min",
        help="Which model is kept: the last one, or the best one by the clients' validation loss or scores, averaged "
        "over three evaluations; needs data.validation. Default: eval.select of the experiment, else last.",
    ),
]
Rounds = Annotated[int | None, typer.Option("--rounds", min=1, help="Rounds to train.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", help="Your own table: CSV, Parquet or NPZ, or a folder with one such file for each client."),
]
ClientColumn = Annotated[
    str | None, typer.Option("--client", help="Its column that says who holds a row; left out: the file is the client.")
]
LabelColumn = Annotated[str | None, typer.Option("--label", help="Its column that is to be learnt.")]
GroupColumn = Annotated[str | None, typer.Option("--group", help="Its column of declared groups of clients.")]
DroppedColumns = Annotated[str, typer.Option("--drop", help="Its columns to leave out, separated by commas.")]
Breakdown = Annotated[
    str,
    typer.Option(
        "--breakdown",
        help="Columns of a table whose groups of rows are reported in every client, separated by commas: sex,age or, "
        "with edges of bands, age:45:65. A column may be dropped and still be reported.",
    ),
]
TaskName = Annotated[str, typer.Option("--task", metavar="auto|classification|regression")]
Score = Annotated[
    str | None, typer.Option("--score", metavar="accuracy|auc|f1|loss", help="What fairness is measured on.")
]
ModelName = Annotated[str | None, typer.Option("--model", metavar="mlp|linear", help="For --data; default: mlp.")]


class OwnTable(NamedTuple):
    """What the command line says about the user's own table."""

    data: Path | None
    client: str | None
    label: str | None
    group: str | None
    drop: str
    task: str
    score: str | None
    model: str | None

    def config(
        self,
        experiment: str | None,
        rounds: int | None,
        seed: int | None,
        changes: Sequence[str],
        algorithm: str | None,
    ) -> Any:
        """Return the experiment on the table; `experiment` (a preset or a file) and the changes may say more."""
        from dqnfed.experiments.config import read_config
        from dqnfed.experiments.data_commands import own_config

        assert self.data is not None
        if self.label is None or (self.client is None and not self.data.is_dir()):
            raise ValueError(
                "your own table needs --client and --label: the columns that say whose a row is and what is learnt. "
                "Only for a folder with one file for each client may --client be left out."
            )
        return own_config(
            self.data,
            client=self.client,
            label=self.label,
            group=self.group,
            drop=tuple(names_of(self.drop)),
            task=self.task,
            score=self.score,
            model=self.model or "mlp",
            base=read_config(experiment) if experiment else None,
            changes=(*changes, *number_changes(rounds, seed), *name_change(algorithm)),
        )

    def score_change(self) -> list[str]:
        """Return the change of a packaged experiment's score; raise where more is said and there is no table."""
        given = {"--client": self.client, "--label": self.label, "--group": self.group, "--drop": self.drop}
        given |= {"--task": "" if self.task == "auto" else self.task, "--model": self.model}
        refuse_without_table([option for option, value in given.items() if value])
        return [f"eval.score={self.score}"] if self.score else []


def read_settings(
    experiment: str,
    algorithm: str | None,
    rounds: int | None,
    seed: int | None,
    changes: Sequence[str] | None,
    data_dir: Path | None,
) -> Any:
    from dqnfed.experiments.config import read_config

    extra = [*(changes or []), *number_changes(rounds, seed), *data_dir_change(data_dir)]
    return read_config(experiment, [*extra, *name_change(algorithm)])


def data_dir_change(data_dir: Path | None) -> list[str]:
    """Return the change that says where datasets lie."""
    return [] if data_dir is None else [f"data.dir={json.dumps(str(data_dir))}"]


def select_change(select: str | None) -> list[str]:
    """Return the change that says which model is kept."""
    return [] if select is None else [f"eval.select={json.dumps(select)}"]


def breakdown_change(columns: str) -> list[str]:
    """Return the change that says which columns' groups are reported."""
    names = names_of(columns)
    return [f"data.breakdown={json.dumps(names)}"] if names else []


def name_change(algorithm: str | None) -> list[str]:
    """Return the change that names the method, so that `--set algorithm.KEY` is of this one."""
    return [] if algorithm is None else [f"algorithm.name={json.dumps(algorithm)}"]


def number_changes(rounds: int | None, seed: int | None) -> list[str]:
    """Return the changes that say how long to train, and with which seed."""
    named = {"train.rounds": rounds, "run.seed": seed}
    return [f"{key}={value}" for key, value in named.items() if value is not None]


def print_notes(config: Any, quiet: bool) -> None:
    from dqnfed.experiments.data_source import data_source

    own = data_source(config.data, config.run.seed, config.eval.score).own
    if own is not None and not quiet:
        for note in own.notes:
            console.print(escape(note), soft_wrap=True, highlight=False)


def observers_of(config: Any, quiet: bool) -> Callable[[str], Sequence[Any]]:
    from dqnfed.experiments.progress import ProgressBar
    from dqnfed.experiments.trackers import trackers_of

    def made(label: str) -> Sequence[Any]:
        trackers = trackers_of(config)
        return trackers if quiet or not console.is_terminal else [ProgressBar(console, label), *trackers]

    return made


def run_planned(planned: Sequence[Any], config: Any, jobs: int | None, folder: Path, quiet: bool) -> list[Path]:
    """Return the folders of the runs that are finished, so many at a time, with progress in the terminal."""
    from dqnfed.experiments.compare import run_all
    from dqnfed.experiments.planned import is_finished
    from dqnfed.experiments.progress import RunBoard

    board = RunBoard(errors, enabled=errors.is_terminal and not quiet)  # where warnings are shown, too
    try:
        return run_all(planned, jobs=jobs, observers=observers_of(config, quiet), board=board)
    except KeyboardInterrupt:
        n_finished = sum(is_finished(run.folder, run.config) for run in planned)
        errors.print(
            f"{n_finished} of {len(planned)} runs are finished; the same command with --out {folder} goes on",
            soft_wrap=True,
        )
        raise


def print_note(text: str) -> None:
    errors.print(f"[yellow]note:[/yellow] {escape(text)}", soft_wrap=True, highlight=False)


def note_of(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else print_note


def print_unused(planned: Sequence[Any], done: Sequence[Path], quiet: bool) -> None:
    """Tell of settings that had no effect, once for all seeds of a method."""
    from dqnfed.core.run_folder import RunFolder
    from dqnfed.experiments.settings import unused_lines

    found: dict[str, tuple[Any, list[str]]] = {}
    for run in planned:
        if run.folder in done:
            summary = RunFolder(run.folder).summary() or {}
            found[run.config.algorithm.name] = (run.config, summary.get("unused", []))
    for line in unused_lines(found.values()):
        note_of(quiet)(line)


def print_diverged(planned: Sequence[Any], done: Sequence[Path]) -> None:
    """Tell which of the finished runs diverged, and why."""
    from dqnfed.core.run_folder import RunFolder

    for run in planned:
        summary = (RunFolder(run.folder).summary() or {}) if run.folder in done else {}
        if summary.get("status") == "diverged":
            line = f"{run.config.algorithm.name}, seed {run.config.run.seed}: {summary['reason']}"
            errors.print(f"[red]diverged:[/red] {escape(line)}", soft_wrap=True, highlight=False)


def print_kept(planned: Sequence[Any], done: Sequence[Path], quiet: bool) -> None:
    """Tell which round's model every run kept, one line a method, where the best one is kept and not the last."""
    from dqnfed.core.run_folder import RunFolder
    from dqnfed.sim.choice import LAST, RULES

    rounds: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for run in planned:
        summary = (RunFolder(run.folder).summary() or {}) if run.folder in done and not quiet else {}
        if (select := summary.get("select", LAST)) != LAST:
            key = (run.config.algorithm.name, RULES[select])
            rounds.setdefault(key, []).append((summary["kept_round"], run.config.run.seed))
    for (name, rule), kept in rounds.items():
        console.print(f"{name}: kept the model of {kept_rounds(kept)}: {rule}", soft_wrap=True, highlight=False)


def kept_rounds(kept: Sequence[tuple[int, int]]) -> str:
    """Return which rounds' models were kept, seed by seed; of many seeds the first, the middle and the last round."""
    if len(kept) <= MANY_SEEDS:
        return "round " + ", ".join(f"{round} (seed {seed})" for round, seed in kept)
    rounds = sorted(round for round, _ in kept)
    return f"rounds {rounds[0]} to {rounds[-1]} (middle {rounds[len(rounds) // 2]}, {len(kept)} seeds)"


def refuse_without_method(changes: Sequence[str] | None, config: Any, algorithms: Sequence[str]) -> None:
    """Refuse `--set algorithm.KEY`, which is of the experiment's own method, where that one does not run."""
    from dqnfed.experiments.config import parsed_change

    paths = [path for path, _ in map(parsed_change, changes or [])]
    lost = [path[1] for path in paths if path[0] == "algorithm" and path[1:] not in ((), ("name",))]
    if lost and config.algorithm.name not in algorithms:
        raise ValueError(
            f"algorithm.{lost[0]} is a setting of the experiment's own method, {config.algorithm.name}, which is not "
            f"among {', '.join(algorithms)}; use algorithms.NAME.{lost[0]} for the method NAME."
        )


def print_estimate(config: Any) -> None:
    from dqnfed.experiments.estimate import estimate

    found = estimate(config)
    gpu = "" if found.gpu_megabytes is None else f", {found.gpu_megabytes:.0f} MB of the GPU"
    console.print(
        f"{config.algorithm.name} on {config.name}: about {found.seconds:.0f} s for {config.train.rounds} rounds "
        f"({1000 * found.seconds_per_round:.1f} ms a round), {found.peak_megabytes:.0f} MB{gpu}; "
        f"{found.n_parameters:,} parameters, {found.cohort_size} of {found.n_clients} clients a round, "
        f"{found.uplink_bytes_per_client / 1024:.1f} KiB up a client and round."
    )


def print_report(runs: Sequence[Path], out: Path, title: str | None, quiet: bool) -> None:
    from dqnfed.report.page import make_report

    made = make_report(runs, out, title=title)
    console.print(made.table)
    for problem in made.problems:
        print_note(str(problem))
    if not quiet:
        console.print(f"report: {made.path}", soft_wrap=True)


def print_epsilons(folder: Path, quiet: bool) -> None:
    """Write and print the tables and the figure of several budgets."""
    from dqnfed.report.epsilons import block, summary_of, write_all

    found = summary_of(folder)
    files = write_all(found, folder, "epsilons")
    console.print(block(found), markup=False, highlight=False, soft_wrap=True)
    if not quiet:
        console.print(f"budgets: {', '.join(map(str, files))}", soft_wrap=True)


def print_result(summary: dict[str, Any], folder: Path, quiet: bool) -> None:
    from dqnfed.maths.fairness import known_measures
    from dqnfed.report.noise import noise_line
    from dqnfed.sim.selection import kept_line

    accuracy = summary["accuracy"]
    rho = "" if summary["rho_mean"] is None else f", improved clients {100 * summary['rho_mean']:.1f} %"
    named = {"mean": "mean", "std": "std", "worst10": "worst 10 %", "best10": "best 10 %"}
    shown = ", ".join(f"{named[key]} {two_digits(accuracy[key])}" for key in known_measures(accuracy, list(named)))
    console.print(
        f"{summary['algorithm']} on {summary['name']}, {summary['rounds']} rounds: {summary['score']} {shown}{rho}"
    )
    if "summed" in summary:
        console.print(f"evaluation under pads: {summary['summed']}", soft_wrap=True, highlight=False)
    if line := kept_line(summary):
        console.print(line, soft_wrap=True, highlight=False)
    if "noise" in summary:
        console.print(noise_line(summary), soft_wrap=True, highlight=False)
    if summary.get("untested") and not quiet:
        n = summary["untested"]
        console.print(f"{n} {'client was' if n == 1 else 'clients were'} too small to be tested, and trained only")
    if n := summary.get("idle_rounds"):
        console.print(f"in {n} of {summary['rounds']} rounds no reply was used, and the model stayed", highlight=False)
    if summary["status"] == "diverged":
        errors.print(f"[red]diverged:[/red] {escape(summary['reason'])}", soft_wrap=True, highlight=False)
    elif summary["reason"]:
        console.print(f"ended early: {summary['reason']}", soft_wrap=True)
    if not quiet:
        console.print(f"run folder: {folder}", soft_wrap=True)
    if summary["status"] == "diverged":
        raise typer.Exit(DIVERGED)
    if summary["status"] == "interrupted":
        console.print(f"interrupted; go on with: dqnfed resume {folder}")
        raise typer.Exit(130)


def two_digits(value: float | None) -> str:
    return "nan" if value is None else f"{value:.2f}"  # a number that is none is null in the files


def default_out(name: str) -> Path:
    """Return a new folder inside runs/, whatever the experiment is called."""
    inside = re.sub(r"[^\w .+=,()-]", "-", name).strip(". ")[:100] or "run"
    return Path("runs") / f"{inside}-{time.strftime('%Y%m%d-%H%M%S')}"


def refuse_used(folder: Path) -> None:
    if (folder / "config.toml").is_file():
        raise FileExistsError(
            f"{folder} already holds a run; go on with `dqnfed resume {folder}`, or choose another --out."
        )


def refuse_without_table(options: Sequence[str]) -> None:
    if options:
        raise ValueError(
            f"{' and '.join(options)} {'describes' if len(options) == 1 else 'describe'} your own table, but no --data "
            "names it; add --data FILE, or leave it out: a packaged experiment is changed with --set, as in "
            "--set model.name=linear."
        )


def names_of(text: str | None) -> list[str]:
    """Return the names of an option that takes several, separated by commas."""
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def plain_text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(str(v) for v in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
